"""Corpora for the tests of `batch`, and how to compare what came of them."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from helpers.command_line import Result, call

WORDS = ("the", "bank", "river", "is", "on", "日本", "said", "quick", "fox", "=1+1", '"quoted"', "a,b", "naïve", "😀")


def some_texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Texts of mixed length."""
    pick = random.Random(seed)
    return [" ".join(pick.choice(WORDS) for _ in range(pick.randint(1, longest))) for _ in range(count)]


def written(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """A corpus of records, as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def jsonl(path: Path, texts: list[str], **fields: Any) -> Path:
    """A corpus with ids and a field."""
    return written(path, ({"id": f"t{i}", "text": text, "n": i, **fields} for i, text in enumerate(texts)))


def batch(corpus: Path | str, model: Path | str, out: Path, *flags: str) -> Result:
    """Run the command over a corpus, in this process and without its talk."""
    return call("batch", str(corpus), "--model", str(model), "--out", str(out), "-q", *flags)


def differs(option: str, before: object, now: object) -> str:
    """How a dataset that was begun with another option is refused."""
    was, now_is = ("not given" if value is None else repr(value) for value in (before, now))
    return f"{option} was {was}, now {now_is}"


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """All rows of a Parquet table, in the order of its files."""
    return [row for part in sorted((folder / table).iterdir()) for row in pq.read_table(part).to_pylist()]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset, by name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
