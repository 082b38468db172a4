"""Everything that README claims about speed and memory, measured anew: one table, in under half an hour on 2 cores.

    python benchmarks/all.py             # runs the scripts named below, each in fresh processes
    python benchmarks/all.py --write     # and puts the table into RESULTS.md, from which README has its numbers

A claim is a cell of the table that a script prints. A test of README holds its figures to the table.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from results import measured_here

TITLE = "What README and docs/engines.md claim"
ENGINES = "engines.py --tokens 2048 --first --processes 5 --ways plain,numba,tiles,output_attentions"
COMMAND = "command.py --tokens 2048,8192 --pairs 5"
BATCH = "batch.py --texts 2000 --rounds 5"
STARTUP = "startup.py --runs 5"
LINEAR = "linear.py --tokens 8192 --model-tokens 2048 --processes 5"
RATIO = "ratio to the first (least to most)"


@dataclass(frozen=True)
class Claim:
    """A cell of a script's table. row: a text in a cell of its row. column: its heading."""

    title: str
    script: str
    row: str
    column: str


CLAIMS = (
    Claim("all statistics by the compiled kernel, of a plain forward", ENGINES, "numba", "times plain"),
    Claim("the same by PyTorch's tiles", ENGINES, "tiles (PyTorch)", "times plain"),
    Claim("the same after `output_attentions=True`", ENGINES, "output_attentions=True", "times plain"),
    Claim("memory of the compiled kernel, of a plain forward", ENGINES, "numba", "of its memory"),
    Claim("memory of PyTorch's tiles", ENGINES, "tiles (PyTorch)", "of its memory"),
    Claim("memory of `output_attentions=True`", ENGINES, "output_attentions=True", "of its memory"),
    Claim("`heads` of 2,048 tokens, of a plain forward", COMMAND, "2,048", "times plain"),
    Claim("its memory, of a plain forward", COMMAND, "2,048", "of its memory"),
    Claim("`heads` of 8,192 tokens", COMMAND, "8,192", "times plain"),
    Claim("its memory", COMMAND, "8,192", "of its memory"),
    Claim("`batch`, of a loop of padded batches", BATCH, "attnscope batch", "times as fast"),
    Claim("`heads` from the shell, of importing torch", STARTUP, "table only", "ratio (least to most)"),
    Claim("all statistics of a linear layer of 8,192 tokens, of SDPA of its shape", LINEAR, "all statistics", RATIO),
    Claim("`capture` of a hybrid of 2,048 tokens, of its forward", LINEAR, "`capture`", RATIO),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines = ["| claim | measured | script |", "|---|---|---|"]
    start = time.perf_counter()
    for script, claims in groupby(CLAIMS, key=lambda claim: claim.script):
        printed = run(script)
        lines += [f"| {claim.title} | {cell(printed, claim)} | `{script}` |" for claim in claims]
    text = "\n".join([f"`python benchmarks/all.py`, {(time.perf_counter() - start) / 60:.0f} minutes.", "", *lines])
    print(text)
    if options.write:
        measured_here(TITLE, text)


def run(script: str) -> str:
    """What a script of this folder prints; it is shown too."""
    print(f"\n{script}", file=sys.stderr, flush=True)
    name, *arguments = script.split()
    command = [sys.executable, Path(__file__).with_name(name), *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    print(printed, file=sys.stderr, flush=True)
    return printed


def cell(printed: str, claim: Claim) -> str:
    """The cell of a claim in the Markdown table that was printed. Raises SystemExit where there is none."""
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"
    )
    for row in rows:
        if any(claim.row in part for part in row):
            return row[header.index(claim.column)]
    raise SystemExit(f"{claim.script} prints no row of {claim.row}")


if __name__ == "__main__":
    main()
