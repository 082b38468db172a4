"""Files of attention, npz and safetensors: what they declare, checked before it is unpacked, and what is in them.

    save_tensors("bank.safetensors", tensors_of([{"q": q_HQD, "k": k_GKD, "scale": 0.125}], ["the", "bank"]))
    read_tensors("bank.safetensors").text.labels

A file is somebody's: nothing in it is run, and no pickle is opened. It holds `layer.0`, `layer.1`, ... with 3 axes, or
one `weights` with 4, or `layer.0.q`, `layer.0.k`, `layer.0.scale`, ..., and `tokens`; of an encoder-decoder
`encoder.layer.0`, `decoder.weights`, `cross.layer.0.q`, and `query_tokens`. First the arrays of any such file.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from attnscope.errors import AttnscopeError, InputError, UsageError, brief
from attnscope.inputs.tensors import (
    ARRAYS,
    FLAGS,
    KV_HEADS,
    MASK,
    MODEL,
    MOST_LAYERS,
    NUMBERS,
    POSITIONS,
    QUERY_TOKENS,
    SEEN,
    SINK_LOGITS,
    TOKENS,
    WEIGHTS,
    WHOLE,
    GivenLayer,
    GivenTensors,
    Sizes,
    as_words,
    check_parts,
    check_shapes,
    last_queries,
    number,
    of_one_text,
    tensors_of,
)
from attnscope.model.selection import CROSS, DECODER
from attnscope.utils.files import FOREIGN, LONGEST_TEXT, open_regular, write_whole
from attnscope.utils.memory import check_free, human_bytes

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

NPZ, SAFETENSORS = ".npz", ".safetensors"
FLOATS = "f2", "f4", "f8", "F16", "F32", "F64", "BF16"  # as npz and safetensors call them
WHOLE_NUMBERS = (
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    *("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"),
)
TEXT = "text"  # the dtype of what metadata says
UTF8 = "_utf8"  # ends the name of an array with the bytes of a text
MOST_BYTES = 2**33  # that a file may unpack to
MOST_ARRAYS, MOST_TOKEN_BYTES = 4096, 2**26
HEADER_BYTES = 10_000  # of an array in npz
# What readers of archives raise.
DAMAGED = (*FOREIGN, EOFError, RuntimeError, SystemError, zlib.error, zipfile.BadZipFile)
SCHEMA = "tensors/1"  # of a file; goes up when a name means something else
IN_METADATA = TOKENS, QUERY_TOKENS, MODEL, KV_HEADS, SINK_LOGITS, "schema"
BESIDE = *IN_METADATA, TOKENS + UTF8, QUERY_TOKENS + UTF8, *FLAGS, POSITIONS  # arrays of a file that are no layers
MOST_TOKENS = 2**20
OF_STACK = r"(?:(encoder|decoder|cross)\.)?"
LAYER = re.compile(rf"{OF_STACK}(?:layer\.(\d{{1,3}})(?:\.({'|'.join((*ARRAYS, *NUMBERS))}))?|weights)")
OF_LAYER = re.compile(rf"{OF_STACK}layer\.")
SHARED = re.compile(rf"{OF_STACK}({'|'.join(NUMBERS)})")  # a number of all layers, or of those of a stack
NAMES = (
    "layer.0, layer.1, ... (heads, queries, keys), or one `weights` (layers, heads, queries, keys), "
    "or layer.0.q, layer.0.k, layer.0.scale, ..., and tokens"
)


class Entry(NamedTuple):
    """An array of a file, as its header declares it; read() gives it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]

    @property
    def declared(self) -> str:
        """Dtype and shape, `f4 (2, 3, 3)`."""
        return f"{self.dtype} {as_words(self.shape)}"


def read_file(path: Path, wanted: Callable[[str], bool], read: Callable[[Mapping[str, Entry]], T]) -> T:
    """What `read` makes of the arrays of a file, and of the texts of its metadata with `wanted` names.

    Raises InputError for a file that cannot be read, is another, is damaged or is too large; MemoryLimitError where
    this machine has no room for it.
    """
    suffix = path.suffix.lower()
    if suffix not in (NPZ, SAFETENSORS):
        raise InputError(f"expected weights in a file of .npz or .safetensors, got {path.name}", "name such a file")
    try:
        with open_regular(path) as stream:
            return read(_npz(stream) if suffix == NPZ else _safetensors(path, stream, wanted))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", "check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder", "name a file in it") from None
    except AttnscopeError as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from None
    except DAMAGED as error:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"{path} cannot be read as {suffix[1:]}: {why}", "save it again") from None


def twice(name: str) -> InputError:
    """The error for a name that a file has in two forms."""
    return InputError(f"it has {name} twice, in two forms", "keep one of them")


def _check_count(arrays: int) -> None:
    if arrays > MOST_ARRAYS:
        raise InputError(f"it has {arrays} arrays, expected at most {MOST_ARRAYS}", "save fewer")


def _check_size(needed: int) -> None:
    """Refuse a file that unpacks to more than is read, or than this machine has."""
    takes, hint = "it unpacks to", "save fewer layers, or float16"
    if needed > MOST_BYTES:
        raise InputError(f"{takes} {human_bytes(needed)}, expected at most {human_bytes(MOST_BYTES)}", hint)
    check_free(takes, needed, hint)


def _npz(stream: IO[bytes]) -> dict[str, Entry]:
    """The arrays of an npz file by name, with headers that agree with the archive's sizes."""
    archive = zipfile.ZipFile(stream)
    members = archive.infolist()
    _check_count(len(members))
    _check_size(sum(member.file_size for member in members))
    entries = dict[str, Entry]()
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name == member.filename or name in entries:
            raise InputError(f"it holds {brief(member.filename)}, expected arrays of numpy, each once", "save it again")
        with archive.open(member) as part:
            shape, dtype, start = _npy_header(part)
        if dtype.hasobject:
            raise InputError(f"{name} holds Python objects, which are not read", "save numbers and strings")
        if math.prod(shape) * dtype.itemsize + start != member.file_size:
            raise InputError(f"{name} has not as many bytes as its shape {as_words(shape)} says", "save it again")
        kind = "U" if dtype.kind == "U" else dtype.kind + str(dtype.itemsize)
        if kind == "U" and member.file_size > MOST_TOKEN_BYTES:
            raise InputError(f"{name} takes {human_bytes(member.file_size)}", "save tokens_utf8 instead")
        entries[name] = Entry(shape, kind, partial(_read_npy, archive, member))
    return entries


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
        raise ValueError(f"an array of shape {as_words(shape)}")
    return shape, dtype, part.tell()


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    with archive.open(member) as part:
        return np.lib.format.read_array(part, allow_pickle=False, max_header_size=HEADER_BYTES)


def _safetensors(path: Path, stream: IO[bytes], wanted: Callable[[str], bool]) -> dict[str, Entry]:
    """The arrays of a safetensors file by name, and the texts of its metadata."""
    from safetensors import SafetensorError, safe_open

    _check_size(stream.seek(0, io.SEEK_END))
    try:
        archive = safe_open(path, framework="pt")
        _check_count(len(archive.keys()))
        entries = dict[str, Entry]()
        for name in archive.keys():  # noqa: SIM118
            part = archive.get_slice(name)
            entries[name] = Entry(tuple(part.get_shape()), part.get_dtype(), partial(archive.get_tensor, name))
        metadata = archive.metadata() or {}
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    _check_count(len(metadata))
    for name in filter(wanted, metadata):
        if name in entries:
            raise twice(name)
        entries[name] = Entry((), TEXT, partial(str, metadata[name]))
    return entries


def write_file(path: Path, arrays: Mapping[str, Tensor], scalars: Mapping[str, Any], texts: Mapping[str, str]) -> Path:
    """Write arrays to an npz or safetensors file, whole or not at all; bfloat16 in npz as float32.

    texts: those of the metadata; in npz each is an array of its bytes. Raises UsageError for another suffix, and where
    the folder cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (NPZ, SAFETENSORS):
        raise UsageError(f"expected a file of .npz or .safetensors, got {path.name}", "name it weights.npz")
    import torch

    if suffix == SAFETENSORS:
        from safetensors.torch import save

        # The format holds no array twice: a mask that layers share is written for each.
        places = {array.data_ptr(): name for name, array in arrays.items()}
        alone = {name: places[array.data_ptr()] == name for name, array in arrays.items()}
        tensors = {name: (array if alone[name] else array.clone()).contiguous() for name, array in arrays.items()}
        metadata = {**texts, **{name: str(value) for name, value in scalars.items()}}
        return write_whole(path, lambda temp: temp.write_bytes(save(tensors, metadata)))
    narrow = torch.bfloat16  # which numpy does not have
    plain = {name: (array.float() if array.dtype == narrow else array).numpy() for name, array in arrays.items()}
    plain |= {name + UTF8: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}
    plain |= {name: np.array(value) for name, value in scalars.items()}

    def write(temp: Path) -> None:
        with open(temp, "xb") as stream:
            np.savez_compressed(stream, **plain)  # type: ignore[arg-type]

    return write_whole(path, write)


# What the arrays of such a file are


def _is_ours(name: str) -> bool:
    """Whether a text of metadata is about tensors: other programs write texts there too."""
    return name in IN_METADATA or SHARED.fullmatch(name) is not None or OF_LAYER.match(name) is not None


def read_tensors(file: Path | str) -> GivenTensors:
    """The matrices and tokens of an npz or safetensors file, read as data.

    Raises InputError for a file that cannot be read, is another, is damaged or is too large; MemoryLimitError where
    this machine has no room for it.

    >>> read_tensors("bank.npz").text.labels
    """
    return replace(read_file(Path(file), _is_ours, _of_entries), file=Path(file))


def _of_entries(entries: Mapping[str, Entry]) -> GivenTensors:
    """What the arrays of a file say."""
    _scalar("schema", re.escape(SCHEMA), f"{SCHEMA}, the form that this attnscope reads", entries)
    tokens, query_tokens = (_strings(name, entries) for name in (TOKENS, QUERY_TOKENS))
    if tokens is None:
        raise InputError("it has no tokens", f"it should hold {NAMES}")
    stacks = _stacks_of(entries, DECODER if query_tokens is None else CROSS)
    count = _scalar(KV_HEADS, r"[1-9]\d{0,5}", "a number from 1", entries)
    letters = f"a string of at most {LONGEST_TEXT} letters"
    model = _scalar(MODEL, rf"(?s:.{{0,{LONGEST_TEXT}}})", letters, entries)
    sinks = _scalar(SINK_LOGITS, "0|1|true|false", "0 or 1", entries)
    kv_heads, target = None if count is None else int(count), None if query_tokens is None else len(query_tokens)
    # All that is declared is compared with the tokens before the first array of a layer is unpacked.
    positions = _positions(entries.get(POSITIONS), len(tokens))
    last = None if positions is None else last_queries(positions, len(tokens), target is not None)
    shapes = {stack: _declared(layers) for stack, layers in stacks.items()}
    check_shapes(shapes, Sizes(len(tokens), target, last), kv_heads)
    masks = {name: entries[name] for name in FLAGS if name in entries}
    most = len(tokens) * max(len(tokens), target or 0)
    for name, entry in masks.items():
        if entry.dtype not in WHOLE_NUMBERS + FLOATS or math.prod(entry.shape) > most:
            raise InputError(f"expected {name} as 0 and 1 for each token, got {entry.declared}", "save it so")
    given = tensors_of(
        {stack: _read_layers(layers) for stack, layers in stacks.items()},
        tokens,
        query_tokens,
        masks={name: entry.read() for name, entry in masks.items()},
        kv_heads=kv_heads,
        query_positions=positions,
    )
    return replace(given, name=model or None, sink_logits=sinks in ("1", "true"))


Parts = dict[str, Any]  # of a layer by name: the entries of its arrays, and its numbers
Layers = dict[int | None, Parts]  # of a stack, by number; None: the one array of all layers


def _stacks_of(entries: Mapping[str, Entry], plain: str) -> dict[str, Layers]:
    """The arrays and numbers of each stack; plain: of names without one. Names that are not known are refused.

    A misspelt layer would be missing without a word.
    """
    stacks, shared = dict[str, Layers](), dict[tuple[str | None, str], float]()
    for name, entry in entries.items():
        if (match := LAYER.fullmatch(name)) is not None:
            index, part = None if match[2] is None else int(match[2]), match[3] or WEIGHTS
            parts = stacks.setdefault(match[1] or plain, {}).setdefault(index, {})
            if part in parts:  # as layer.1 and decoder.layer.01
                raise InputError(f"it has {brief(name)} twice, by two names", "keep one of them")
            parts[part] = number(name, part, _plain(entry) or entry.declared) if part in NUMBERS else entry
        elif (match := SHARED.fullmatch(name)) is not None:
            shared[match[1], match[2]] = number(name, match[2], _plain(entry) or entry.declared)
        elif name not in BESIDE:
            raise InputError(f"it has an array {brief(name)}, which is none of weights", f"it should hold {NAMES}")
    if not stacks:
        raise InputError("it has no weights, and no q and k", f"it should hold {NAMES}")
    # What a layer says itself counts more than what its stack says, and that more than what all share.
    unread = dict(shared)
    for stack, layers in stacks.items():
        for index, parts in layers.items():
            for (of_stack, part), value in sorted(shared.items(), key=lambda item: item[0][0] is None):
                hidden = part in SEEN and any(name in parts for name in SEEN)
                if of_stack in (None, stack) and WEIGHTS not in parts and index is not None:
                    unread.pop((of_stack, part), None)
                    if not hidden:
                        parts.setdefault(part, value)
    for of_stack, part in unread:
        name = part if of_stack is None else f"{of_stack}.{part}"
        how = "leave it out; of weights alone `mask` says which keys a query sees"
        raise InputError(f"it has {name}, and no layer of q and k that it is of", how)
    return stacks


def _declared(layers: Layers) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of a stack's layers, as the headers say them, by name. InputError for what are no layers."""
    if None in layers and len(layers) > 1:
        raise InputError("it has `weights` and `layer.0` too", "keep one of them")
    shapes = dict[str, dict[str, tuple[int, ...]]]()
    for index, parts in layers.items():
        name = WHOLE if index is None else f"layer {index}"
        if index is not None:
            check_parts(parts, name)
        for part, entry in parts.items():
            if part in NUMBERS:
                continue
            whole = part in (MASK, "key_positions")
            what = f"{name}: {part}".removesuffix(": ")
            if entry.dtype not in (*FLOATS, *(WHOLE_NUMBERS if whole else ())):
                raise InputError(f"{what}: expected floating-point numbers, got {entry.dtype}", "save it as floats")
            axes = max(map(len, ARRAYS[part])) if part in ARRAYS else 4 if index is None else 3
            shape = of_one_text(entry.shape, axes)
            if index is None:
                if len(shape) != 4 or not 0 < shape[0] <= MOST_LAYERS:
                    message = f"{name}: expected 4 axes (layers, heads, queries, keys), got {as_words(entry.shape)}"
                    raise InputError(message, "save one array for each layer, as layer.0")
                shape = shape[1:]
            shapes.setdefault(name, {})[part] = shape
    return shapes


def _read_layers(layers: Layers) -> Any:
    """The layers of a stack with their arrays unpacked, as `tensors_of` takes them."""
    if None in layers:
        return layers[None][WEIGHTS].read()
    read = {
        index: {part: value.read() if isinstance(value, Entry) else value for part, value in parts.items()}
        for index, parts in layers.items()
    }
    return {index: parts.get(WEIGHTS, parts) for index, parts in read.items()}


def _positions(entry: Entry | None, tokens: int) -> Any:
    """The tokens that queries are of, None where all have one. Raises InputError for what are no such numbers."""
    if entry is None:
        return None
    if entry.dtype not in WHOLE_NUMBERS or len(entry.shape) != 1 or entry.shape[0] > tokens:
        raise InputError(f"expected {POSITIONS} as numbers of tokens, got {entry.declared}", "save them so")
    return entry.read()


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
    """What a file says under a name, in its metadata or as an array of one number; None where it says nothing."""
    entry = entries.get(name)
    if entry is None:
        return None
    value = _plain(entry)
    if value is None or not re.fullmatch(pattern, value):
        got = brief(entry.declared if value is None else value)
        raise InputError(f"expected {name} as {expected}, got {got}", "leave it out")
    return value


def _plain(entry: Entry) -> str | None:
    """A text or a number of a file, as text; None of another array."""
    if entry.shape not in ((), (1,)) or entry.dtype not in (TEXT, "U", *WHOLE_NUMBERS, *FLOATS):
        return None
    item = entry.read()
    item = item.reshape(()).item() if hasattr(item, "reshape") else item
    return str(int(item)) if isinstance(item, bool) else str(item)


def save_tensors(file: Path | str, given: GivenTensors) -> Path:
    """Write layers and tokens to an npz or safetensors file, whole or not at all; bfloat16 in npz as float32.

    Raises UsageError for another suffix, and where the folder cannot be written.
    """
    import torch

    tokens = {what: json.dumps(names, ensure_ascii=False) for what, names in given.written.items()}
    every = {MODEL: given.name, KV_HEADS: given.kv_heads, SINK_LOGITS: int(given.sink_logits)}
    scalars = {"schema": SCHEMA, **{name: value for name, value in every.items() if value}}
    arrays = {name: torch.from_numpy(flags) for name, flags in given.flags.items()}
    if given.last is not None:
        arrays[POSITIONS] = torch.arange(len(given.text) - given.last, len(given.text))
    for stack, layers in given.stacks.items():
        for index, layer in layers.items():
            name = f"{stack}.layer.{index}" if len(given.stacks) > 1 else f"layer.{index}"
            if not isinstance(layer, GivenLayer):
                arrays[name] = layer
                continue
            for part, value in layer.parts.items():
                (arrays if part in ARRAYS else scalars)[f"{name}.{part}"] = value
    return write_file(Path(file), arrays, scalars, tokens)
