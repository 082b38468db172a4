"""Values of JSON as records: each field is checked against its annotation, and nothing else is let in.

>>> from_json(Point, {"x": 1}, "point")   # of a dataclass with x: int
Point(x=1)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from attnscope.errors import UnknownOptionError, UsageError, brief

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def takes_fields(record: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Make a function of one record a function of the record's fields, which a type checker and `help` then list.

    An option of a call is declared once, as a field. Raises TypeError for arguments that are no call of it, and of
    these UnknownOptionError for a keyword that names no field.

    >>> @takes_fields(LoadOptions)
    ... def load(options: LoadOptions) -> LoadedModel: ...
    >>> load("demo", device="cpu")
    """

    def give(call: Callable[[R], T]) -> Callable[P, T]:
        arguments = signature(record)

        @wraps(call)
        def with_fields(*values: P.args, **named: P.kwargs) -> T:
            check_names(call.__name__, named, record)  # type: ignore[arg-type]  # a dataclass, as a function
            try:
                arguments.bind(*values, **named)  # else the message names the constructor of a record that nobody sees
            except TypeError as error:
                raise TypeError(f"{call.__name__}() {error}") from None
            return call(record(*values, **named))

        result = call.__annotations__["return"]
        with_fields.__signature__ = arguments.replace(return_annotation=result)  # type: ignore[attr-defined]
        return with_fields

    return give


def check_names(function: str, keywords: Iterable[str], record: type[DataclassInstance]) -> None:
    """Raise UnknownOptionError for a keyword that names no field of a record; function: the one that was called."""
    names = [field.name for field in fields(record)]
    # Others than keywords are what the options are about.
    options = [field.name for field in fields(record) if field.kw_only] or names
    for name in keywords:
        if name not in names:
            raise UnknownOptionError(f"{function} has no option {name!r}", f"it has {', '.join(options)}")


def to_json(record: Any) -> Any:
    """A record as JSON has it: mappings with names for keys, lists, and values."""
    if is_dataclass(record):
        return {field.name: to_json(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, Mapping):
        return {str(name): to_json(value) for name, value in record.items()}
    if isinstance(record, Sequence) and not isinstance(record, str):
        return [to_json(value) for value in record]
    return record


def from_json(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as an annotation has it. Raises UsageError that names the field where it is none.

    kind: a dataclass, None, bool, int, float, str, a Literal, a tuple or Sequence or list or Mapping of these, a union,
    or Any, which is not checked.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _record(kind, value, name)
    if origin in (Union, types.UnionType):
        hint = ""
        for member in inner:
            try:
                return from_json(member, value, name)
            except UsageError as error:
                hint = error.hint
        raise UsageError(f"{name}: expected {' or '.join(map(_words, inner))}, got {brief(value)}", hint)
    if origin is Literal and any(value == item and type(value) is type(item) for item in inner):
        return value
    # Each item is named by its place or key, so that a message says which one is wrong.
    if origin is list and isinstance(value, list):
        return [from_json(inner[0], item, f"{name}[{place}]") for place, item in enumerate(value)]
    if origin in (tuple, Sequence) and isinstance(value, list):
        if inner[0] in (bool, int, str) and all(type(item) is inner[0] for item in value):  # a long text's tokens
            return tuple(value)
        return tuple(from_json(inner[0], item, f"{name}[{place}]") for place, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {
            _key(inner[0], key, name): from_json(inner[1], item, f"{name}[{brief(key)}]") for key, item in value.items()
        }
    # By their very type: to Python true is the whole number 1.
    if kind in (bool, int, str, type(None)) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    hint = f"it has {', '.join(_needed(kind))}" if is_dataclass(kind) else ""
    raise UsageError(f"{name}: expected {_words(kind)}, got {brief(value)}", hint)


def _record(kind: Any, value: Mapping[str, Any], name: str) -> Any:
    hints, needed = get_type_hints(kind), _needed(kind)
    for key in value:
        if key not in needed:
            raise UsageError(f"{name} has no field {brief(key)}", f"it has {', '.join(needed)}")
    lacking = [key for key, is_needed in needed.items() if is_needed and key not in value]
    if lacking:
        raise UsageError(f"{name} lacks the field {lacking[0]!r}", f"it has {', '.join(needed)}")
    values = {}
    for key in needed:
        if key in value:
            try:
                values[key] = from_json(hints[key], value[key], f"{name}.{key}")
            except UsageError as error:
                hint = f"{name} needs this field" if needed[key] else "correct this field, or leave it out"
                raise UsageError(error.message, error.hint or hint) from None
    return kind(**values)


def _needed(kind: Any) -> dict[str, bool]:
    """The fields of a record, and whether each has to be there."""
    return {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(kind)
        if field.init
    }


def _key(kind: Any, key: str, name: str) -> Any:
    if kind is int and key.isdecimal() and key.isascii() and len(key) < 10:
        return int(key)
    return from_json(kind, key, f"a key of {name}")


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(option) for option in get_args(kind))
    return {type(None): "null", bool: "true or false", int: "a whole number", str: "a text", float: "a number"}.get(
        kind, "a list" if get_origin(kind) in (tuple, Sequence, list) else "an object"
    )
