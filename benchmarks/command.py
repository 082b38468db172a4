"""What the command line costs for a long text: `heads` over N tokens less that over 16, beside a plain forward.

    python benchmarks/command.py --tokens 2048,8192 [--engine fused] [--pairs 5]

Fresh processes in turn: `heads` over N tokens, over 16 tokens, and the plain forward, whose own first pass is timed in
its process. The difference leaves out starting, loading and drawing the table; compiling happens once before. Memory is
the largest that the operating system saw of a whole process. The model: 8 layers of 16 heads on 4, width 1024, random
weights, float32.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from engines import build

from attnscope.model.loading import DEMO_FOLDER

SHORT = 16
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
HEADER = """| tokens | plain, s | heads less heads over 16, s | times plain | plain, MiB | heads, MiB | of its memory |
|---|---|---|---|---|---|---|"""
PLAIN = """
import sys, time, torch
from transformers import LlamaModel
model = LlamaModel.from_pretrained(sys.argv[1], attn_implementation="sdpa").eval()
ids = torch.tensor([[int(one) for one in open(sys.argv[2]).read().split()]])
start = time.perf_counter()
with torch.no_grad():
    model(ids, use_cache=False)
print(time.perf_counter() - start)
"""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), [SHORT, *options.tokens])
        command(Path(folder), max(options.tokens), options.engine)  # compiles where nothing is kept yet
        print(HEADER, flush=True)
        for tokens in options.tokens:
            print(row(tokens, [turn(Path(folder), tokens, options.engine) for _ in range(options.pairs)]), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[2048, 8192])
    parser.add_argument("--engine", default="fused")
    parser.add_argument("--pairs", type=int, default=5)
    return parser.parse_args()


def prepare(folder: Path, lengths: list[int]) -> None:
    """The model with a tokenizer, and a file of ids for each length."""
    model, ids = build("plain", max(lengths), "cpu", large=False)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    for length in lengths:
        (folder / f"{length}.txt").write_text(" ".join(map(str, ids[0, :length].tolist())))


class Turn(NamedTuple):
    """Seconds of the plain forward, and of the command over the text less those over 16 tokens; MiB of both."""

    plain: float
    heads: float
    plain_memory: float
    heads_memory: float


def turn(folder: Path, tokens: int, engine: str) -> Turn:
    """One of each, in processes of their own."""
    printed, _, plain_memory = process([sys.executable, "-c", PLAIN, folder, folder / f"{tokens}.txt"])
    (seconds, memory), (short, _) = (command(folder, length, engine) for length in (tokens, SHORT))
    return Turn(float(printed.split()[-1]), seconds - short, plain_memory, memory)


def command(folder: Path, tokens: int, engine: str) -> tuple[float, float]:
    """Seconds and MiB of the whole command."""
    text = ["--model", folder, "--ids", folder / f"{tokens}.txt", "--engine", engine, "--format", "csv", "--quiet"]
    return process([sys.executable, "-m", "attnscope", "heads", *text])[1:]


def process(arguments: list[str | Path]) -> tuple[bytes, float, float]:
    """What a process prints, its seconds, and its largest memory in MiB."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(arguments, stdout=printed, env=os.environ | QUIET)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, arguments)
        printed.seek(0)
        return printed.read(), seconds, usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def row(tokens: int, turns: list[Turn]) -> str:
    plain, heads, plain_memory, heads_memory = map(statistics.median, zip(*turns, strict=True))
    times = spread([turn.heads / turn.plain for turn in turns])
    memory = spread([turn.heads_memory / turn.plain_memory for turn in turns])
    return f"| {tokens:,} | {plain:.2f} | {heads:.2f} | {times} | {plain_memory:.0f} | {heads_memory:.0f} | {memory} |"


def spread(ratios: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
