"""One table of one shard as a file, written piece by piece; each Parquet file carries the name of its schema."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnscope._version import __version__
from attnscope.batch.job import DatasetOutput
from attnscope.batch.rows import SCHEMA_VERSIONS, json_rows, plain


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
        self._writer: Any = None

    def write(self, table: pa.Table) -> None:
        self.rows += len(table)
        if self.output.format == "jsonl":
            lines = json_rows(table).to_pylist()
            self.stream.write(("\n".join(lines) + "\n" * bool(lines)).encode())
            return
        if self.output.format == "csv":
            table = plain(table, self.output.spreadsheet)
        self._writer = self._writer or self._open(table.schema)
        self._writer.write_table(table)

    def _open(self, schema: pa.Schema) -> Any:
        if self.output.format == "csv":
            from pyarrow.csv import CSVWriter

            return CSVWriter(self.stream, schema)
        from pyarrow.parquet import ParquetWriter

        numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
        floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        # without Arrow's own schema tokens are dictionaries on disk and strings to every reader
        writer = ParquetWriter(
            self.stream,
            schema,
            compression={name: "none" if name in floats else "zstd" for name in schema.names},  # they hardly shrink
            store_schema=False,
            use_dictionary=[name for name in schema.names if name not in numbers + floats],
            column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
            write_statistics=numbers,  # others find nothing
        )
        writer.add_key_value_metadata(metadata(self.name, self.output.about))
        return writer

    def close(self) -> None:
        """Whole and on the disk."""
        if self._writer is not None:
            self._writer.close()
        self.stream.file.flush()
        os.fsync(self.stream.file.fileno())
        self.stream.file.close()

    def drop(self) -> None:
        """Let go of the file; nothing more is written."""
        self.stream.dropped = True
        if self._writer is not None:
            self._writer.close()
        with suppress(OSError):  # what was buffered may have no room
            self.stream.file.close()


def metadata(table: str, about: Mapping[str, Any]) -> dict[str, str]:
    """What a Parquet file says of itself: the version of its schema, of attnscope, and the run's options."""
    return {
        "attnscope.schema": f"{table}/{SCHEMA_VERSIONS[table]}",
        "attnscope.version": __version__,
        "attnscope.run": json.dumps(about, sort_keys=True, default=str),
    }
