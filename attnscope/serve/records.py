"""Records as JSON and bytes, and back: of the types that are listed here, and of no other.

said, blobs = packed(seen)
unpacked(said, blobs)   # with arrays in place of tensors

No name of a module or of a class is read from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from attnscope.serve.wire import WireError

TAG = "~"
RECORDS = {  # by name, where the type is; each is imported without torch
    "attnscope.calls.why_record": ("Why",),
    "attnscope.explain.records": ("Check", "Explanation", "Numbers", "Step"),
    "attnscope.intervene.sets": ("Cut",),
    "attnscope.keep.atlas": ("HeadNames",),
    "attnscope.keep.columns": ("HeadColumns", "Score"),
    "attnscope.keep.layers": ("LayerKey",),
    "attnscope.keep.records": (
        *("KeptKeys", "KeptOperands", "LayerMaps", "Matrices", "Rollout", "SpanPairs", "TokenWeights"),
    ),
    "attnscope.keep.request": ("Asked",),
    "attnscope.keep.view": ("View",),
    "attnscope.measure.binned": ("Cells",),
    "attnscope.model.geometry": ("Geometry", "LayerGeometry"),
    "attnscope.observation": ("Observation",),
    "attnscope.purposes.cut": ("KnockedModel",),
    "attnscope.purposes.page": ("HeadDivergence", "PageSide"),
    "attnscope.purposes.tokenise": ("Tokenised",),
    "attnscope.seam.report": ("CallCheck", "CaptureReport"),
    "attnscope.study.knockout.records": ("AskedCut", "Case", "Draw", "Knocked", "Masses", "Null"),
    "attnscope.study.why.records": ("AskedLogit", "Component", "KeyParts", "LogitParts"),
    "attnscope.telling": ("Prepared",),
    "attnscope.text.prompt": ("Medium", "Patch", "Prompt", "Span"),
    "attnscope.text.tokens": ("Chosen", "Found"),
}
HOMES = {name: home for home, names in RECORDS.items() for name in names}
KINDS = "biufU"  # of arrays: numbers, truth and text
UNSENT = {"CaptureReport": ("output", "logits"), "CallCheck": ("owed",)}  # fields that stay where they were made


@cache
def type_of(name: str) -> Any:
    """The type of a record by its name, which is imported."""
    return getattr(import_module(HOMES[name]), name)


def packed(value: Any) -> tuple[Any, list[memoryview]]:
    """A value as JSON and the bytes of its arrays. Raises TypeError for what has no form."""
    packing = _Packing()
    return packing.said(value), packing.blobs


def unpacked(said: Any, blobs: Sequence[bytes], tensor: Callable[[np.ndarray], Any] = lambda array: array) -> Any:
    """The value again; tensor: what is made of an array that was a tensor. Raises WireError for what is none."""
    try:
        return _Unpacking(blobs, tensor).value(said)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WireError("expected a record, got another thing") from error


@dataclass
class _Packing:
    blobs: list[memoryview] = field(default_factory=list)
    sent: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by identity: its number, and itself to keep it

    def once(self, value: Any, said: Callable[[], Any]) -> Any:
        """A value that may be there several times, as one: the first time as it is said, then by its number."""
        if id(value) in self.sent:
            return {TAG: "again", "of": self.sent[id(value)][0]}
        found = said()
        self.sent[id(value)] = len(self.sent), value
        return found

    def said(self, value: Any) -> Any:
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
            return value
        if isinstance(value, np.generic):
            return self.said(value.item())
        name = type(value).__name__
        if name == "Atlas":  # whose names are all that is asked of it
            return self.said(type_of("HeadNames")(value.roles, value.facts))
        if name in HOMES and type(value) is type_of(name):
            return self.once(value, lambda: {TAG: name, "fields": self._fields(name, value)})
        if isinstance(value, np.ndarray):
            return self._array("array", value)
        if type(value).__module__ == "torch":
            if name == "dtype":
                return str(value).removeprefix("torch.")
            return self._array("tensor", value.detach().cpu().numpy())
        if isinstance(value, range):
            return {TAG: "range", "of": [value.start, value.stop, value.step]}
        if isinstance(value, Mapping):
            kind = "layers" if name == "PerLayer" else "mapping"
            return {TAG: kind, "of": [[self.said(key), self.said(one)] for key, one in value.items()]}
        if isinstance(value, tuple):
            return self.once(value, lambda: {TAG: "tuple", "of": [self.said(one) for one in value]})
        if isinstance(value, list):
            return [self.said(one) for one in value]
        raise TypeError(f"{type(value)} has no form on the wire")

    def _fields(self, name: str, value: Any) -> dict[str, Any]:
        names = [one.name for one in fields(value)] if is_dataclass(value) else value._fields
        return {one: self.said(getattr(value, one)) for one in names if one not in UNSENT.get(name, ())}

    def _array(self, kind: str, array: np.ndarray) -> Any:
        if array.dtype.kind == "O":  # truth, or None
            return {TAG: "objects", "shape": list(array.shape), "of": [self.said(one) for one in array.ravel()]}
        if array.dtype.kind not in KINDS:
            raise TypeError(f"an array of {array.dtype} has no form on the wire")
        self.blobs.append(memoryview(np.ascontiguousarray(array).tobytes()))
        return {TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "at": len(self.blobs) - 1}


@dataclass
class _Unpacking:
    blobs: Sequence[bytes]
    tensor: Callable[[np.ndarray], Any]
    known: list[Any] = field(default_factory=list)  # records and tuples, in the order in which they were whole

    def value(self, said: Any) -> Any:
        if isinstance(said, list):
            return [self.value(one) for one in said]
        if not isinstance(said, dict):
            return said
        tag = said[TAG]
        if tag in HOMES:
            return self._known(type_of(tag)(**{str(name): self.value(one) for name, one in said["fields"].items()}))
        if tag == "again":
            return self.known[said["of"]]
        if tag in ("array", "tensor"):
            array = self._array(said)
            return self.tensor(array) if tag == "tensor" else array
        if tag == "objects":
            return self._objects(said)
        if tag == "range":
            start, stop, step = said["of"]
            return range(start, stop, step)
        parts = said["of"]
        if tag == "tuple":
            return self._known(tuple([self.value(one) for one in parts]))
        if tag == "mapping":
            return {self.value(key): self.value(one) for key, one in parts}
        if tag == "layers":
            from attnscope.keep.layers import PerLayer

            return PerLayer({self.value(key): self.value(one) for key, one in parts})
        raise WireError(f"expected a record, got {tag!r}")

    def _known(self, value: Any) -> Any:
        self.known.append(value)
        return value

    def _array(self, said: Mapping[str, Any]) -> np.ndarray:
        dtype, shape = np.dtype(said["dtype"]), tuple(said["shape"])
        if dtype.kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
            raise WireError("expected an array, got another thing")
        bytes_of = self.blobs[said["at"]]
        if math.prod(shape) * dtype.itemsize != len(bytes_of):
            raise WireError("expected an array, got another thing")
        return np.frombuffer(bytearray(bytes_of), dtype).reshape(shape)

    def _objects(self, said: Mapping[str, Any]) -> np.ndarray:
        found = np.empty(len(said["of"]), object)
        found[:] = [self.value(one) for one in said["of"]]
        return found.reshape(said["shape"])
