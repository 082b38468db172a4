"""Records as JSON and bytes, and back: of the types that are listed here, and of no other.

document, blobs = packed(record)
unpacked(document, blobs)   # with arrays in place of tensors

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

from attnscope.model.selection import StackLayer
from attnscope.serve.wire import WireError

TAG = "~"
RECORDS = {  # by name, where the type is; each is imported without torch
    "attnscope.observe.request": ("LayerKey", "View", "CaptureSpec", "TextInputs", "Request", "RunInfo"),
    "attnscope.api.why": ("Why",),
    "attnscope.api.depth": ("Depth",),
    "attnscope.steps.records": ("Check", "Explanation", "Numbers", "Step"),
    "attnscope.interventions.spec": ("Cut",),
    "attnscope.observe.atlas": ("HeadNames",),
    "attnscope.observe.records": (
        "HeadColumns",
        "Score",
        "KeptKeys",
        "KeptOperands",
        "LayerMaps",
        "Matrices",
        "Rollout",
        "SpanPairs",
        "TokenWeights",
    ),
    "attnscope.metrics.texts": ("Cells",),
    "attnscope.model.geometry": ("Geometry", "LayerGeometry"),
    "attnscope.observe.observation": ("Observation",),
    "attnscope.serve.questions": ("KnockedModel", "HeadDivergence", "PageSide", "Tokenised"),
    "attnscope.hooks.report": ("CallCheck", "CaptureReport"),
    "attnscope.studies.knockout_records": ("AskedCut", "Case", "Draw", "KnockoutResult", "Masses", "Null"),
    "attnscope.studies.attribution_records": (
        "Component",
        "DepthParts",
        "DepthPoint",
        "KeyParts",
        "LogitParts",
        "LogitQuery",
    ),
    "attnscope.inputs.prompt": ("Medium", "Patch", "Prompt", "Span"),
    "attnscope.inputs.tokens": ("TokenSelection", "TokenMatch"),
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
    return packing.document(value), packing.blobs


def unpacked(document: Any, blobs: Sequence[bytes], tensor: Callable[[np.ndarray], Any] = lambda array: array) -> Any:
    """The value again; tensor: what is made of an array that was a tensor. Raises WireError for what is none."""
    try:
        return _Unpacking(blobs, tensor).value(document)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WireError("expected a record, got another thing") from error


@dataclass
class _Packing:
    blobs: list[memoryview] = field(default_factory=list)
    sent: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by identity: its number, and itself to keep it

    def once(self, value: Any, pack: Callable[[], Any]) -> Any:
        """A value that may be there several times, as one: the first time as it is packed, then by its number."""
        if id(value) in self.sent:
            return {TAG: "again", "of": self.sent[id(value)][0]}
        document = pack()
        self.sent[id(value)] = len(self.sent), value
        return document

    def document(self, value: Any) -> Any:
        """A value as JSON; what JSON has no word for is an object with a TAG."""
        if isinstance(value, StackLayer):
            return {TAG: "layer", "of": [int(value), value.stack]}
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
            return value
        if isinstance(value, np.generic):
            return self.document(value.item())
        # Records go by their type's name, which is looked up in HOMES and never imported by what is sent.
        name = type(value).__name__
        if name == "Atlas":  # whose names are all that is asked of it
            return self.document(type_of("HeadNames")(value.roles, value.facts))
        if name == "NamesBeside":  # who reads it may know nothing of the model's folder
            return self.document(value.read())
        if name in HOMES and type(value) is type_of(name):
            names = [field.name for field in fields(value)] if is_dataclass(value) else value._fields
            sent = [each for each in names if each not in UNSENT.get(name, ())]
            return self.once(
                value, lambda: {TAG: name, "fields": {each: self.document(getattr(value, each)) for each in sent}}
            )
        # Arrays go as bytes after the JSON, and tensors as arrays: the other end may have no torch.
        if isinstance(value, np.ndarray):
            return self._array("array", value)
        if type(value).__module__ == "torch":
            if name == "dtype":
                return str(value).removeprefix("torch.")
            return self._array("tensor", value.detach().cpu().numpy())
        # Of collections those too that JSON would make lists of, or objects with names for keys.
        if isinstance(value, range):
            return {TAG: "range", "of": [value.start, value.stop, value.step]}
        if isinstance(value, Mapping):
            kind = "layers" if name == "PerLayer" else "mapping"
            return {TAG: kind, "of": [[self.document(key), self.document(item)] for key, item in value.items()]}
        if isinstance(value, tuple):
            return self.once(value, lambda: {TAG: "tuple", "of": [self.document(item) for item in value]})
        if isinstance(value, list):
            return [self.document(item) for item in value]
        raise TypeError(f"{type(value)} has no form on the wire")

    def _array(self, kind: str, array: np.ndarray) -> Any:
        if array.dtype.kind == "O":  # truth, or None
            return {TAG: "objects", "shape": list(array.shape), "of": [self.document(item) for item in array.ravel()]}
        if array.dtype.kind not in KINDS:
            raise TypeError(f"an array of {array.dtype} has no form on the wire")
        self.blobs.append(memoryview(np.ascontiguousarray(array).tobytes()))
        return {TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "at": len(self.blobs) - 1}


@dataclass
class _Unpacking:
    blobs: Sequence[bytes]
    tensor: Callable[[np.ndarray], Any]
    known: list[Any] = field(default_factory=list)  # records and tuples, in the order in which they were whole

    def value(self, document: Any) -> Any:
        """The value of a part of the JSON. Raises WireError for a tag that none has."""
        if isinstance(document, list):
            return [self.value(item) for item in document]
        if not isinstance(document, dict):
            return document
        # A record or a tuple is remembered when it is whole, in the order in which the other end numbered them.
        tag = document[TAG]
        if tag in HOMES:
            values = {str(name): self.value(item) for name, item in document["fields"].items()}
            return self._remember(type_of(tag)(**values))
        if tag == "again":
            return self.known[document["of"]]
        # Sizes of arrays are checked against the bytes that are here before memory is taken for them.
        if tag in ("array", "tensor"):
            array = self._array(document)
            return self.tensor(array) if tag == "tensor" else array
        parts = document["of"]
        if tag == "objects":
            objects = np.empty(len(parts), object)
            objects[:] = [self.value(item) for item in parts]
            return objects.reshape(document["shape"])
        if tag == "layer":
            number, stack = parts
            return StackLayer(number, stack)
        if tag == "range":
            start, stop, step = parts
            return range(start, stop, step)
        if tag == "tuple":
            return self._remember(tuple([self.value(item) for item in parts]))
        if tag not in ("mapping", "layers"):
            raise WireError(f"expected a record, got {tag!r}")
        mapping = {self.value(key): self.value(item) for key, item in parts}
        if tag == "mapping":
            return mapping
        from attnscope.observe.request import PerLayer

        return PerLayer(mapping)

    def _remember(self, value: Any) -> Any:
        self.known.append(value)
        return value

    def _array(self, document: Mapping[str, Any]) -> np.ndarray:
        dtype, shape = np.dtype(document["dtype"]), tuple(document["shape"])
        if dtype.kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
            raise WireError("expected an array, got another thing")
        bytes_of = self.blobs[document["at"]]
        if math.prod(shape) * dtype.itemsize != len(bytes_of):
            raise WireError("expected an array, got another thing")
        return np.frombuffer(bytearray(bytes_of), dtype).reshape(shape)
