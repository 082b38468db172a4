"""`attnscope.batch`, and the job of the command of that name: many texts in, a dataset out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from attnscope.api.records import DrawnRecord
from attnscope.corpus.dataset import read_dataset
from attnscope.corpus.folder import TABLES, DatasetFormat, DatasetOutput, Failure, Job
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.corpus.tables import write_summary
from attnscope.errors import UsageError, hints_of
from attnscope.export.drawing import picture_of
from attnscope.figures import About, Style
from attnscope.inputs.tokens import check_expression, defined, names_of_spans
from attnscope.metrics.metrics import LENGTHS, with_asked
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.model.selection import pairs, resolve_roles
from attnscope.observe.atlas import HeadNames, atlas_of
from attnscope.observe.request import Request, View
from attnscope.utils.display import head_name
from attnscope.utils.files import open_native
from attnscope.utils.folders import CORPORA, refuse_file_name
from attnscope.utils.parquet import as_plain, read_columns
from attnscope.utils.schema import takes_fields
from attnscope.utils.tables import read_delimited

if TYPE_CHECKING:
    from attnscope.corpus.dataset import CorpusHeads, Dataset
    from attnscope.corpus.pipeline import Tally
    from attnscope.export.drawing import Picture, Pictures
    from attnscope.inputs.prompt import Side
    from attnscope.model.loaded import LoadedModel

CorpusTexts = Sequence[str | Mapping[str, Any]] | Path | Sequence[Path]  # texts or records, or files, folders and globs


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What is kept of every text, and how the texts are read.

    select, by, weights: of which heads, and how entries are read, as in `View`. atlas: what names them, as in
    `CaptureSpec`.
    metrics: ids by commas, besides those that are always there. query, key, define, and query_field, key_field of
    records: the tokens that are asked about. spans: `NAME=TOKENS`, whose mass on each other is a table. tables: of
    heads and relations. top_k: keys of a query (None: all). text_field and the other fields: of records; answer: after
    every text. max_tokens: texts are cut to so many. matrices: whole matrices too.
    keep_text: the text itself in the table of texts. format, shard_size (MiB),
    spreadsheet: of the files. summary: write the means over the texts. batch_tokens: of a padded batch, by memory
    without it. strict: the first item that fails ends it.
    """

    select: str | None = None
    atlas: HeadNames | Path | str | None = None
    by: Literal["kv"] | None = None
    weights: Literal["softmax", "scores", "value"] = "softmax"
    metrics: str | None = None
    query: str | int | None = None
    key: str | int | None = None
    define: Mapping[str, str] = field(default_factory=dict)
    query_field: str | None = None
    key_field: str | None = None
    spans: Sequence[str] = ()
    tables: Sequence[str] = TABLES
    top_k: int | None = 5
    min_weight: float | None = None
    group: Literal["words", "sentences"] | None = None
    text_field: str | None = None
    id_field: str | None = None
    target_field: str | None = None
    answer_field: str | None = None
    answer: str | None = None
    audio_field: str | None = None
    picture_field: str | None = None
    pair_field: str | None = None
    global_tokens: str | None = None
    chat: bool = False
    truncate: Side | None = None
    max_tokens: int | None = None
    matrices: bool = False
    keep_text: bool = True
    format: DatasetFormat = "parquet"
    spreadsheet: bool = False
    summary: bool = False
    engine: Literal["auto", "eager", "fused", "tiles", "numba", "triton", "probe"] = "auto"
    batch_tokens: int | None = None
    shard_size: int = 64
    strict: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.tables if name not in TABLES]
        if unknown:
            raise UsageError(f"there is no table {unknown[0]!r}", f"the tables are {', '.join(TABLES)}")
        for name in ("query", "key"):
            if getattr(self, name) is not None and getattr(self, f"{name}_field") is not None:
                raise UsageError(f"{name} and {name}_field were both given", "give one of them")
        if self.answer is not None and self.answer_field is not None:
            raise UsageError("each record gives its answer, and one of all texts was given", "leave out {answer}")

    def job(
        self,
        load: LoadOptions,
        about: Mapping[str, Any],
        pictures: Pictures | None = None,
        atlas: HeadNames | None = None,
    ) -> Job:
        """What a worker needs to know.

        about: what each file says of its run; pictures: what is drawn of each text; atlas: what names the heads.
        """
        spans = names_of_spans(self.spans)
        # What is written of each text.
        output = DatasetOutput(
            tables=tuple(name for name in TABLES if name in self.tables),
            format=self.format,
            min_weight=self.min_weight,
            weights=self.matrices,
            keep_text=self.keep_text,
            spreadsheet=self.spreadsheet,
            pictures=pictures,
            about=about,
            chosen=self.chosen,
            spans=spans,
        )
        # Which tokens are meant; what no text makes right is refused before any is read.
        meanings = [f"{name}={means}" for name, means in self.define.items()]
        groups = defined([*meanings, *(span for span in self.spans if "=" in span)])
        query, key = (None if value is None else str(value) for value in (self.query, self.key))
        for expression in (query, key):
            if expression is not None:
                check_expression(expression, groups)
        # What the tables and pictures need of a pass.
        request = Request(
            view=View(self.weights, self.by == "kv"),
            metrics=with_asked(self.metrics, "layer"),
            relations="relations" in output.tables,
            top_k=self.top_k,
            group=self.group,
            maps="all" if pictures else None,
            weights=self.matrices,
            spans=spans,
            query=query,
            key=key,
            define=groups,
        )
        return Job(
            load,
            request,
            select=None if self.select is None else resolve_roles(self.select, atlas.by_role() if atlas else None),
            output=output,
            shard_bytes=self.shard_size * 2**20,
            atlas=HeadNames(atlas.roles, atlas.facts) if atlas else None,
            **{name: getattr(self, name) for name in OF_JOB},
        )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Which of query and key name tokens."""
        sides = {"query": (self.query, self.query_field), "key": (self.key, self.key_field)}
        return tuple(name for name, values in sides.items() if values != (None, None))

    @property
    def held(self) -> dict[str, Any]:
        """The options that change the rows: what an output folder is held to."""
        names = (option.name for option in fields(BatchOptions) if option.name not in NOT_HELD)
        options = {name.replace("_", "-"): getattr(self, name) for name in names}
        lengths = ",".join(name for name in LENGTHS if name in with_asked(self.metrics, "layer")) or None
        return options | {"tables": ",".join(self.tables), "metrics": lengths}


OF_JOB: tuple[str, ...] = (
    *("chat", "truncate", "batch_tokens", "strict", "engine", "query_field", "key_field", "target_field"),
    *("answer_field", "answer", "audio_field", "picture_field", "pair_field", "global_tokens", "max_tokens"),
)
NOT_HELD = ("summary", "batch_tokens", "strict", "atlas")


def named_heads(atlas: HeadNames | None) -> dict[str, str] | None:
    """What an output folder is held to of an atlas: {role: `L3H0,L3H1`}; None without one."""
    if atlas is None:
        return None
    return {
        role: ",".join(head_name(*head) for head in pairs(heads)) for role, heads in atlas.by_role().items() if heads
    }


@dataclass(frozen=True)
class BatchCall(BatchOptions):
    """What `attnscope.batch` is called with."""

    model: LoadedModel
    texts: CorpusTexts
    out: str | Path | None = None


@hints_of(LoadOptions)
@takes_fields(BatchCall)
def batch(call: BatchCall) -> Batch:
    """Heads and relations of every text, in padded passes, as a dataset.

    texts: texts, records with a `text`, or paths of files, folders or globs. out: the folder that the dataset is
    written to, where the same call resumes after it was stopped; without one it lives as long as what is returned.
    options: the fields of `BatchOptions`. Raises UsageError for an option that does not exist and for a folder with
    another dataset; what is wrong with one text is listed in `failures`.

        >>> found = attnscope.batch(attnscope.load("demo"), ["the bank", "the river bank"], query="last")
        >>> found.table().to_pandas()
        >>> found.rows("relations").to_pandas()
    """
    model = call.model
    check_loaded(model)
    # Texts, records, or paths of them: all of one kind.
    if isinstance(call.texts, str):
        raise UsageError("expected texts, got one", "give a list, or a file as pathlib.Path")
    texts = [call.texts] if isinstance(call.texts, Path) else list(call.texts)
    if not texts:
        raise UsageError("there is nothing to read", "give at least one text")
    how = {name: getattr(call, name) for name in ("text_field", "id_field", "audio_field", "chat")}
    if all(isinstance(text, Path) for text in texts):
        corpus = Corpus(tuple(map(str, texts)), **how)
    else:
        wrong = next((text for text in texts if not isinstance(text, str | Mapping)), None)
        if wrong is not None:
            message = f"expected a text or a record, got {type(wrong).__name__}"
            raise UsageError(message, "give texts, records, or paths")
        corpus = Corpus((), given=tuple(texts), **how)  # type: ignore[arg-type]  # which was looked at
    # Without a folder the dataset lives as long as what is returned.
    held = tempfile.TemporaryDirectory(prefix="attnscope-") if call.out is None else None
    folder = Path(held.name if held else str(call.out))
    load, atlas = model.options or LoadOptions(model=model.name), atlas_of(model, call.atlas)
    named = f"{model.name} ({model.revision})" if model.revision else model.name
    about = {"model": named, **call.held, "atlas": named_heads(atlas)}
    job = call.job(load, about, atlas=atlas)
    journal, tally = run_folder(job, corpus, folder, {**about, "sources": list(corpus.sources)}, loaded=model)
    if call.summary:
        write_summary(folder, job.output)
    return Batch(folder, tally, tuple(journal.failures()), held)


@dataclass(frozen=True, repr=False)
class Batch(DrawnRecord):
    """A dataset: folder, what this call did, and the items that gave no rows."""

    folder: Path
    tally: Tally
    failures: tuple[Failure, ...] = ()
    _held: Any = None  # the folder goes with the last reference to this record

    @property
    def line(self) -> str:
        failed = f", {len(self.failures)} failed: {self.failures[0].reason}" if self.failures else ""
        return f"{self.dataset.texts if self.tally.texts else 0:,} texts{failed}"

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset as it is read. Raises InputError where no text was measured."""
        return read_dataset(self.folder)

    @cached_property
    def heads(self) -> CorpusHeads:
        """Every head over the texts. Raises UsageError for a dataset without the table of heads."""
        return self.dataset.heads()

    def table(self, sort: str | None = None) -> pa.Table:
        """A row per head: of each metric its mean over the texts, the ends of its interval, and its texts; ranked.

        sort: a metric, by which the largest come first; mass where keys were named, else focus, without it.
        """
        return self.heads.table(self.heads.order(sort or self.heads.ranked_by, np.arange(len(self.heads.key))))

    def rows(self, name: Literal["texts", "heads", "relations", "spans"] = "heads") -> pa.Table:
        """Every row of a table: of heads a row per text and head. Raises UsageError for one that was not written."""
        output = self.dataset.output
        if name not in output.names:
            raise UsageError(f"this dataset has no table {name!r}", f"it has {', '.join(output.names)}")
        paths = sorted((self.folder / name).glob(f"part-*.{output.format}"))
        return pa.concat_tables([_read(path, output.format) for path in paths], promote_options="default")

    def figure(self, metric: str | None = None, style: Style = Style()) -> Picture:
        """A metric over the layers, with its interval over the texts."""
        from attnscope.figures import save_depth

        places, name = np.arange(len(self.heads.key)), metric or self.heads.ranked_by
        depths = self.dataset.depths(self.heads, places, [name])
        drawn = [course for of_stack in depths.values() for course in of_stack]
        line, title = f"{self.dataset.model}, {self.dataset.texts:,} texts", style.headed(f"{name} over the layers")
        style = replace(style, about=About(line=line), title=title)
        return picture_of(
            f"{name} over the layers", style, lambda to, style: save_depth(to / "depth.png", drawn, style)
        )

    def _below(self) -> str:
        return super()._below() if "heads" in self.dataset.output.tables else ""

    def export(self, folder: str | Path) -> Path:
        """Copy the dataset into a new folder, which `attnscope heads` reads; its path.

        Raises UsageError for a folder that is not empty.
        """
        into = Path(folder)
        refuse_file_name(into, CORPORA)
        if into.exists() and any(into.iterdir()):
            raise UsageError(f"{into} is not empty", "name a new folder")
        return Path(shutil.copytree(self.folder, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*")))


def _read(path: Path, format: str) -> pa.Table:
    with open_native(path) as source:
        if format == "parquet":
            return as_plain(read_columns(source))
        if format == "csv":
            return read_delimited(source)
        from pyarrow.json import read_json

        return read_json(source)
