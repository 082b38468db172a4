"""Attention matrices that somebody else computed -> their layers and the Prompts of both axes, as data; and their file.

    matrices = weights_of([A0, A1], ["the", "cat", "sat"])   # arrays of numpy or torch, (H, Q, K) for each layer
    save_weights("bank.npz", matrices)
    matrices = read_weights("bank.npz")

A file is somebody's: npz or safetensors, nothing in it is run, and what it declares is checked before it is unpacked.
It holds `layer.0`, `layer.1`, ... with 3 axes, or one `weights` with 4, and `tokens`; of an encoder-decoder
`encoder.layer.0`, `decoder.weights`, `cross.weights`, and `query_tokens`.

Shapes: L layer, H head, Q query, K key.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from attnscope.errors import InputError, MemoryLimitError, UsageError, brief, listed
from attnscope.inputs.labels import BYTE_TOKEN, Piece, marks_of, piece_bytes, piece_gap, read_pieces
from attnscope.inputs.prompt import Prompt, from_ids
from attnscope.model.selection import CROSS, DECODER, ENCODER, OF_TWO_TEXTS
from attnscope.utils.files import FOREIGN, LONGEST_TEXT, open_regular, sha256_of, write_whole
from attnscope.utils.memory import free_memory, human_bytes

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

WHOLE = "weights"  # the one array of a stack; and what a file's source is called where it lies in memory
MEMORY = "memory"
TOKENS, QUERY_TOKENS, UTF8 = "tokens", "query_tokens", "_utf8"
MODEL, KV_HEADS, SINK_LOGITS = "model", "kv_heads", "sink_logits"
ATTENTION_MASK, QUERY_ATTENTION_MASK, MASK = "attention_mask", "query_attention_mask", "mask"
FLAGS = (ATTENTION_MASK, QUERY_ATTENTION_MASK, MASK)
BESIDE = (
    *(TOKENS, TOKENS + UTF8, QUERY_TOKENS, QUERY_TOKENS + UTF8, MODEL, KV_HEADS, SINK_LOGITS),
    *FLAGS,
)  # no weights
NPZ, SAFETENSORS = ".npz", ".safetensors"
MOST_BYTES = 2**33  # that a file may unpack to
MOST_ARRAYS, MOST_LAYERS, MOST_TOKENS, MOST_TOKEN_BYTES = 4096, 1000, 2**20, 2**26
HEADER_BYTES = 10_000  # of an array in npz
LAYER = re.compile(r"(?:(encoder|decoder|cross)\.)?(?:layer\.(\d{1,4})|weights)")
SPECIAL = re.compile(r"<\|?[^<>|\s]+\|?>|\[[A-Z]+\]")  # <s>, <|endoftext|>, [CLS]
NAMES = "layer.0, layer.1, ... (heads, queries, keys), or one `weights` (layers, heads, queries, keys), and tokens"
DAMAGED = (*FOREIGN, EOFError, RuntimeError, SystemError, zlib.error)  # what readers of archives raise


@dataclass(frozen=True, eq=False)
class GivenWeights:
    """Attention weights that somebody else computed, with the tokens of both axes; nothing of them is checked yet.

    stacks: {stack: {layer: (H, Q, K), on the CPU}}, of `decoder`, `encoder` and `cross`; a single stack over one text
    is called a decoder until its weights say which way they look. text: the tokens that are attended to. target: those
    of queries of another text. name: of the model, where somebody says it. source: the file, or `memory`. kv_heads: of
    every layer, None where that is not known. sink_logits: rows may sum to less than 1, a sink takes the rest.
    written: `tokens` and `query_tokens` as somebody wrote them, for a file. flags: `attention_mask` and
    `query_attention_mask`, False for padding, and `mask` (Q, K), True where a query sees a key; those that are known.
    """

    stacks: Mapping[str, Mapping[int, Tensor]]
    text: Prompt
    target: Prompt | None = None
    name: str | None = None
    source: str = MEMORY
    kv_heads: int | None = None
    sink_logits: bool = False
    file: Path | None = None
    written: Mapping[str, Sequence[str]] = field(default_factory=dict)
    flags: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """Hash of the file, or of the numbers in memory, in hexadecimal."""
        if self.file is not None:
            return sha256_of(self.file)
        total = hashlib.sha256()
        for stack, layers in self.stacks.items():
            for index, weights in layers.items():
                total.update(f"{stack} {index} {weights.dtype} {tuple(weights.shape)}".encode())
                for of_head in weights:
                    total.update(_plain(of_head.contiguous()).numpy().tobytes())
        return total.hexdigest()


def weights_of(
    weights: Any,
    tokens: Any,
    query_tokens: Any = None,
    tokenizer: Any = None,
    *,
    model: str | None = None,
    kv_heads: int | None = None,
    sink_logits: bool = False,
    attention_mask: Any = None,
    query_attention_mask: Any = None,
    mask: Any = None,
) -> GivenWeights:
    """Matrices and tokens from Python, their shapes checked; see `attnscope.from_weights`.

    Raises UsageError for what are no matrices or no tokens, InputError for shapes that do not fit each other.

    >>> weights_of(torch.ones(1, 1, 1, 1), ["a"]).stacks["decoder"][0].shape
    torch.Size([1, 1, 1])
    """
    text = prompt_of_tokens(tokens, tokenizer, TOKENS)
    target = None if query_tokens is None else prompt_of_tokens(query_tokens, tokenizer, QUERY_TOKENS)
    of_axes = ((TOKENS, tokens, text), (QUERY_TOKENS, query_tokens, target))
    written = {what: _written(items, tokenizer, prompt) for what, items, prompt in of_axes if prompt is not None}
    plain = DECODER if target is None else CROSS
    of_stacks = {plain: weights}
    if isinstance(weights, Mapping) and any(isinstance(name, str) for name in weights):
        if not weights.keys() <= set(OF_TWO_TEXTS):
            raise UsageError(f"expected the stacks {', '.join(OF_TWO_TEXTS)}, got {listed(list(map(str, weights)))}")
        of_stacks = {stack: weights[stack] for stack in OF_TWO_TEXTS if stack in weights}
    stacks = {stack: _layers(of_stack) for stack, of_stack in of_stacks.items()}
    named = zip(FLAGS, (attention_mask, query_attention_mask, mask), strict=True)
    flags = {name: _flags(values, name, len(text)) for name, values in named if values is not None}
    return _checked(GivenWeights(stacks, text, target, model, MEMORY, kv_heads, sink_logits, None, written, flags))


def _layers(weights: Any) -> dict[int, Tensor]:
    """The layers of a stack as tensors (H, Q, K), from one array, a list of them, or {layer: array}."""
    if isinstance(weights, Mapping):
        if not all(isinstance(index, int) and 0 <= index < MOST_LAYERS for index in weights):
            raise UsageError("expected numbers of layers from 0 on", "give {0: array, 2: array}")
        return {index: _layer(weights[index], index) for index in sorted(weights)}
    if not isinstance(weights, list | tuple):
        stacked = _tensor(weights, "the weights")
        if stacked.ndim == 5 and stacked.shape[1] == 1:
            stacked = stacked[:, 0]
        if stacked.ndim != 4:
            raise InputError(
                f"expected weights of 4 axes (layers, heads, queries, keys), got {_shape(stacked.shape)}",
                "give a list with an array (heads, queries, keys) for each layer",
            )
        weights = list(stacked)
    if not weights:
        raise InputError("there is no layer in the weights", "give at least one array (heads, queries, keys)")
    return {index: _layer(of_layer, index) for index, of_layer in enumerate(weights)}


def _layer(weights: Any, index: int) -> Tensor:
    """One layer as a tensor (H, Q, K); a batch of one text loses that axis."""
    if weights is None:
        raise UsageError(
            f"layer {index} is None: this model returned no weights",
            'load it with attn_implementation="eager", and ask for output_attentions=True',
        )
    tensor = _tensor(weights, f"layer {index}")
    if tensor.ndim == 4:
        if tensor.shape[0] != 1:
            message = f"layer {index} has {tensor.shape[0]} texts, expected one: {_shape(tensor.shape)}"
            raise InputError(message, "give the weights of one text, as weights[:, [0]]")
        tensor = tensor[0]
    return tensor


def _tensor(weights: Any, what: str) -> Tensor:
    """An array of numpy, torch or another library as a tensor on the CPU, without a copy where that is possible."""
    import torch

    if isinstance(weights, torch.Tensor):
        tensor = weights.detach().cpu()
    else:
        array = weights if isinstance(weights, np.ndarray) else _array(weights, what)
        if array.dtype.name == "bfloat16":  # of ml_dtypes
            tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        elif array.dtype.kind == "f" and array.dtype.itemsize in (2, 4, 8):
            native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
            tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
        else:
            raise UsageError(
                f"{what}: expected floating-point numbers, got {array.dtype}", "give the weights as floats"
            )
    if not tensor.is_floating_point():
        raise UsageError(f"{what}: expected floating-point numbers, got {tensor.dtype}", "give the weights as floats")
    return tensor


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


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _plain(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that numpy has."""
    import torch

    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _checked(matrices: GivenWeights) -> GivenWeights:
    """The same, or InputError where shapes do not fit the tokens or each other, UsageError for what is left out."""
    if matrices.target is None and (CROSS in matrices.stacks or len(matrices.stacks) > 1):
        raise UsageError("weights of several stacks need the tokens of the queries", "give {query_tokens=TOKENS}")
    for stack, layers in matrices.stacks.items():
        axes = axes_of(stack, matrices.text, matrices.target)
        for index, weights in layers.items():
            name = f"{stack} layer {index}" if len(matrices.stacks) > 1 else f"layer {index}"
            _check_shape(name, tuple(weights.shape), *map(len, axes))
            if matrices.kv_heads and weights.shape[0] % matrices.kv_heads:
                raise InputError(
                    f"{name} has {weights.shape[0]} heads, which {matrices.kv_heads} kv heads do not divide",
                    "leave out {kv_heads}, or give the number of the model's config",
                )
    text, target = len(matrices.text), len(matrices.target or ())
    shapes: dict[str, tuple[int, ...]] = {ATTENTION_MASK: (text,), QUERY_ATTENTION_MASK: (target,)}
    shapes[MASK] = axes_of(next(iter(matrices.stacks)), text, target or None)
    for name, flags in matrices.flags.items():
        if flags.shape != shapes[name]:
            raise InputError(f"{name}: expected shape {_shape(shapes[name])}, got {_shape(flags.shape)}", "correct it")
    if MASK in matrices.flags and len(matrices.stacks) > 1:
        raise UsageError("a mask is of one stack", "give each stack alone, or leave out {mask}")
    return matrices


def _check_shape(name: str, shape: Sequence[int], queries: int, keys: int) -> None:
    if len(shape) != 3:
        raise InputError(
            f"{name}: expected 3 axes (heads, queries, keys), got {_shape(shape)}", "give one array for each layer"
        )
    if not shape[0]:
        raise InputError(f"{name} has no heads: {_shape(shape)}", "leave it out")
    if shape[1:] != (queries, keys):
        other = "give {query_tokens} for queries of another text" if shape[2] == keys else "give a token for each key"
        raise InputError(
            f"{name}: expected {queries} queries and {keys} keys, one for each token, got {shape[1]} and {shape[2]}",
            other,
        )


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
    items = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    items = items[0] if len(items) == 1 and isinstance(items[0], list) else items  # a batch of one text
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


class Entry(NamedTuple):
    """An array of a file, as its header declares it; read() gives it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]


def read_weights(file: Path | str) -> GivenWeights:
    """The matrices and tokens of an npz or safetensors file, read as data.

    Raises InputError for a file that cannot be read, is another, is damaged or is too large; MemoryLimitError where
    this machine has no room for it.

    >>> read_weights("bank.npz").text.labels
    """
    path = Path(file)
    reading = {NPZ: _npz, SAFETENSORS: _safetensors}.get(path.suffix.lower())
    if reading is None:
        raise InputError(f"expected weights in a file of .npz or .safetensors, got {path.name}", "name such a file")
    try:
        with open_regular(path) as stream:
            return _checked(_of_entries(path, *reading(path, stream)))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", "check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder", "name a file in it") from None
    except zipfile.BadZipFile as error:
        raise _damaged(path, error) from None
    except DAMAGED as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    why = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    return InputError(f"{path} cannot be read as {path.suffix[1:].lower()}: {why}", "save it again")


def _of_entries(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> GivenWeights:
    """What the arrays and the metadata of a file say; each array is read only when all that is declared fits."""
    tokens, query_tokens = (_strings(path, name, entries, metadata) for name in (TOKENS, QUERY_TOKENS))
    if tokens is None:
        raise InputError(f"{path} has no tokens", f"it should hold {NAMES}")
    # Only names that are known: a misspelt layer would be missing without a word.
    plain, stacks = DECODER if query_tokens is None else CROSS, dict[str, dict[int | None, Entry]]()
    for name, entry in entries.items():
        match = LAYER.fullmatch(name)
        if match is None and name not in BESIDE:
            raise InputError(f"{path} has an array {brief(name)}, which is none of weights", f"it should hold {NAMES}")
        if match is not None:
            of_stack, index = stacks.setdefault(match[1] or plain, {}), None if match[2] is None else int(match[2])
            if index in of_stack:  # as layer.1 and decoder.layer.01
                raise InputError(f"{path} has {brief(name)} twice, by two names", "keep one of them")
            of_stack[index] = entry
    if not stacks:
        raise InputError(f"{path} has no weights", f"it should hold {NAMES}")
    # All shapes are compared with the tokens before the first array is unpacked.
    _check_declared(path, stacks, len(tokens), None if query_tokens is None else len(query_tokens))
    for name in (name for name in FLAGS if name in entries):
        shape, most = entries[name].shape, len(tokens) * max(len(tokens), len(query_tokens or ()))
        if entries[name].dtype == "U" or entries[name].dtype[0] not in "biufBIUF" or math.prod(shape) > most:
            got = f"{entries[name].dtype} {_shape(shape)}"
            raise InputError(f"{path}: expected {name} as 0 and 1 for each token, got {got}", "save it so")
    text = prompt_of_tokens(tokens)
    target = None if query_tokens is None else prompt_of_tokens(query_tokens, what=QUERY_TOKENS)
    layers = {}
    for stack in (stack for stack in OF_TWO_TEXTS if stack in stacks):
        arrays = stacks[stack]
        whole = arrays.get(None)
        layers[stack] = _layers(whole.read() if whole else {at: array.read() for at, array in arrays.items()})
    number = _scalar(path, KV_HEADS, r"[1-9]\d{0,5}", "a number from 1", entries, metadata)
    model = _scalar(
        path, MODEL, rf"(?s:.{{0,{LONGEST_TEXT}}})", f"a string of at most {LONGEST_TEXT} letters", entries, metadata
    )
    sink = _scalar(path, SINK_LOGITS, "0|1|true|false", "0 or 1", entries, metadata)
    flags = {name: _flags(entries[name].read(), name, len(text)) for name in FLAGS if name in entries}
    kv_heads = None if number is None else int(number)
    return GivenWeights(
        layers, text, target, model or None, path.name, kv_heads, sink in ("1", "true"), file=path, flags=flags
    )


def _check_declared(
    path: Path, stacks: Mapping[str, Mapping[int | None, Entry]], text: int, target: int | None
) -> None:
    """Raise InputError for arrays whose declared shape or dtype is not that of weights of so many tokens."""
    for stack, arrays in stacks.items():
        if None in arrays and len(arrays) > 1:
            raise InputError(f"{path} has `weights` and `layer.0` too", "keep one of them")
        queries, keys = axes_of(stack, text, target)
        for index, entry in arrays.items():
            name = f"{path}: {WHOLE if index is None else f'layer {index}'}"
            if entry.dtype not in ("f2", "f4", "f8", "F16", "F32", "F64", "BF16"):
                raise InputError(f"{name}: expected floating-point numbers, got {entry.dtype}", "save it as floats")
            shape = entry.shape
            if index is None:
                if len(shape) == 5 and shape[1] == 1:
                    shape = (shape[0], *shape[2:])
                if len(shape) != 4 or not 0 < shape[0] <= MOST_LAYERS:
                    raise InputError(
                        f"{name}: expected 4 axes (layers, heads, queries, keys), got {_shape(entry.shape)}",
                        "save one array for each layer, as layer.0",
                    )
                shape = shape[1:]
            elif index >= MOST_LAYERS:
                raise InputError(f"{name}: expected a layer under {MOST_LAYERS}", "number layers from 0 on")
            shape = shape[1:] if len(shape) == 4 and shape[0] == 1 and index is not None else shape
            _check_shape(name, shape, queries, keys)


def _strings(path: Path, name: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> list[str] | None:
    """The tokens under a name: a JSON list in metadata or in `NAME_utf8`, or an array of strings."""
    _once(path, name, (name in metadata) + (name + UTF8 in entries) + (name in entries) < 2)
    if name in metadata or name + UTF8 in entries:
        document = metadata[name] if name in metadata else _utf8(path, name + UTF8, entries[name + UTF8])
        try:
            tokens = json.loads(document)
        except (ValueError, RecursionError):
            tokens = None
        if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
            raise InputError(
                f"{path}: expected {name} as a JSON list of strings, got {brief(document[:40])}", "save them so"
            )
        return tokens
    if name not in entries:
        return None
    entry = entries[name]
    if not entry.dtype.startswith("U") or len(entry.shape) != 1:
        raise InputError(f"{path}: expected {name} as strings, got {entry.dtype} {_shape(entry.shape)}", "save them so")
    if entry.shape[0] > MOST_TOKENS:  # each may take no byte in the file
        raise InputError(f"{path} has {entry.shape[0]:,} {name}, expected at most {MOST_TOKENS:,}", "save fewer")
    return [str(token) for token in entry.read().tolist()]


def _utf8(path: Path, name: str, entry: Entry) -> str:
    if entry.dtype not in ("u1", "U8") or len(entry.shape) != 1 or entry.shape[0] > MOST_TOKEN_BYTES:
        raise InputError(
            f"{path}: expected {name} as bytes, got {entry.dtype} {_shape(entry.shape)}", "save it as uint8"
        )
    return bytes(np.asarray(entry.read()).tobytes()).decode()


def _scalar(
    path: Path, name: str, pattern: str, expected: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]
) -> str | None:
    """What a file says under a name, in its metadata or as an array without axes; None where it says nothing."""
    entry, value, plain = entries.get(name), metadata.get(name), True
    if entry is not None:
        _once(path, name, name not in metadata)
        value = f"{entry.dtype} {_shape(entry.shape)}"
        if plain := not entry.shape and entry.dtype.startswith(("U", "i", "u", "b1", "I", "BOOL")):
            item = np.asarray(entry.read()).item()
            value = str(int(item)) if isinstance(item, bool) else str(item)
    if value is not None and not (plain and re.fullmatch(pattern, value)):
        raise InputError(f"{path}: expected {name} as {expected}, got {brief(value)}", "leave it out")
    return value


def _once(path: Path, name: str, once: bool) -> None:
    if not once:
        raise InputError(f"{path} has {name} twice, in two forms", "keep one of them")


def _check_size(path: Path, needed: int) -> None:
    """Refuse a file that unpacks to more than is read, or than this machine has."""
    if needed > MOST_BYTES:
        message = f"{path} unpacks to {human_bytes(needed)}, expected at most {human_bytes(MOST_BYTES)}"
        raise InputError(message, "save fewer layers, or float16")
    if needed > 2**20 and needed > (room := free_memory("cpu")):
        raise MemoryLimitError(
            f"{path} unpacks to {human_bytes(needed)}, and this machine has {human_bytes(room)} free",
            "save fewer layers, or float16",
        )


def _npz(path: Path, stream: IO[bytes]) -> tuple[dict[str, Entry], dict[str, str]]:
    """The arrays of an npz file by name, with headers that agree with the archive's sizes."""
    archive = zipfile.ZipFile(stream)
    members = archive.infolist()
    if len(members) > MOST_ARRAYS:
        raise InputError(f"{path} has {len(members)} arrays, expected at most {MOST_ARRAYS}", "save fewer")
    _check_size(path, sum(member.file_size for member in members))
    entries = dict[str, Entry]()
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name == member.filename or name in entries:
            raise InputError(
                f"{path} holds {brief(member.filename)}, expected arrays of numpy, each once", "save it again"
            )
        with archive.open(member) as part:
            shape, dtype, start = _npy_header(part)
        if dtype.hasobject:
            raise InputError(f"{path}: {name} holds Python objects, which are not read", "save numbers and strings")
        if math.prod(shape) * dtype.itemsize + start != member.file_size:
            raise InputError(f"{path}: {name} has not as many bytes as its shape {_shape(shape)} says", "save it again")
        kind = "U" if dtype.kind == "U" else dtype.kind + str(dtype.itemsize)
        if kind == "U" and member.file_size > MOST_TOKEN_BYTES:
            raise InputError(f"{path}: {name} takes {human_bytes(member.file_size)}", "save tokens_utf8 instead")
        entries[name] = Entry(shape, kind, partial(_read_npy, stream, member))
    return entries, {}


def _npy_header(part: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and length of the header of an array in numpy's own format."""
    version = np.lib.format.read_magic(part)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"an array of format {version}")
    try:
        shape, _, dtype = read(part, max_header_size=HEADER_BYTES)
    except Exception as error:  # numpy reads it with Python's parser, which raises errors of its own, MemoryError too
        raise ValueError(f"a header that is none: {brief(str(error))}") from None
    if any(size < 0 for size in shape):
        raise ValueError(f"an array of shape {_shape(shape)}")
    return shape, dtype, part.tell()


def _read_npy(stream: IO[bytes], member: zipfile.ZipInfo) -> Any:
    with zipfile.ZipFile(stream) as archive, archive.open(member) as part:
        return np.lib.format.read_array(part, allow_pickle=False, max_header_size=HEADER_BYTES)


def _safetensors(path: Path, stream: IO[bytes]) -> tuple[dict[str, Entry], dict[str, str]]:
    """The arrays of a safetensors file by name, and its metadata."""
    from safetensors import SafetensorError, safe_open

    _check_size(path, stream.seek(0, io.SEEK_END))
    try:
        with safe_open(path, framework="pt") as archive:
            names = list(archive.keys())
            if len(names) > MOST_ARRAYS:
                raise InputError(f"{path} has {len(names)} arrays, expected at most {MOST_ARRAYS}", "save fewer")
            parts = {name: archive.get_slice(name) for name in names}
            entries = {
                name: Entry(tuple(part.get_shape()), str(part.get_dtype()), partial(_read_tensor, path, name))
                for name, part in parts.items()
            }
            return entries, dict(archive.metadata() or {})
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _read_tensor(path: Path, name: str) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as archive:
        return archive.get_tensor(name)


def save_weights(file: Path | str, matrices: GivenWeights) -> Path:
    """Write weights and tokens to an npz or safetensors file, whole or not at all; bfloat16 in npz as float32.

    Raises UsageError for another suffix, and where the folder cannot be written.
    """
    path, suffix = Path(file), Path(file).suffix.lower()
    if suffix not in (NPZ, SAFETENSORS):
        raise UsageError(f"expected a file of .npz or .safetensors, got {path.name}", "name it weights.npz")
    tokens = {what: json.dumps(names, ensure_ascii=False) for what, names in matrices.written.items()}
    every = {MODEL: matrices.name, KV_HEADS: matrices.kv_heads, SINK_LOGITS: int(matrices.sink_logits)}
    scalars = {name: value for name, value in every.items() if value}
    if suffix == SAFETENSORS:
        import torch
        from safetensors.torch import save

        tensors = {name: tensor.contiguous() for name, tensor in _named_layers(matrices)}
        tensors |= {name: torch.from_numpy(flags) for name, flags in matrices.flags.items()}
        metadata = tokens | {name: str(value) for name, value in scalars.items()}
        return write_whole(path, lambda temp: temp.write_bytes(save(tensors, metadata)))
    arrays = {name: _for_numpy(tensor) for name, tensor in _named_layers(matrices)}
    arrays |= {name + UTF8: np.frombuffer(text.encode(), np.uint8) for name, text in tokens.items()}
    arrays |= {name: np.array(value) for name, value in scalars.items()} | dict(matrices.flags)

    def write(temp: Path) -> None:
        with open(temp, "xb") as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]

    return write_whole(path, write)


def _named_layers(matrices: GivenWeights) -> Iterator[tuple[str, Tensor]]:
    for stack, layers in matrices.stacks.items():
        before = f"{stack}." * (len(matrices.stacks) > 1)
        yield from ((f"{before}layer.{index}", weights) for index, weights in layers.items())


def _written(tokens: Any, tokenizer: Any, prompt: Prompt) -> list[str]:
    """Tokens as a file writes them: the strings that were given, the tokenizer's own names, or a Prompt's pieces."""
    if isinstance(tokens, Prompt):
        return [plain or token for plain, token in zip(prompt.plain, prompt.tokens, strict=True)]
    items = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    items = items[0] if len(items) == 1 and isinstance(items[0], list) else items
    return items if isinstance(items[0], str) else list(tokenizer.convert_ids_to_tokens(items))


def _for_numpy(tensor: Tensor) -> np.ndarray:
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
