"""Pages of what a run kept: its tables and its manifest damaged. Judged by the data that the page is made of."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fuzzing.made import copied, left
from fuzzing.trying import Ended, Try, kind
from fuzzing.words import JSONS, NASTY, NUMBERS, damage, edit, odd_file, spoil

FACTS = ("name", "type", "revision", "layers")
TOKENS = 30_000  # of a manifest that asks for more memory than its few rows need


@kind
def pages(rng: random.Random, folder: Path) -> Try:
    runs = copied(left("run"), folder, "runs")
    table, manifest = runs / rng.choice(("heads.csv", "relations.csv")), runs / "manifest.json"
    what = rng.choice(
        ("cells", "cells", "columns", "columns", "manifest", "manifest", "model", "spoiled", "large", "odd")
    )
    if what == "cells":
        _change_cells(rng, table)
    elif what == "columns":
        _change_columns(rng, table)
    elif what == "manifest":
        damage(rng, manifest)
    elif what == "model":
        said = {"toString": "x"}, {"valueOf": 1}, [said_twice()], *NASTY, *JSONS
        edit(manifest, lambda values: values["model"].update({rng.choice(FACTS): rng.choice(said)}))
    elif what == "spoiled":
        spoil(rng, table)
    elif what == "odd":
        odd_file(rng, rng.choice((table, manifest)))
    else:
        _grow(runs)
    where = rng.choice((["--out", "page.html"], ["--out", "page.html"], []))
    return Try(["view", "-q", str(runs), "--from-tables", *where], after=of_page(folder / "page.html"))


def said_twice() -> dict[str, Any]:
    """An object that JavaScript cannot make a word of."""
    return {"__proto__": {"toString": None}}


def _rows(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))


def _write(path: Path, rows: list[list[str]]) -> None:
    csv.writer(text := io.StringIO(newline="")).writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8", errors="surrogatepass")


def _change_cells(rng: random.Random, path: Path) -> None:
    rows = _rows(path)
    for _ in range(rng.choice((1, 1, 3))):
        row = rng.choice(rows[1:])
        row[rng.randrange(len(row))] = rng.choice((*NUMBERS, *NASTY, "1e38", "-0", "99999", "true"))
    _write(path, rows)


def _change_columns(rng: random.Random, path: Path) -> None:
    """Columns left out, said twice, renamed; or the first alone."""
    rows = _rows(path)
    at, other = rng.sample(range(len(rows[0])), 2)
    what = rng.choice(("first", "without", "twice", "renamed", "swapped", "no rows"))
    if what == "first":
        rows = [row[: rng.choice((3, 3, 2, 5))] for row in rows]
    elif what == "without":
        rows = [row[:at] + row[at + 1 :] for row in rows]
    elif what == "twice":
        rows = [[*row, row[at]] for row in rows]
    elif what == "renamed":
        rows[0][at] = rng.choice((rows[0][other], *NASTY[:8], "", "x"))
    elif what == "swapped":
        rows[0][at], rows[0][other] = rows[0][other], rows[0][at]
    else:
        rows = rows[:1]
    _write(path, rows)


def _grow(runs: Path) -> None:
    """A long text, thousands of heads and a single relation."""

    def longer(values: dict[str, Any]) -> None:
        prompt = values["prompt"]
        for name, column in prompt.items():
            if isinstance(column, list) and len(column) == values["text"]["tokens"]:
                prompt[name] = column[:1] + [column[1]] * (TOKENS - 1)

    edit(runs / "manifest.json", longer)
    first, row = _rows(runs / "heads.csv")[:2]
    _write(runs / "heads.csv", [first, *([str(n // 100), str(n % 100), "0", *row[3:]] for n in range(3000))])
    _write(runs / "relations.csv", _rows(runs / "relations.csv")[:2])


def of_page(path: Path) -> Callable[[Ended], Iterable[str]]:
    """The data of the page are such that its script can show them."""

    def after(ended: Ended) -> Iterable[str]:
        if ended.code:
            if path.exists():
                yield "left a page"
            return
        page = path.read_bytes() if path.exists() else ended.out
        [data] = re.findall(rb'<script [^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL) or [b"{}"]
        said = json.loads(data)
        for side in said.get("sides", ()):
            if any(isinstance(value, dict | list) for value in side["model"].values()):
                yield "a fact of the model that is neither word nor number"
            if "view=metrics" in said.get("open", "") and not side["metrics"]:
                yield "opens with metrics that it does not have"

    return after
