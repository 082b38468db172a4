"""A dataset, read again: its heads, ranked over its texts, and a metric layer by layer. No model and no torch here.

    found = read_dataset(Path("runs/ioi")).heads()
    found.table(found.order("mass", np.arange(len(found.key))))

Shapes: S text, N head, L layer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from attnscope.corpus.folder import PART, SUMMARY, TABLES, DatasetFormat, DatasetOutput, Record, kept_options, written
from attnscope.corpus.tables import (
    DAMAGED,
    SCHEMAS,
    WrittenRows,
    columns_of,
    damage,
    head_keys,
    head_numbers,
    plain_schema,
    summary_table,
)
from attnscope.errors import InputError, UsageError
from attnscope.figures import Depth
from attnscope.metrics.metrics import KNOWN, LENGTHS, LOOKBACKS, MASS, SIGNED
from attnscope.model.selection import DECODER, STACKS
from attnscope.observe.records import Score, first_ranked, ranked
from attnscope.studies.statistics import Means, means
from attnscope.utils.files import open_native
from attnscope.utils.memory import check_free
from attnscope.utils.parquet import open_parquet
from attnscope.utils.tables import FORMATS, as_table, numbers, texts_at

ROW_BYTES = 16  # of a row, while one of its columns is read, at the least
MOST_ROWS = 1 << 23  # of a summary
Pair = tuple[str, str]  # the names of a query span and of a key span


@dataclass(frozen=True)
class CorpusHeads:
    """The heads of a dataset, in the model's order: (N,) each.

    key: which, as `head_keys` numbers them. head: -1 for the mean over a kv head's. stack: a place in STACKS. scores:
    of each metric the mean over the texts, its interval, and of `mass` what uniform attention would give. texts: of
    each metric how many have it.
    """

    key: np.ndarray
    layer: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    stack: np.ndarray
    scores: Mapping[str, Score]
    texts: Mapping[str, np.ndarray]

    @property
    def ranked_by(self) -> str:
        """What heads are sorted by, by default: mass where keys were named, else focus, or the first metric that they
        have."""
        return first_ranked(self.scores, np.arange(len(self.key))) or "layer"

    @property
    def plain(self) -> str:
        """The stack whose heads have no other name: the decoder where there is one."""
        stacks = [STACKS[stack] for stack in np.unique(self.stack).tolist()]
        return DECODER if DECODER in stacks else stacks[0]

    @property
    def counts(self) -> dict[str, dict[int, int]]:
        """{stack: {layer: heads}}; of means over kv heads how many of these."""
        counts = dict[str, dict[int, int]]()
        for stack, layer, head in self._named:
            of_stack = counts.setdefault(stack, {})
            of_stack[layer] = max(of_stack.get(layer, 0), head + 1)
        return counts

    @property
    def _named(self) -> Iterator[tuple[str, int, int]]:
        """Stack, layer and number of each."""
        number = np.where(self.head < 0, self.kv_head, self.head)
        for stack, layer, head in zip(self.stack.tolist(), self.layer.tolist(), number.tolist(), strict=True):
            yield STACKS[stack], layer, head

    def places(self, heads: Mapping[str, Mapping[int, Sequence[int]]]) -> np.ndarray:
        """The places of some heads, {stack: {layer: heads}}."""
        return np.flatnonzero([head in heads.get(stack, {}).get(layer, ()) for stack, layer, head in self._named])

    def order(self, sort: str, places: np.ndarray) -> np.ndarray:
        """Places in the order of a metric's mean, or of `layer`; mass by how far it is above uniform attention.

        Raises UsageError for what the dataset did not measure.
        """
        return ranked(places, sort, self.scores, {"layer": self.layer}, "dataset")

    def table(self, order: np.ndarray) -> pa.Table:
        """A row per head: which; of each metric its mean, the ends of its interval, and its texts; uniform; stack."""
        head, columns = self.head[order], dict[str, Any]()
        for name, score in self.scores.items():
            for end, value in (("", score.value), ("_low", score.low), ("_high", score.high)):
                columns[f"{name}{end}"] = None if value is None else value[order].astype(np.float32)
            columns[f"{name}_texts"] = self.texts[name][order]
            if name == MASS.id:
                columns["uniform"] = score.null[order].astype(np.float32)
        return as_table(
            {
                "layer": self.layer[order],
                "head": numbers(head, head < 0),
                "kv_head": self.kv_head[order],
                **columns,
                "stack": texts_at(STACKS, self.stack[order]),
            }
        )


@dataclass(frozen=True)
class Dataset:
    """A folder that `attnscope batch` has filled, or is filling. output: what it writes, as its files say it.

    model: its name, as run.json says it. asked: which queries and keys its numbers are of, in words.
    """

    folder: Path
    shards: Sequence[Record]
    output: DatasetOutput
    model: str
    asked: str = ""

    @property
    def texts(self) -> int:
        """How many were measured."""
        return sum(shard.texts for shard in self.shards)

    @property
    def failed(self) -> int:
        """How many items gave no text."""
        return sum(len(shard.failures) for shard in self.shards)

    def heads(self, pair: Pair | None = None, advance: Callable[[int], object] = lambda done: None) -> CorpusHeads:
        """Every head over the texts, by the summary, which is made where there is none; pair: mass of two spans.

        advance: called for every metric that is taken. Raises UsageError for a dataset without heads, or spans of these
        names, InputError for a damaged one.
        """
        self._check(pair)
        with damage(self.folder):
            whole = self._summary
            if whole is None:
                self._check_room()
                whole = summary_table(self.folder, self.shards, self.output, advance)
            return _heads_of(whole, pair)

    def layers(self, name: str, heads: np.ndarray, pair: Pair | None = None) -> dict[str, tuple[np.ndarray, Means]]:
        """{stack: (layers, means over the texts of each layer's mean over heads)} of a metric, of heads by their keys.

        A text in which a layer has no value is left out of that layer's mean. Raises as `heads`.
        """
        self._check(pair)
        self._check_room()
        rows = WrittenRows(self.folder, self.shards, "heads" if pair is None else "spans", self.output)
        with damage(self.folder):
            key_N, values = rows.read([name])
            chosen_N, names = np.ones(len(key_N), bool), self.output.spans
            if pair is not None:
                key_N, pair_N = np.divmod(key_N, len(names) ** 2)
                chosen_N = pair_N == names.index(pair[0]) * len(names) + names.index(pair[1])
            chosen_N &= np.isin(key_N, heads)
            which = {part: numbers[chosen_N] for part, numbers in head_numbers(key_N).items()}
            value_SN, within = values[name][:, chosen_N], KNOWN[name].within
            result = {}
            for stack in np.unique(which["stack"]).tolist():
                of = which["stack"] == stack
                layers, there_SN = np.unique(which["layer"][of]), ~np.isnan(value_SN[:, of])
                of_LN = (which["layer"][of] == layers[:, None]).astype(np.float64)
                # The mean over the heads of each layer, text by text, and then its mean over the texts.
                with np.errstate(invalid="ignore"):
                    value_SL = (np.where(there_SN, value_SN[:, of], 0.0) @ of_LN.T) / (there_SN @ of_LN.T)
                result[STACKS[stack]] = layers, means(value_SL, within=within)
            return result

    def depths(
        self, heads: CorpusHeads, places: np.ndarray, names: Sequence[str], pair: Pair | None = None
    ) -> dict[str, list[Depth]]:
        """{stack: metrics over its layers}, of some heads of `heads`, with intervals. Raises as `heads`."""
        drawn = dict[str, list[Depth]]()
        for name in names:
            if name not in heads.scores:
                raise UsageError(f"this dataset did not measure {name}", f"it has {', '.join(heads.scores)}")
            metric, score = KNOWN[name], heads.scores[name]
            for stack, (layers, mean) in self.layers(name, heads.key[places], pair).items():
                of = places[heads.stack[places] == STACKS.index(stack)]
                present = np.isfinite(mean.low) | np.isfinite(mean.high)
                interval = (layers[present], mean.low[present], mean.high[present]) if present.any() else ()
                depth = Depth(metric.title, metric.unit, heads.layer[of], score.value[of], score.null[of], interval)
                if np.isfinite(depth.value_N).any():
                    drawn.setdefault(stack, []).append(depth)
        return drawn

    def _check(self, pair: Pair | None) -> None:
        """Raise UsageError where there is nothing to rank."""
        spans = self.output.spans
        if pair is not None and not spans:
            message = f"{self.folder} has no spans, and those are what a query and a key name here"
            raise UsageError(message, "leave out {query} and {key}, or give spans to attnscope batch")
        if pair is not None and not set(pair) <= set(spans):
            raise UsageError(f"{self.folder} has these spans: {', '.join(spans)}", "name two of them")
        if pair is None and "heads" not in self.output.tables:
            how = "name two of its spans with {query=NAME} and {key=NAME}" if spans else "read its tables themselves"
            raise UsageError(f"{self.folder} has no table of heads", how)

    def _check_room(self) -> None:
        """Raise MemoryLimitError where the machine has no room for one column of the largest table."""
        rows = max(sum(shard.rows.get(table, 0) for shard in self.shards) for table in ("heads", "spans"))
        hint = "read them on a larger machine, or in parts with DuckDB"
        check_free(f"the rows of {self.folder} take", ROW_BYTES * rows, hint)

    @cached_property
    def _summary(self) -> pa.Table | None:
        """What --summary has written; None without it."""
        path = self.folder / f"{SUMMARY}.{self.output.format}"
        if not path.exists():
            return None
        schema = SCHEMAS["summary"]
        _check_rows(path, range(MOST_ROWS + 1))
        return FORMATS[self.output.format].read(path, schema.names, plain_schema(schema))


def read_dataset(folder: Path) -> Dataset:
    """The dataset of a folder, with the shards that are complete.

    Raises UsageError for a folder that is none, InputError for a damaged one and for one without a text.

        >>> read_dataset(Path("runs/ioi")).heads().ranked_by
        'mass'
    """
    options = kept_options(folder)
    model = str(options.get("model") or "").partition(" (")[0]  # which files follow it
    with damage(folder):
        try:
            shards = written(folder)
        except InputError as error:
            raise InputError(error.message, DAMAGED) from error
        if not any(shard.texts for shard in shards):
            raise InputError(f"{folder} has no text that was measured", "the command that began it resumes it")
        return Dataset(folder, shards, _output(folder, shards), model, _asked(options))


def _asked(options: Mapping[str, Any]) -> str:
    """`queries last, keys of the field subject`; empty where no tokens were named."""
    parts = []
    for side, name in (("queries", "query"), ("keys", "key")):
        if options.get(name):
            parts.append(f"{side} {options[name]}")
        elif options.get(f"{name}-field"):
            parts.append(f"{side} of the field {options[f'{name}-field']}")
    return ", ".join(parts)


def _output(folder: Path, shards: Sequence[Record]) -> DatasetOutput:
    """What a dataset holds, by the names and columns of its files."""
    rows = {folder / name: shard.rows.get(name.partition("/")[0], 0) for shard in shards for name in shard.files}
    for path, count in rows.items():
        if not (path.parent.parent == folder and PART.fullmatch(path.name) and path.is_file()):
            raise InputError(f"{folder} lacks {path.name} of {path.parent.name}, which its journal names", DAMAGED)
        _check_rows(path, [count])
    first = {path.parent.name: path for path in reversed(rows)}
    format = first["texts"].suffix.removeprefix(".")
    if format not in get_args(DatasetFormat):
        raise ValueError(f"tables in {format}")
    columns = columns_of(first["heads"], format) if "heads" in first else []
    spans: list[str | None] = []
    if "spans" in first:  # in the order in which every text has them
        schema = pa.schema([("query_span", pa.string())])
        spans = FORMATS[format].read(first["spans"], ["query_span"], schema)["query_span"].unique().to_pylist()
    return DatasetOutput(
        tables=tuple(name for name in TABLES if name in first),
        format=format,
        chosen=("key",) if MASS.id in columns else (),
        spans=tuple(filter(None, spans)),
        metrics=tuple(name for name in (*LENGTHS, *LOOKBACKS, *SIGNED) if name in columns),
    )


def _check_rows(path: Path, expected: Container[int]) -> None:
    """Raise ValueError for a Parquet file of another number of rows: few bytes decompress to many."""
    if path.suffix == ".parquet":
        with open_native(path) as source:
            if open_parquet(source).metadata.num_rows not in expected:
                raise ValueError(f"{path} has another number of rows")


def _heads_of(summary: pa.Table, pair: Pair | None) -> CorpusHeads:
    """The rows of a summary as columns: those of metrics of heads, or of a pair of spans."""
    query, key = pair or ("", "")  # csv has no null in a column of text
    of_pair = (pc.equal(summary[name].fill_null(""), text) for name, text in (("query_span", query), ("key_span", key)))
    rows = summary.filter(pc.and_(*of_pair))
    key_N, place = np.unique(head_keys(rows), return_inverse=True)
    if not len(key_N):
        raise ValueError("no heads")
    value, low, high, uniform = (
        rows[name].cast(pa.float64()).fill_null(np.nan).to_numpy() for name in ("mean", "low", "high", "uniform")
    )
    count = rows["texts"].cast(pa.int64()).fill_null(0).to_numpy()
    scores, texts = dict[str, Score](), dict[str, np.ndarray]()
    for name in [text for text in rows["metric"].unique().to_pylist() if text in KNOWN]:
        of = pc.equal(rows["metric"], name).to_numpy()

        def spread(values: np.ndarray, none: float = np.nan, of: np.ndarray = of) -> np.ndarray:
            result = np.full(len(key_N), none, values.dtype)
            result[place[of]] = np.where(np.isfinite(values[of]), values[of], none)
            return result

        scores[name] = Score(spread(value), spread(uniform), spread(low), spread(high))
        texts[name] = spread(count, 0)
    return CorpusHeads(key_N, **head_numbers(key_N), scores=scores, texts=texts)
