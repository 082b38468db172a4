"""Every command on a device beside the CPU, in one process: the same numbers, or which column differs, and by how much.

    python benchmarks/paths.py [--device cuda:0] [--dtype bfloat16]

Rows are compared by what they are of (stack, layer, head, query). In bfloat16 the largest of nearly equal weights may
be another's: keys and names are then not compared, and what goes by them only where both name the same.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from unittest import mock

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
PLACE = ("stack", "layer", "head", "query", "probe", "metric")  # what a row is of
CHOSEN = ("key", "strongest")  # what the largest of nearly equal weights decides
Row = dict[str, float | str]


class FailedError(Exception):
    """A command that ended with another code than 0; says its last line."""


def said(command: list[str], device: str, dtype: str) -> list[Row]:
    """What a command prints, one record a row. Raises FailedError with its own words."""
    from attnscope.cli import run

    asked = [*command, "--device", device, "--dtype", dtype, "--format", "jsonl"]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with mock.patch.multiple(sys, stdout=out, stderr=err):
        code = run(asked)
        out.flush()
        err.flush()
    if code:
        raise FailedError((err.buffer.getvalue().decode().strip().splitlines() or ["killed"])[-1][:80])
    return [dict(flat(json.loads(line))) for line in out.buffer.getvalue().decode().splitlines()]


def flat(value: object, name: str = "") -> Iterator[tuple[str, float | str]]:
    """Everything within, by the names on the way to it."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, float(value) if isinstance(value, int | float) else str(value)


def difference(mine: list[Row], theirs: list[Row], rounded: bool) -> tuple[float, str]:
    """The largest of all numbers, and its column; infinite where the rows or the columns are not the same."""
    if rounded:
        return rounded_difference(mine, theirs)
    if [row.keys() for row in mine] != [row.keys() for row in theirs]:
        return float("inf"), "rows or columns"
    return max([(0.0, ""), *(far for one, other in zip(mine, theirs, strict=True) for far in apart(one, other))])


def rounded_difference(mine: list[Row], theirs: list[Row]) -> tuple[float, str]:
    """The same of rows that stand in any order, some of which the other side may not have."""
    known = {_place(row): row for row in theirs}
    pairs = [(row, known[_place(row)]) for row in mine if _place(row) in known]
    if 2 * len(pairs) < max(len(mine), len(theirs)):
        return float("inf"), "rows"
    return max([(0.0, ""), *(far for one, other in pairs for far in apart(one, other) if not _of_choice(far[1]))])


def _place(row: Row) -> tuple[object, ...]:
    return tuple(value for name, value in row.items() if name.partition(".")[0] in (*PLACE, "key"))


def _of_choice(name: str) -> bool:
    return any(word in name for word in CHOSEN)


def apart(one: Row, other: Row) -> Iterator[tuple[float, str]]:
    for name in one.keys() & other.keys():
        mine, theirs = one[name], other[name]
        if isinstance(mine, float) and isinstance(theirs, float):
            yield abs(mine - theirs) / (1 + abs(theirs)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", choices=list(ALLOWED), default="float32")
    parser.add_argument("--commands", type=lambda text: text.split(","), default=list(COMMANDS))
    options = parser.parse_args()
    print("| command | largest difference | column | holds | seconds |\n|---|---|---|---|---|", flush=True)
    failed = []
    for name in options.commands:
        start = time.perf_counter()
        try:
            both = [said(COMMANDS[name], device, options.dtype) for device in (options.device, "cpu")]
            far, column = difference(*both, rounded=options.dtype != "float32")
        except Exception as error:  # the next command may hold
            far, column = float("inf"), f"{type(error).__name__}: {error}"[:120].replace("|", "/")
        holds, seconds = far <= ALLOWED[options.dtype], time.perf_counter() - start
        failed += [] if holds else [name]
        print(f"| {name} | {far:.1g} | {column} | {'yes' if holds else 'no'} | {seconds:.1f} |", flush=True)
    if failed:
        raise SystemExit(f"not the same: {', '.join(failed)}")


if __name__ == "__main__":
    main()
