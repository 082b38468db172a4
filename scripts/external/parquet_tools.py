"""Parquet files as parquet-tools' commands show them, against what attnscope's own reading finds."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas

from external.common import Check, Report, arguments, by_project
from external.tables import zeroed

PHYSICAL = {"bool": "0", "int32": "1", "int64": "2", "float": "4", "double": "5", "string": "6"}  # by Parquet's format
ELEMENT = re.compile(r"SchemaElement\n((?: {12}.*\n)+)")
Table = Mapping[str, Any]


def said(*command: str) -> str:
    """What a command of parquet-tools prints; raises CalledProcessError where it fails."""
    program = Path(sys.executable).with_name("parquet-tools")
    return subprocess.run([program, *command], check=True, capture_output=True).stdout.decode()


def rows_hold(check: Check, name: str, path: str, table: Table) -> None:
    """A case for each column of `csv`: its number of rows and each value."""
    given = {"dtype": str, "keep_default_na": False, "lineterminator": "\n"}  # it writes a lone \\r without quotes
    shown = pandas.read_csv(io.StringIO(said("csv", path), newline=""), **given)
    for column, values in table["columns"].items():
        cells = list(shown.get(column, ()))
        wrong = [pair for pair in zip(values, cells, strict=False) if not same(*pair)]
        held = len(cells) == len(values) and not wrong
        check.hold(held, f"{name}, column {column}: {len(values)} rows, read {len(cells)}. {wrong[:1]}")


def same(value: Any, cell: str) -> bool:
    """Whether a cell says a value; a column of whole numbers with a null is one of numbers in pandas."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return cell == ""
    if isinstance(value, bool | str):
        return cell == str(value)
    try:
        return math.isclose(float(cell), value, rel_tol=1e-6 if isinstance(value, float) else 0.0)
    except ValueError:
        return False


def footer_holds(check: Check, name: str, path: str, table: Table) -> None:
    """A case for each column of `inspect`, its place, name and type, and one for the number of rows."""
    text = said("inspect", "--detail", path)
    found = [fields(one) for one in ELEMENT.findall(text)][1:]  # the first is the whole table
    types = [(one["name"], one.get("type", "0")) for one in found]
    for place, (column, kind) in enumerate(table["types"].items()):
        here = types[place] if place < len(types) else None
        check.hold(here == (column, PHYSICAL[kind]), f"{name}, column {column}, {kind}: {here}")
    rows = len(next(iter(table["columns"].values())))
    check.hold(f"\n    num_rows = {rows}\n" in text and len(types) == len(table["types"]), f"{name}: {rows} rows")


def fields(element: str) -> dict[str, str]:
    """`name = layer` lines as a dictionary."""
    return dict(line.strip().split(" = ", 1) for line in element.splitlines() if " = " in line)


Holds = Callable[[Check, str, str, Table], None]


def attempt(check: Check, holds: Holds, name: str, path: str, table: Table) -> None:
    """Compare; a file that the program gives up on holds in no case."""
    try:
        holds(check, name, path, table)
    except subprocess.CalledProcessError as error:
        check.hold(False, f"{name}: {(error.stderr.decode().splitlines() or ['nothing said'])[-1][:200]}")


def main() -> None:
    """A check of each command; controls of another table, and of a damaged page."""
    asked, folder = arguments(), Path.cwd()
    by_project("parquet_tools_ours", str(folder))
    tables = json.loads((folder / "tables.json").read_text())
    report = Report(("parquet-tools", "pandas", "pyarrow"))
    for what, holds, another in (
        ("`csv` gives every column with the same rows and values", rows_hold, "other"),
        ("`inspect` names every column with its type, and the number of rows", footer_holds, "keys"),
    ):
        with report.check(what) as check:
            for name, table in tables.items():
                attempt(check, holds, name, table["path"], table)
        with report.control(f"{what}: the file of another table") as check:
            attempt(check, holds, "heads", tables[another]["path"], tables["heads"])
    with report.control("`csv`: a Parquet file with a damaged page") as check:
        damaged = folder / "damaged.parquet"
        damaged.write_bytes(zeroed(Path(tables["relations"]["path"]).read_bytes()))
        attempt(check, rows_hold, "relations", str(damaged), tables["relations"])
    report.write(asked.out)


if __name__ == "__main__":
    main()
