"""Texts per second of `attnscope batch` against a competent loop of padded batches (`batch_loop.py`), in one run.

Both read the same corpus of mixed lengths (5 to 200 tokens), compute the same metrics of all heads and the same
relations with the embedded model, and write Parquet; the loop has no roles, no top keys, no checks and no journal.
Its numbers are compared with ours. Each runs in a process of its own, on all cores, as PyTorch does; the start is not
measured.

    python benchmarks/batch.py                  # 2,000 texts, speed
    python benchmarks/batch.py --memory         # peak memory at 2,000 and 20,000 texts
    python benchmarks/batch.py --device cuda    # both on a card
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from batch_loop import loop
from results import measured_here

from attnscope.corpus.folder import Job
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions


def corpus(path: Path, texts: int) -> Path:
    """Texts of 5 to 200 tokens, uniformly, of words of the demo's own card."""
    from attnscope.model.loading import load as load_model

    tokenizer = load_model(LoadOptions(device="cpu")).tokenizer
    pick = random.Random(0)
    words = (DEMO_FOLDER / "README.md").read_text().split()
    with open(path, "w") as stream:
        for number in range(texts):
            ids = tokenizer(" ".join(pick.choices(words, k=220)))["input_ids"][: pick.randint(5, 200)]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            stream.write(json.dumps({"id": f"t{number}", "text": text}) + "\n")
    return path


def ours(loaded: LoadedModel, path: Path, folder: Path) -> None:
    """The same through `batch`."""
    run_folder(Job(), Corpus((str(path),)), folder, {}, loaded=loaded)


def compare(ours_folder: Path, loop_folder: Path) -> float:
    """The largest difference of a number, relative above 1; both must have the same rows."""
    ours, theirs = pq.read_table(ours_folder / "heads"), pq.read_table(loop_folder / "heads.parquet")
    worst = 0.0
    for name in theirs.column_names:
        found, expected = (np.asarray(table[name], float) for table in (ours, theirs))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), name)
        worst = max(worst, np.nanmax(np.abs(found - expected) / np.maximum(1, np.abs(expected)), initial=0.0))
    names = ["item", "layer", "head", "query", "weight"]  # of equal weights either may be the stronger key
    ours, theirs = (
        pq.read_table(path, columns=names) for path in (ours_folder / "relations", loop_folder / "relations.parquet")
    )
    for name in names[:-1]:
        np.testing.assert_array_equal(ours[name], theirs[name], name)
    return float(max(worst, np.abs(np.asarray(ours["weight"]) - np.asarray(theirs["weight"])).max()))


def timed(way: str, path: Path, folder: Path, device: str) -> tuple[float, float, float]:
    """Run one way in a process of its own: seconds without the start, processor seconds, peak MiB."""
    command = [sys.executable, __file__, "--way", way, "--corpus", str(path), "--folder", str(folder)]
    command += ["--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu, peak


def one_way(way: str, path: Path, folder: Path, device: str) -> None:
    loaded = load(LoadOptions(device=device))  # the start is not what is measured
    start, cpu = time.perf_counter(), time.process_time()
    ours(loaded, path, folder) if way == "ours" else loop(loaded, path, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, peak]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--way", choices=["ours", "loop"])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.way:
        one_way(given.way, given.corpus, given.folder, given.device)
        return
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        if given.memory:
            for count in (given.texts, 10 * given.texts):
                wall, _, peak = timed(
                    "ours", corpus(base / f"{count}.jsonl", count), base / f"out{count}", given.device
                )
                print(f"{count:6} texts  {count / wall:6.1f} texts/s  peak {peak:6.0f} MiB")
            return
        path = corpus(base / "corpus.jsonl", given.texts)
        found: dict[str, list[tuple[float, float, float]]] = {"loop": [], "ours": []}
        for number in range(given.rounds):  # in turn, so that a drifting machine drifts for both
            for way, runs in found.items():
                runs.append(timed(way, path, base / f"{way}{number}", given.device))
        text = table(found, given, compare(base / "ours0", base / "loop0"))
        print(text)
        if given.write:
            measured_here("Batch", text)


def table(found: dict[str, list[tuple[float, float, float]]], given: argparse.Namespace, difference: float) -> str:
    """Medians as a Markdown table."""
    texts = given.texts
    medians = {way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in found.items()}
    lines = [
        f"`python benchmarks/batch.py`; {texts:,} texts of 5 to 200 tokens, {given.device}, {os.cpu_count()} cores, "
        f"medians of {len(found['ours'])} runs in turn; largest difference of a number {difference:.0e}.",
        "",
        "| way | texts/s | seconds (least to most) | processor seconds | peak memory | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for way, name in (("loop", "a loop of padded batches"), ("ours", "attnscope batch")):
        wall, cpu, peak = medians[way]
        walls = [run[0] for run in found[way]]
        times = [loop[0] / run[0] for loop, run in zip(found["loop"], found[way], strict=True)]
        lines.append(
            f"| {name} | {texts / wall:.1f} | {wall:.1f} ({min(walls):.1f} to {max(walls):.1f}) | {cpu:.1f} | "
            f"{peak:.0f} MiB | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
