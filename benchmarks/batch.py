"""Texts per second of `attnscope batch` against a competent loop of padded batches (`batch_loop.py`), in one run.

Both read the same corpus of mixed lengths (5 to 200 tokens), compute the same metrics of all heads and the same
relations with the embedded model, and write Parquet; the loop has no roles, no top keys, no checks and no journal.
Its numbers are compared with ours. Each runs in a process of its own, on all cores, as PyTorch does; the start is not
measured.

    python benchmarks/batch.py                  # 2,000 texts, speed
    python benchmarks/batch.py --memory         # peak memory at 2,000 and 20,000 texts
    python benchmarks/batch.py --wide           # 8 layers, 1,024 wide, against a plain forward of the sorted texts
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
import torch
from batch_loop import batches, loop
from knockout import long_model
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


@torch.inference_mode()
def plain(loaded: LoadedModel, path: Path, _folder: Path) -> None:
    """A forward pass of every text without its vocabulary, in padded batches of like length. It writes nothing."""
    ids = loaded.tokenizer([json.loads(line)["text"] for line in path.read_text().splitlines()])["input_ids"]
    for batch in batches(range(len(ids)), ids, budget=1024):
        longest = len(ids[batch[-1]])
        padded_BN = torch.tensor([[*ids[text], *[0] * (longest - len(ids[text]))] for text in batch])
        real_BN = torch.tensor([[1] * len(ids[text]) + [0] * (longest - len(ids[text])) for text in batch])
        loaded.model.base_model(padded_BN, attention_mask=real_BN, use_cache=False)


WAYS = {"ours": ours, "loop": loop, "plain": plain}


def compared(ours_folder: Path, loop_folder: Path) -> str:
    """Says the largest difference of a number, relative above 1; both must have the same rows."""
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
    worst = max(worst, np.abs(np.asarray(ours["weight"]) - np.asarray(theirs["weight"])).max())
    return f"; largest difference of a number {worst:.0e}"


def timed(way: str, path: Path, folder: Path, given: argparse.Namespace) -> tuple[float, float, float]:
    """Run one way in a process of its own: seconds without the start, processor seconds, peak MiB."""
    command = [sys.executable, __file__, "--way", way, "--corpus", str(path), "--folder", str(folder)]
    command += ["--device", given.device, *["--wide"] * given.wide]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu, peak


def one_way(way: str, path: Path, folder: Path, given: argparse.Namespace) -> None:
    # The start is not what is measured.
    loaded = long_model(1)[0] if given.wide else load(LoadOptions(device=given.device))
    start, cpu = time.perf_counter(), time.process_time()
    WAYS[way](loaded, path, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, peak]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--wide", action="store_true", help="the shape of engines.py, against a plain forward")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.way:
        one_way(given.way, given.corpus, given.folder, given)
        return
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        if given.memory:
            for count in (given.texts, 10 * given.texts):
                wall, _, peak = timed("ours", corpus(base / f"{count}.jsonl", count), base / f"out{count}", given)
                print(f"{count:6} texts  {count / wall:6.1f} texts/s  peak {peak:6.0f} MiB")
            return
        path = corpus(base / "corpus.jsonl", given.texts)
        other = "plain" if given.wide else "loop"
        found: dict[str, list[tuple[float, float, float]]] = {other: [], "ours": []}
        for number in range(given.rounds):  # in turn, so that a drifting machine drifts for both
            for way, runs in found.items():
                runs.append(timed(way, path, base / f"{way}{number}", given))
        text = table(found, given, "" if given.wide else compared(base / "ours0", base / "loop0"))
        print(text)
        if given.write:
            measured_here("Batch" + " of a wide model" * given.wide, text)


def table(found: dict[str, list[tuple[float, float, float]]], given: argparse.Namespace, difference: str) -> str:
    """Medians as a Markdown table."""
    texts = given.texts
    medians = {way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in found.items()}
    lines = [
        f"`python benchmarks/batch.py{' --wide' * given.wide}`; {texts:,} texts of 5 to 200 tokens, {given.device}, "
        f"{os.cpu_count()} cores, medians of {len(found['ours'])} runs in turn{difference}.",
        "",
        "| way | texts/s | seconds (least to most) | processor seconds | peak memory | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    names = {"loop": "a loop of padded batches", "plain": "a plain forward", "ours": "attnscope batch"}
    for way, (wall, cpu, peak) in medians.items():
        walls = [run[0] for run in found[way]]
        times = [other[0] / run[0] for other, run in zip(next(iter(found.values())), found[way], strict=True)]
        lines.append(
            f"| {names[way]} | {texts / wall:.1f} | {wall:.1f} ({min(walls):.1f} to {max(walls):.1f}) | {cpu:.1f} | "
            f"{peak:.0f} MiB | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
