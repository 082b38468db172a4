"""A corpus -> items, one at a time: lines, JSON lines, CSV rows, Parquet rows, whole files; compressed or not.

Nothing is read ahead, and no item is held that is larger than ITEM_BYTES: a 10 GB file costs the memory of its largest
item. What cannot be read becomes an item too, one that says why.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from attnscope.errors import InputError, UsageError
from attnscope.text.prompt import decode_utf8

ITEM_BYTES = 64 * 2**20
FORMATS = ("txt", "jsonl", "csv", "parquet")
PACKED = (".gz", ".zst")
STDIN = "-"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One text of a corpus, or why there is none: `problem` is set then, and `text` is empty.

    number: its place in the corpus, from 0. line: of the file (of a Parquet file, the row), from 1; None for whole
    files. text: the text; under chat, the messages as JSON. fields: what else its record held. read: bytes of the
    corpus that had been read when it came.
    """

    number: int
    file: str
    line: int | None
    id: str
    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    read: int = 0


@dataclass(frozen=True)
class Reading:
    """How a corpus is read.

    sources: files, folders, globs, or `-`. format: of what has no telling suffix (stdin). whole: a .txt file is one
    text, not a text a line. text_field, id_field: where records hold them; None takes `text` (under chat `messages`,
    where there is one), and `id`, where there is one.
    """

    sources: tuple[str, ...]
    format: str | None = None
    whole: bool = False
    text_field: str | None = None
    id_field: str | None = None
    chat: bool = False


@dataclass(frozen=True)
class Source:
    """One file to read: what it is, and how it is called in tables and messages."""

    path: str
    format: str

    @property
    def size(self) -> int | None:
        """Bytes on disk; None where no one knows."""
        with suppress(OSError):
            return None if self.path == STDIN else Path(self.path).stat().st_size
        return None


class Progress:
    """How far the reading is: bytes of the files themselves, compressed as they are."""

    def __init__(self) -> None:
        self.bytes = 0


Raw = tuple[int | None, "str | Mapping[str, Any] | None", "str | None"]  # line, text or record, problem


def find_sources(reading: Reading) -> list[Source]:
    """The files of a corpus in a fixed order: as given, folders and globs sorted.

    Raises UsageError for a path that is not there, and for a file whose format nobody said.

        >>> find_sources(Reading(("corpus/", "more.jsonl.gz")))
    """
    found: list[Source] = []
    for name in reading.sources:
        found += [Source(path, _format(path, reading)) for path in _expand(name)]
    if not found:
        raise UsageError("there is nothing to read", "name a file, a folder, a glob, or - for standard input")
    return found


def read_items(reading: Reading, sources: Sequence[Source], progress: Progress | None = None) -> Iterator[Item]:
    """Every item of the corpus, in order; what cannot be read is an item with a `problem`.

    >>> [item.text for item in read_items(reading, find_sources(reading))]
    """
    number, progress = 0, progress or Progress()
    for source in sources:
        for line, found, problem in _read(source, reading, progress):
            yield _item(number, source, line, found, problem, reading, progress.bytes)
            number += 1


def _expand(name: str) -> list[str]:
    path = Path(name)
    if name == STDIN or path.is_file():
        return [name]
    if path.is_dir():
        files = [one for one in sorted(path.rglob("*")) if one.is_file() and _suffix(one.name) in FORMATS]
        seen = [str(one) for one in files if not any(part.startswith(".") for part in one.relative_to(path).parts)]
        if not seen:
            raise UsageError(f"{name} holds no file that ends in .{', .'.join(FORMATS)}", "name another folder or file")
        return seen
    matches = sorted(one for one in glob.glob(name, recursive=True) if Path(one).is_file())
    if not matches:
        raise UsageError(f"there is no file {name}", "check the path; quote a glob")
    return matches


def _suffix(name: str) -> str:
    path = Path(name)
    return (Path(path.stem).suffix if path.suffix in PACKED else path.suffix).lstrip(".").lower()


def _format(path: str, reading: Reading) -> str:
    suffix = _suffix(path) if path != STDIN else reading.format or "txt"
    kind = suffix if suffix in FORMATS else reading.format
    if kind is None:
        raise UsageError(
            f"{path}: its suffix does not say what it is", "give --input-format txt, jsonl, csv or parquet"
        )
    if path == STDIN and sys.stdin is not None and sys.stdin.isatty():
        raise UsageError("standard input is a terminal", "pipe a corpus into it, or name a file")
    if path.endswith(".zst"):
        import pyarrow as pa

        if not pa.Codec.is_available("zstd"):
            raise UsageError(f"{path}: this pyarrow reads no zstd", "pip install -U pyarrow, or unpack the file")
    if kind == "parquet" and (path == STDIN or path.endswith(PACKED)):
        raise UsageError(f"{path}: Parquet is read from its end", "give it as an uncompressed file")
    return kind


def _read(source: Source, reading: Reading, progress: Progress) -> Iterator[Raw]:
    """A file's items; a file that breaks in the middle gives what it has, and then says why it ends."""
    read = READERS["whole" if reading.whole and source.format == "txt" else source.format]
    try:
        yield from read(source, progress)
    except Exception as error:  # any decompressor and any file format, with any bytes
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
        yield None, None, f"the file can't be read: {reason}"


@contextmanager
def _opened(source: Source, progress: Progress) -> Iterator[IO[bytes]]:
    """The uncompressed bytes of a file or of standard input; counts the compressed ones."""
    raw: Any = sys.stdin.buffer if source.path == STDIN else open(source.path, "rb")  # noqa: SIM115
    counted = io.BufferedReader(_Counted(raw, progress), 2**16)
    try:
        if source.path.endswith(".gz"):
            import gzip

            yield io.BufferedReader(gzip.GzipFile(fileobj=counted), 2**16)
        elif source.path.endswith(".zst"):
            import pyarrow as pa

            yield io.BufferedReader(pa.CompressedInputStream(counted, "zstd"), 2**16)
        else:
            yield counted
    finally:
        if source.path != STDIN:
            raw.close()


class _Counted(io.RawIOBase):
    def __init__(self, raw: IO[bytes], progress: Progress) -> None:
        self.raw, self.progress = raw, progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read1(len(buffer)) if hasattr(self.raw, "read1") else self.raw.read(len(buffer))
        buffer[: len(data)] = data
        self.progress.bytes += len(data)
        return len(data)


def _lines(source: Source, progress: Progress) -> Iterator[tuple[int, bytes | None]]:
    """Lines without their ends, numbered from 1; None for one that is longer than ITEM_BYTES."""
    with _opened(source, progress) as stream:
        number = 0
        while line := stream.readline(ITEM_BYTES):
            number += 1
            if len(line) < ITEM_BYTES or line.endswith(b"\n"):
                yield number, line.removesuffix(b"\n").removesuffix(b"\r")
                continue
            while line and not line.endswith(b"\n"):
                line = stream.readline(ITEM_BYTES)
            yield number, None


def _texts(source: Source, progress: Progress) -> Iterator[Raw]:
    for number, line in _lines(source, progress):
        yield number, *_decoded(line, number == 1)


def _whole(source: Source, progress: Progress) -> Iterator[Raw]:
    with _opened(source, progress) as stream:
        data = stream.read(ITEM_BYTES + 1)
    yield None, *_decoded(data if len(data) <= ITEM_BYTES else None, True)


def _decoded(data: bytes | None, first: bool) -> tuple[str | None, str | None]:
    """The text, or why there is none. A byte order mark is only one at the start of a file."""
    if data is None:
        return None, f"too long: over {ITEM_BYTES} bytes"
    try:
        return (decode_utf8(data, "the text") if first else data.decode()), None
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}"
    except InputError as error:
        return None, error.message.replace("the text is not UTF-8", "not UTF-8")


def _json_lines(source: Source, progress: Progress) -> Iterator[Raw]:
    for number, line in _lines(source, progress):
        text, problem = _decoded(line, number == 1)
        if text is not None and not text.strip():
            text, problem = None, "empty line"
        yield number, *((None, problem) if text is None else _record(text))


def _record(text: str) -> tuple[Mapping[str, Any] | None, str | None]:
    try:
        record = json.loads(text)
    except RecursionError:
        return None, "broken JSON: nested too deeply"
    except ValueError as error:
        return None, f"broken JSON: {error}"
    if not isinstance(record, dict):
        return None, f"expected a JSON object, got {type(record).__name__}"
    return record, None


def _csv_rows(source: Source, progress: Progress) -> Iterator[Raw]:
    """Rows under the header's names. Bytes that aren't UTF-8 come as lone surrogates, so that only their row fails."""
    csv.field_size_limit(ITEM_BYTES)  # a quote that never closes ends here
    with _opened(source, progress) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(text)
        header: list[str] | None = None
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, None, f"broken CSV: {error}"
                continue
            if header is None:
                header = row
            elif row:
                yield line, *_csv_record(header, row)


def _csv_record(header: Sequence[str], row: Sequence[str]) -> tuple[Mapping[str, Any] | None, str | None]:
    if any("\udc80" <= letter <= "\udcff" for cell in row if not cell.isascii() for letter in cell):
        return None, "not UTF-8"
    if len(row) != len(header):
        return None, f"expected {len(header)} cells, got {len(row)}"
    return dict(zip(header, row, strict=True)), None


def _parquet_rows(source: Source, progress: Progress) -> Iterator[Raw]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path, memory_map=True) as file:
        number, rows = 0, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=64):
            for record in batch.to_pylist():
                number += 1
                yield number, record, None
            progress.bytes += (source.size or 0) * batch.num_rows // rows


READERS: Mapping[str, Callable[[Source, Progress], Iterator[Raw]]] = {
    "txt": _texts,
    "whole": _whole,
    "jsonl": _json_lines,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
}


def _item(
    number: int,
    source: Source,
    line: int | None,
    found: str | Mapping[str, Any] | None,
    problem: str | None,
    reading: Reading,
    read: int,
) -> Item:
    file = "stdin" if source.path == STDIN else source.path
    id = file if line is None else f"{file}:{line}"
    fields: Mapping[str, Any] = {}
    if isinstance(found, Mapping):
        given = found.get(reading.id_field or "id")
        if given is not None:
            id = given if isinstance(given, str) else json.dumps(given, default=str)
        elif reading.id_field:
            problem = f"no field {reading.id_field!r}"
        found, fields, missing = _split(found, reading)
        problem = problem or missing
    if problem is None and not (found or "").strip():
        problem = "empty"
    return Item(number, printable(file), line, printable(id), "" if problem else str(found), fields, problem, read)


def printable(text: str) -> str:
    """Names may hold bytes, and JSON halves of characters, that no UTF-8 file can: they are written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _split(record: Mapping[str, Any], reading: Reading) -> tuple[str | None, Mapping[str, Any], str | None]:
    """A record's text, its other fields, and what is wrong with it."""
    name = reading.text_field or ("messages" if reading.chat and "messages" in record else "text")
    rest = {key: value for key, value in record.items() if key not in (name, reading.id_field or "id")}
    if name not in record:
        return None, rest, f"no field {name!r}; there are {', '.join(map(repr, list(record)[:8])) or 'none'}"
    value = record[name]
    if value is None:
        return None, rest, f"field {name!r} is null"
    if reading.chat and isinstance(value, list):
        return json.dumps(value, ensure_ascii=False, default=str), rest, None
    if not isinstance(value, str):
        return None, rest, f"field {name!r} is not text but {type(value).__name__}"
    return value, rest, None
