"""Observations -> rows, as Arrow tables of texts, heads, relations and spans, and where a shard's rows are written.

Rows go from the observations' arrays to Arrow without a Python object each. Schemas are written down in
docs/schemas.md. `ShardWriter` writes tables, weights and pictures under temporary names, and renames them together;
`StreamWriter` writes rows to standard output.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.corpus.folder import INTEGER_IDS, PARTIAL, DatasetOutput, Failure, Record, Shard, digest
from attnscope.corpus.items import Item, printable
from attnscope.corpus.tables import TableFile, schema_of, version_of
from attnscope.errors import AttnscopeError
from attnscope.hooks.generation import DEFAULT, POSITIONS
from attnscope.hooks.report import joined_ways
from attnscope.model.selection import DECODER, SOFTMAX, STACKS, as_ranges, is_cross
from attnscope.observe.records import HeadColumns, RelationRows
from attnscope.observe.request import ENTRIES, codes
from attnscope.utils.files import json_line
from attnscope.utils.folders import sync, sync_file
from attnscope.utils.tables import integers, json_rows, numbers, texts_at, words

if TYPE_CHECKING:
    from attnscope.inputs.tokens import TokenSelection
    from attnscope.observe.observation import Observation

ROWS_A_PIECE = 1 << 19  # that are made, and written, at a time


@dataclass
class Measured:
    """Some consecutive items, measured: observations in order, and what failed. `items` counts both."""

    items: int
    seen: list[tuple[Item, Observation]]
    failures: list[Failure]

    @classmethod
    def joined(cls, parts: Sequence[Measured]) -> Measured:
        """The parts as one, in the order of the items."""
        pairs = [pair for part in parts for pair in part.seen]
        failures = [failure for part in parts for failure in part.failures]
        pairs.sort(key=lambda pair: pair[0].number)
        failures.sort(key=lambda failure: failure.item)
        return cls(sum(part.items for part in parts), pairs, failures)

    @property
    def texts(self) -> int:
        """How many were observed."""
        return len(self.seen)

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(len(obs.prompt) for _, obs in self.seen)

    @property
    def lacking(self) -> Counter[str]:
        """How many texts lack a span, by name."""
        spans = ([of.chosen.spans for stack, of in obs.stacks.items() if not is_cross(stack)] for _, obs in self.seen)
        return Counter(name for texts in spans for name in texts[0] if all(matches[name] is None for matches in texts))

    @property
    def targets(self) -> Counter[str]:
        """How many targets were `given`, how many `generated`, and how many of these a number of tokens `cut`.

        Nothing where texts have none.
        """
        facts = [target for _, obs in self.seen if (target := obs.facts.get("target"))]
        cut = sum(target["stopped_by"] in (DEFAULT, POSITIONS) for target in facts)
        return Counter("generated" if target["generated"] else "given" for target in facts) + Counter({"cut": cut})

    @property
    def engines(self) -> Counter[str]:
        """How many texts each engine read."""
        return Counter(str(obs.facts["engine"]) for _, obs in self.seen)

    @property
    def replaced(self) -> dict[str, Any]:
        """What the model's config states and it was read without, by name."""
        return dict(self.seen[0][1].facts["model"].get("replaced", {})) if self.seen else {}

    @property
    def answered_by(self) -> dict[str, list[str]]:
        """Which of attnscope's own ways read each kind of question."""
        reports = {id(obs.report.calls): obs.report for _, obs in self.seen}  # the texts of a batch share the calls
        return joined_ways(report.answered_by for report in reports.values())


def pieces(measured: Measured) -> Iterator[Measured]:
    """The same observations in pieces of about ROWS_A_PIECE relations, at least one: they stay in caches."""
    pairs: list[tuple[Item, Observation]] = []
    rows = 0
    for pair in measured.seen:
        pairs.append(pair)
        rows += pair[1].most_relations
        if rows >= ROWS_A_PIECE:
            yield Measured(len(pairs), pairs, [])
            pairs, rows = [], 0
    if pairs or not measured.seen:
        yield Measured(len(pairs), pairs, [])


def arrow_tables(measured: Measured, output: DatasetOutput) -> dict[str, pa.Table]:
    """The rows of some items, in order: {table: rows}, as `schema_of` says.

    >>> arrow_tables(Measured(1, [(item, observation)], []), DatasetOutput())["relations"]
    """
    return {name: arrow_table(name, measured, output) for name in output.names}


def arrow_table(name: str, measured: Measured, output: DatasetOutput) -> pa.Table:
    """The rows of one of the tables."""
    build = {"texts": _texts, "heads": _heads, "relations": _relations, "spans": _spans}
    return build[name](measured.seen, output) if measured.seen else schema_of(name, output).empty_table()


def _texts(pairs: Sequence[tuple[Item, Observation]], output: DatasetOutput) -> pa.Table:
    rows: list[dict[str, Any]] = [
        {
            "item": item.number,
            "id": item.id if output.ids == INTEGER_IDS else str(item.id),
            "text": printable(item.text) if item.text else None,
            "file": item.file,
            "line": item.line,
            "tokens": len(obs.prompt),
            "removed_tokens": obs.prompt.removed,
            "sha256": obs.prompt.sha256,
            "fields": printable(json.dumps(item.fields, ensure_ascii=False, default=str)),
            **_chosen(obs),
            "target": "".join(obs.queries.plain).strip() if output.targets else None,
            "target_tokens": len(obs.queries),  # of an encoder-decoder, whose decoder read them; in no other's schema
            "answer": obs.prompt.answer,
        }
        for item, obs in pairs
    ]
    columns, schema = dict[str, pa.Array](), schema_of("texts", output)
    for field in schema:  # texts or whole numbers
        values: list[Any] = [row.get(field.name) for row in rows]
        is_text = field.type == pa.string()
        columns[field.name] = words(values) if is_text else integers(values, field.type.to_pandas_dtype())
    return _table(columns, schema)


def _chosen(obs: Observation) -> dict[str, str | None]:
    """The tokens that were asked about, as `--query` and `--key` take them, and what a person should know of them.

    Of an encoder-decoder each is a JSON object by stack, null where a stack was not asked.
    """

    def positions(chosen: TokenSelection) -> dict[str, Any]:
        tokens = {"query": chosen.query, "key": chosen.key}
        cells: dict[str, Any] = {name: as_ranges(match.positions) or None for name, match in tokens.items() if match}
        if chosen.spans:
            cells["positions"] = {name: match and as_ranges(match.positions) for name, match in chosen.spans.items()}
        return cells

    by_stack = {stack: positions(stack_read.chosen) for stack, stack_read in obs.stacks.items()}
    by_name = {name: {stack: of.get(name) for stack, of in by_stack.items()} for of in by_stack.values() for name in of}
    columns = by_name if obs.other_stacks else by_stack[obs.stack]
    notes = dict.fromkeys(note for stack_read in obs.stacks.values() for note in stack_read.chosen.notes)
    cells = {
        name: json.dumps(cell, ensure_ascii=False) if isinstance(cell, dict) else cell for name, cell in columns.items()
    }
    return {**cells, "note": "; ".join(notes) or None}


def _heads(pairs: Sequence[tuple[Item, Observation]], output: DatasetOutput) -> pa.Table:
    # Each text has a row for each of its heads, of which a selection keeps some.
    every = [obs.every for _, obs in pairs]
    whole, stacks = HeadColumns.joined(every), [codes(heads.stack.tolist()) for heads in every]
    # The tokens' texts are one dictionary for all rows.
    top_keys = [obs.place("keys", stack, obs.every.top_key) for (_, obs), stack in zip(pairs, stacks, strict=True)]
    texts, [top_key] = _numbered([obs.names() for _, obs in pairs], top_keys)
    rows = whole.table(np.flatnonzero(whole.kept), texts, top_key)
    about = _about(pairs, output, [int(np.count_nonzero(heads.kept)) for heads in every])
    return _table(about | dict(zip(rows.column_names, rows.columns, strict=True)), schema_of("heads", output))


def _relations(pairs: Sequence[tuple[Item, Observation]], output: DatasetOutput) -> pa.Table:
    parts = [obs.relation_rows(output.min_weight) for _, obs in pairs]
    columns_read = RelationRows.joined(parts).columns()
    head, both = columns_read["head"], [(obs, part, part.stack) for (_, obs), part in zip(pairs, parts, strict=True)]
    queries = [obs.place("queries", stack, part.query, obs.group) for obs, part, stack in both]
    keys = [obs.place("keys", stack, part.key, obs.group) for obs, part, stack in both]
    texts, tokens = _numbered([obs.names(obs.group) for _, obs in pairs], queries, keys)
    dictionary = words(texts)
    query_token, key_token = (pa.DictionaryArray.from_arrays(numbers(of_side), dictionary) for of_side in tokens)
    columns = {
        **_about(pairs, output, [len(part.query) for part in parts]),
        **columns_read,
        "head": numbers(head, head < 0),
        "query_token": query_token,
        "key_token": key_token,
        ENTRIES[output.entries]: columns_read["weight"],
        "stack": texts_at(STACKS, columns_read["stack"]),
    }
    return _table(columns, schema_of("relations", output))


def _spans(pairs: Sequence[tuple[Item, Observation]], output: DatasetOutput) -> pa.Table:
    names, count = words(output.spans), len(output.spans)
    whole = HeadColumns.joined([obs.every for _, obs in pairs])
    kept = np.flatnonzero(whole.kept)
    code = np.indices((count, count), np.int32).reshape(2, -1)  # of every pair: its query span, its key span

    def of_pairs(of_heads: np.ndarray) -> np.ndarray:
        return np.repeat(of_heads[kept], count**2)

    def span(code: np.ndarray) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(numbers(np.tile(code, len(kept))), names)

    def mass(name: str) -> pa.Array:
        of_layers = (layer for _, obs in pairs for stack in obs.stacks.values() for layer in stack.spans.values())
        parts = [getattr(layer, name).numpy().ravel() for layer in of_layers]
        return numbers(np.concatenate([np.empty(0), *parts]).astype(np.float32))  # NaN is null

    # Each head of each text has a row for every pair, in the order of `code`.
    head = of_pairs(whole.head)
    columns = {
        **_about(pairs, output, [int(np.count_nonzero(obs.every.kept)) * count**2 for _, obs in pairs]),
        "layer": of_pairs(whole.layer),
        "head": numbers(head, head < 0),
        "kv_head": of_pairs(whole.kv_head),
        "query_span": span(code[0]),
        "key_span": span(code[1]),
        "mass": mass("mass"),
        "uniform": mass("uniform"),
        "stack": texts_at(STACKS, of_pairs(codes(whole.stack.tolist()))),
    }
    return _table(columns, schema_of("spans", output))


class _Numbers(dict[str, int]):
    """Texts in order, each with its number."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


def _numbered(units: Sequence[Sequence[str]], *columns: Sequence[np.ndarray]) -> tuple[list[str], list[np.ndarray]]:
    """Every unit of some texts, and of each column the number among them of the unit at each place of its text."""
    numbers_of = _Numbers()
    codes = [np.fromiter(map(numbers_of.__getitem__, names), np.int32, len(names)) for names in units]
    joined = [np.concatenate([code.take(at) for code, at in zip(codes, places, strict=True)]) for places in columns]
    return list(numbers_of), joined


def _about(pairs: Sequence[tuple[Item, Observation]], output: DatasetOutput, counts: Sequence[int]) -> dict[str, Any]:
    """Which item each row speaks of."""
    index = np.repeat(np.arange(len(pairs), dtype=np.int32), counts)
    item = np.repeat(np.array([item.number for item, _ in pairs], np.int64), counts)
    if output.ids == INTEGER_IDS:
        return {"item": item, "id": np.array([item.id for item, _ in pairs], np.int64)[index]}
    ids = words([str(item.id) for item, _ in pairs])
    return {"item": item, "id": pa.DictionaryArray.from_arrays(numbers(index), ids)}


def _table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    arrays = [columns[field.name] for field in schema]
    return pa.table([numbers(array) if isinstance(array, np.ndarray) else array for array in arrays], schema=schema)


MOST_WAITING = 8  # texts whose maps are kept because they are not drawn yet


def _with(record: Record, measured: Measured) -> Record:
    """The record of a shard of which some more items were written."""
    return replace(
        record,
        items=record.items + measured.items,
        texts=record.texts + measured.texts,
        tokens=record.tokens + measured.tokens,
        failures=(*record.failures, *measured.failures),
        answered_by=joined_ways([record.answered_by, measured.answered_by]),
        replaced={**record.replaced, **measured.replaced},
        lacking=dict(Counter(record.lacking) + measured.lacking),
        engines=dict(Counter(record.engines) + measured.engines),
        targets=dict(Counter(record.targets) + measured.targets),
    )


class ShardWriter:
    """One shard, under temporary names until `commit`; the names of its files come from its first item alone.

    >>> writer = ShardWriter(folder, shard, output, pool)
    >>> writer.add(measured)
    >>> record = writer.commit()
    """

    def __init__(self, folder: Path, shard: Shard, output: DatasetOutput, pool: Executor | None = None) -> None:
        self.folder, self.shard, self.output, self.pool = folder, shard, output, pool
        self._record = Record(shard.first, 0, 0, 0)
        self.partial = folder / PARTIAL / f"{shard.first:09d}-{uuid.uuid4().hex[:8]}"
        self.partial.mkdir()  # not its parent: what outlives its run, on another machine, finds no place to write
        self.part = f"part-{shard.first:09d}"
        self._drawn: list[int] = []
        self._waiting: deque[Future[None]] = deque()
        self._weights: dict[str, Any] = {}
        self._weights_index: list[dict[str, Any]] = []
        self._tables = {name: TableFile(self.partial / name, name, output) for name in output.names}

    def add(self, measured: Measured) -> None:
        """Write the rows of some more items; the drawing of their pictures starts."""
        for name, table in self._tables.items():
            for piece in pieces(measured) if name == "relations" else (measured,):
                table.write(arrow_table(name, piece, self.output))
        pictures, pool = self.output.pictures, self.pool
        for item, obs in measured.seen:
            if pictures and pool:
                self._wait_for_pictures(MOST_WAITING - 1)
                folder = self.partial / "figures" / f"{item.number:06d}"
                with _pool_in_words():
                    self._waiting.append(pool.submit(pictures.draw, pictures(obs), folder))
                self._drawn.append(item.number)
            self._keep_weights(item, obs)
        self._record = _with(self._record, measured)

    def commit(self) -> Record:
        """Close, sync and rename everything. What is renamed is not yet a part of the dataset: the journal says so."""
        for table in self._tables.values():
            table.close()
        self._wait_for_pictures(0)
        # Each file gets its name at once; the same names as those of an attempt before, which it replaces.
        moves = {f"{name}/{self.part}.{self.output.format}": self.partial / name for name in self._tables}
        if self.output.weights:
            moves |= self._save_weights()
        files = {}
        for name, path in moves.items():
            files[name] = path.stat().st_size
            target = self.folder / name
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
        # Picture by picture: another attempt at this shard draws the same ones, and none is missing in between.
        for number in self._drawn:
            figures = self.partial / "figures" / f"{number:06d}"
            for path in sorted(figures.rglob("*")):
                target = self.folder / path.relative_to(self.partial)
                (target if path.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
                if not path.is_dir():
                    sync_file(path)
                    os.replace(path, target)
        # On return all of it survives a crash of the machine, so that the journal may name it.
        for parent in {(self.folder / name).parent for name in files}:
            sync(parent)
        shutil.rmtree(self.partial, ignore_errors=True)
        read = digest(self.shard.items[: self._record.items])
        return replace(
            self._record, digest=read, rows={name: table.rows for name, table in self._tables.items()}, files=files
        )

    def abandon(self) -> None:
        """Leave nothing."""
        for table in self._tables.values():
            table.drop()
        for drawing in self._waiting:
            drawing.cancel()
        shutil.rmtree(self.partial, ignore_errors=True)

    def _wait_for_pictures(self, most: int) -> None:
        """Until no more than `most` texts wait for their pictures; a picture that failed is raised here."""
        while len(self._waiting) > most:
            with _pool_in_words():
                self._waiting.popleft().result()

    def _keep_weights(self, item: Item, obs: Observation) -> None:
        """Keep the lower triangles of a text's layers until they are saved; as they are where no row bounds them."""
        if not self.output.weights:
            return
        import torch

        count = len(obs.prompt)
        lower = torch.tril_indices(count, count)
        for stack, of_stack in obs.stacks.items():
            if of_stack.keys is not of_stack.queries:  # a triangle has no room for summaries
                continue
            columns = of_stack.columns
            numbers = np.where(columns.head < 0, columns.kv_head, columns.head)
            for (layer, _), weights_HQK in of_stack.weights.items():
                name = f"{item.number}.{layer}" if stack == DECODER else f"{item.number}.{stack}.{layer}"
                triangle_HE = weights_HQK[:, lower[0], lower[1]]
                self._weights[name] = (triangle_HE.half() if stack in SOFTMAX else triangle_HE).contiguous()
                self._weights_index.append(
                    {
                        "item": item.number,
                        "id": item.id,
                        "stack": stack,
                        "layer": layer,
                        "heads": numbers[columns.kept & (columns.layer == layer)].tolist(),
                        "tokens": count,
                        "file": f"{self.part}.safetensors",
                        "tensor": name,
                    }
                )

    def _save_weights(self) -> dict[str, Path]:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path, index = self.partial / "weights", self.partial / "weights_index"
        try:
            save_file(self._weights, path, {"attnscope.schema": version_of("weights", self.output)})
        except SafetensorError as error:  # a full disk, in its own words
            match = re.search(r"os error (\d+)", str(error))
            number = int(match[1]) if match else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        index.write_bytes(b"".join(map(json_line, self._weights_index)))
        for file in (path, index):
            sync_file(file)
        return {f"weights/{self.part}.safetensors": path, f"weights/{self.part}.index.jsonl": index}


class StreamWriter:
    """Rows to a stream, one JSON object per text, in order: what it is, and a list for each table that was asked for.

    >>> StreamWriter(sys.stdout.buffer, shard, DatasetOutput(tables=("heads",)))
    """

    def __init__(self, stream: IO[bytes], shard: Shard, output: DatasetOutput) -> None:
        self.stream, self.output = stream, output
        self._record = Record(shard.first, 0, 0, 0)

    def add(self, measured: Measured) -> None:
        """Write some more texts."""
        tables = arrow_tables(measured, self.output)
        objects = [name for name in ("fields", "positions") if name in tables["texts"].column_names]
        texts = json_rows(tables["texts"].drop_columns([*objects, "item", "id"])).to_pylist()
        cells = [[f',"{name}":{cell}' for cell in tables["texts"][name].to_pylist()] for name in objects]
        # The rows of each item as JSON, without the columns that say which item.
        rows: dict[str, dict[int, list[str]]] = {name: {} for name in self.output.names if name != "texts"}
        for name, by_item in rows.items():
            lines = json_rows(tables[name].drop_columns(["item", "id"])).to_pylist()
            for number, line in zip(tables[name]["item"].to_pylist(), lines, strict=True):
                by_item.setdefault(number, []).append(line)
        for (item, _), text, *row in zip(measured.seen, texts, *cells, strict=True):
            lists = (f',"{name}":[{",".join(rows[name].get(item.number, []))}]' for name in rows)
            item_id = json.dumps(item.id, ensure_ascii=False)  # of whichever type its record has
            about = f'{{"item":{item.number},"id":{item_id},'
            self.stream.write(f"{about}{text[1:-1]}{''.join([*row, *lists])}}}\n".encode())
        self.stream.flush()
        self._record = _with(self._record, measured)

    def commit(self) -> Record:
        """What was written; a stream keeps no files."""
        return self._record

    def abandon(self) -> None:
        """What is written is written."""


@contextmanager
def _pool_in_words() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        message = "a process that draws pictures was killed"
        raise AttnscopeError(message, "free memory on this machine; the same command resumes the run") from error
