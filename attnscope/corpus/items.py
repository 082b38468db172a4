"""A corpus -> items, one at a time: lines, JSON, rows of CSV, TSV and Parquet, whole files; compressed or not.

Nothing is read ahead, and no item is held that is larger than ITEM_BYTES: a 10 GB file costs the memory of its largest
item. What cannot be read becomes an item too, one that says why. A record may name parts of its text as ranges of
characters, `"spans": {"subject": [[5, 9]]}` or `"key": [[5, 9]]`, which become tokens here.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from attnscope.corpus.records import (
    ABSENT,
    GIVEN,
    STDIN,
    Corpus,
    CorpusFile,
    TextRecord,
    find_files,
    no_field,
    value_at,
    values_in,
)
from attnscope.errors import InputError, brief
from attnscope.inputs.labels import tokens_touching
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.tokens import TokenMatch
from attnscope.utils.files import decode_utf8

logger = logging.getLogger(__name__)
ITEM_BYTES = 64 * 2**20
EMPTY, EMPTY_LINE = "empty", "empty line"  # problems of an item
NO_OBJECT = "expected a JSON object, got "
MOST_LINES = 1000  # of one row of TSV
QUOTED = re.compile(r'"(?:[^"]|"")*"')


@dataclass(frozen=True)
class Item:
    """One text of a corpus, or why there is none: `problem` is set then, and `text` is empty.

    number: its place in the corpus, from 0. id: as its record has it, a whole number or a text. line: of the file (of a
    Parquet file, the row), from 1; None for whole files. text: the text; under chat, the messages as JSON; empty where
    a sound is read instead. fields: what else its record held. read: bytes of the corpus that had been read when it
    was.
    """

    number: int
    file: str
    line: int | None
    id: str | int
    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    read: int = 0

    @property
    def name(self) -> str:
        """What messages call it: its id, of a number `id 7`."""
        return self.id if isinstance(self.id, str) else f"id {self.id}"

    def says(self, field: str) -> Any:
        """What a field of the record says, or a field in a field, `doc.question`. Raises InputError where none does."""
        value = value_at(self.fields, field)
        if value is ABSENT:
            raise InputError(no_field(self.fields, field))
        return value


class Raw(NamedTuple):
    """What is at one place of a file: a text or a record, or why there is none."""

    line: int | None
    value: str | Mapping[str, Any] = ""
    problem: str | None = None


class BytesRead:
    """How many bytes of the files were read, compressed as they are."""

    def __init__(self) -> None:
        self.count = 0


def read_items(corpus: Corpus, files: Sequence[CorpusFile]) -> Iterator[Item]:
    """Every item of the corpus, in order; what cannot be read is an item with a `problem`.

    >>> [item.text for item in read_items(corpus, find_files(corpus))]
    """
    number, read = 0, BytesRead()
    for value in corpus.given:
        yield _item(Raw(number + 1, value), CorpusFile(GIVEN, "jsonl"), corpus, number, 0)
        number += 1
    for file in files:
        for raw in _read(file, corpus, read):
            yield _item(raw, file, corpus, number, read.count)
            number += 1


def have_integer_ids(items: Iterable[Item]) -> bool:
    """Whether the id of every item with a text is a whole number; a warning where some are, and some are not."""
    integers = 0
    for item in items:
        if item.problem is None:
            if not isinstance(item.id, int):
                if integers:
                    logger.warning("ids are whole numbers and text (first: %s): all are written as text", item.id)
                return False
            integers += 1
    return bool(integers)


def with_ids(items: Iterable[Item], integers: bool) -> Iterator[Item]:
    """The items with ids of one kind, those that have a text: a number becomes text, and a text no number."""
    for item in items:
        if not integers:
            yield replace(item, id=str(item.id))
        elif isinstance(item.id, int) or item.problem is not None:
            yield item
        else:
            yield replace(item, text="", problem="its id is text, and those of the dataset are whole numbers")


def texts_in(
    source: str, most: int | None = None, *, chat: bool = False, strict: bool = False, stdin: str | None = None
) -> list[Item]:
    """The texts of a file, a folder or a glob, at most so many; what cannot be read is left out.

    strict: what cannot be read is an error, empty items aside. stdin: the format of what is piped in, lines of text
    without it. Raises InputError for what is an error, and where there is no text.

    >>> [item.text for item in texts_in("corpus.txt.gz", 64)]
    """
    corpus, items, why = Corpus((source,), chat=chat, format=stdin), list[Item](), ""
    for item in read_items(corpus, find_files(corpus)):
        if item.problem is None:
            items.append(item)
        elif strict and item.problem not in (EMPTY, EMPTY_LINE):
            raise InputError(f"{item.name}: {item.problem}", "correct the file, or name another with {texts}")
        else:
            why = why or f": {item.problem}"
        if len(items) == most:
            break
    if not items:
        raise InputError(f"there is no text in {source}{why}", "give one text per line, or records with a field 'text'")
    return items


def printable(text: str) -> str:
    """Names may hold bytes, and JSON halves of characters, that no UTF-8 file can: they are written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _item(raw: Raw, file: CorpusFile, corpus: Corpus, number: int, read: int) -> Item:
    """The item of what was read at one place; of a record the text in its field."""
    id: str | int = file.name if raw.line is None else f"{file.name}:{raw.line}"
    text, problem = raw.value, raw.problem
    fields: Mapping[str, Any] = {}
    if isinstance(text, Mapping):
        record = TextRecord.of(text, corpus)
        id, fields, problem = id if record.id in (None, "") else record.id, record.fields, record.problem
        text = "" if problem else record.text
    if problem is None and not text.strip() and corpus.audio_field is None:
        problem = EMPTY
    id = printable(id) if isinstance(id, str) else id
    return Item(number, printable(file.name), raw.line, id, "" if problem else text, fields, problem, read)


def _read(file: CorpusFile, corpus: Corpus, read: BytesRead) -> Iterator[Raw]:
    """What a file holds; one that breaks in the middle gives what it has, and then says why it ends."""
    form = "whole" if corpus.whole and file.format == "txt" else file.format
    reader = partial(_json_records, corpus) if form == "json" else READERS[form]
    try:
        yield from reader(file, read)
    except Exception as error:  # any decompressor and any file format, with any bytes
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
        yield Raw(None, problem=f"the file can't be read: {reason}")


@contextmanager
def _opened(file: CorpusFile, read: BytesRead) -> Iterator[IO[bytes]]:
    """The uncompressed bytes of a file or of standard input; counts the compressed ones."""
    raw: Any = sys.stdin.buffer if file.path == STDIN else open(file.path, "rb")  # noqa: SIM115
    counted = io.BufferedReader(_Counted(raw, read), 2**16)
    try:
        if file.path.endswith(".gz"):
            import gzip

            yield io.BufferedReader(gzip.GzipFile(fileobj=counted), 2**16)
        elif file.path.endswith(".zst"):
            import pyarrow as pa

            yield io.BufferedReader(pa.CompressedInputStream(counted, "zstd"), 2**16)
        else:
            yield counted
    finally:
        if file.path != STDIN:
            raw.close()


class _Counted(io.RawIOBase):
    """A stream that counts what is read from it."""

    def __init__(self, raw: IO[bytes], read: BytesRead) -> None:
        self.raw, self.bytes_read = raw, read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read1(len(buffer)) if hasattr(self.raw, "read1") else self.raw.read(len(buffer))
        buffer[: len(data)] = data
        self.bytes_read.count += len(data)
        return len(data)


def _lines(file: CorpusFile, read: BytesRead) -> Iterator[Raw]:
    """Lines without their ends, numbered from 1; one that is longer than ITEM_BYTES is a problem."""
    with _opened(file, read) as stream:
        number = 0
        while line := stream.readline(ITEM_BYTES):
            number += 1
            if len(line) < ITEM_BYTES or line.endswith(b"\n"):
                yield _decoded(number, line.removesuffix(b"\n").removesuffix(b"\r"))
                continue
            while line and not line.endswith(b"\n"):
                line = stream.readline(ITEM_BYTES)
            yield _too_long(number)


def _whole(file: CorpusFile, read: BytesRead) -> Iterator[Raw]:
    with _opened(file, read) as stream:
        data = stream.read(ITEM_BYTES + 1)
    yield _decoded(None, data) if len(data) <= ITEM_BYTES else _too_long(None)


def _too_long(line: int | None) -> Raw:
    return Raw(line, problem=f"too long: over {ITEM_BYTES} bytes")


def _decoded(line: int | None, data: bytes) -> Raw:
    """The text, or why there is none. A byte order mark is only one at the start of a file."""
    try:
        return Raw(line, decode_utf8(data, "the text") if line in (None, 1) else data.decode())
    except UnicodeDecodeError as error:
        return Raw(line, problem=f"not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}")
    except InputError as error:
        return Raw(line, problem=error.message.replace("the text is not UTF-8", "not UTF-8"))


def _record(raw: Raw) -> Raw:
    """The record in a line of JSON, or why there is none."""
    line, text = raw.line, str(raw.value)
    if raw.problem:
        return raw
    if not text.strip():
        return Raw(line, problem=EMPTY_LINE)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _broken(line, error)
    if not isinstance(record, dict):
        array = "; an array of records is a .json file" * isinstance(record, list)
        return Raw(line, problem=NO_OBJECT + type(record).__name__ + array)
    return Raw(line, record)


def _json_records(corpus: Corpus, file: CorpusFile, read: BytesRead) -> Iterator[Raw]:
    """The records of a JSON file, numbered from 1; an item of an array may be a text instead of a record."""
    with _opened(file, read) as stream:
        number, text = 0, io.TextIOWrapper(stream, "utf-8-sig")
        try:
            values = values_in(text, ITEM_BYTES, lambda value: TextRecord.of(value, corpus).is_whole)
            for number, value in enumerate(values, start=1):
                fits = isinstance(value, dict | str)
                yield Raw(number, value) if fits else Raw(number, problem=NO_OBJECT + type(value).__name__)
        except UnicodeDecodeError as error:
            yield Raw(number + 1, problem=f"not UTF-8: byte 0x{error.object[error.start]:02X}")
        except (ValueError, RecursionError) as error:
            yield _broken(number + 1, error)


def _broken(line: int | None, error: Exception) -> Raw:
    return Raw(line, problem=f"broken JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}")


def _tsv_rows(file: CorpusFile, read: BytesRead) -> Iterator[Raw]:
    """Rows under the header's names, most of them a line; quotes are text, but those around a whole cell."""
    csv.field_size_limit(ITEM_BYTES)
    lines, waiting, header = _lines(file, read), deque[Raw](), list[str]()

    def following() -> Raw | None:
        return waiting.popleft() if waiting else next(lines, None)

    while (raw := following()) is not None:
        if raw.problem or not raw.value:
            yield from (raw,) if raw.problem else ()
            continue
        row = [cell[1:-1].replace('""', '"') if QUOTED.fullmatch(cell) else cell for cell in str(raw.value).split("\t")]
        if header and len(row) != len(header):
            whole, lines_read = _quoted_row(str(raw.value), following)
            if len(whole) == len(header):
                row = whole
            else:
                waiting.extendleft(reversed(lines_read))
        if header:
            yield _csv_record(raw.line or 0, header, row)
        else:
            header = row


def _quoted_row(text: str, following: Callable[[], Raw | None]) -> tuple[list[str], list[Raw]]:
    """The cells of a row whose quotes hold tabs and line ends, and the lines that it took; no cells of one without."""
    lines_read: list[Raw] = []
    while text.count('"') % 2 and len(lines_read) < MOST_LINES and (line := following()) is not None:
        lines_read.append(line)
        if line.problem or len(text) > ITEM_BYTES:
            break
        text += f"\n{line.value}"
    try:
        closed = '"' in text and text.count('"') % 2 == 0
        return next(csv.reader(io.StringIO(text, newline=""), delimiter="\t")) if closed else [], lines_read
    except csv.Error:
        return [], lines_read


def _csv_rows(file: CorpusFile, read: BytesRead) -> Iterator[Raw]:
    """Rows under the header's names. Bytes that aren't UTF-8 come as lone surrogates, so that only their row fails."""
    csv.field_size_limit(ITEM_BYTES)  # a quote that never closes ends here
    with _opened(file, read) as stream:
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
                yield Raw(line, problem=f"broken CSV: {error}")
                continue
            if header is None:
                header = row
            elif row:
                yield _csv_record(line, header, row)


def _csv_record(line: int, header: Sequence[str], row: Sequence[str]) -> Raw:
    if any("\udc80" <= letter <= "\udcff" for cell in row if not cell.isascii() for letter in cell):
        return Raw(line, problem="not UTF-8")
    if len(row) != len(header):
        return Raw(line, problem=f"expected {len(header)} cells, got {len(row)}")
    return Raw(line, dict(zip(header, row, strict=True)))


def _parquet_rows(file: CorpusFile, read: BytesRead) -> Iterator[Raw]:
    from attnscope.utils.files import open_native
    from attnscope.utils.parquet import CORPUS_FOOTER_BYTES, open_parquet, row_batches, unpacked_bytes

    with open_native(Path(file.path), mapped=True) as source:
        number, rows = 0, max(1, open_parquet(source, CORPUS_FOOTER_BYTES).metadata.num_rows)
        for batch in row_batches(source):
            first, number = number + 1, number + len(batch)
            if len(batch) == 1 and sum(map(unpacked_bytes, batch.columns)) > ITEM_BYTES:
                yield _too_long(number)
            else:
                yield from map(Raw, range(first, number + 1), batch.to_pylist())
            read.count += (file.size or 0) * batch.num_rows // rows


READERS: Mapping[str, Callable[[CorpusFile, BytesRead], Iterator[Raw]]] = {
    "txt": _lines,
    "whole": _whole,
    "jsonl": lambda file, read: map(_record, _lines(file, read)),
    "csv": _csv_rows,
    "tsv": _tsv_rows,
    "parquet": _parquet_rows,
}


FIELD = "spans"


def given_spans(item: Item, prompt: Prompt, names: Sequence[str], chat: bool = False) -> dict[str, TokenMatch | None]:
    """Those of the names that the item's record gives: their tokens, None where it gives no range, or cut ones.

    A cell of csv holds them as JSON; null is as if nothing was there. Raises InputError for what are no ranges of
    characters of the text.
    """
    value: Any = _unpacked(item.fields.get(FIELD))
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f'field {FIELD!r}: expected {{"subject": [[5, 9]]}}, got {brief(value)}')
    named = {name: value[name] for name in names if value.get(name) is not None}
    spans = dict[str, TokenMatch | None]()
    for name, value in named.items():
        ranges = ranges_of(value)
        if ranges is None:
            raise InputError(f"span {name!r}: expected ranges like [[5, 9]], got {brief(value)}")
        places = _tokens_of(prompt, f"span {name!r}", ranges, chat)
        spans[name] = None if places is None else TokenMatch(name, places)
    return spans


def given_tokens(item: Item, prompt: Prompt, field: str, chat: bool = False) -> TokenMatch | None:
    """The tokens of the ranges in a field of the item's record; None where it names tokens by an expression.

    Raises InputError for what are no ranges of characters of the text, and where no token is left of them.
    """
    ranges = ranges_of(item.says(field))
    if ranges is None:
        return None
    places = _tokens_of(prompt, f"field {field!r}", ranges, chat)
    if places is None:
        raise InputError(f"field {field!r}: no token is left of the characters {ranges}")
    return TokenMatch(json.dumps(ranges), places)


def ranges_of(value: object) -> list[list[int]] | None:
    """The ranges of characters that a value gives, a list of them or one; None for what is neither.

    >>> ranges_of([[5, 9]]), ranges_of("[5, 9]"), ranges_of("Mary")
    ([[5, 9]], [[5, 9]], None)
    """
    value = _unpacked(value)
    ranges = [value] if _is_pair(value) else value
    return ranges if isinstance(ranges, list) and all(map(_is_pair, ranges)) else None


def _unpacked(value: Any) -> Any:
    """A value of a record; of a cell of csv, what its JSON says, if it is that."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value or "null")
    return value


def _tokens_of(prompt: Prompt, where: str, ranges: list[list[int]], chat: bool) -> tuple[int, ...] | None:
    """The tokens that hold one of the characters, or a part of one; None where there is none. where: says which."""
    if prompt.medium.sha256:
        raise InputError(f"{where} counts characters of a text that is read alone: name tokens instead")
    if chat:
        raise InputError(f"{where} counts characters of a text, and the chat template writes another")
    for start, stop in ranges:
        if not 0 <= start < stop <= len(prompt.text):
            raise InputError(f"{where}: {[start, stop]} is not a range of the text's {len(prompt.text)} characters")
    places = tokens_touching(prompt.characters, [(start, stop) for start, stop in ranges])
    return tuple(sorted({at for place in places for at in place})) or None


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value)
