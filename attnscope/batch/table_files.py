"""One table of one shard as a file, written piece by piece; a Parquet file holds the name of its schema."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from attnscope._version import __version__
from attnscope.batch.job import DatasetOutput
from attnscope.batch.schemas import SCHEMA_VERSIONS
from attnscope.utils.tables import FORMATS, Pieces, tamed


class _Droppable(io.RawIOBase):
    """A file that swallows what comes after it was dropped: Parquet's writer always writes an end."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.dropped = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(memoryview(data)) if self.dropped else self.file.write(data)


class TableFile:
    """One table of one shard, written piece by piece."""

    def __init__(self, path: Path, name: str, output: DatasetOutput) -> None:
        self.name, self.output, self.rows = name, output, 0
        self.stream = _Droppable(path)
        self._pieces: Pieces | None = None

    def write(self, table: pa.Table) -> None:
        self.rows += len(table)
        table = tamed(table) if self.output.spreadsheet else table
        if self._pieces is None:
            about = metadata(self.name, self.output.about)
            self._pieces = FORMATS[self.output.format].pieces(cast(IO[bytes], self.stream), table.schema, about)
        self._pieces.write(table)

    def close(self) -> None:
        """Whole and on the disk."""
        if self._pieces is not None:
            self._pieces.close()
        self.stream.file.flush()
        os.fsync(self.stream.file.fileno())
        self.stream.file.close()

    def drop(self) -> None:
        """Let go of the file; nothing more is written."""
        self.stream.dropped = True
        if self._pieces is not None:
            self._pieces.close()
        with suppress(OSError):  # what was buffered may have no room
            self.stream.file.close()


def metadata(table: str, about: Mapping[str, Any]) -> dict[str, str]:
    """What a Parquet file says of itself: the version of its schema, of attnscope, and the run's options."""
    return {
        "attnscope.schema": f"{table}/{SCHEMA_VERSIONS[table]}",
        "attnscope.version": __version__,
        "attnscope.observe.run": json.dumps(about, sort_keys=True, default=str),
    }
