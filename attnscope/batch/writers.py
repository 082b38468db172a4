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
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.batch.items import Item
from attnscope.batch.job import DatasetOutput
from attnscope.batch.journal import PARTIAL, Record, digest
from attnscope.batch.rows import Measured, arrow_tables, pieces
from attnscope.batch.schemas import SCHEMA_VERSIONS
from attnscope.batch.shards import Shard
from attnscope.batch.table_files import TableFile
from attnscope.errors import AttnscopeError
from attnscope.hooks.report import joined_ways
from attnscope.utils.files import json_line
from attnscope.utils.folders import sync, sync_file
from attnscope.utils.tables import json_rows

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation

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
        for piece in pieces(measured):
            for name, table in arrow_tables(piece, self.output).items():
                self._tables[name].write(table)
        for item, obs in measured.seen:
            self._draw(item, obs)
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
            drawn = self.partial / "figures" / f"{number:06d}"
            for path in sorted(drawn.rglob("*")):
                target = self.folder / "figures" / f"{number:06d}" / path.relative_to(drawn)
                if path.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
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

    def _draw(self, item: Item, obs: Observation) -> None:
        if self.output.pictures and self.pool:
            self._wait_for_pictures(MOST_WAITING - 1)
            folder = self.partial / "figures" / f"{item.number:06d}"
            with _pool_in_words():
                self._waiting.append(self.pool.submit(self.output.pictures.draw, self.output.pictures(obs), folder))
            self._drawn.append(item.number)

    def _wait_for_pictures(self, most: int) -> None:
        """Until no more than `most` texts wait for their pictures; a picture that failed is raised here."""
        while len(self._waiting) > most:
            with _pool_in_words():
                self._waiting.popleft().result()

    def _keep_weights(self, item: Item, obs: Observation) -> None:
        if not self.output.weights or obs.keys is not obs.queries:  # a triangle has no room for summaries
            return
        import torch

        count = len(obs.prompt)
        lower, columns = torch.tril_indices(count, count), obs.columns
        numbers = np.where(columns.head < 0, columns.kv_head, columns.head)
        for (layer, _), weights_HQK in obs.weights.items():
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
        texts = json_rows(tables["texts"].drop_columns(objects)).to_pylist()
        cells = [[f',"{name}":{cell}' for cell in tables["texts"][name].to_pylist()] for name in objects]
        rows = {name: _by_item(tables[name]) for name in self.output.names if name != "texts"}
        for (item, _), text, *row in zip(measured.seen, texts, *cells, strict=True):
            lists = (f',"{name}":[{",".join(rows[name].get(item.number, []))}]' for name in rows)
            self.stream.write(f"{text[:-1]}{''.join([*row, *lists])}}}\n".encode())
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
        raise AttnscopeError(
            "a process that draws pictures was killed",
            "free memory on this machine; the same command resumes the run",
        ) from error


def _by_item(table: pa.Table) -> dict[int, list[str]]:
    """The rows of each item as JSON, without the columns that say which item."""
    by_item: dict[int, list[str]] = {}
    lines = json_rows(table.drop_columns(["item", "id"])).to_pylist()
    for number, line in zip(table["item"].to_pylist(), lines, strict=True):
        by_item.setdefault(number, []).append(line)
    return by_item
