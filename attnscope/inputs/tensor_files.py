"""Files of arrays, npz and safetensors: what they declare, checked before it is unpacked, and the arrays themselves.

    read_file(Path("bank.npz"), ("tokens",), lambda entries: entries["layer.0"].read())
    write_file(Path("bank.npz"), {"layer.0": weights_HQK}, {"model": "mine"}, {"tokens": '["the", "bank"]'})

A file is somebody's: nothing in it is run, and no pickle is opened.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from attnscope.errors import AttnscopeError, InputError, MemoryLimitError, UsageError, brief
from attnscope.utils.files import FOREIGN, open_regular, write_whole
from attnscope.utils.memory import free_memory, human_bytes

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

NPZ, SAFETENSORS = ".npz", ".safetensors"
FLOATS = "f2", "f4", "f8", "F16", "F32", "F64", "BF16"  # as npz and safetensors call them
TEXT = "text"  # the dtype of what metadata says
UTF8 = "_utf8"  # ends the name of an array with the bytes of a text
MOST_BYTES = 2**33  # that a file may unpack to
SURELY_FREE = 2**20  # bytes of memory that are not asked after
MOST_ARRAYS, MOST_TOKEN_BYTES = 4096, 2**26
HEADER_BYTES = 10_000  # of an array in npz
# What readers of archives raise.
DAMAGED = (*FOREIGN, EOFError, RuntimeError, SystemError, zlib.error, zipfile.BadZipFile)


class Entry(NamedTuple):
    """An array of a file, as its header declares it; read() gives it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]

    @property
    def declared(self) -> str:
        """Dtype and shape, `f4 (2, 3, 3)`."""
        return f"{self.dtype} {as_words(self.shape)}"


def read_file(path: Path, texts: Sequence[str], read: Callable[[Mapping[str, Entry]], T]) -> T:
    """What `read` makes of the arrays of a file, and of the texts of its metadata that have these names.

    Raises InputError for a file that cannot be read, is another, is damaged or is too large; MemoryLimitError where
    this machine has no room for it.
    """
    suffix = path.suffix.lower()
    if suffix not in (NPZ, SAFETENSORS):
        raise InputError(f"expected weights in a file of .npz or .safetensors, got {path.name}", "name such a file")
    try:
        with open_regular(path) as stream:
            return read(_npz(stream) if suffix == NPZ else _safetensors(path, stream, texts))
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
    check_room(takes, needed, hint)


def check_room(takes: str, needed: int, hint: str) -> None:
    """Raise MemoryLimitError where the machine has fewer bytes; takes: the words before their number."""
    if needed > SURELY_FREE and needed > (room := free_memory("cpu")):
        raise MemoryLimitError(f"{takes} {human_bytes(needed)}, and this machine has {human_bytes(room)} free", hint)


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


def _safetensors(path: Path, stream: IO[bytes], texts: Sequence[str]) -> dict[str, Entry]:
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
    for name in texts:
        if name in metadata:
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

        tensors = {name: array.contiguous() for name, array in arrays.items()}
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


def as_words(shape: Sequence[int]) -> str:
    """A shape as messages have it, `(2, 3, 3)`."""
    return f"({', '.join(map(str, shape))})"
