"""Attention matrices that somebody else computed -> their layers and the Prompts of both axes, as data; and their file.

    matrices = tensors_of([A0, A1], ["the", "cat", "sat"])   # arrays of numpy or torch, (H, Q, K) for each layer
    save_weights("bank.npz", matrices)
    matrices = read_tensors("bank.npz")

A file is somebody's: npz or safetensors, nothing in it is run, and what it declares is checked before it is unpacked.
It holds `layer.0`, `layer.1`, ... with 3 axes, or one `weights` with 4, and `tokens`; of an encoder-decoder
`encoder.layer.0`, `decoder.weights`, `cross.weights`, and `query_tokens`.

Shapes: L layer, H head, Q query, K key.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from attnscope.errors import InputError, UsageError, brief, listed
from attnscope.inputs.labels import BYTE_TOKEN, Piece, marks_of, piece_bytes, piece_gap, read_pieces
from attnscope.inputs.prompt import Prompt, from_ids
from attnscope.inputs.tensor_files import (
    FLOATS,
    MOST_TOKEN_BYTES,
    TEXT,
    UTF8,
    Entry,
    as_words,
    read_file,
    twice,
    write_file,
)
from attnscope.model.selection import CROSS, DECODER, ENCODER, OF_TWO_TEXTS
from attnscope.utils.files import LONGEST_TEXT, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

WHOLE = "weights"  # the one array of a stack
MEMORY = "memory"  # what the source of weights is called that are in no file
TOKENS, QUERY_TOKENS = "tokens", "query_tokens"
MODEL, KV_HEADS, SINK_LOGITS = "model", "kv_heads", "sink_logits"
FLAGS = ATTENTION_MASK, QUERY_ATTENTION_MASK, MASK = "attention_mask", "query_attention_mask", "mask"
IN_METADATA = TOKENS, QUERY_TOKENS, MODEL, KV_HEADS, SINK_LOGITS
BESIDE = *IN_METADATA, TOKENS + UTF8, QUERY_TOKENS + UTF8, *FLAGS  # arrays of a file that are no weights
MOST_LAYERS, MOST_TOKENS = 1000, 2**20
LAYER = re.compile(r"(?:(encoder|decoder|cross)\.)?(?:layer\.(\d{1,3})|weights)")
SPECIAL = re.compile(r"<\|?[^<>|\s]+\|?>|\[[A-Z]+\]")  # <s>, <|endoftext|>, [CLS]
NAMES = "layer.0, layer.1, ... (heads, queries, keys), or one `weights` (layers, heads, queries, keys), and tokens"


@dataclass(frozen=True, eq=False)
class GivenTensors:
    """Attention weights that somebody else computed, with the tokens of both axes; nothing of them is checked yet.

    stacks: {stack: {layer: (H, Q, K), on the CPU}}, of `decoder`, `encoder` and `cross`; a single stack over one text
    is called a decoder until its weights say which way they look. text: the tokens that are attended to. target: those
    of queries of another text. name: of the model. kv_heads: of every layer. sink_logits: rows may sum to less than 1,
    a sink takes the rest. file: where the weights lie. written: `tokens` and `query_tokens` as a file has them. flags:
    `attention_mask` and `query_attention_mask`, False for padding, and `mask` (Q, K), True where a query sees a key.
    """

    stacks: Mapping[str, Mapping[int, Tensor]]
    text: Prompt
    target: Prompt | None = None
    name: str | None = None
    kv_heads: int | None = None
    sink_logits: bool = False
    file: Path | None = None
    written: Mapping[str, Sequence[str]] = field(default_factory=dict)
    flags: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The name of the file, or `memory`."""
        return MEMORY if self.file is None else self.file.name

    @cached_property
    def sha256(self) -> str:
        """Hash of the file, or of the numbers in memory, in hexadecimal."""
        if self.file is not None:
            return sha256_of(self.file)
        import torch

        total = hashlib.sha256()
        for stack, layers in self.stacks.items():
            for index, weights in layers.items():
                total.update(f"{stack} {index} {weights.dtype} {tuple(weights.shape)}".encode())
                for of_head in weights:
                    total.update(of_head.contiguous().view(torch.uint8).numpy())
        return total.hexdigest()


def tensors_of(
    weights: Any,
    tokens: Any,
    query_tokens: Any = None,
    tokenizer: Any = None,
    masks: Mapping[str, Any] | None = None,
    *,
    kv_heads: int | None = None,
) -> GivenTensors:
    """Matrices and tokens from Python, their shapes checked, see `attnscope.from_weights`; masks: by a name of FLAGS.

    Raises UsageError for what are no matrices or no tokens, InputError for shapes that do not fit each other.

    >>> tensors_of(torch.ones(1, 1, 1, 1), ["a"]).stacks["decoder"][0].shape
    torch.Size([1, 1, 1])
    """
    text = prompt_of_tokens(tokens, tokenizer)
    target = None if query_tokens is None else prompt_of_tokens(query_tokens, tokenizer, QUERY_TOKENS)
    of_axes = ((TOKENS, tokens, text), (QUERY_TOKENS, query_tokens, target))
    written = {what: _written(items, tokenizer, prompt) for what, items, prompt in of_axes if prompt is not None}
    # Names are those of stacks, numbers those of the layers of one.
    of_stacks = {DECODER if target is None else CROSS: weights}
    if isinstance(weights, Mapping) and any(isinstance(name, str) for name in weights):
        if not weights.keys() <= set(OF_TWO_TEXTS):
            raise UsageError(f"expected the stacks {', '.join(OF_TWO_TEXTS)}, got {listed(list(map(str, weights)))}")
        of_stacks = {stack: weights[stack] for stack in OF_TWO_TEXTS if stack in weights}
    stacks = {stack: _layers(of_stack) for stack, of_stack in of_stacks.items()}
    shapes = {
        stack: {f"layer {index}": tuple(layer.shape) for index, layer in layers.items()}
        for stack, layers in stacks.items()
    }
    _check_shapes(shapes, len(text), None if target is None else len(target), kv_heads)
    flags = {name: _flags(values, name, len(text)) for name, values in (masks or {}).items() if values is not None}
    matrices = GivenTensors(stacks, text, target, kv_heads=kv_heads, written=written, flags=flags)
    _check_flags(matrices)
    return matrices


def _layers(weights: Any) -> dict[int, Tensor]:
    """The layers of a stack as tensors (H, Q, K), from one array, a list of them, or {layer: array}."""
    if isinstance(weights, Mapping):
        if not all(isinstance(index, int) and 0 <= index < MOST_LAYERS for index in weights):
            raise UsageError("expected numbers of layers from 0 on", "give {0: array, 2: array}")
        return {index: _layer(weights[index], index) for index in sorted(weights)}
    if not isinstance(weights, list | tuple):
        stacked = _tensor(weights, "the weights")
        stacked = stacked.view(_of_one_text(stacked.shape, whole=True))
        if stacked.ndim != 4:
            raise InputError(
                f"expected weights of 4 axes (layers, heads, queries, keys), got {as_words(stacked.shape)}",
                "give a list with an array (heads, queries, keys) for each layer",
            )
        weights = list(stacked)
    if not weights:
        raise InputError("there is no layer in the weights", "give at least one array (heads, queries, keys)")
    return {index: _layer(of_layer, index) for index, of_layer in enumerate(weights)}


def _layer(weights: Any, index: int) -> Tensor:
    """One layer as a tensor (H, Q, K)."""
    if weights is None:
        raise UsageError(
            f"layer {index} is None: this model returned no weights",
            'load it with attn_implementation="eager", and ask for output_attentions=True',
        )
    tensor = _tensor(weights, f"layer {index}")
    tensor = tensor.view(_of_one_text(tensor.shape))
    if tensor.ndim == 4:
        message = f"layer {index} has {tensor.shape[0]} texts, expected one: {as_words(tensor.shape)}"
        raise InputError(message, "give the weights of one text, as weights[:, [0]]")
    return tensor


def _of_one_text(shape: Sequence[int], whole: bool = False) -> tuple[int, ...]:
    """The shape of a layer, or of a whole stack, without the axis of a batch of one text."""
    at, axes = (1, 5) if whole else (0, 4)
    return (*shape[:at], *shape[at + 1 :]) if len(shape) == axes and shape[at] == 1 else tuple(shape)


def _tensor(weights: Any, what: str) -> Tensor:
    """An array of numpy, torch or another library as a tensor on the CPU, without a copy where that is possible."""
    import torch

    if isinstance(weights, torch.Tensor):
        if weights.is_floating_point():
            return weights.detach().cpu()
        dtype = str(weights.dtype)
    else:
        array = weights if isinstance(weights, np.ndarray) else _array(weights, what)
        if array.dtype.name == "bfloat16":  # of ml_dtypes
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        if array.dtype.kind == "f" and array.dtype.itemsize in (2, 4, 8):
            native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
            return torch.from_numpy(native if native.flags.writeable else native.copy())
        dtype = str(array.dtype)
    raise UsageError(f"{what}: expected floating-point numbers, got {dtype}", "give the weights as floats")


def _array(weights: Any, what: str) -> np.ndarray:
    if isinstance(weights, str | bytes | Mapping):
        raise UsageError(f"{what}: expected an array, got {type(weights).__name__}", "give numbers of numpy or torch")
    try:
        return np.asarray(weights)
    except (ValueError, TypeError, RuntimeError):
        kind = type(weights).__name__
        raise UsageError(f"{what}: expected an array, got {kind}", "give the weights of one forward pass") from None


def _flags(values: Any, name: str, tokens: int) -> np.ndarray:
    """Booleans of an array of 0 and 1, without the axis of a batch of one; `causal` is such a mask."""
    if name == MASK and isinstance(values, str):
        if values != "causal":
            raise UsageError(f"expected {MASK} as 'causal' or an array, got {brief(values)}", "give one of them")
        return np.tri(tokens, dtype=bool)
    array = np.asarray(values.detach().cpu().float() if hasattr(values, "detach") else _array(values, name))
    if array.dtype.kind not in "biuf" or not ((array == 0) | (array == 1)).all():
        raise InputError(f"{name}: expected an array of 0 and 1", "give booleans")
    axes = 2 if name == MASK else 1
    while array.ndim > axes and len(array) == 1:
        array = array[0]
    return array.astype(bool)


def _check_shapes(
    shapes: Mapping[str, Mapping[str, Sequence[int]]], text: int, target: int | None, kv_heads: int | None
) -> None:
    """Raise InputError for shapes of the arrays of stacks, by name, that do not fit the tokens; UsageError without."""
    if target is None and (CROSS in shapes or len(shapes) > 1):
        raise UsageError("weights of several stacks need the tokens of the queries", "give {query_tokens=TOKENS}")
    for stack, of_stack in shapes.items():
        queries, keys = axes_of(stack, text, target)
        for array, shape in of_stack.items():
            name = f"{stack} " * (len(shapes) > 1) + array
            if len(shape) != 3:
                message = f"{name}: expected 3 axes (heads, queries, keys), got {as_words(shape)}"
                raise InputError(message, "give one array for each layer")
            if not shape[0]:
                raise InputError(f"{name} has no heads: {as_words(shape)}", "leave it out")
            # Where the keys are right, the queries are likely those of another text.
            if shape[1:] != (queries, keys):
                got = f"one for each token, got {shape[1]} and {shape[2]}"
                other_text = "give {query_tokens} for queries of another text"
                how = other_text if shape[2] == keys else "give a token for each key"
                raise InputError(f"{name}: expected {queries} queries and {keys} keys, {got}", how)
            if kv_heads and shape[0] % kv_heads:
                raise InputError(
                    f"{name} has {shape[0]} heads, which {kv_heads} kv heads do not divide",
                    "leave out {kv_heads}, or give the number of the model's config",
                )


def _check_flags(matrices: GivenTensors) -> None:
    """Raise InputError for masks that do not fit the tokens, UsageError for a mask of several stacks."""
    text, target = len(matrices.text), len(matrices.target or ())
    shapes: dict[str, tuple[int, ...]] = {ATTENTION_MASK: (text,), QUERY_ATTENTION_MASK: (target,)}
    shapes[MASK] = axes_of(next(iter(matrices.stacks)), text, target or None)
    for name, flags in matrices.flags.items():
        if flags.shape != shapes[name]:
            raise InputError(
                f"{name}: expected shape {as_words(shapes[name])}, got {as_words(flags.shape)}", "correct it"
            )
    if MASK in matrices.flags and len(matrices.stacks) > 1:
        raise UsageError("a mask is of one stack", "give each stack alone, or leave out {mask}")


def axes_of(stack: str, text: T, target: T | None) -> tuple[T, T]:
    """The tokens of a stack's queries and of its keys; target: those of queries of another text.

    >>> axes_of("cross", "the text", "its target")
    ('its target', 'the text')
    """
    of_queries = text if target is None else target
    return {ENCODER: (text, text), CROSS: (of_queries, text)}.get(stack, (of_queries, of_queries))


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
    wrong = next((item for item in items if not isinstance(item, str)), None)
    if wrong is not None:
        raise UsageError(f"{what}: expected strings or ids, got {brief(wrong)}", "give one string for each token")
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


# Files


def read_tensors(file: Path | str) -> GivenTensors:
    """The matrices and tokens of an npz or safetensors file, read as data.

    Raises InputError for a file that cannot be read, is another, is damaged or is too large; MemoryLimitError where
    this machine has no room for it.

    >>> read_tensors("bank.npz").text.labels
    """
    return replace(read_file(Path(file), IN_METADATA, _of_entries), file=Path(file))


def _of_entries(entries: Mapping[str, Entry]) -> GivenTensors:
    """What the arrays of a file say."""
    tokens, query_tokens = (_strings(name, entries) for name in (TOKENS, QUERY_TOKENS))
    if tokens is None:
        raise InputError("it has no tokens", f"it should hold {NAMES}")
    stacks = _stacks_of(entries, DECODER if query_tokens is None else CROSS)
    number = _scalar(KV_HEADS, r"[1-9]\d{0,5}", "a number from 1", entries)
    letters = f"a string of at most {LONGEST_TEXT} letters"
    model = _scalar(MODEL, rf"(?s:.{{0,{LONGEST_TEXT}}})", letters, entries)
    sinks = _scalar(SINK_LOGITS, "0|1|true|false", "0 or 1", entries)
    kv_heads, queries = None if number is None else int(number), None if query_tokens is None else len(query_tokens)
    # All that is declared is compared with the tokens before the first array is unpacked.
    shapes = {stack: _declared(arrays) for stack, arrays in stacks.items()}
    _check_shapes(shapes, len(tokens), queries, kv_heads)
    masks = {name: entries[name] for name in FLAGS if name in entries}
    most = len(tokens) * max(len(tokens), queries or 0)
    for name, entry in masks.items():
        if entry.dtype == "U" or entry.dtype[0] not in "biufBIUF" or math.prod(entry.shape) > most:
            raise InputError(f"expected {name} as 0 and 1 for each token, got {entry.declared}", "save it so")
    matrices = tensors_of(
        {stack: arrays[None].read() if None in arrays else _read(arrays) for stack, arrays in stacks.items()},
        tokens,
        query_tokens,
        masks=_read(masks),
        kv_heads=kv_heads,
    )
    return replace(matrices, name=model or None, sink_logits=sinks in ("1", "true"))


Arrays = dict[int | None, Entry]  # of a stack, by layer; None: of all layers


def _stacks_of(entries: Mapping[str, Entry], plain: str) -> dict[str, Arrays]:
    """The arrays of each stack; plain: of names without one. Names that are not known are refused.

    A misspelt layer would be missing without a word.
    """
    stacks = dict[str, Arrays]()
    for name, entry in entries.items():
        match = LAYER.fullmatch(name)
        if match is not None:
            arrays, index = stacks.setdefault(match[1] or plain, {}), None if match[2] is None else int(match[2])
            if index in arrays:  # as layer.1 and decoder.layer.01
                raise InputError(f"it has {brief(name)} twice, by two names", "keep one of them")
            arrays[index] = entry
        elif name not in BESIDE:
            raise InputError(f"it has an array {brief(name)}, which is none of weights", f"it should hold {NAMES}")
    if not stacks:
        raise InputError("it has no weights", f"it should hold {NAMES}")
    return stacks


def _declared(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    """The shapes of a stack's layers, as the headers say them, by name. InputError for what are no layers."""
    if None in arrays and len(arrays) > 1:
        raise InputError("it has `weights` and `layer.0` too", "keep one of them")
    shapes = {}
    for index, entry in arrays.items():
        name, shape = WHOLE if index is None else f"layer {index}", _of_one_text(entry.shape, whole=index is None)
        if entry.dtype not in FLOATS:
            raise InputError(f"{name}: expected floating-point numbers, got {entry.dtype}", "save it as floats")
        if index is None and (len(shape) != 4 or not 0 < shape[0] <= MOST_LAYERS):
            message = f"{name}: expected 4 axes (layers, heads, queries, keys), got {as_words(entry.shape)}"
            raise InputError(message, "save one array for each layer, as layer.0")
        shapes[name] = shape[1:] if index is None else shape
    return shapes


def _read(arrays: Mapping[Any, Entry]) -> dict[Any, Any]:
    return {name: array.read() for name, array in arrays.items()}


def _strings(name: str, entries: Mapping[str, Entry]) -> list[str] | None:
    """The tokens under a name: a JSON list in metadata or in `NAME_utf8`, or an array of strings."""
    entry, encoded = entries.get(name), entries.get(name + UTF8)
    if encoded is not None:
        if entry is not None:
            raise twice(name)
        if encoded.dtype not in ("u1", "U8") or len(encoded.shape) != 1 or encoded.shape[0] > MOST_TOKEN_BYTES:
            raise InputError(f"expected {name}{UTF8} as bytes, got {encoded.declared}", "save it as uint8")
        return _of_json(name, np.asarray(encoded.read()).tobytes().decode())
    if entry is None:
        return None
    if entry.dtype == TEXT:
        return _of_json(name, entry.read())
    if not entry.dtype.startswith("U") or len(entry.shape) != 1:
        raise InputError(f"expected {name} as strings, got {entry.declared}", "save them so")
    if entry.shape[0] > MOST_TOKENS:  # each may take no byte in the file
        raise InputError(f"it has {entry.shape[0]:,} {name}, expected at most {MOST_TOKENS:,}", "save fewer")
    return [str(token) for token in entry.read().tolist()]


def _of_json(name: str, document: str) -> list[str]:
    try:
        tokens = json.loads(document)
    except (ValueError, RecursionError):
        tokens = None
    if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        raise InputError(f"expected {name} as a JSON list of strings, got {brief(document[:40])}", "save them so")
    return tokens


def _scalar(name: str, pattern: str, expected: str, entries: Mapping[str, Entry]) -> str | None:
    """What a file says under a name, in its metadata or as an array without axes; None where it says nothing."""
    entry = entries.get(name)
    if entry is None:
        return None
    value = entry.declared
    if plain := not entry.shape and entry.dtype.startswith((TEXT, "U", "i", "u", "b1", "I", "BOOL")):
        item = entry.read()
        item = item if isinstance(item, str) else np.asarray(item).item()
        value = str(int(item)) if isinstance(item, bool) else str(item)
    if not (plain and re.fullmatch(pattern, value)):
        raise InputError(f"expected {name} as {expected}, got {brief(value)}", "leave it out")
    return value


def save_weights(file: Path | str, matrices: GivenTensors) -> Path:
    """Write weights and tokens to an npz or safetensors file, whole or not at all; bfloat16 in npz as float32.

    Raises UsageError for another suffix, and where the folder cannot be written.
    """
    import torch

    tokens = {what: json.dumps(names, ensure_ascii=False) for what, names in matrices.written.items()}
    every = {MODEL: matrices.name, KV_HEADS: matrices.kv_heads, SINK_LOGITS: int(matrices.sink_logits)}
    scalars = {name: value for name, value in every.items() if value}
    several = len(matrices.stacks) > 1
    layers = {
        f"{stack}.layer.{index}" if several else f"layer.{index}": weights
        for stack, of_stack in matrices.stacks.items()
        for index, weights in of_stack.items()
    }
    flags = {name: torch.from_numpy(flags) for name, flags in matrices.flags.items()}
    return write_file(Path(file), layers | flags, scalars, tokens)
