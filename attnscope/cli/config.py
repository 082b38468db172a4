"""A YAML file of options, named as on the command line with underscores for hyphens.

What may stand in such a file, and of which type, is read off the option groups.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from attnscope.cli.groups import Parameter, parameters
from attnscope.errors import UsageError
from attnscope.shown import brief

if TYPE_CHECKING:
    import typer

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list of texts"}
TEXTS = ("text", "file", "ids", "given", "audio")  # a flag of one leaves out the others of the file
OWN = ("config", "from_")  # which name files themselves
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """What a key of a configuration holds: one of `kinds`, of at least `least`; text is one of `choices`, if any."""

    kinds: tuple[type, ...]
    choices: tuple[str, ...] = ()
    least: float | None = None

    @property
    def expected(self) -> str:
        """For people: `true or false`, `a number`, `a whole number from 1`, `8bit or 4bit`."""
        names = [NAMES[kind] for kind in self.kinds if not (kind is str and self.choices)]
        return " or ".join([*names, *self.choices]) + ("" if self.least is None else f" from {self.least}")

    def accepts(self, value: object) -> bool:
        # A YAML true is an int in Python, and nobody means `top: true`.
        if type(value) not in self.kinds and not (type(value) is int and float in self.kinds):
            return False
        texts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        if not all(isinstance(one, str) and _can_be_typed(one) for one in texts):
            return False
        if self.least is not None and isinstance(value, int | float) and not value >= self.least:
            return False
        return not (isinstance(value, str) and self.choices) or value in self.choices

    @staticmethod
    def of(option: Parameter) -> Key:
        """What the values of an option may be; a Key in its annotation says what its type does not."""
        said = [one for one in option.extra if isinstance(one, Key)]
        if said:
            return said[0]
        if get_origin(option.type) is list:
            return Key((list,))
        kind = option.type if option.type in NAMES else str  # a path, or words to choose from
        return Key((kind,), option.choices, option.info.min)


def _can_be_typed(text: str) -> bool:
    """Whether a command line and a path can hold it: they have no NUL, and no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def keys_of(*groups: type) -> dict[str, Key]:
    """What a configuration file may hold for these groups: every option but the file itself."""
    found = [one for one in parameters(*groups).values() if one.is_option and one.name not in OWN]
    return {one.spelled.replace("-", "_"): Key.of(one) for one in found}


def configured(context: typer.Context, groups: tuple[type, ...], keys: Mapping[str, Key]) -> dict[str, Any]:
    """The options, by field, that the file of --config gives and no flag does.

    keys: what may stand in the file; what the groups have no option for is left out.
    """
    options = {one.spelled.replace("-", "_"): one for one in parameters(*groups).values()}
    content = read_config(context.params["config"], keys)
    flags = [name for name in TEXTS if flagged(context, name)]
    return {
        options[key].name: converted(value, options[key].type)
        for key, value in content.items()
        if key in options and not flagged(context, options[key].name) and not (key in TEXTS and flags)
    }


def flagged(context: typer.Context, name: str) -> bool:
    """Whether the command line gives an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def converted(value: Any, kind: Any) -> Any:
    """The value as the command line would have given it: a path, a number where text is taken too, None for `all`."""
    if kind is int and value == "all":
        return None
    return kind(value) if kind is Path or (kind is str and type(value) is int) else value


def read_config(path: Path | str, keys: Mapping[str, Key]) -> dict[str, Any]:
    """The options of a configuration file, by name; keys that say nothing (null) are left out.

    keys: what may stand in it. Raises `UsageError`: no such file, not YAML (with the line), an unknown key (with the
    nearest valid one), a value of another type or outside the choices.

    >>> read_config("configs/demo.yaml", keys_of(Loading))["model"]
    'demo'
    """
    content = _parse(Path(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}, expected options", "write them as key: value")
    for name, value in content.items():
        _check(path, name, value, keys)
    return {name: value for name, value in content.items() if value is not None}


def _parse(path: Path) -> Any:
    import yaml

    try:
        return yaml.load(_content(path), Loader=_strict())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path} is not YAML: {error.problem} in line {line}", "correct that line") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {str(error).splitlines()[0]}", "correct the file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}", "save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path of --config") from None
    except UsageError:
        raise
    except Exception as error:  # PyYAML's own, of tags, dates, numbers of 5,000 digits and a thousand brackets
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} holds a value that cannot be read: {why}", "correct the file") from None


def _content(path: Path) -> str:
    """The text of the file, which may be no stream without an end."""
    with path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} is over {MOST_BYTES} bytes", "name a file of options")
    return data.decode()


def _strict() -> type:
    """PyYAML's safe loader, refusing a key that stands twice (it would silently take the last), and aliases.

    A few lines of aliases of aliases stand for more values than any machine holds.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent) and (alias := self.peek_event()).anchor in self.anchors:
                problem = f"aliases are not taken, and *{alias.anchor} is one"
                raise yaml.composer.ComposerError(None, None, problem, alias.start_mark)
            return super().compose_node(parent, index)

    def construct(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping as key: refused by PyYAML itself
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{brief(key.value)} stands twice", key.start_mark)
            seen.add(key.value)
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct)
    return Loader


def _check(path: Path | str, name: object, value: object, keys: Mapping[str, Key]) -> None:
    if name not in keys:
        close = get_close_matches(brief(name).strip("'").replace("-", "_"), keys, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(keys)}"
        raise UsageError(f"{path}: unknown key {brief(name)}", hint)
    check_value(path, str(name), value, keys[str(name)])


def check_value(path: Path | str, name: str, value: object, key: Key) -> None:
    """Raise UsageError for a value of another type, or outside the choices; None says nothing."""
    if value is not None and not key.accepts(value):
        raise UsageError(f"{path}: {name}: expected {key.expected}, got {brief(value)}", "correct the value")
