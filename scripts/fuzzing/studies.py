"""Folders that scan, ablate and compare have left, damaged; and the lists that they are given."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from fuzzing.made import command, copied, left, lines, one_by_one, other_table, room, shallow, stopped
from fuzzing.trying import Try, heads, kind
from fuzzing.words import JSONS, NASTY, NUMBERS, RAW_JSON, TEXT, damage, edit, odd_file, spoil

STUDIES = ("scan", "texts", "ablate", "pairs", "prune", "knockout", "budgets", "patch", "why", "compare", "models")
ROLES: tuple[Any, ...] = ([5], "induction", {"a": 1}, [None], [NASTY[0]], [[]], ["x" * 9999], 10**30)
PLACES = ("L0H0", "L9H9", "L-1H0", "LxH0", "", "L0H" + "9" * 5000, NASTY[2], "cross.L0H0")
MANY = 5 * 10**7  # rows of a table that takes a few KB


@kind
def studies(rng: random.Random, folder: Path) -> Try:
    name = rng.choice(STUDIES)
    runs = copied(left(name), folder, "runs")
    _break_some(rng, runs)
    return Try([*command(name, runs), *rng.choice(([], [], ["--force"]))])


@kind
def stopped_studies(rng: random.Random, folder: Path) -> Try:
    """A study is resumed that was stopped in the midst of a part, the batch or the facts that it kept damaged."""
    name = rng.choice(("scan", "ablate"))
    runs = copied(stopped(name), folder, "runs")
    [batch] = runs.rglob("*.000000.npz")
    _break(rng, rng.choice((batch, batch, batch, *runs.rglob("*.json"))))
    return Try([*command(name, runs), *rng.choice(([], [], ["--force"]))], before=one_by_one)


@kind
def redrawn(rng: random.Random, folder: Path) -> Try:
    """What heatmap draws again: the folder of a run or a study, damaged."""
    runs = copied(left(rng.choice(("run", *STUDIES))), folder, "runs")
    _break_some(rng, runs)
    return Try(["draw", "-q", str(runs), "--out", "pictures"])


def _data(runs: Path) -> list[Path]:
    """The files of a study that are read again."""
    return sorted(path for path in runs.rglob("*") if path.suffix in {".json", ".npz", ".parquet", ".csv"})


def _break_some(rng: random.Random, runs: Path) -> None:
    """Damage one or two of a folder's files."""
    files = _data(runs)
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 2)))):
        _break(rng, path)


def _break(rng: random.Random, path: Path) -> None:
    if rng.random() < 0.1:
        odd_file(rng, path)
    elif path.suffix == ".npz" and rng.random() < 0.6:
        _other_arrays(rng, path)
    elif path.suffix == ".json" and rng.random() < 0.7:
        damage(rng, path)
    elif not path.is_dir():
        spoil(rng, path)


def _other_arrays(rng: random.Random, path: Path) -> None:
    """The arrays of a file, one of them missing, of another shape or of another type."""
    import numpy as np

    arrays = dict(np.load(path)) if path.is_file() else {}
    name = rng.choice(sorted(arrays) or ["x"])
    old = arrays.pop(name, np.zeros(1))
    odd = (
        np.array(1.0),
        np.array([{}], object),
        np.array(["x"]),
        old[..., None],
        old.ravel()[:0],
        np.full(old.shape, np.nan),
    )
    if rng.random() < 0.8:
        of_numbers = (old.astype(complex), -np.ones_like(old)) if old.dtype.kind in "iuf" else ()
        arrays[name] = rng.choice((*odd, np.zeros((0, 7)), *of_numbers))
    np.savez(path, **arrays)


@kind
def atlases(rng: random.Random, folder: Path) -> Try:
    """What other commands read of an atlas."""
    runs = copied(left("scan"), folder, "atlas")
    said, table = runs / "atlas.json", runs / "atlas.parquet"
    what = rng.choice(("roles", "damaged", "damaged", "table", "broken", "broken", "many"))
    if what == "roles":
        edit(said, lambda values: values.update(roles={rng.choice(PLACES): rng.choice(ROLES)}))
    elif what == "damaged":
        damage(rng, said)
    elif what == "broken":
        _break(rng, rng.choice((said, table)))
    else:
        table.write_bytes(many_rows() if what == "many" else other_table(rng, table))
    model = ["--model", str(shallow())]
    other = Try(["ablate", "-q", *model, "--atlas", "atlas", "--sequences", "2", "--random", "0"])
    compare = Try(
        ["compare", "-q", *model, "--text", TEXT, "--compare-text", "a bank", "--atlas", "atlas", "--select", "@sink"]
    )
    asked = heads(*model, "--atlas", "atlas", "--select", rng.choice(("@induction", "@sink", "0")))
    return rng.choice((asked, asked, asked, compare, other))


@cache
def many_rows() -> bytes:
    """The table with its first row some ten million times, which compresses well."""
    import pyarrow as pa
    from pyarrow import parquet

    row = parquet.read_table(left("scan") / "atlas.parquet").slice(0, 1)
    block = pa.concat_tables([row] * 1000).combine_chunks()
    for _ in range(3):
        block = pa.concat_tables([block] * 10).combine_chunks()
    with parquet.ParquetWriter(path := room() / "many.parquet", block.schema) as writer:
        for _ in range(MANY // len(block)):
            writer.write_table(block)
    return path.read_bytes()


@kind
def foreign_tables(rng: random.Random, folder: Path) -> Try:
    """A table of few bytes, beside a model or in a study, in which one text stands for gigabytes."""
    rows, size = rng.choice(((2**14, 2**20), (2**19, 2**16), (2**10, 2**20)))
    if rng.random() < 0.5:
        model = copied(shallow(), folder)
        shutil.rmtree(model / "atlas")  # which is that of the whole model
        copied(left("scan"), model, "atlas")
        table, one = model / "atlas" / "atlas.parquet", heads("--model", str(model))
    else:
        runs = copied(left(rng.choice(("scan", "ablate"))), folder, "runs")
        table, one = rng.choice(sorted(runs.rglob("*.parquet"))), Try(["draw", "-q", str(runs), "--out", "pictures"])
    table.write_bytes(one_text(table, rows, size))
    return one


def one_text(path: Path, rows: int, size: int) -> bytes:
    """The table with its first row so many times, each text of it of that size, once in a dictionary."""
    import pyarrow as pa
    from pyarrow import parquet

    row = parquet.read_table(path).slice(0, 1).combine_chunks()
    numbers = pa.array([0] * rows, pa.int32())

    def repeated(column: pa.ChunkedArray) -> pa.Array:
        if pa.types.is_string(column.type):
            return pa.DictionaryArray.from_arrays(numbers, pa.array(["x" * size]))
        return column.take(numbers)

    table = pa.table({name: repeated(row[name]) for name in row.column_names})
    parquet.write_table(table, sink := pa.BufferOutputStream(), compression="zstd")
    return sink.getvalue().to_pybytes()


@kind
def knockouts(rng: random.Random, folder: Path) -> Try:
    """Records of a knockout's texts, and its options."""
    row: dict[str, Any] = {"text": TEXT, "key": "first", "query": "last", "answer": " bank", "foil": " river"}
    for name in rng.sample(sorted(row), rng.choice((1, 1, 2))):
        row[name] = rng.choice((*JSONS, *NASTY, *PLACES))
    path = folder / "facts.jsonl"
    path.write_bytes(rng.choice((lines(row), lines(row, row), b"[" * 100_000, *RAW_JSON)))
    over = rng.choice(("none", "heads", "layers", "keys", "kv", "window:2", *NASTY, *NUMBERS))
    return Try(
        ["knockout", "-q", *["--model", str(shallow())], "--texts", str(path), "--random", "1", f"--over={over}"]
    )


@kind
def patches(rng: random.Random, folder: Path) -> Try:
    """Records of pairs, and the options of their patches."""
    other = rng.choice((TEXT.replace("and", "bank"), f"a {TEXT}"))
    row: dict[str, Any] = {"text": TEXT, "corrupted": other, "at": "last", "answer": " bank", "foil": " river"}
    for name in rng.sample(sorted(row), rng.choice((0, 1, 1, 2))):
        row[name] = rng.choice((*JSONS, *NASTY, *PLACES))
    path = folder / "pairs.jsonl"
    path.write_bytes(rng.choice((lines(row), lines(row, row), rng.choice((b"[" * 100_000, *RAW_JSON)))))
    over = rng.choice(
        ("none", "heads", "layers", "positions", "kv", "layers,positions", rng.choice((*NASTY, *NUMBERS)))
    )
    what = rng.choice(("output", "pattern", "key", "value", "value", rng.choice(NASTY)))
    options = ["--texts", str(path), "--random", "1", f"--over={over}", f"--what={what}"]
    method = ["--method", "gradient"] * (rng.random() < 0.3)
    return Try(["patch", "-q", "--model", str(shallow()), *options, *method])


@kind
def budgets(rng: random.Random, folder: Path) -> Try:
    """Budgets of a cache, and records of texts with the end of their prompt."""
    row: dict[str, Any] = {"text": TEXT, "at": "first", "answer": " bank of", "foil": " river"}
    for name in rng.sample(sorted(row), rng.choice((0, 1, 1, 2))):
        row[name] = rng.choice((*JSONS, *NASTY, *PLACES))
    path = folder / "texts.jsonl"
    path.write_bytes(rng.choice((lines(row), lines(row, row), b"[" * 100_000, *RAW_JSON)))
    kinds = ["stream:1+2", "top:2", "h2o:3", "received:2", "snap:3@2"]
    if rng.random() < 0.3:
        kinds = [*kinds, *rng.sample(("stream:4", "snap:2@3", f"top:{'9' * 5000}", *NASTY, *NUMBERS), 3)]
    keep = ",".join(rng.sample(kinds, rng.choice((1, 1, 2, 3))))
    more = rng.choice(([], [], ["--at", "last"], ["--generate", rng.choice(NUMBERS)], ["--below", rng.choice(NUMBERS)]))
    source = rng.choice((["--texts", str(path)], ["--texts", str(path)], ["--text", TEXT]))
    over = rng.choice(("none", "heads", "layers", "kv", rng.choice(("keys", "window:2", *NASTY))))
    return Try(["knockout", "-q", "--model", str(shallow()), *source, f"--keep={keep}", f"--over={over}", *more])


@kind
def logits(rng: random.Random, folder: Path) -> Try:
    """The head, the tokens and the options of a logit that is taken apart."""
    options = {"head": "L1H0", "query": "last", "key": "first", "against": "mean", "side": "key", "by": "component"}
    unasked = ("target", "generate", "picture", "audio")  # of other models than this one
    for name in rng.sample(sorted(options), rng.choice((0, 1, 1, 2))):
        options[name] = rng.choice((*NASTY, *PLACES, *NUMBERS, "tokens", "both", "last", "bank#1", "cross L1H0"))
    for name in rng.sample(unasked, rng.choice((0, 0, 0, 1))):
        options[name] = rng.choice((*NASTY, *PLACES, *NUMBERS))
    more = ["--verify"] * (rng.random() < 0.3)
    if rng.random() < 0.3:
        of_page = [
            f"--why={options['head']}",
            f"--query={options['query']}",
            f"--max-mb={rng.choice(('20', *NUMBERS))}",
        ]
        return Try(["view", "-q", "--text", TEXT, *of_page, "--out", "page.html"])
    return Try(["why", "-q", "--text", TEXT, *(f"--{name}={value}" for name, value in options.items()), *more])


@kind
def lists(rng: random.Random, folder: Path) -> Try:
    """Sets of heads, tasks, pools of tokens and corpora, as studies are given them."""
    option = rng.choice(("--sets", "--on", "--pool", "--texts"))
    row = {"--sets": {"set": "a", "heads": ["L0H0"]}, "--on": {"text": TEXT, "targets": [[3, 5]]}}.get(
        option, {"text": TEXT}
    )
    row[rng.choice(sorted(row))] = rng.choice((*JSONS, *NASTY, [rng.choice(PLACES)], [[rng.choice(JSONS)] * 2]))
    path = folder / "list.jsonl"
    path.write_bytes(rng.choice((lines(row), lines(row, row), b"[" * 100_000, *RAW_JSON, json.dumps([row]).encode())))
    if option != "--texts" and rng.random() < 0.1:  # a corpus may be as long as it likes
        odd_file(rng, path, waits=False)
    study = "scan" if option == "--pool" else "ablate"
    more = ["--random", "0", "--select", "0.0"] if study == "ablate" and option != "--sets" else []
    return Try([study, "-q", str(shallow()), "--sequences", "2", option, str(path), *more])
