"""Texts a second of `attnscope batch` against a plain loop over `output_attentions=True`, in one run.

Both read the same corpus of mixed lengths (5 to 200 tokens), compute the same head table and the same relations with
the embedded model, and write Parquet. The loop is what a careful person writes: one text at a time, all heads of a
layer at once, rows kept as arrays. Its numbers are compared with ours.

    python benchmarks/batch.py                  # 2,000 texts, speed
    python benchmarks/batch.py --memory         # peak memory at 2,000 and 20,000 texts
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
import pandas as pd
import pyarrow.parquet as pq
import torch
from results import update_section

from attnscope.batch.corpus import Corpus
from attnscope.batch.job import Job
from attnscope.batch.run import run_folder
from attnscope.measure.roles import role_of
from attnscope.model.loading import DEMO_FOLDER, LoadedModel, LoadOptions, load

LOAD = LoadOptions(device="cpu")
CHUNK = 200  # texts whose rows the loop holds before it writes them


def corpus(path: Path, texts: int) -> Path:
    """Texts of 5 to 200 tokens, uniformly, of words of the demo's own card."""
    from attnscope.model.loading import load as load_model

    tokenizer = load_model(LOAD).tokenizer
    pick = random.Random(0)
    words = (DEMO_FOLDER / "README.md").read_text().split()
    with open(path, "w") as stream:
        for number in range(texts):
            ids = tokenizer(" ".join(pick.choices(words, k=220)))["input_ids"][: pick.randint(5, 200)]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            stream.write(json.dumps({"id": f"t{number}", "text": text}) + "\n")
    return path


def naive(path: Path, folder: Path) -> None:
    """The loop: one text at a time through the model, metrics and top keys of each layer, Parquet every CHUNK texts."""
    loaded = load(LOAD)
    folder.mkdir()
    heads: list[pd.DataFrame] = []
    relations: list[pd.DataFrame] = []
    for number, line in enumerate(path.read_text().splitlines()):
        text_heads, text_relations = naive_text(loaded, json.loads(line)["text"], number)
        heads.append(text_heads)
        relations.append(text_relations)
        if len(heads) == CHUNK:
            naive_write(folder, number, heads, relations)
    if heads:
        naive_write(folder, number, heads, relations)


def naive_write(folder: Path, number: int, heads: list[pd.DataFrame], relations: list[pd.DataFrame]) -> None:
    pd.concat(heads).to_parquet(folder / f"heads-{number:06d}.parquet", compression="zstd")
    pd.concat(relations).to_parquet(folder / f"relations-{number:06d}.parquet", compression="zstd")
    heads.clear()
    relations.clear()


def naive_text(loaded: LoadedModel, text: str, number: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    encoded = loaded.tokenizer(text, return_offsets_mapping=True)
    ids = torch.tensor(encoded["input_ids"])
    spans = encoded["offset_mapping"]
    tokens = np.array([text[a:b] or loaded.tokenizer.decode([t]) for t, (a, b) in zip(ids, spans, strict=True)])
    with torch.no_grad():
        attentions = loaded.model(ids[None], output_attentions=True).attentions
    heads, relations = [], []
    uniform = {k: float(v[0]) for k, v in naive_metrics(uniform_HQK(len(ids)), ids).items()}
    repeated = int(earlier_equal(ids).any(-1).sum())
    for layer, weights_1HQK in enumerate(attentions):
        A_HQK = weights_1HQK[0]
        scores = naive_metrics(A_HQK, ids)
        H, N, _ = A_HQK.shape
        rows = {"two_keys": N - 1, "three_keys": N - 2, "all": N, "repeats": repeated, "beyond_32": max(0, N - 32)}
        rows["repeats_apart"] = int(earlier_equal(ids).tril(-3).any(-1).sum())
        for head in range(H):
            means = {name: float(values[head]) for name, values in scores.items()}
            kv_head = head // 2
            role = role_of(means, uniform, rows)
            heads.append({"item": number, "layer": layer, "head": head, "kv_head": kv_head, "role": role, **means})
        best = A_HQK.topk(min(5, N), -1)
        query = torch.arange(N)[None, :, None].expand_as(best.indices)
        keep = best.indices <= query
        head = torch.arange(H)[:, None, None].expand_as(best.indices)[keep].numpy()
        q, k = query[keep].numpy(), best.indices[keep].numpy()
        columns = {"item": number, "layer": layer, "head": head, "kv_head": head // 2, "query": q}
        columns |= {"query_token": tokens[q], "key": k, "key_token": tokens[k], "weight": best.values[keep].numpy()}
        relations.append(pd.DataFrame(columns))
    return pd.DataFrame(heads), pd.concat(relations)


def uniform_HQK(N: int) -> torch.Tensor:
    return (torch.ones(N, N).tril() / torch.arange(1, N + 1)[:, None])[None]


def earlier_equal(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, None] == ids[None]).tril(-1)


def naive_metrics(A: torch.Tensor, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """The metrics of one layer, (H, N, N), from their formulas."""
    N = A.shape[-1]
    position = torch.arange(N)
    same = earlier_equal(ids)
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    after = after.tril(-2)
    again = same.any(-1)
    visible = position + 1.0

    def entropy(P: torch.Tensor) -> torch.Tensor:
        return torch.special.entr(P).sum(-1)

    def over(values: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
        return values[:, rows].double().mean(-1).numpy()

    two_keys, three_keys = position >= 1, position >= 2
    H = entropy(A)
    rest = A[..., 1:]
    mass = rest.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    sharp = 1 - (entropy(rest) / mass + mass.log()).clamp_min(0) / (visible - 1).clamp_min(2).log()
    distance = position[:, None] - position
    return {
        "previous_token": over(torch.nn.functional.pad(A.diagonal(-1, 1, 2), (1, 0)), two_keys),
        "self": over(A.diagonal(0, 1, 2), two_keys),
        "sink": over(A[..., 0], position >= 0),
        "off_token_mass": over(1 - A.sum(-1), two_keys),
        "duplicate_token": over((A * same).sum(-1), again),
        "induction": over((A * after).sum(-1), after.any(-1)),
        "entropy": over(H, two_keys),
        "entropy_normalised": over(H / visible.clamp_min(2).log(), two_keys),
        "effective_keys": over(1 / (A * A).sum(-1), two_keys),
        "confidence": over(A.amax(-1), two_keys),
        "distance": over((A * distance).sum(-1), two_keys),
        "local_mass_32": over((A * (distance < 32)).sum(-1), two_keys),
        "focus": over((1 - A[..., 0]) * sharp, three_keys),
    }


def ours(path: Path, folder: Path) -> None:
    """The same through `batch`."""
    run_folder(Job(LOAD), Corpus((str(path),)), folder, {})


def compare(ours_folder: Path, naive_folder: Path) -> float:
    """The largest difference between the two head tables; relations must be of the same rows."""
    ours_heads, theirs = pq.read_table(ours_folder / "heads").to_pandas(), read_all(naive_folder, "heads")
    assert (ours_heads["role"].to_numpy() == theirs["role"].to_numpy()).mean() > 0.999
    names = list(theirs.columns[5:])
    scale = np.maximum(1, np.abs(theirs[names].to_numpy(float)))
    worst = np.nanmax(np.abs(ours_heads[names].to_numpy(float) - theirs[names].to_numpy(float)) / scale)
    a, b = pq.read_table(ours_folder / "relations", columns=["weight"]), read_all(naive_folder, "relations")
    assert len(a) == len(b), (len(a), len(b))
    difference = np.abs(np.asarray(a["weight"]) - b["weight"].to_numpy()).max()
    return float(max(worst, difference))


def read_all(folder: Path, name: str) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(part) for part in sorted(folder.glob(f"{name}-*.parquet"))])


def timed(way: str, path: Path, folder: Path) -> tuple[float, float, float]:
    """Run one way in a process of its own: seconds without the start, processor seconds, peak MiB."""
    command = [sys.executable, __file__, "--way", way, "--corpus", str(path), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu, peak


def one_way(way: str, path: Path, folder: Path) -> None:
    load(LOAD)  # the start is not what is measured
    start, cpu = time.perf_counter(), time.process_time()
    (ours if way == "ours" else naive)(path, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, peak]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--way", choices=["ours", "naive"])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.way:
        one_way(given.way, given.corpus, given.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        if given.memory:
            for count in (given.texts, 10 * given.texts):
                wall, _, peak = timed("ours", corpus(base / f"{count}.jsonl", count), base / f"out{count}")
                print(f"{count:6} texts  {count / wall:6.1f} texts/s  peak {peak:6.0f} MiB")
            return
        path = corpus(base / "corpus.jsonl", given.texts)
        found: dict[str, list[tuple[float, float, float]]] = {"naive": [], "ours": []}
        for number in range(given.rounds):  # in turn, so that a drifting machine drifts for both
            for way, runs in found.items():
                runs.append(timed(way, path, base / f"{way}{number}"))
        text = table(found, given.texts, compare(base / "ours0", base / "naive0"))
        print(text)
        if given.write:
            update_section("Batch", text)


def table(found: dict[str, list[tuple[float, float, float]]], texts: int, difference: float) -> str:
    """Medians as a Markdown table."""
    medians = {way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in found.items()}
    lines = [
        f"`python benchmarks/batch.py`; {texts:,} texts of 5 to 200 tokens, {os.cpu_count()} cores, medians of "
        f"{len(found['ours'])} runs in turn; largest difference of a number {difference:.0e}.",
        "",
        "| way | texts/s | seconds (least to most) | processor seconds | peak memory | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for way, name in (("naive", "loop over output_attentions"), ("ours", "attnscope batch")):
        wall, cpu, peak = medians[way]
        walls = [run[0] for run in found[way]]
        lines.append(
            f"| {name} | {texts / wall:.1f} | {wall:.1f} ({min(walls):.1f} to {max(walls):.1f}) | {cpu:.1f} | "
            f"{peak:.0f} MiB | {medians['naive'][0] / wall:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
