"""The tables that attnscope writes, read by DuckDB, polars, pandas (with Arrow) and pandas (with fastparquet)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from external.common import Check, Report, arguments

TEXT = "=1+1, \"so\" he said;\tthen\r\nnothing\r \u202e🙂 \u05e9\u05dc\u05d5\u05dd 'x' NA null nan 007"
OTHER = "the river bank is green, and the other bank is older than the river"
COMMANDS = {
    "heads": ("heads", TEXT),
    "relations": ("relations", TEXT, "--top-k", "all"),
    "keys": ("keys", TEXT),
    "atlas": ("scan", "demo", "--sequences", "32", "--out", "atlas"),  # measured once, then read from its folder
}
UNTYPED = ("csv", "tsv", "jsonl")  # a number is as its digits say, without its number of bits
FORMATS = ("parquet", "arrow", *UNTYPED)
BATCH = ("texts", "heads", "relations", "spans")
BATCH_FORMATS = ("parquet", "csv", "jsonl")
Columns = Mapping[str, Sequence[Any]]


def duckdb_reads(path: Path) -> Columns:
    """Arrow through the library nanoarrow, which shares no code with the pyarrow that wrote it."""
    import duckdb

    if path.suffix == ".arrow":
        from nanoarrow import ArrayStream

        return duckdb.from_arrow(ArrayStream.from_path(path)).to_arrow_table().to_pydict()
    read = {
        "parquet": "read_parquet('{}')",
        "csv": "read_csv('{}', all_varchar=false)",
        "tsv": "read_csv('{}', delim='\t', all_varchar=false)",
        "jsonl": "read_json('{}', format='newline_delimited')",
    }[path.suffix[1:]]
    return duckdb.sql(f"select * from {read.format(path)}").to_arrow_table().to_pydict()


def duckdb_extension_reads(path: Path) -> Columns:
    import duckdb

    return duckdb.sql(f"select * from read_arrow('{path}')").to_arrow_table().to_pydict()


def has_extension(folder: Path) -> bool:
    """Whether DuckDB's own reader of Arrow, an extension that it downloads, could be had."""
    import duckdb

    duckdb.sql(f"set extension_directory = '{folder}'")
    try:
        duckdb.sql("install nanoarrow from community")
        duckdb.sql("load nanoarrow")
    except duckdb.Error:
        return False
    return True


def polars_reads(path: Path) -> Columns:
    import polars

    read = {
        "parquet": polars.read_parquet,
        "arrow": polars.read_ipc_stream,
        "csv": lambda one: polars.read_csv(one, infer_schema_length=None),
        "tsv": lambda one: polars.read_csv(one, separator="\t", infer_schema_length=None),
        "jsonl": lambda one: polars.read_ndjson(one, infer_schema_length=None),
    }
    return read[path.suffix[1:]](path).to_dict(as_series=False)


def pandas_reads(path: Path) -> Columns:
    import pandas
    import pyarrow

    read = {
        "parquet": pandas.read_parquet,
        "arrow": lambda one: pandas.DataFrame.from_arrow(pyarrow.ipc.open_stream(one)),
        "csv": lambda one: pandas.read_csv(one, keep_default_na=False, na_values=[""]),
        "tsv": lambda one: pandas.read_csv(one, sep="\t", keep_default_na=False, na_values=[""]),
        "jsonl": lambda one: pandas.read_json(one, lines=True, dtype=False),
    }
    table = read[path.suffix[1:]](path)
    return table.astype(object).where(table.notna(), None).to_dict("list")


def feather_refuses(path: Path) -> bool:
    """Whether pandas' `read_feather` says that a file is not of the format which it reads."""
    import pandas
    import pyarrow

    try:
        pandas.read_feather(path)
    except pyarrow.ArrowInvalid as error:
        return "Not a Feather V1 or Arrow IPC file" in str(error)
    return False


def fastparquet_reads(path: Path) -> Columns:
    from fastparquet import ParquetFile

    table = ParquetFile(str(path)).to_pandas()
    return table.astype(object).where(table.notna(), None).to_dict("list")


READERS: Mapping[str, tuple[Callable[[Path], Columns], Sequence[str]]] = {
    "DuckDB": (duckdb_reads, FORMATS),
    "polars": (polars_reads, FORMATS),
    "pandas": (pandas_reads, FORMATS),
    "fastparquet": (fastparquet_reads, ("parquet",)),
}


def own(path: Path) -> Columns:
    """The rows as attnscope reads its own Parquet."""
    import pyarrow.parquet as pq

    from attnscope.utils.tables import FORMATS as KNOWN

    return KNOWN["parquet"].read(path, pq.read_schema(path).names, pq.read_schema(path)).to_pydict()


def written(folder: Path) -> dict[str, dict[str, Path]]:
    """{table: {format: path}}, as the commands write them."""
    found: dict[str, dict[str, Path]] = {}
    for format in FORMATS:
        for name, command in COMMANDS.items():
            found.setdefault(name, {})[format] = printed(folder / f"{name}.{format}", command)
    for format in BATCH_FORMATS:
        for name, path in batch(folder, format).items():
            found.setdefault(name, {})[format] = path
    return found


def batch(folder: Path, format: str) -> dict[str, Path]:
    """A file of each table of a dataset, in one format."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(f'{{"id": "a,{n}", "text": "the bank, \\"{n}\\" is old"}}\n' for n in range(40)))
    given = ("--tables", "heads,relations", "--spans", "where=bank", "--spans", "end=last")
    attnscope("batch", str(corpus), "--format", format, *given, "--out", str(folder / format))
    return {f"batch {name}": next((folder / format / name).glob(f"*.{format}")) for name in BATCH}


def printed(path: Path, command: Sequence[str]) -> Path:
    """The file that a command's output makes, in the format of its suffix."""
    with path.open("wb") as stream:
        attnscope(*command, "--format", path.suffix[1:], stdout=stream)
    return path


def attnscope(*given: str, stdout: Any = subprocess.DEVNULL) -> None:
    subprocess.run([sys.executable, "-m", "attnscope", *given, "--quiet"], check=True, stdout=stdout)


def compare(check: Check, name: str, expected: Columns, found: Columns, text: bool) -> None:
    """A case for each column: its name, its number of rows, and each value with its kind."""
    for column, values in expected.items():
        read = list(found.get(column, ()))
        wrong = [n for n, pair in enumerate(zip(values, read, strict=False)) if not same(*pair, text)]
        held = len(read) == len(values) and not wrong
        first = f"row {wrong[0]}: {values[wrong[0]]!r} is {read[wrong[0]]!r}" if wrong else ""
        check.hold(held, f"{name}, column {column}: {len(values)} rows, read {len(read)}. {first}")


def same(value: Any, read: Any, text: bool) -> bool:
    """Equal, of one kind; text: of a format without types, which shows neither 32 bits nor an empty text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return read is None or (isinstance(read, float) and math.isnan(read))
    if isinstance(value, str):
        return str(read) == value or (text and value == "" and read is None)
    if isinstance(value, float):
        return isinstance(read, int | float) and math.isclose(read, value, rel_tol=1e-6 if text else 0.0)
    return read is not None and not isinstance(read, str) and read == value


def zeroed(whole: bytes) -> bytes:
    """The first half is zeros, but for the first four bytes."""
    half = len(whole) // 2
    return whole[:4] + bytes(half - 4) + whole[half:]


DAMAGED: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "parquet": ("a Parquet file with a damaged page", zeroed),
    "arrow": ("an Arrow stream that ends in its middle", lambda whole: whole[: len(whole) // 2]),
}


def main() -> None:
    """A check for each reader and format, a control of another text's table, and one of a damaged file."""
    asked, folder = arguments(), Path.cwd()
    report = Report(("attnscope", "duckdb", "polars", "pandas", "pyarrow", "fastparquet", "nanoarrow"))
    tables = written(folder)
    others = {format: printed(folder / f"other.{format}", ("heads", OTHER)) for format in FORMATS}
    expected = {name: own(paths["parquet"]) for name, paths in tables.items()}
    readers = dict(READERS)
    if has_extension(folder / "extensions"):
        readers["DuckDB's extension"] = (duckdb_extension_reads, ("arrow",))
    else:
        report.not_had.append("DuckDB's own reader of Arrow, its extension: DuckDB could not download it")
    for reader, (read, formats) in readers.items():
        for format in formats:
            text = format in UNTYPED
            with report.check(f"{reader} reads every column of {format} with the same rows and values") as check:
                for name, paths in tables.items():
                    if format in paths:
                        attempt(check, name, read, paths[format], expected[name], text)
            with report.control(f"{reader}: another text's {format}") as check:
                attempt(check, "heads", read, others[format], expected["heads"], text)
        for format, (fault, damage) in DAMAGED.items():
            if format not in formats:
                continue
            path = folder / f"damaged.{format}"
            path.write_bytes(damage(tables["relations"][format].read_bytes()))
            with report.control(f"{reader}: {fault}") as check:
                attempt(check, "relations", read, path, expected["relations"], False)
    if all(feather_refuses(paths["arrow"]) for paths in tables.values() if "arrow" in paths):
        report.notes.append(
            "pandas' `read_feather` refuses every Arrow table: it reads Arrow's file format alone, and a command writes"
            " Arrow's stream format, which fits a pipe. `pandas.DataFrame.from_arrow` takes the stream"
        )
    report.write(asked.out)


def attempt(
    check: Check, name: str, read: Callable[[Path], Columns], path: Path, expected: Columns, text: bool
) -> None:
    """Read and compare; a reader that gives up holds in no case."""
    try:
        found = read(path)
    except Exception as error:  # whatever a reader raises of a file that it cannot read
        return check.hold(False, f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return compare(check, name, expected, found, text)


if __name__ == "__main__":
    main()
