"""What a corpus is: its files, the records of a JSON file, and which field of a record is the text.

Files, folders and globs become the files to read, in a fixed order, each with its format. A JSON file has records, one
after another: those of an array, or of the one list in an object. Only the value that is being read is held, so that an
array of any length costs the memory of its largest record. A field may be inside a field.
"""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from attnscope.errors import InputError, UsageError

FORMATS = ("txt", "json", "jsonl", "csv", "tsv", "parquet")
PACKED = (".gz", ".zst")
STDIN = "-"
GIVEN = "given"  # how messages call texts in memory


@dataclass(frozen=True)
class Corpus:
    """What to read, and how.

    sources: files, folders, globs, or `-`. format: of what has no telling suffix (stdin). whole: a .txt file is one
    text, not one text per line. text_field, id_field: where records hold them, `doc.question` in a field of a field;
    None takes `text` (under chat `messages` or `conversations`, where there is one), and `id`, where there is one.
    audio_field: where records name a sound, which is read instead of the text. given: texts and records in memory,
    which are read instead of sources.
    """

    sources: tuple[str, ...]
    format: str | None = None
    whole: bool = False
    text_field: str | None = None
    id_field: str | None = None
    audio_field: str | None = None
    chat: bool = False
    given: tuple[str | Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class CorpusFile:
    """One file to read and its format."""

    path: str
    format: str

    @property
    def name(self) -> str:
        """How tables and messages call it."""
        return "stdin" if self.path == STDIN else self.path

    @property
    def size(self) -> int | None:
        """Bytes on disk; None where that is not known."""
        with suppress(OSError):
            return None if self.path == STDIN else Path(self.path).stat().st_size
        return None


def find_files(corpus: Corpus) -> list[CorpusFile]:
    """The files of a corpus in a fixed order: as given, folders and globs sorted.

    Raises UsageError for a path that is not there, for a file of unknown format, and where a field was named
    and no file has records.

        >>> find_files(Corpus(("corpus/", "more.jsonl.gz")))
    """
    if corpus.given:
        return []
    files = [CorpusFile(path, _format(path, corpus)) for name in corpus.sources for path in _expand(name)]
    if not files:
        raise UsageError("there is nothing to read", "name a file, a folder, a glob, or - for standard input")
    named = [name for name in ("text_field", "id_field") if getattr(corpus, name) is not None]
    if named and all(file.format == "txt" for file in files):
        records = "say that it holds records with {input_format=jsonl}, or " * (files[0].path == STDIN)
        raise UsageError(f"{files[0].name} is plain text, which has no fields", f"{records}leave out {{{named[0]}}}")
    return files


def _expand(name: str) -> list[str]:
    """The files that a source means: itself, those of a folder, or a glob's."""
    path = Path(name)
    if name == STDIN or path.is_file():
        return [name]
    if path.is_dir():
        # Files of a known format, also of folders in it, but for hidden ones; a .json next to others describes those.
        files = [inner for inner in sorted(path.rglob("*")) if inner.is_file() and _suffix(inner.name) in FORMATS]
        files = [inner for inner in files if _suffix(inner.name) != "json"] or files
        names = [str(inner) for inner in files if not any(part[0] == "." for part in inner.relative_to(path).parts)]
        if not names:
            raise UsageError(f"{path} holds no file that ends in .{', .'.join(FORMATS)}", "name another folder or file")
        return names
    matches = sorted(match for match in glob.glob(name, recursive=True) if Path(match).is_file())
    if not matches:
        raise UsageError(f"there is no file {name}", "check the path; quote a glob")
    return matches


def _suffix(name: str) -> str:
    path = Path(name)
    return (Path(path.stem).suffix if path.suffix in PACKED else path.suffix).lstrip(".").lower()


def _format(path: str, corpus: Corpus) -> str:
    """The format of a file. Raises UsageError for what cannot be read in it here."""
    suffix = _suffix(path) if path != STDIN else corpus.format or "txt"
    kind = suffix if suffix in FORMATS else corpus.format
    if kind is None:
        raise UsageError(
            f"{path}: its suffix does not say what it is",
            f"name a file that ends in .{', .'.join(FORMATS)}, or give {{input_format={FORMATS[0]}}}",
        )
    if path == STDIN and sys.stdin is None:
        raise InputError("standard input is closed", "pipe a corpus into it, or name a file")
    if path == STDIN and sys.stdin.isatty():
        raise UsageError("standard input is a terminal", "pipe a corpus into it, or name a file")
    if path.endswith(".zst"):
        import pyarrow as pa

        if not pa.Codec.is_available("zstd"):
            raise UsageError(f"{path}: this pyarrow reads no zstd", "pip install -U pyarrow, or unpack the file")
    if kind == "parquet" and (path == STDIN or path.endswith(PACKED)):
        raise UsageError(f"{path}: Parquet is read from its end", "give it as an uncompressed file")
    return kind


CHUNK = 1 << 16
BLANK = re.compile(r"[\s,]*")
DECODER = json.JSONDecoder()


def values_in(stream: IO[str], most: int, is_record: Callable[[Mapping[str, Any]], bool]) -> Iterator[Any]:
    """The values of a JSON file. Raises ValueError for what is no JSON, and for a value of more than `most` characters.

    An object alone that is no record may have the list of them in one of its fields (SQuAD's `data`), or its fields are
    columns (as pandas writes them).

    >>> list(values_in(io.StringIO('[{"text": "a"}, {"text": "b"}]'), 100, lambda value: "text" in value))
    [{'text': 'a'}, {'text': 'b'}]
    """
    text, at, ended = "", 0, False

    def more(size: int) -> None:
        nonlocal text, at, ended
        chunk = stream.read(size)
        text, at, ended = text[at:] + chunk, 0, not chunk

    def skip() -> str:
        """The next character that is no blank and no comma; "" at the end."""
        nonlocal at
        while True:
            at = BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or ended:
                return text[at : at + 1]
            more(CHUNK)

    # Values follow one another, in an array or, as of JSON lines, without one.
    in_array = skip() == "["
    at, first = at + in_array, True
    while (begins := skip()) and not (in_array and begins == "]"):
        while True:  # until the text that is held has all of the value
            try:
                value, stop = DECODER.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if ended:
                    raise ValueError(error.msg) from error
            else:
                if stop < len(text) or ended:  # a number may continue
                    break
            if len(text) - at > most:
                raise ValueError(f"too long: over {most} characters, or broken")
            more(max(CHUNK, len(text) - at))  # twice as much each time: what is long is tried a few times
        at = stop
        if first and not in_array and isinstance(value, dict) and not skip():
            yield from [value] if is_record(value) else _inside(value)
            return
        first = False
        yield value
    # A file that was cut off, or that has more than its array, is damaged: what was read of it stays.
    if in_array and not begins:
        raise ValueError("the array does not end")
    at += in_array
    if skip():
        raise ValueError("something follows the array")


def _inside(value: dict[str, Any]) -> Iterator[Any]:
    """The records of one object, which may be the only one."""
    columns = list(value.values())
    tables = columns and all(isinstance(rows, Mapping) and rows.keys() == columns[0].keys() for rows in columns)
    if tables and columns[0] and all(row.isdecimal() for row in columns[0]):  # pandas numbers its rows
        for row in columns[0]:
            yield {name: column[row] for name, column in value.items()}
        return
    # The records are the one list of objects in it that are not a chat's messages.
    lists = [column for column in columns if isinstance(column, list) and column]
    lists = [rows for rows in lists if all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in rows)]
    if len(lists) == 1:
        yield from lists[0]
    else:
        yield value


CHATS = ("messages", "conversations")  # fields that hold one, where none is named
ABSENT = object()  # what a record does not have


def value_at(record: Any, name: str) -> Any:
    """The value at a name, or at names and indices joined by points; ABSENT where there is none.

    >>> value_at({"doc": {"choices": ["a", "b"]}}, "doc.choices.1")
    'b'
    """
    if isinstance(record, Mapping) and name in record:
        return record[name]
    if isinstance(record, list) and name.isdecimal():
        return record[int(name)] if int(name) < len(record) else ABSENT
    for point in (at for at, char in enumerate(name) if char == "."):
        inner = value_at(record, name[:point])
        if isinstance(inner, Mapping | list) and (value := value_at(inner, name[point + 1 :])) is not ABSENT:
            return value
    return ABSENT


def as_text(value: Any) -> Any:
    """A text that was cut into words already, as one; anything else as it is.

    >>> as_text(["the", "bank"])
    'the bank'
    """
    words = isinstance(value, list) and value and all(isinstance(word, str) for word in value)
    return " ".join(value) if words else value


def no_field(record: Mapping[str, Any], name: str) -> str:
    """That a record has no such field, and which it has there."""
    outer, _, rest = name.partition(".")
    inside = record.get(outer) if rest else None
    place = inside if isinstance(inside, Mapping) else record
    names = ", ".join(map(repr, list(place)[:8])) or "none"
    return f"no field {name!r}; there are {names}" + f" in {outer!r}" * (place is inside)


@dataclass(frozen=True)
class TextRecord:
    """What a corpus reads of a record: a text where there is no `problem`.

    fields: all but the text and the id; with a sound the text is a field like others, such as its transcript. value:
    what the field of the text says, messages as they are, words as one text; empty where there is a sound instead.
    problem: why there is no text, or not the id that was asked for. is_whole: whether the record has what is read of
    it: its text, or the name of its sound.
    """

    id: str | int | None
    fields: Mapping[str, Any]
    value: Any
    problem: str | None
    is_whole: bool

    @classmethod
    def of(cls, record: Mapping[str, Any], corpus: Corpus) -> TextRecord:
        """A record, read as the corpus says."""
        chats = [name for name in CHATS if corpus.chat and name in record]
        name, id_name = corpus.text_field or next(iter(chats), "text"), corpus.id_field or "id"
        id = value_at(record, id_name)
        whole = type(id) is int and -(2**63) <= id < 2**63  # True is none
        id = None if id is ABSENT else id if whole or isinstance(id, str | None) else json.dumps(id, default=str)
        problem = f"no field {id_name!r}" if corpus.id_field and id is None else None
        if corpus.audio_field is not None:
            fields = {key: value for key, value in record.items() if key != id_name}
            return cls(id, fields, "", problem, isinstance(value_at(record, corpus.audio_field), str))
        # The text, or why there is none: of a chat the list of its messages.
        text = value_at(record, name) if corpus.chat else as_text(value_at(record, name))
        if text is ABSENT:
            problem = problem or no_field(record, name)
        elif text is None:
            problem = problem or f"field {name!r} is null"
        elif not isinstance(text, (str, list) if corpus.chat else str):
            problem = problem or f"field {name!r}: expected text, got {type(text).__name__}"
        fields = {key: value for key, value in record.items() if key not in (name, id_name)}
        return cls(id, fields, text, problem, problem is None)

    @property
    def text(self) -> str:
        """The text, messages as JSON."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False, default=str)
