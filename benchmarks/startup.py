"""How long a person waits before anything happens: attnscope against the imports it cannot avoid.

    python benchmarks/startup.py [--runs 7] [--write]

Every pair is run alternately, so that both see the same machine; medians of wall time, processes and all.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

from results import measured_here

SENTENCE = "the financial bank is located on river bank"
# What a bash asks when TAB is pressed behind `attnscope heads --sort `.
ASKS = {"_ATTNSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "attnscope\nheads\n--sort\n", "COMP_CWORD": "3"}
COMPLETION = f"import os; os.environ |= {ASKS}; from attnscope.cli import main; main([])"
PAIRS = (  # what is measured, against what, how many times as long it may take
    ("attnscope --help", ("-m", "attnscope", "--help"), "import typer", 1.9),
    ("attnscope heads --sort TAB", ("-c", COMPLETION), "import typer", 3.0),
    (
        "attnscope heads --text ..., table only",
        ("-m", "attnscope", "heads", "--text", SENTENCE, "--format", "table"),
        "import torch; from transformers import LlamaForCausalLM",
        1.1,
    ),
)


def seconds(arguments: tuple[str, ...], folder: str) -> float:
    """Wall time of one Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def in_turn(ours: tuple[str, ...], theirs: tuple[str, ...], runs: int) -> list[tuple[float, float]]:
    """Both commands in turn, after one run of each that fills the disk's cache."""
    with tempfile.TemporaryDirectory() as folder:
        return [(seconds(ours, folder), seconds(theirs, folder)) for _ in range(runs + 1)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines = ["| command | seconds | against | seconds | ratio (least to most) | at most |", "|---|---|---|---|---|---|"]
    missed = []
    for name, ours, imports, most in PAIRS:
        taken = in_turn(ours, ("-c", imports), options.runs)
        mine, theirs = (statistics.median(side) for side in zip(*taken, strict=True))
        ratios = [one / other for one, other in taken]
        ratio = f"{mine / theirs:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| `{name}` | {mine:.2f} | `{imports}` | {theirs:.2f} | {ratio} | {most} |")
        missed += [name] if mine / theirs > most else []
    text = "\n".join(lines)
    print(text)
    if options.write:
        how = f"`python benchmarks/startup.py`; medians of {options.runs} alternating runs."
        measured_here("Startup", f"{how}\n\n{text}")
    if missed:
        raise SystemExit(f"slower than meant: {', '.join(missed)}")


if __name__ == "__main__":
    main()
