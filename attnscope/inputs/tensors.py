"""What somebody else computed of a model's attention -> its layers and the Prompts of both axes, as data.

    given = tensors_of([A0, A1], ["the", "cat", "sat"])   # arrays of numpy or torch, (H, Q, K) for each layer
    given = tensors_of([{"q": q_HQD, "k": k_GKD, "scale": 0.125}], ["the", "cat", "sat"])

A layer is its weights after the softmax, or q, k and how logits are made of them.

Shapes: L layer, H head, G kv head, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from attnscope.errors import InputError, UsageError, brief, listed
from attnscope.inputs.labels import BYTE_TOKEN, Piece, marks_of, piece_bytes, piece_gap, read_pieces
from attnscope.inputs.prompt import Prompt, from_ids
from attnscope.model.selection import CROSS, DECODER, ENCODER, OF_TWO_TEXTS
from attnscope.utils.files import LONGEST_TEXT, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

WHOLE = "weights"  # the one array of a stack
MEMORY = "memory"  # what the source of tensors is called that are in no file
TOKENS, QUERY_TOKENS = "tokens", "query_tokens"
MODEL, KV_HEADS, SINK_LOGITS, POSITIONS = "model", "kv_heads", "sink_logits", "query_positions"
FLAGS = ATTENTION_MASK, QUERY_ATTENTION_MASK, MASK = "attention_mask", "query_attention_mask", "mask"
MOST_LAYERS = 1000
MOST_WEIGHTS = 2**41  # of all layers and heads of a file, each of which takes time
# A layer of q and k: the axes that each of its arrays may have, and the numbers that it may have, see NUMBERS.
ARRAYS: Mapping[str, Sequence[str]] = {
    "q": ("HQD",),
    "k": ("GKD",),
    "v": ("GKV",),
    "output": ("HQV",),
    MASK: ("QK", "HQK"),
    "bias": ("QK", "HQK"),
    "sinks": ("H", "HQ"),
    "key_positions": ("K",),
}
AXES = {"H": "heads", "G": "kv heads", "Q": "queries", "K": "keys", "D": "width of q and k", "V": "width of v"}
WEIGHTS = ""  # the array of a layer that is its weights, and has the layer's own name
SEEN = MASK, "window", "chunk"  # of which one says what a query sees
SPECIAL = re.compile(r"<\|?[^<>|\s]+\|?>|\[[A-Z]+\]")  # <s>, <|endoftext|>, [CLS]


class Kind(NamedTuple):
    """What a number of a file may be: how it is written, what that is in words, and what it is read as."""

    pattern: str
    expected: str
    read: Callable[[str], float]


_POSITIVE = Kind(r"\+?(?=[\d.]*[1-9])(\d{1,40}\.?\d{0,40}|\.\d{1,40})(e[+-]?\d\d?)?", "a number above 0", float)
_COUNT = Kind(r"[1-9]\d{0,11}", "a whole number from 1", int)
_FLAG = Kind("0|1|true|false", "0 or 1", lambda text: int(text in ("1", "true")))
NUMBERS: Mapping[str, Kind] = {
    "scale": _POSITIVE,
    "softcap": _POSITIVE,
    "window": _COUNT,
    "chunk": _COUNT,
    "causal": _FLAG,
    "sinks_scale_output": _FLAG,
}


@dataclass(frozen=True, eq=False)
class GivenLayer:
    """q and k of a layer after position encoding, and how logits are made of them; nothing of it is checked yet.

    Logits are scale * q.k, soft-cap, bias, mask, in this order; H is a multiple of G, and query head h reads kv head
    h // (H / G). mask: boolean, True where a query sees a key, or added to the logits; without one `window` and `chunk`
    say it, in a causal layer. causal: None where the stack says it. sinks: logits that take their share of every row,
    or, with `sinks_scale_output`, of the output alone. key_positions: the tokens that the keys are of, where these are
    not all. output: P V as the runtime computed it, before the output projection.
    """

    q: Tensor
    k: Tensor
    scale: float
    v: Tensor | None = None
    output: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    key_positions: Tensor | None = None
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    causal: int | None = None
    sinks_scale_output: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, queries and keys, as of weights."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    @property
    def widths(self) -> tuple[int, int]:
        """The width of q and k, and that of v, 0 without one."""
        return self.q.shape[-1], 0 if self.v is None else self.v.shape[-1]

    @property
    def parts(self) -> dict[str, Any]:
        """Its arrays and numbers by name, without those that it lacks."""
        return {part.name: value for part in fields(self) if (value := getattr(self, part.name)) is not None}

    def cut(self, rows: slice, columns: slice) -> GivenLayer:
        """Some of its queries and keys alone."""
        of = {"Q": rows, "K": columns}
        cut = {}
        for name, value in self.parts.items():
            if name in ARRAYS:
                axes = next(axes for axes in ARRAYS[name] if len(axes) == value.ndim)
                cut[name] = value[tuple(of.get(axis, slice(None)) for axis in axes)]
        return replace(self, **cut)


@dataclass(frozen=True, eq=False)
class GivenTensors:
    """Attention that somebody else computed, with the tokens of both axes; nothing of it is checked yet.

    stacks: {stack: {layer: its weights (H, Q, K), on the CPU, or its q and k}}, of `decoder`, `encoder` and `cross`; a
    single stack over one text is called a decoder until it shows which way it looks. text: the tokens that are attended
    to. target: those of queries of another text. name: of the model. kv_heads: of every layer of weights. sink_logits:
    rows of weights may sum to less than 1, a sink takes the rest. last: so many of the last tokens have queries, None
    for all. file: where it lies. written: `tokens` and `query_tokens` as a file has them. flags: `attention_mask` and
    `query_attention_mask`, False for padding, and `mask` (Q, K), True where a query sees a key.
    """

    stacks: Mapping[str, Mapping[int, Tensor | GivenLayer]]
    text: Prompt
    target: Prompt | None = None
    name: str | None = None
    kv_heads: int | None = None
    sink_logits: bool = False
    last: int | None = None
    file: Path | None = None
    written: Mapping[str, Sequence[str]] = field(default_factory=dict)
    flags: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is in words: `weights`, or `tensors` where a layer has q and k."""
        every = (layer for layers in self.stacks.values() for layer in layers.values())
        return "tensors" if any(isinstance(layer, GivenLayer) for layer in every) else WHOLE

    @property
    def source(self) -> str:
        """The name of the file, or `memory`."""
        return MEMORY if self.file is None else self.file.name

    @cached_property
    def sha256(self) -> str:
        """Hash of the file, or of what is in memory, in hexadecimal."""
        if self.file is not None:
            return sha256_of(self.file)
        import torch

        total = hashlib.sha256()
        for stack, layers in self.stacks.items():
            for index, layer in layers.items():
                for name, part in layer.parts.items() if isinstance(layer, GivenLayer) else [(None, layer)]:
                    if not isinstance(part, torch.Tensor):
                        total.update(f"{stack} {index} {name} {part}".encode())
                        continue
                    named = "" if name is None else f" {name}"
                    total.update(f"{stack} {index}{named} {part.dtype} {tuple(part.shape)}".encode())
                    for of_head in part if part.ndim > 1 else part[None]:
                        total.update(of_head.contiguous().view(torch.uint8).numpy())
        return total.hexdigest()


def tensors_of(
    layers: Any,
    tokens: Any,
    query_tokens: Any = None,
    tokenizer: Any = None,
    masks: Mapping[str, Any] | None = None,
    *,
    kv_heads: int | None = None,
    query_positions: Any = None,
) -> GivenTensors:
    """Layers and tokens from Python, their shapes checked, see `attnscope.from_tensors`; masks: by a name of FLAGS.

    Raises UsageError for what are no layers or no tokens, InputError for shapes that do not fit each other.

    >>> tensors_of(torch.ones(1, 1, 1, 1), ["a"]).stacks["decoder"][0].shape
    torch.Size([1, 1, 1])
    """
    text = prompt_of_tokens(tokens, tokenizer)
    target = None if query_tokens is None else prompt_of_tokens(query_tokens, tokenizer, QUERY_TOKENS)
    of_axes = ((TOKENS, tokens, text), (QUERY_TOKENS, query_tokens, target))
    written = {what: _written(items, tokenizer, prompt) for what, items, prompt in of_axes if prompt is not None}
    # Names are those of stacks, numbers those of the layers of one.
    of_stacks = {DECODER if target is None else CROSS: layers}
    if isinstance(layers, Mapping) and any(isinstance(name, str) for name in layers):
        if not layers.keys() <= set(OF_TWO_TEXTS):
            raise UsageError(f"expected the stacks {', '.join(OF_TWO_TEXTS)}, got {listed(list(map(str, layers)))}")
        of_stacks = {stack: layers[stack] for stack in OF_TWO_TEXTS if stack in layers}
    stacks = {stack: _layers(of_stack) for stack, of_stack in of_stacks.items()}
    shapes = {
        stack: {f"layer {index}": _shapes_of(layer) for index, layer in layers.items()}
        for stack, layers in stacks.items()
    }
    # What does not fit is refused before anything is made of it.
    last = None if query_positions is None else last_queries(query_positions, len(text), target is not None)
    check_shapes(shapes, Sizes(len(text), None if target is None else len(target), last), kv_heads)
    flags = {
        name: _flags(values, name, len(text), last or len(text))
        for name, values in (masks or {}).items()
        if values is not None
    }
    given = GivenTensors(stacks, text, target, kv_heads=kv_heads, last=last, written=written, flags=flags)
    _check_flags(given)
    return given


def _layers(layers: Any) -> dict[int, Tensor | GivenLayer]:
    """The layers of a stack, from one array of weights, a list of layers, or {layer: one}."""
    if isinstance(layers, Mapping):
        if not all(isinstance(index, int) and 0 <= index < MOST_LAYERS for index in layers):
            raise UsageError("expected numbers of layers from 0 on", "give {0: array, 2: array}")
        return {index: _layer(layers[index], index) for index in sorted(layers)}
    if not isinstance(layers, list | tuple):
        stacked = _tensor(layers, "the weights")
        stacked = stacked.view(of_one_text(stacked.shape, 4))
        if stacked.ndim != 4:
            message = f"expected weights of 4 axes (layers, heads, queries, keys), got {as_words(stacked.shape)}"
            raise InputError(message, "give a list with an array (heads, queries, keys) for each layer")
        layers = list(stacked)
    if not layers:
        raise InputError("there is no layer in the weights", "give at least one array (heads, queries, keys)")
    return {index: _layer(of_layer, index) for index, of_layer in enumerate(layers)}


def _layer(layer: Any, index: int) -> Tensor | GivenLayer:
    """One layer as weights (H, Q, K), or as its q and k."""
    if layer is None:
        message = f"layer {index} is None: this model returned no weights"
        raise UsageError(message, 'load it with attn_implementation="eager", and ask for output_attentions=True')
    if isinstance(layer, Mapping):
        return _of_parts(layer, f"layer {index}")
    tensor = _tensor(layer, f"layer {index}")
    tensor = tensor.view(of_one_text(tensor.shape, 3))
    if tensor.ndim == 4:
        message = f"layer {index} has {tensor.shape[0]} texts, expected one: {as_words(tensor.shape)}"
        raise InputError(message, "give the weights of one text, as weights[:, [0]]")
    return tensor


def _of_parts(parts: Mapping[str, Any], name: str) -> GivenLayer:
    """A layer from its arrays and numbers by name. Raises UsageError for other names, InputError where some lack."""
    parts = {part: value for part, value in parts.items() if value is not None}
    unknown = next((part for part in parts if part not in ARRAYS and part not in NUMBERS), None)
    if unknown is not None:
        raise UsageError(f"{name} has no {brief(unknown)}", f"it may have {', '.join((*ARRAYS, *NUMBERS))}")
    check_parts(parts, name)
    numbers = {part: number(f"{name}: {part}", part, parts[part]) for part in NUMBERS if part in parts}
    arrays: dict[str, Any] = {}
    for part, forms in ARRAYS.items():
        if part in parts:
            array = _tensor(parts[part], f"{name}: {part}", whole=part in (MASK, "key_positions"))
            arrays[part] = array.reshape(of_one_text(array.shape, max(map(len, forms))))
    mask = arrays.get(MASK)
    if mask is not None and not mask.is_floating_point():
        if bool(((mask != 0) & (mask != 1)).any()):
            raise InputError(f"{name}: expected mask of 0 and 1, or of floats", "give booleans")
        arrays[MASK] = mask.bool()
    return GivenLayer(**arrays | numbers)


def check_parts(parts: Collection[str], name: str) -> None:
    """Raise InputError for parts of a layer that are not enough, or too many: of a layer of weights these alone."""
    if WEIGHTS in parts:
        other = next((part for part in parts if part != WEIGHTS), None)
        if other is not None:
            raise InputError(f"{name} has weights and {other} too", "keep one form of a layer")
        return
    lacks = next((part for part in ("q", "k", "scale") if part not in parts), None)
    if lacks is not None:
        raise InputError(f"{name} has no {lacks}", "a layer is its weights, or q, k and scale")
    said = [part for part in SEEN if part in parts]
    if len(said) > 1:
        raise InputError(f"{name} has {said[0]} and {said[1]} too", "keep one of them")


def number(what: str, name: str, value: Any) -> float:
    """A number of a layer, from what Python or a file says under its name. Raises InputError for another value."""
    kind = NUMBERS[name]
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    text = str(value).lower()
    if not re.fullmatch(kind.pattern, text):
        raise InputError(f"expected {what} as {kind.expected}, got {brief(str(value))}", "leave it out, or correct it")
    return kind.read(text)


def last_queries(positions: Any, tokens: int, of_two: bool) -> int:
    """How many of the last tokens the queries are of. Raises InputError for others than the last ones, in order."""
    if of_two:
        raise UsageError("positions of queries are of one text", "leave out {query_positions}")
    array = np.asarray(positions.detach().cpu() if hasattr(positions, "detach") else positions)
    count = array.size
    if array.dtype.kind not in "iu" or array.ndim != 1 or not 0 < count <= tokens:
        raise InputError(f"expected {POSITIONS} as numbers of tokens, got {brief(array.tolist())}", "correct them")
    if not np.array_equal(array, np.arange(tokens - count, tokens)):
        first = f"{array[0]} to {array[-1]}"
        message = f"expected {POSITIONS} of the last tokens, {tokens - count} to {tokens - 1}, got {first}"
        raise InputError(message, "leave out the tokens that follow them")
    return count


def _shapes_of(layer: Tensor | GivenLayer) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's arrays by name."""
    if not isinstance(layer, GivenLayer):
        return {WEIGHTS: tuple(layer.shape)}
    return {name: tuple(part.shape) for name, part in layer.parts.items() if name in ARRAYS}


def of_one_text(shape: Sequence[int], axes: int) -> tuple[int, ...]:
    """The shape of an array of so many axes without that of a batch of one text, the second axis of a whole stack."""
    at = 1 if axes == 4 else 0
    return (*shape[:at], *shape[at + 1 :]) if len(shape) == axes + 1 and shape[at] == 1 else tuple(shape)


def _tensor(array: Any, what: str, whole: bool = False) -> Tensor:
    """An array of numpy, torch or another library as a tensor on the CPU, without a copy where that is possible.

    whole: it may hold whole numbers and booleans too.
    """
    import torch

    if isinstance(array, torch.Tensor):
        if array.is_meta or array.is_nested or array.layout != torch.strided:
            kind = "without data" if array.is_meta else "nested" if array.is_nested else f"as {array.layout}"
            raise UsageError(f"{what}: expected a dense tensor, got one {kind}", "give a dense tensor of one text")
        if array.is_floating_point() or (whole and not array.is_complex()):
            return array.detach().cpu()
        dtype = str(array.dtype)
    else:
        array = array if isinstance(array, np.ndarray) else _array(array, what)
        if array.dtype.name == "bfloat16":  # of ml_dtypes
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        if array.dtype.kind in "fbiu"[: 4 if whole else 1] and array.dtype.itemsize in (1, 2, 4, 8):
            native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
            return torch.from_numpy(native if native.flags.writeable else native.copy())
        dtype = str(array.dtype)
    raise UsageError(f"{what}: expected floating-point numbers, got {dtype}", "give it as floats")


def _array(weights: Any, what: str) -> np.ndarray:
    if isinstance(weights, str | bytes | Mapping):
        raise UsageError(f"{what}: expected an array, got {type(weights).__name__}", "give numbers of numpy or torch")
    try:
        return np.asarray(weights)
    except (ValueError, TypeError, RuntimeError):
        kind = type(weights).__name__
        raise UsageError(f"{what}: expected an array, got {kind}", "give the weights of one forward pass") from None


def _flags(values: Any, name: str, tokens: int, queries: int) -> np.ndarray:
    """Booleans of an array of 0 and 1, without the axis of a batch of one; `causal` is such a mask."""
    if name == MASK and isinstance(values, str):
        if values != "causal":
            raise UsageError(f"expected {MASK} as 'causal' or an array, got {brief(values)}", "give one of them")
        return np.tri(tokens, dtype=bool)[-queries:]
    array = np.asarray(values.detach().cpu().float() if hasattr(values, "detach") else _array(values, name))
    if array.dtype.kind not in "biuf" or not ((array == 0) | (array == 1)).all():
        raise InputError(f"{name}: expected an array of 0 and 1", "give booleans")
    axes = 2 if name == MASK else 1
    while array.ndim > axes and len(array) == 1:
        array = array[0]
    return array.astype(bool)


class Sizes(NamedTuple):
    """How many tokens the text has, and its target; last: so many of the last have queries, None for all."""

    text: int
    target: int | None
    last: int | None

    def of(self, stack: str) -> tuple[int, int]:
        """How many queries and keys a stack has."""
        queries, keys = axes_of(stack, self.text, self.target)
        return self.last or queries, keys


Shapes = Mapping[str, Sequence[int]]  # of the arrays of a layer


def check_shapes(shapes: Mapping[str, Mapping[str, Shapes]], sizes: Sizes, kv_heads: int | None) -> None:
    """Raise InputError for arrays of layers that do not fit the tokens; UsageError without tokens of the queries."""
    if sizes.target is None and (CROSS in shapes or len(shapes) > 1):
        raise UsageError("weights of several stacks need the tokens of the queries", "give {query_tokens=TOKENS}")
    weights = 0
    for stack, of_stack in shapes.items():
        queries, keys = sizes.of(stack)
        for array, of_layer in of_stack.items():
            name = f"{stack} " * (len(shapes) > 1) + array
            if WEIGHTS in of_layer:
                _check_weights(name, of_layer[WEIGHTS], (queries, keys), kv_heads)
            else:
                weights += _check_arrays(name, of_layer, {"Q": queries}, keys)
    if weights > MOST_WEIGHTS:
        message = f"q and k make {weights:,} weights, expected at most {MOST_WEIGHTS:,}"
        raise InputError(message, "save fewer layers, or the last tokens' queries alone")


def _check_weights(name: str, shape: Sequence[int], expected: tuple[int, int], kv_heads: int | None) -> None:
    queries, keys = expected
    if len(shape) != 3:
        message = f"{name}: expected 3 axes (heads, queries, keys), got {as_words(shape)}"
        raise InputError(message, "give one array for each layer")
    if not shape[0]:
        raise InputError(f"{name} has no heads: {as_words(shape)}", "leave it out")
    # Where the keys are right, the queries are likely those of another text.
    if tuple(shape[1:]) != expected:
        got = f"one for each token, got {shape[1]} and {shape[2]}"
        other_text = "give {query_tokens} for queries of another text, {query_positions} for those of the last tokens"
        how = other_text if shape[2] == keys else "give a token for each key"
        raise InputError(f"{name}: expected {queries} queries and {keys} keys, {got}", how)
    if kv_heads and shape[0] % kv_heads:
        message = f"{name} has {shape[0]} heads, which {kv_heads} kv heads do not divide"
        raise InputError(message, "leave out {kv_heads}, or give the number of the model's config")


def _check_arrays(name: str, shapes: Shapes, sizes: dict[str, int], tokens: int) -> int:
    """How many weights the arrays of a layer make, whose sizes fit each other. Raises InputError where they do not."""
    sizes = {**sizes, "K": shapes["key_positions"][0] if len(shapes.get("key_positions", ())) == 1 else tokens}
    if not 0 < sizes["K"] <= tokens:
        raise InputError(f"{name}: expected key_positions of 1 to {tokens} tokens, got {sizes['K']}", "correct them")
    for part, forms in ARRAYS.items():
        if part not in shapes:
            continue
        shape = tuple(shapes[part])
        axes = next((axes for axes in forms if len(axes) == len(shape)), forms[-1])
        words = ", ".join(AXES[axis] for axis in axes)
        if len(shape) != len(axes):
            got = f"of {len(axes)} axes ({words}), got {as_words(shape)}"
            raise InputError(f"{name}: expected {part} {got}", "give the tensor of one text")
        if 0 in shape:
            raise InputError(f"{name}: {part} is empty, {as_words(shape)}", "leave out the layer")
        # The first array with an axis says how long it is; a mask and a bias may be one for all heads.
        shared = part in (MASK, "bias") and len(axes) == 3 and shape[0] == 1
        own = dict(zip(axes, shape, strict=True))
        expected = tuple(1 if shared and axis == "H" else sizes.setdefault(axis, own[axis]) for axis in axes)
        if shape != expected:
            message = f"{name}: expected {part} ({words}) as {as_words(expected)}, got {as_words(shape)}"
            raise InputError(message, _why_not(own, sizes))
    if sizes["H"] % sizes["G"]:
        message = f"{name} has {sizes['H']} heads, which {sizes['G']} kv heads do not divide"
        raise InputError(message, "give k and v of the model's own kv heads")
    return sizes["H"] * sizes["Q"] * sizes["K"]


def _why_not(own: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """What an array with other sizes may lack."""
    if own.get("Q") not in (None, sizes["Q"]):
        return "give {query_positions} for queries of the last tokens, {query_tokens} for those of another text"
    of_keys = own.get("K") not in (None, sizes["K"])
    return "give a token for each key, or the layer's key_positions" if of_keys else "give q and k of one layer"


def _check_flags(given: GivenTensors) -> None:
    """Raise InputError for masks that do not fit the tokens, UsageError for a mask of several stacks."""
    text, target = len(given.text), len(given.target or ())
    shapes: dict[str, tuple[int, ...]] = {ATTENTION_MASK: (text,), QUERY_ATTENTION_MASK: (target,)}
    shapes[MASK] = Sizes(text, target or None, given.last).of(next(iter(given.stacks)))
    for name, flags in given.flags.items():
        if flags.shape != shapes[name]:
            expected, got = as_words(shapes[name]), as_words(flags.shape)
            raise InputError(f"{name}: expected shape {expected}, got {got}", "correct it")
    if MASK in given.flags and len(given.stacks) > 1:
        raise UsageError("a mask is of one stack", "give each stack alone, or leave out {mask}")
    if ATTENTION_MASK in given.flags and given.last is not None:
        raise UsageError("queries of the last tokens have no padding", "leave out {attention_mask} and its tokens")


def axes_of(stack: str, text: T, target: T | None) -> tuple[T, T]:
    """The tokens of a stack's queries and of its keys; target: those of queries of another text.

    >>> axes_of("cross", "the text", "its target")
    ('its target', 'the text')
    """
    of_queries = text if target is None else target
    return {ENCODER: (text, text), CROSS: (of_queries, text)}.get(stack, (of_queries, of_queries))


def as_words(shape: Sequence[int]) -> str:
    """A shape as messages have it, `(2, 3, 3)`."""
    return f"({', '.join(map(str, shape))})"


# Tokens


def prompt_of_tokens(tokens: Any, tokenizer: Any = None, what: str = TOKENS) -> Prompt:
    """Tokens as a Prompt: strings as a tokenizer or a person writes them, ids with their tokenizer, or a Prompt.

    Marks of vocabularies are read: `Ġthe`, `▁the`, `##ing`. Names such as `<s>` and `[CLS]` are special tokens. Where
    no token has a blank or a mark, they are words with a blank between them. Equal tokens have equal ids.

    >>> prompt_of_tokens(["<s>", "Ġthe", "Ġbank"]).labels
    ('<s>', '·the', '·bank')
    """
    if isinstance(tokens, Prompt):
        return tokens
    if isinstance(tokens, str | bytes) or not (isinstance(tokens, Sequence) or hasattr(tokens, "tolist")):
        how = "give a list, such as tokenizer.convert_ids_to_tokens(ids)"
        raise UsageError(f"{what}: expected a list of tokens, got {type(tokens).__name__}", how)
    items = _items(tokens)
    if not items:
        raise InputError(f"{what}: there is no token", "give a token for each key")
    if all(type(item) is int for item in items):
        if tokenizer is None:
            raise UsageError(f"{what}: ids need their tokenizer", "give {tokenizer}, or the tokens as strings")
        return from_ids(tokenizer, items)
    others = [item for item in items if not isinstance(item, str)]
    if others:
        raise UsageError(f"{what}: expected strings or ids, got {brief(others[0])}", "give one string for each token")
    longest = max(map(len, items))
    if longest > LONGEST_TEXT:
        raise InputError(f"{what}: a token has {longest} letters, expected at most {LONGEST_TEXT}", "shorten it")
    try:
        "".join(items).encode()
    except UnicodeEncodeError:
        raise InputError(f"{what}: a token holds half of a surrogate pair", "write the character itself") from None
    return _of_strings(items)


def _items(tokens: Any) -> list[Any]:
    """The strings or ids of a list or an array, of a batch of one text too."""
    items: list[Any] = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    return items[0] if len(items) == 1 and isinstance(items[0], list) else items


def _written(tokens: Any, tokenizer: Any, prompt: Prompt) -> list[str]:
    """Tokens as a file writes them: the strings that were given, the tokenizer's own names, or a Prompt's pieces."""
    if isinstance(tokens, Prompt):
        return [plain or token for plain, token in zip(prompt.plain, prompt.tokens, strict=True)]
    items = _items(tokens)
    return items if isinstance(items[0], str) else list(tokenizer.convert_ids_to_tokens(items))


def _of_strings(names: Sequence[str]) -> Prompt:
    style, blanks = marks_of(names), any(char.isspace() for name in names for char in name)
    style = style if not blanks or style in ("byte", "metaspace") else "plain"
    words = style == "plain" and not blanks
    pieces, before = list[Piece](), None
    for name in names:
        special = SPECIAL.fullmatch(name) is not None and not BYTE_TOKEN.fullmatch(name)
        gap = not special and (before is not None if words else piece_gap(name, before, style))
        data = name.encode() if special else piece_bytes(name, style)
        pieces.append(Piece(name, data, None, special, gap=gap))
        before = None if special else name
    exact, labels, plain, _ = zip(*read_pieces(pieces), strict=True)
    numbers = {name: at for at, name in enumerate(dict.fromkeys(names))}
    return Prompt(
        text="".join(plain),
        ids=tuple([numbers[name] for name in names]),
        tokens=exact,
        labels=labels,
        special=tuple([piece.special for piece in pieces]),
        plain=plain,
        turns=(),
    )
