"""Folders that commands write into: left by a run and damaged, with links in them, on a disk that is full."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from attnscope.corpus.folder import SCHEMA
from fuzzing.made import COMMANDS, TEXT, baseline, command, copied, left, other_table
from fuzzing.trying import Ended, Try, full_disk, kind, outside
from fuzzing.words import JSONS, NASTY, RAW_JSON, damage, odd_file, spoil

# What a folder holds that a command may open, sweep or write into.
INSIDE = (
    ".lock", "journal.jsonl", "run.json", "manifest.json", "heads.csv", "heads", "layers", "figures", ".partial",
    "relations", "readings", "texts", "ablation", "atlas.json", "compare.json", "overview.png", "unfinished.json",
    "failures.jsonl",
)  # fmt: skip
TARGETS = (".", ".", "kept.txt", "kept.txt", "000000000", "new", "new.json")  # some are not there
RECORD = {"first": 0, "items": 1, "texts": 1, "tokens": 5, "digest": "x", "rows": {}, "files": {}, "failures": []}


@kind
def folders(rng: random.Random, folder: Path) -> Try:
    """The folder of a corpus, its journal or its options damaged."""
    runs = copied(left("batch"), folder, "runs")
    what = rng.choice(("journal", "journal", "options", "spoiled", "odd", "odd"))
    if what == "journal":
        record = RECORD | {rng.choice(list(RECORD)): rng.choice((*JSONS, [{}], [{"item": "x"}], [JSONS]))}
        body = json.dumps(record)
        line = f"{hashlib.sha256(body.encode()).hexdigest()[:16]} {body}\n".encode()
        damaged = (line, line * 2, b"\x1b[2J\n\n", *(one + b"\nx" for one in RAW_JSON))
        (runs / "journal.jsonl").write_bytes(rng.choice(damaged))
    elif what == "options":
        options = {"schema": SCHEMA, "options": {"model": NASTY[0]}}
        options[rng.choice(("schema", "options"))] = rng.choice((*JSONS, {NASTY[0]: NASTY[2], "model": "x" * 9999}))
        (runs / "run.json").write_bytes(rng.choice((*RAW_JSON, *([json.dumps(options).encode()] * 9))))
    elif what == "spoiled":
        spoil(rng, rng.choice(sorted(path for path in runs.rglob("*") if path.is_file())))
    else:
        odd_file(rng, runs / rng.choice((".lock", "journal.jsonl", "run.json", "failures.jsonl", "heads")))
    return Try([*command("batch", runs), *rng.choice(([], [], ["--force"]))])


@kind
def datasets(rng: random.Random, folder: Path) -> Try:
    """What heads and heatmap read of the folder of a corpus: its journal, its options or its tables damaged."""
    runs = copied(left(rng.choice(("batch", "summary"))), folder, "runs")
    files = sorted(path for path in runs.rglob("*") if path.is_file() and path.name != ".lock")
    for path in rng.sample(files, rng.choice((1, 1, 2))):
        what = rng.choice(("damaged", "spoiled", "odd", "rows"))
        if what == "odd":
            odd_file(rng, path)
        elif what == "damaged" and path.suffix == ".json":
            damage(rng, path)
        elif what == "rows" and path.suffix == ".parquet":
            path.write_bytes(other_table(rng, path))
        else:
            spoil(rng, path)
    more = rng.choice(([], ["--sort", "sink"], ["--query", "a", "--key", "b"], ["--select", "0"]))
    drawn = ["draw", "-q", str(runs), "--out", str(folder / "pictures")]
    return rng.choice(
        (Try(["heads", "-q", str(runs), *more]), Try(["heads", "-q", str(runs)], terminal=True), Try(drawn))
    )


@kind
def manifests(rng: random.Random, folder: Path) -> Try:
    """The folder of a run, which is asked more or repeated."""
    runs = copied(left("run"), folder, "runs")
    path = runs / "manifest.json"
    rng.choice((damage, damage, damage, spoil, odd_file))(rng, path)
    more = [str(runs), "--query", "last"], [str(runs)], ["--from", str(path)]
    return Try([rng.choice(("heads", "relations")), "-q", *rng.choice(more)], terminal=rng.random() < 0.5)


@kind
def baselines(rng: random.Random, folder: Path) -> Try:
    """What a gate holds a model to: the file of a baseline, or the folder of a run."""
    if rng.random() < 0.7:
        path = folder / "base.json"
        path.write_bytes(baseline())
        rng.choice((damage, damage, damage, spoil, odd_file))(rng, path)
    else:
        path = copied(left("run"), folder, "runs")
        rng.choice((damage, spoil, odd_file))(rng, path / rng.choice(("manifest.json", "manifest.json", "heads.csv")))
    gate = rng.choice(([], ["--gate", "visible=same,role=same,entropy<0.1"], ["--gate", "entropy<0.1"]))
    return Try(["compare", "-q", "--text", TEXT, "--baseline", str(path), *gate])


@kind
def links(rng: random.Random, folder: Path) -> Try:
    """A folder of a run in which links lead out."""
    name = rng.choice(sorted(COMMANDS))
    runs = folder / "runs"
    if rng.random() < 0.7:
        copied(left(name), folder, "runs")
    runs.mkdir(exist_ok=True)
    inside = sorted(path.name for path in runs.iterdir())
    for one in rng.sample((*INSIDE, *inside * 2), 2):
        path = runs / one
        if path.is_dir() and not path.is_symlink():
            path.rename(folder / f"before-{one}")
        path.unlink(missing_ok=True)
        path.symlink_to(outside(folder) / rng.choice(TARGETS))
    return Try([*command(name, runs), *rng.choice(([], ["--force"]))])


@kind
def full_disks(rng: random.Random, folder: Path) -> Try:
    runs, most = folder / "runs", rng.choice((0, 1, 200, 1000, 4000, 20_000, 60_000))
    asked = command(rng.choice(sorted(COMMANDS)), runs)
    return Try(asked, before=lambda: full_disk(most), after=without_halves(runs))


def without_halves(runs: Path) -> Callable[[Ended], Iterable[str]]:
    """No half file is left outside the folders that a run resumes from."""

    def after(ended: Ended) -> Iterable[str]:
        for path in runs.rglob("*"):
            half = path.name.startswith(("tmp", ".")) and path.name != ".lock" and path.is_file()
            if half and ".partial" not in path.parts:
                yield f"left {path.relative_to(runs)}"

    return after
