"""Every command on a device beside the CPU: the same numbers, or which column differs, and by how much.

python benchmarks/paths.py [--device cuda:0] [--dtype bfloat16]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

TEXT = "the financial bank is located on the river bank and the financial bank is on the river"
COMMANDS = {
    "heads": ["heads", TEXT],
    "heads, fused": ["heads", TEXT, "--engine", "fused"],
    "heads of tokens": ["heads", TEXT, "--query", "bank", "--key", "river", "--engine", "fused"],
    "relations": ["relations", TEXT, "--engine", "fused"],
    "keys": ["keys", TEXT, "--engine", "fused"],
    "rollout": ["rollout", TEXT, "--engine", "fused"],
    "heads, norms of values": ["heads", TEXT, "--weights", "value"],
    "relations of words": ["relations", TEXT, "--group", "words"],
    "text": ["text", TEXT, "--query", "last"],
    "compare": ["compare", TEXT, "--compare-text", "the river bank is located on the financial bank"],
    "ablate": ["ablate", "demo", "--select", "3.0", "--sequences", "4"],
    "scan": ["scan", "demo", "--probe", "induction p25", "--sequences", "32"],
    "parity": ["parity", TEXT],
    "explain": ["explain", TEXT, "--head", "2.3"],
}
ALLOWED = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to 1 + the value


def said(command: list[str], device: str, dtype: str) -> list[dict[str, float | str]]:
    """What a command prints, one record a row. Raises CalledProcessError with its own words."""
    asked = [sys.executable, "-m", "attnscope", *command, "--device", device, "--dtype", dtype, "--format", "jsonl"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
    return [dict(flat(json.loads(line))) for line in done.stdout.splitlines()]


def flat(value: object, name: str = "") -> Iterator[tuple[str, float | str]]:
    """Everything within, by the names on the way to it."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, float(value) if isinstance(value, int | float) else str(value)


def difference(mine: list[dict[str, float | str]], theirs: list[dict[str, float | str]]) -> tuple[float, str]:
    """The largest of all numbers, and its column; infinite where the rows or the columns are not the same."""
    if [row.keys() for row in mine] != [row.keys() for row in theirs]:
        return float("inf"), "rows or columns"
    found = [(0.0, "")]
    for one, other in zip(mine, theirs, strict=True):
        numbers = [name for name, value in one.items() if isinstance(value, float) and isinstance(other[name], float)]
        found += [(abs(one[name] - other[name]) / (1 + abs(other[name])), name) for name in numbers]
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", choices=list(ALLOWED), default="float32")
    options = parser.parse_args()
    print("| command | largest difference | column | holds |\n|---|---|---|---|")
    failed = []
    for name, command in COMMANDS.items():
        try:
            far, column = difference(*(said(command, device, options.dtype) for device in (options.device, "cpu")))
        except subprocess.CalledProcessError as error:
            far, column = float("inf"), (error.stderr.strip().splitlines() or ["killed"])[-1][:80]
        holds = far <= ALLOWED[options.dtype]
        failed += [] if holds else [name]
        print(f"| {name} | {far:.1g} | {column} | {'yes' if holds else 'no'} |", flush=True)
    if failed:
        raise SystemExit(f"not the same: {', '.join(failed)}")


if __name__ == "__main__":
    main()
