"""What the command line costs for a long text: `heads` over N tokens less that over 16, beside a plain forward.

    python benchmarks/command.py --tokens 2048,8192 [--engine fused] [--pairs 5]

Fresh processes in turn: `heads` over N tokens, over 16 tokens, and the plain forward, whose own first pass is timed in
its process. The difference leaves out starting, loading and drawing the table; compiling happens once before. The
model: 8 layers of 16 heads on 4, width 1024, random weights, float32.
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

from engines import build

from attnscope.model.loading import DEMO_FOLDER

SHORT = 16
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
        print("| tokens | plain forward | heads less heads over 16 | times plain (least to most) |\n|---|---|---|---|")
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


def turn(folder: Path, tokens: int, engine: str) -> tuple[float, float]:
    """Seconds of the plain forward, and of the command over the text less those over 16 tokens."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, folder, folder / f"{tokens}.txt"], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1]), command(folder, tokens, engine) - command(folder, SHORT, engine)


def command(folder: Path, tokens: int, engine: str) -> float:
    """Seconds of the whole command."""
    text = ["--model", folder, "--ids", folder / f"{tokens}.txt", "--engine", engine, "--format", "csv", "--quiet"]
    offline, start = {**os.environ, "HF_HUB_OFFLINE": "1"}, time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "attnscope", "heads", *text], stdout=subprocess.DEVNULL, env=offline, check=True
    )
    return time.perf_counter() - start


def row(tokens: int, found: list[tuple[float, float]]) -> str:
    plain, more = (statistics.median(part) for part in zip(*found, strict=True))
    ratios = [one / base for base, one in found]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {tokens:,} | {plain:.2f} | {more:.2f} | {spread} |"


if __name__ == "__main__":
    main()
