"""Which shards of an output folder are whole: the journal has a line per committed shard.

A shard's files lie under their final names before its line is written, so what the journal names is there; what it does
not name is made again, under the same names.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnscope.batch.items import Item
from attnscope.errors import UsageError
from attnscope.utils.files import json_line, open_regular, whole_file
from attnscope.utils.folders import append, read_journal
from attnscope.utils.schema import from_json as typed
from attnscope.utils.tables import FORMATS

JOURNAL, FAILURES, PARTIAL = "journal.jsonl", "failures.jsonl", ".partial"
SUMMARY = "summary"  # of the texts of all shards, with the suffix of its format

# What a killed process was writing, under the temporary names of `files.whole_path`.
HALF_WRITTEN = re.compile(r"\.(failures\.jsonl|run\.json|summary\.[a-z]+)\.[0-9a-f]{8}")
PART = re.compile(r"part-\d{9}(\.[a-z]+)+")
SWEEPS, PAUSE_SECONDS = 20, 0.1


@dataclass(frozen=True)
class Failure:
    """An item that gave no rows, and why."""

    item: int
    file: str
    line: int | None
    id: str
    reason: str

    @classmethod
    def of(cls, item: Item, reason: str) -> Failure:
        """The failure of an item."""
        return cls(item.number, item.file, item.line, item.id, reason)


@dataclass(frozen=True)
class Record:
    """One committed shard: items [first, first + items), what was written, and the digest of what was read.

    lacking: of each span, how many texts had nothing of it. engines: how many texts each engine read. answered_by:
    which of attnscope's own ways read each kind of question. targets: how many texts had one that was `given`, how many
    one that was `generated`, and how many of these were `cut` by a number of tokens. replaced: what the model's config
    states and it was read without, by name.
    """

    first: int
    items: int
    texts: int
    tokens: int
    digest: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)  # path in the folder -> bytes
    failures: tuple[Failure, ...] = ()
    lacking: Mapping[str, int] = field(default_factory=dict)
    engines: Mapping[str, int] = field(default_factory=dict)
    answered_by: Mapping[str, list[str]] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    replaced: Mapping[str, Any] = field(default_factory=dict)


def written(folder: Path) -> list[Record]:
    """The committed shards of a folder in order, those of a run that is still writing too; nothing is changed."""
    records = {record.first: record for record in read_journal(folder / JOURNAL, _record, cut=False)}
    return [records[first] for first in sorted(records)]


def digest(items: Iterable[Item]) -> str:
    """A hash of what was read; a corpus that changed between two runs shows in it."""
    hashed = hashlib.sha256()
    for item in items:
        parts = (item.id, item.text, item.problem or "", json.dumps(item.fields, default=str, sort_keys=True))
        for part in parts:
            hashed.update(part.encode(errors="surrogatepass") + b"\0")
    return hashed.hexdigest()


class Journal:
    """The committed shards of a folder, in the order of their items.

    >>> journal = Journal(folder)
    >>> journal.append(record)
    >>> journal.records[record.first]
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self.folder = folder
        self.records = {record.first: record for record in read_journal(self.path, _record)}

    def append(self, record: Record) -> None:
        """Remember a shard; on return it survives a crash of the machine. A summary without it is removed."""
        for format in FORMATS:
            (self.folder / f"{SUMMARY}.{format}").unlink(missing_ok=True)
        append(self.path, asdict(record))
        self.records[record.first] = record
        with open_regular(self.folder / FAILURES, "ab", follow=False) as stream:
            stream.writelines(_failure_line(failure) for failure in record.failures)

    def rewrite_failures(self) -> None:
        """failures.jsonl as the journal has it, in the order of the items."""
        with whole_file(self.folder / FAILURES) as stream:
            for failure in self.failures():
                stream.write(_failure_line(failure))

    def failures(self) -> Iterator[Failure]:
        """Every failed item of the committed shards, in order."""
        for first in sorted(self.records):
            yield from self.records[first].failures

    def sweep(self) -> None:
        """Remove what a run that was cut off left: half-made shards, and whole ones that were not yet committed.

        What a link leads to is not ours.
        """
        _remove(self.folder / PARTIAL)
        for path in self.folder.iterdir():
            if HALF_WRITTEN.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
                path.unlink(missing_ok=True)
        named = {path for record in self.records.values() for path in record.files}
        for inner in self.folder.iterdir():
            if inner.is_symlink() or not inner.is_dir():
                continue
            for path in inner.glob("part-*"):
                if PART.fullmatch(path.name) and path.relative_to(self.folder).as_posix() not in named:
                    path.unlink(missing_ok=True)
            for path in inner.iterdir() if inner.name == "figures" else ():
                if path.name.isdecimal() and self._shard_of(int(path.name)) is None:
                    _remove(path)

    def _shard_of(self, item: int) -> Record | None:
        """The committed shard that holds an item."""
        firsts = sorted(self.records)
        place = bisect_right(firsts, item) - 1
        record = self.records[firsts[place]] if place >= 0 else None
        return record if record and item < record.first + record.items else None


def _remove(folder: Path) -> None:
    """Remove a folder in which a process that is about to die, on another machine, may still be writing.

    Of a link the link itself.
    """
    if folder.is_symlink():
        folder.unlink()
    for _ in range(SWEEPS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_SECONDS)


def _failure_line(failure: Failure) -> bytes:
    return json_line(asdict(failure))


def _record(values: Mapping[str, Any]) -> Record | None:
    """The record of a line; None where a field is not of its type, or a count is below 0."""
    try:
        record: Record = typed(Record, values, "record")
    except UsageError:
        return None
    counts = (record.first, record.items, record.texts, record.tokens, *record.rows.values(), *record.files.values())
    return record if min(*counts, *(failure.item for failure in record.failures)) >= 0 else None
