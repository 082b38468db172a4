"""An output folder: its journal, which run has it, the shards that are written into it, and the job that fills it.

The journal has a line per committed shard. A shard's files lie under their final names before its line is written, so
what the journal names is there; what it does not name is made again, under the same names. A folder has the options it
must be run with, and one run in it at a time. Shards are items that are written, and committed, together: they are cut
by the items alone, and the same in every run. A `Job` is what to do with every text, and what is written of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnscope.corpus.items import Item
from attnscope.corpus.records import STDIN
from attnscope.errors import InputError, UsageError
from attnscope.hooks.report import joined_ways
from attnscope.inputs.prompt import Side
from attnscope.metrics.metrics import LENGTHS, LOOKBACKS
from attnscope.model.geometry import Geometry
from attnscope.model.options import LoadOptions
from attnscope.observe.request import Request
from attnscope.utils.files import check_schema, json_line, open_regular, read_json, refuse_links, save_json, whole_file
from attnscope.utils.folders import LOCK, append, changes, document, locked, read_journal, writable
from attnscope.utils.schema import from_json
from attnscope.utils.tables import FORMATS

if TYPE_CHECKING:
    from attnscope.export.drawing import Pictures
    from attnscope.observe.atlas import HeadNames

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
    id: str | int
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
    return list(_records(folder / JOURNAL, cut=False).values())


def _records(path: Path, cut: bool = True) -> dict[int, Record]:
    """The shards of a journal by their first items, in order. Raises InputError where two have an item or a file."""
    records = {record.first: record for record in read_journal(path, _record, cut=cut)}
    result, end, names = dict[int, Record](), 0, set[str]()
    for first in sorted(records):
        if first < end or names & records[first].files.keys():
            raise InputError(f"{path} is damaged: item {first} is in two shards", ANOTHER)
        result[first], end = records[first], first + records[first].items
        names |= records[first].files.keys()
    return result


def digest(items: Iterable[Item]) -> str:
    """A hash of what was read; a corpus that changed between two runs shows in it."""
    hashed = hashlib.sha256()
    for item in items:
        parts = (str(item.id), item.text, item.problem or "", json.dumps(item.fields, default=str, sort_keys=True))
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
        self.records = _records(self.path)

    def append(self, record: Record) -> None:
        """Remember a shard; on return it survives a crash of the machine. A summary without it is removed."""
        for format in FORMATS:
            (self.folder / f"{SUMMARY}.{format}").unlink(missing_ok=True)
        append(self.path, asdict(record))
        self.records[record.first] = record
        with open_regular(self.folder / FAILURES, "ab", follow=False) as stream:
            stream.writelines(json_line(asdict(failure)) for failure in record.failures)

    def rewrite_failures(self) -> None:
        """failures.jsonl as the journal has it, in the order of the items."""
        with whole_file(self.folder / FAILURES) as stream:
            stream.writelines(json_line(asdict(failure)) for failure in self.failures())

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


def _record(values: Mapping[str, Any]) -> Record | None:
    """The record of a line; None where a field is not of its type, or a count is below 0 or more than all items."""
    try:
        record: Record = from_json(Record, values, "record")
    except UsageError:
        return None
    counts = (record.first, record.items, record.texts, record.tokens, *record.rows.values(), *record.files.values())
    whole = record.texts + len(record.failures) <= record.items
    return record if whole and min(*counts, *(failure.item for failure in record.failures)) >= 0 else None


OPTIONS = "run.json"
ANOTHER = "name another folder with {out}"
RESUME = f"resume it with the version of attnscope that wrote it, or {ANOTHER}"
SCHEMA = 7  # of the folder; goes up when a file or a column is renamed, or means something else
# Before, texts had no column `text` and every id was text: such a folder is resumed as it was begun. In the first of
# these heads had the text's role alone, as `role`: its numbers are read, and it is not resumed.
ALL_TEXT = 6
TEXT_ROLES = 5
RESUMED = (SCHEMA, ALL_TEXT)
ABOUT = "written by attnscope batch; docs/schemas.md says what is here"
SINCE = {"keep-text": SCHEMA}  # options that folders of an older layout do not name


@contextmanager
def opened(folder: Path, options: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> Iterator[Journal]:
    """The folder's journal, with the folder locked, its options checked, and what is not committed removed.

    about: what else a new folder says of itself.
    """
    with writable(folder, "free disk space or name another folder; the same command resumes the run"):
        folder.mkdir(parents=True, exist_ok=True)
        check_ours(folder)
        with locked(folder):
            check_options(folder, options, {"about": ABOUT, **(about or {})})
            journal = Journal(folder)
            journal.sweep()
            (folder / PARTIAL).mkdir(exist_ok=True)
            try:
                yield journal
            finally:
                journal.sweep()  # what actors that died on other machines left half made


def check_options(folder: Path, options: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Check that the folder was started with these options; a new folder takes them.

    about: what else run.json says, which is not compared. Raises UsageError that names every option that differs.
    """
    before = begun(folder)
    layout = SCHEMA if before is None else before["schema"]
    plain = json.loads(json.dumps({k: v for k, v in options.items() if SINCE.get(k, 0) <= layout}, default=str))
    if before is None:
        save_json({"schema": SCHEMA, "options": plain, **about}, folder / OPTIONS)
    elif changed := changes(before["options"], plain):
        message = f"{folder} was started with other options: {'; '.join(changed)}"
        raise UsageError(message, f"give the same options to resume, or {ANOTHER}")


def begun_sources(folder: Path, sources: Sequence[str]) -> tuple[str, ...]:
    """The sources that the folder was started with, where these are the same paths spelled another way.

    The rows name their files as the sources do, so that those of a resumed run have the names of the first.
    """
    before = (begun(folder) or {"options": {}})["options"].get("sources")
    if not isinstance(before, list) or not all(isinstance(name, str) for name in before):
        return tuple(sources)
    # As paths from the root, links followed; standard input, and what no path can be, as it is.
    paths = [
        [name if name == STDIN or "\0" in name else os.path.realpath(name) for name in names]
        for names in (before, sources)
    ]
    return tuple(before if paths[0] == paths[1] else sources)


def say_who_answered(folder: Path, records: Iterable[Record]) -> None:
    """Write into run.json which engines read how many of the texts that are whole, and who each kind of question.

    Of encoder-decoders also how many targets were given, and how many generated; of a model that is read without what
    its config states, what that is.
    """
    path, whole = folder / OPTIONS, list(records)
    values = read_json(path)
    engines, targets = (
        dict(sorted(sum((Counter(getattr(record, name)) for record in whole), Counter[str]()).items()))
        for name in ("engines", "targets")
    )
    answered_by = joined_ways(record.answered_by for record in whole)
    replaced = {name: value for record in whole for name, value in record.replaced.items()}
    values |= {"engines": engines, "answered_by": answered_by} | ({"replaced": replaced} if replaced else {})
    save_json(values | ({"targets": targets} if targets else {}), path)


def check_ours(folder: Path) -> None:
    """Refuse a folder with files that no run of ours left, or links. Raises UsageError that names one."""
    paths = sorted(folder.iterdir())
    refuse_links(path for path in paths if path.name in (LOCK, JOURNAL, FAILURES) or path.is_dir())
    foreign = [path for path in paths if not path.name.startswith(".") and path.name != "lost+found"]
    if begun(folder) is None and foreign:
        message = f"{folder} holds {foreign[0].name}, which is not part of a dataset of attnscope batch"
        raise UsageError(message, "name a new or an empty folder with {out}")


def is_dataset(folder: Path) -> bool:
    """Whether `attnscope batch` has filled a folder, as far as the names in it tell."""
    return (folder / OPTIONS).exists() or (folder / JOURNAL).exists()


def kept_options(folder: Path) -> dict[str, Any]:
    """The options that a dataset was made with. Raises UsageError for a folder that is none."""
    hint = "name the folder of a dataset that attnscope batch wrote"
    old = "read it with the version of attnscope that wrote it"
    content = begun(folder, hint, old, (*RESUMED, TEXT_ROLES))
    if content is None:
        raise UsageError(f"{folder} has no {OPTIONS}, which each dataset has", hint)
    options: dict[str, Any] = content["options"]
    return options


def begun(
    folder: Path, hint: str = ANOTHER, old: str = RESUME, versions: Sequence[int] = RESUMED
) -> dict[str, Any] | None:
    """What the run.json of a folder says; None without one.

    Raises UsageError where it is another program's, damaged, or of none of the versions. hint, old: what to do then.
    """
    content = document(
        folder / OPTIONS,
        "not written by attnscope batch, or is damaged",
        hint,
        lambda content: isinstance(content.get("options"), dict) and type(content.get("schema")) is int,
    )
    if content is not None and content["schema"] not in versions:
        check_schema(content, SCHEMA, folder, old)
    return content


LETTERS_PER_TOKEN = 3.0  # about; shards are cut before anything is tokenised
MEDIA_TOKENS = 1500  # about, of a sound or of pictures: as Whisper's encoder reads


@dataclass(frozen=True)
class Shard:
    """Consecutive items that are written, and committed, together."""

    items: tuple[Item, ...]

    @property
    def first(self) -> int:
        """The number of its first item."""
        return self.items[0].number


def shards(
    items: Iterable[Item], cost: Callable[[Item], float], limit: float, sizes: Mapping[int, int]
) -> Iterator[Shard]:
    """Cut a corpus into shards with an output of about `limit` bytes; the cut depends on the items alone.

    cost: about how many bytes an item's output takes. known: {first item: items} of shards that an earlier run
    committed, which are cut as they were then.
    """
    taken_items: list[Item] = []
    total = 0.0
    for item in items:
        taken_items.append(item)
        total += cost(item)
        size = sizes.get(taken_items[0].number)
        if len(taken_items) == size if size else total >= limit:
            yield Shard(tuple(taken_items))
            taken_items, total = [], 0.0
    if taken_items:
        yield Shard(tuple(taken_items))


def unfinished(
    items: Iterable[Item], cost: Callable[[Item], float], limit: float, records: Mapping[int, Record]
) -> Iterator[Shard]:
    """The shards of a corpus that no record covers. Raises InputError where the corpus differs from a record."""
    before = dict(records)
    for shard in shards(items, cost, limit, {first: record.items for first, record in before.items()}):
        record = before.pop(shard.first, None)
        if record is None:
            yield shard
        elif digest(shard.items) != record.digest:
            last = shard.first + len(shard.items) - 1
            why = f"the corpus has changed: items {shard.first} to {last} are not those that were read before"
            raise InputError(why, ANOTHER)
    if before:
        why = f"the corpus has changed: item {min(before)} was read before, and now it ends earlier"
        raise InputError(why, ANOTHER)


def item_cost(job: Job, geometry: Geometry) -> Callable[[Item], float]:
    """About how many bytes the files hold of an item, from its length in letters: what shards are cut by."""
    heads, pairs = sum(sum(of.values()) for of in geometry.heads_of_stacks.values()), len(job.output.spans) ** 2

    def cost(item: Item) -> float:
        tokens = min(max(1, round(len(item.text) / LETTERS_PER_TOKEN)), job.max_tokens or sys.maxsize)
        tokens += MEDIA_TOKENS * job.media
        relations = "relations" in job.output.tables
        rows = tokens * min(tokens / 2, job.request.top_k or tokens) if relations else 0
        squares = tokens * tokens if job.output.weights else 0
        return heads * (6.0 * rows + squares + 8.0 * pairs + 120.0) + 200.0

    return cost


TABLES = ("heads", "relations")
INTEGER_IDS, TEXT_IDS = "integer", "text"
DatasetFormat = Literal["parquet", "csv", "jsonl"]


@dataclass(frozen=True)
class DatasetOutput:
    """What is written, and how.

    tables: of TABLES; `texts` is always written. format: a DatasetFormat. spreadsheet: text cells that a
    spreadsheet would run as a formula begin with an apostrophe. pictures: what to draw of a text (a function of the
    observation), and draws it into a folder, in a worker process. about: what each file says of its run. chosen: which
    of `query` and `key` name tokens of each text. spans: the names of spans whose mass on each other is a table.
    targets: whether each text has one, which an encoder-decoder's decoder reads. answers: whether each text has one
    after it. metrics: those that heads have besides METRICS. entries: what relations list, as in `View.weights`.
    keep_text: whether `texts` has the texts themselves. ids: what every id is, INTEGER_IDS or TEXT_IDS. layout: the
    version of the folder.
    """

    tables: tuple[str, ...] = TABLES
    format: str = "parquet"
    min_weight: float | None = None
    weights: bool = False
    spreadsheet: bool = False
    pictures: Pictures | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    targets: bool = False
    answers: bool = False
    metrics: tuple[str, ...] = ()
    entries: Literal["softmax", "scores", "value"] = "softmax"
    keep_text: bool = True
    ids: str = TEXT_IDS
    layout: int = SCHEMA

    @property
    def names(self) -> tuple[str, ...]:
        """The tables, with `texts`, and `spans` where there are any."""
        return ("texts", *self.tables, *(("spans",) if self.spans else ()))


@dataclass(frozen=True)
class Job:
    """What to do with every text; a worker on another machine needs no more than this.

    batch_tokens: the most tokens of a padded batch, None to choose by memory. shard_bytes: about what the files of one
    shard hold. strict: the first item that fails ends the run. engine: auto is what is faster, by the rule of a single
    text (`observe/engine_choice.py`), or the kernel for many short ones together; else eager while the batch's matrices
    fit. query_field, key_field: of the records, where each says itself which tokens are asked about. target_field:
    where each says what an encoder-decoder's decoder reads; without it, what the model itself makes of the text.
    answer_field: where each gives the answer that is read after its text; answer: the same one after every text.
    audio_field: where each names the file of a sound, which is read instead of the text; picture_field: the file of a
    picture to read with its text, or a list of them; pair_field: the second text of a pair. global_tokens: as of
    `CaptureSpec`. max_tokens: every text is cut to so many, on the side `truncate`, else on the right. atlas: what
    names the model's heads, where there is one.
    """

    load: LoadOptions = LoadOptions()
    request: Request = Request(relations=True)
    select: str | None = None
    output: DatasetOutput = DatasetOutput()
    chat: bool = False
    truncate: Side | None = None
    batch_tokens: int | None = None
    shard_bytes: int = 64 * 2**20
    strict: bool = False
    engine: Literal["auto", "eager", "fused", "tiles", "numba", "triton", "probe"] = "auto"
    query_field: str | None = None
    key_field: str | None = None
    target_field: str | None = None
    answer_field: str | None = None
    answer: str | None = None
    audio_field: str | None = None
    picture_field: str | None = None
    pair_field: str | None = None
    global_tokens: str | None = None
    max_tokens: int | None = None
    atlas: HeadNames | None = None

    def __post_init__(self) -> None:
        """What the output says of the request is read off the request."""
        if self.request.view.weights == "logit":
            raise UsageError("effects on a logit are read of one text at a time", "use {weights=value}, or `relations`")
        metrics = (*(name for name in LENGTHS if name in self.request.metrics), *(LOOKBACKS if self.answered else ()))
        output = replace(self.output, answers=self.answered, metrics=metrics, entries=self.request.view.weights)
        object.__setattr__(self, "output", output)

    @property
    def answered(self) -> bool:
        """Whether an answer follows each text."""
        return (self.answer_field, self.answer) != (None, None)

    @property
    def one_by_one(self) -> bool:
        """Whether every text is a batch of its own: maps are kept of one text at a time, so are sounds and pictures."""
        return self.request.maps is not None or self.media

    @property
    def media(self) -> bool:
        """Whether a sound or pictures are read with every text, or instead of it."""
        return (self.audio_field, self.picture_field) != (None, None)
