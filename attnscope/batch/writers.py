"""Shards on disk: tables, weights and pictures under temporary names, renamed together; or rows on standard output."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.batch.items import Item
from attnscope.batch.job import DatasetOutput
from attnscope.batch.journal import PARTIAL, Failure, Record, digest
from attnscope.batch.rows import Measured, arrow_tables, pieces
from attnscope.batch.schemas import SCHEMA_VERSIONS
from attnscope.batch.shards import Shard
from attnscope.batch.table_files import TableFile
from attnscope.errors import AttnscopeError
from attnscope.files import json_line
from attnscope.folder.journal import sync, sync_file
from attnscope.seam.report import joined_ways
from attnscope.tables import json_rows

if TYPE_CHECKING:
    from attnscope.observation import Observation

MOST_WAITING = 8  # texts whose maps are kept because they are not drawn yet


class _Counts:
    """What a writer has written so far of its shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.items = self.texts = self.tokens = 0
        self.lacking: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()
        self.targets: Counter[str] = Counter()
        self.answered_by: dict[str, list[str]] = {}
        self.replaced: dict[str, Any] = {}
        self.failures: list[Failure] = []

    def count(self, measured: Measured) -> None:
        """Some more items were written."""
        self.items += measured.items
        self.texts += measured.texts
        self.tokens += measured.tokens
        self.lacking.update(measured.lacking)
        self.engines.update(measured.engines)
        self.targets.update(measured.targets)
        self.answered_by = joined_ways([self.answered_by, measured.answered_by])
        self.replaced |= measured.replaced
        self.failures += measured.failures

    def record(self, **written: Any) -> Record:
        """The shard's record; written: its digest, rows and files, where it has any."""
        counts = self.items, self.texts, self.tokens
        return Record(
            self.shard.first,
            *counts,
            failures=tuple(self.failures),
            lacking=dict(self.lacking),
            engines=dict(self.engines),
            targets=dict(self.targets),
            answered_by=self.answered_by,
            replaced=self.replaced,
            **written,
        )


class ShardWriter:
    """One shard, under temporary names until `commit`; the names of its files come from its first item alone.

    >>> writer = ShardWriter(folder, shard, output, pool)
    >>> writer.add(measured)
    >>> record = writer.commit()
    """

    def __init__(self, folder: Path, shard: Shard, output: DatasetOutput, pool: Executor | None = None) -> None:
        self.folder, self.output, self.pool = folder, output, pool
        self._counts = _Counts(shard)
        self.partial = folder / PARTIAL / f"{shard.first:09d}-{uuid.uuid4().hex[:8]}"
        self.partial.mkdir()  # not its parent: what outlives its run, on another machine, finds no place to write
        self.part = f"part-{shard.first:09d}"
        self._drawn: list[int] = []
        self._waiting: deque[Future[None]] = deque()
        self._weights: dict[str, Any] = {}
        self._weights_index: list[dict[str, Any]] = []
        self._tables = {name: TableFile(self.partial / name, name, output) for name in output.names}

    def add(self, measured: Measured) -> None:
        """Write the rows of some more items; their pictures are begun."""
        for piece in pieces(measured):
            for name, table in arrow_tables(piece, self.output).items():
                self._tables[name].write(table)
        for item, one in measured.seen:
            self._draw(item, one)
            self._keep_weights(item, one)
        self._counts.count(measured)

    def commit(self) -> Record:
        """Close, sync and rename everything. What is renamed is not yet a part of the dataset: the journal says so."""
        for table in self._tables.values():
            table.close()
        self._wait_for_pictures(0)
        moves = {f"{name}/{self.part}.{self.output.format}": self.partial / name for name in self._tables}
        if self.output.weights:
            moves |= self._save_weights()
        files = {}
        for name, path in moves.items():
            files[name] = path.stat().st_size
            target = self.folder / name
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
        self._move_pictures()
        for parent in {(self.folder / name).parent for name in files}:
            sync(parent)
        shutil.rmtree(self.partial, ignore_errors=True)
        read = digest(self._counts.shard.items[: self._counts.items])
        return self._counts.record(
            digest=read, rows={name: table.rows for name, table in self._tables.items()}, files=files
        )

    def abandon(self) -> None:
        """Leave nothing."""
        for table in self._tables.values():
            table.drop()
        for drawing in self._waiting:
            drawing.cancel()
        shutil.rmtree(self.partial, ignore_errors=True)

    def _draw(self, item: Item, one: Observation) -> None:
        if self.output.pictures and self.pool:
            self._wait_for_pictures(MOST_WAITING - 1)
            folder = self.partial / "figures" / f"{item.number:06d}"
            with _pool_in_words():
                self._waiting.append(self.pool.submit(self.output.pictures.draw, self.output.pictures(one), folder))
            self._drawn.append(item.number)

    def _wait_for_pictures(self, most: int) -> None:
        """Until no more than `most` texts wait for their pictures; a picture that failed is raised here."""
        while len(self._waiting) > most:
            with _pool_in_words():
                self._waiting.popleft().result()

    def _move_pictures(self) -> None:
        """Picture by picture: another attempt at this shard draws the same ones, and none is missing in between."""
        for number in self._drawn:
            drawn = self.partial / "figures" / f"{number:06d}"
            for path in sorted(drawn.rglob("*")):
                target = self.folder / "figures" / f"{number:06d}" / path.relative_to(drawn)
                if path.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_file(path)
                os.replace(path, target)

    def _keep_weights(self, item: Item, one: Observation) -> None:
        if not self.output.weights or one.keys is not one.queries:  # a triangle has no room for summaries
            return
        import torch

        count = len(one.prompt)
        lower, columns = torch.tril_indices(count, count), one.columns
        numbers = np.where(columns.head < 0, columns.kv_head, columns.head)
        for (layer, _), weights_HQK in one.weights.items():
            name = f"{item.number}.{layer}"
            self._weights[name] = weights_HQK[:, lower[0], lower[1]].half().contiguous()
            self._weights_index.append(
                {
                    "item": item.number,
                    "id": item.id,
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
            save_file(self._weights, path, {"attnscope.schema": f"weights/{SCHEMA_VERSIONS['weights']}"})
        except SafetensorError as error:  # a full disk, in its own words
            said = re.search(r"os error (\d+)", str(error))
            number = int(said[1]) if said else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        index.write_bytes(b"".join(map(json_line, self._weights_index)))
        for one in (path, index):
            sync_file(one)
        return {f"weights/{self.part}.safetensors": path, f"weights/{self.part}.index.jsonl": index}


class StreamWriter:
    """Rows to a stream, one JSON object per text, in order: what it is, and a list for each table that was asked for.

    >>> StreamWriter(sys.stdout.buffer, shard, DatasetOutput(tables=("heads",)))
    """

    def __init__(self, stream: IO[bytes], shard: Shard, output: DatasetOutput) -> None:
        self.stream, self.output = stream, output
        self._counts = _Counts(shard)

    def add(self, measured: Measured) -> None:
        """Write some more texts."""
        tables = arrow_tables(measured, self.output)
        objects = [name for name in ("fields", "positions") if name in tables["texts"].column_names]
        texts = json_rows(tables["texts"].drop_columns(objects)).to_pylist()
        given = [[f',"{name}":{one}' for one in tables["texts"][name].to_pylist()] for name in objects]
        rows = {name: _by_item(tables[name]) for name in self.output.names if name != "texts"}
        for (item, _), text, *said in zip(measured.seen, texts, *given, strict=True):
            lists = (f',"{name}":[{",".join(rows[name].get(item.number, []))}]' for name in rows)
            self.stream.write(f"{text[:-1]}{''.join([*said, *lists])}}}\n".encode())
        self.stream.flush()
        self._counts.count(measured)

    def commit(self) -> Record:
        """What was written; a stream keeps no files."""
        return self._counts.record()

    def abandon(self) -> None:
        """What is written is written."""


@contextmanager
def _pool_in_words() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise AttnscopeError(
            "a process that draws pictures was killed",
            "free memory on this machine; the same command resumes the run",
        ) from error


def _by_item(table: pa.Table) -> dict[int, list[str]]:
    """The rows of each item as JSON, without the columns that say which item."""
    found: dict[int, list[str]] = {}
    lines = json_rows(table.drop_columns(["item", "id"])).to_pylist()
    for number, line in zip(table["item"].to_pylist(), lines, strict=True):
        found.setdefault(number, []).append(line)
    return found
