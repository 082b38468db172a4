"""Do two trees print and write the same? `python scripts/same.py TREE_A TREE_B [--only NAME]`

A tree is a checkout, or what holds another `attnscope/`. Every case below runs in both, each in an empty folder of its
own, with the same environment and without network. Compared are stdout, messages, exit codes and all files by their
hashes, after times, folders and versions are taken out; Parquet by types and values. Lines that end a silence are left
out, as they depend on the machine's load. A case that differs shows its first difference; then the exit code is 1.
`--expect FILE` names differences that a change means to make: `CASE<TAB>REGEX` per line, for lines of it.
"""

import argparse
import difflib
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

BANK = "'the bank of the river, the bank of the'"
SENTENCE = "'the financial bank is located on river bank'"
STORY = "--file examples/story.txt"
COMMANDS = (  # each is asked for all of its help
    *("heads", "relations", "keys", "text", "draw", "view", "rollout", "explain", "tokens", "batch", "scan"),
    *("compare", "ablate", "knockout", "patch", "why", "depth", "budgets", "serve", "run", "parity", "info", "metrics"),
    "doctor",
)
# What follows `attnscope`, as its user would type it; the commands of a case run one after the other in one folder.
CASES: Mapping[str, tuple[str, ...]] = {
    "heads eager": (f"heads {SENTENCE} --engine eager --out out", "heads out --format table"),
    "heads tiles": (f"heads {STORY} --engine tiles --sort induction --metrics keys_95 --format table --out out.csv",),
    "heads numba": (f"heads {STORY} --engine numba --query last --key bank --define his=Jack --format table",),
    "relations": (f"relations {SENTENCE} --top-k 2 --out out", f"relations {SENTENCE} --over heads --format table"),
    "keys": (f"keys {SENTENCE} --format table --top 5 --out out",),
    "rollout": (f"rollout {SENTENCE} --group words --out out",),
    "text": (f"text {SENTENCE} --query last --mean layer --out out", f"text {SENTENCE} --format table --query bank"),
    "draw": (f"draw {SENTENCE} --select 1 --figures overview,layers,heads,metrics,top --out out",),
    "view": (f"view {SENTENCE} --out page.html", f"view {BANK} --compare-text {SENTENCE} --out both.html"),
    "explain": (
        f"explain {SENTENCE} --head L1H4 --query last --format table",
        f"explain {BANK} --head L3H0 --out out",
        "explain --toy --format jsonl",
        "explain --scaling --out scaling.png",
    ),
    "tokens": ("tokens 'Mary saw John. Mary left.' --query Mary#2 --key 1-3 --format table",),
    "parity": (f"parity {SENTENCE} --out certificate.json", f"parity {SENTENCE} --format table --whole"),
    "why": (
        f"why {BANK} --head L3H0 --key river --verify --out out",
        f"why {BANK} --head L3H0 --key river --against 'bank#1' --by tokens",
        f"why {BANK} --head L3H0 --key river --side both --format table --top 8",
    ),
    "depth": (f"depth {BANK} --out out", f"depth {BANK} --query last --format table"),
    "scan": ("scan demo --sequences 32 --texts examples/corpus.jsonl --format table --top 8 --out out",),
    "ablate": (
        "ablate demo --select @previous-token --sequences 8 --format table --out out",
        "ablate demo --select 3.0-1,1.5 --pairs --sequences 8 --out pairs",
        "ablate demo --prune --dry-run",
    ),
    "knockout": (
        f"knockout {BANK} --key river --answer ' river' --over heads --format table --top 8 --out out",
        f"knockout {BANK} --key river --answer ' river' --foil ' bank' --over window:3 --random 2",
    ),
    "budgets": (f"budgets {STORY} --truncate right --keep stream:4+64,h2o:32 --over layers --format table --out out",),
    "patch": (
        f"patch {BANK} --corrupted 'the bank of the field, the bank of the' --answer ' river' --over heads --out out",
        f"patch {BANK} --corrupted 'the bank of the field, the bank of the' --what value --at 5 --format table --top 8",
    ),
    "compare": (
        "compare --text 'Mary gave John a book' --compare-text 'John gave Mary a book' --out out",
        "compare --texts examples/corpus.jsonl --compare-model demo --top 5 --format table --engine tiles",
    ),
    "batch": (
        "batch examples/corpus.jsonl --summary --figures overview --format csv --out out",
        "batch examples/corpus.jsonl --tables heads --to-stdout jsonl --select 3 --query last --key first",
    ),
    "heads DIR": (
        "batch examples/corpus.jsonl --out out",
        "heads out --sort sink --figures depth --out depth",
        "heads out --format table",
    ),
    "info": ("info demo --tokens 128,8192 --format table", "info demo --format json"),
    "metrics": ("metrics", "metrics --format table"),
    "help": ("--help", *(f"{command} --help" for command in COMMANDS), *(f"{name} --help all" for name in COMMANDS)),
}
HANGS = 600
# Without lines that end a silence: an older tree has none, and needs nothing changed.
START = """
import runpy
try:
    from attnscope.utils import stages
    stages.FIRST_SECONDS = float("inf")
except ImportError:
    pass
runpy.run_module("attnscope", run_name="__main__", alter_sys=True)
"""
EXIT_CODE, STDERR = ": exit code", ": stderr"
LONGEST = ("scan", "ablate", "batch", "heads DIR", "compare", "help", "why", "patch", "knockout")  # begin first

# What may differ between two runs of the same code, as a pattern of bytes and what is read instead.
UNSTABLE = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)?", b"TIME"),
        (rb"\b\d+:\d\d:\d\d\b", b"DURATION"),
        (rb"^process \d+ on \S+", b"process N on HOST"),
        (rb'("\w*(seconds|created|started|finished|ended|bytes_free)\w*":) ?[0-9.e+-]+', rb"\1 N"),
        (rb"\b\d+(\.\d+)?(e-\d+)? ?(ms|s|seconds?|min|minutes?|h|hours?)\b", b"DURATION"),
        (rb"\b\d+(\.\d+)? ?(kB|MB|GB|TB)( |-)free\b", b"FREE free"),
        (rb"\b\d+(\.\d+)?(, \d+(\.\d+)?)* (texts|tokens|passes|sequences)(/s\b| (a|per) second)", b"SPEED"),
        (rb'("(attnscope|version|code|torch|transformers)":) ?"[^"]*"', rb'\1 "VERSION"'),
        (rb"attnscope[ /]\d+\.\d+(\.\d+)?\w*", b"attnscope VERSION"),
    )
)


class Outcome(NamedTuple):
    """What a case gave in one tree.

    parts: the bytes of a command's stdout, its messages, or a file, by name; without what changes from run to run.
    """

    parts: dict[str, bytes]
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--only", action="append", choices=CASES, metavar="NAME", help="one case; may be repeated")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="differences that are meant: CASE<TAB>REGEX")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    names = options.only or sorted(CASES, key=lambda name: (name not in LONGEST, [*CASES].index(name)))
    meant = expected(options.expect)
    with tempfile.TemporaryDirectory(prefix="same") as folder, ThreadPoolExecutor(options.jobs) as pool:
        sides = [(tree.resolve(), Path(folder) / side) for tree, side in zip(options.trees, "ab", strict=True)]
        examples = sides[0][0] / "examples"  # both read the same texts
        runs = {name: [pool.submit(run, name, *side, examples) for side in sides] for name in names}
        failed = [name for name in names if not report(name, *(side.result() for side in runs[name]), meant)]
    print(f"{len(names) - len(failed)} of {len(names)} cases are the same")
    return 1 if failed else 0


def expected(path: Path | None) -> list[tuple[str, re.Pattern[str]]]:
    """(case or *, pattern of a line) of every difference that a change means to make."""
    lines = path.read_text("utf-8").splitlines() if path else []
    pairs = (line.split("\t", 1) for line in lines if "\t" in line and not line.startswith("#"))
    return [(case, re.compile(pattern)) for case, pattern in pairs]


def run(name: str, tree: Path, folder: Path, examples: Path) -> Outcome:
    """Run a case with the attnscope of a tree, in an empty folder."""
    place = folder / name.replace(" ", "-")
    place.mkdir(parents=True)
    os.symlink(examples, place / "examples")
    environment = environment_of(tree, folder)
    parts, start = {}, time.perf_counter()
    for number, command in enumerate(CASES[name], 1):
        done = subprocess.run(
            [sys.executable, "-c", START, *shlex.split(command)],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANGS,
        )
        title = f"{number}: attnscope {command}"
        parts[title + EXIT_CODE] = str(done.returncode).encode()
        parts[f"{title}: stdout"] = in_order(stable(done.stdout, tree, place), place)
        parts[title + STDERR] = stable(done.stderr, tree, place)
    seconds = time.perf_counter() - start
    for path in files_in(place):
        parts[str(path.relative_to(place))] = stable(path.read_bytes(), tree, place)
    return Outcome(parts, seconds)


def environment_of(tree: Path, folder: Path) -> dict[str, str]:
    """The same on both sides but for the tree and a home of its own, where caches of compiled code come to lie."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_RUNTIME_DIR": str(home),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ATTNSCOPE_NO_SERVER": "1",
    }


def files_in(place: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(place):  # does not follow the link to the examples
        folders.sort()
        yield from (Path(root, file) for file in sorted(files))


def in_order(stdout: bytes, place: Path) -> bytes:
    """The same, sorted where each line names a file that was written: pictures are drawn side by side."""
    lines = stdout.splitlines(keepends=True)
    # `Path.is_file` raises for a line that is longer than a file's name can be
    written = all(os.path.isfile(os.path.join(place, os.fsdecode(line.strip()))) for line in lines)
    return b"".join(sorted(lines)) if written else stdout


def stable(content: bytes, tree: Path, place: Path) -> bytes:
    """The bytes without what differs between two runs. What is not text is left as it is, but for Parquet."""
    if content.startswith(b"PAR1"):
        content = as_text(content)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return content
    for path, word in ((place, b"FOLDER"), (place.parent, b"PLACE"), (tree, b"TREE")):
        content = content.replace(os.fsencode(path), word)
    for pattern, replacement in UNSTABLE:
        content = pattern.sub(replacement, content)
    return content


def as_text(content: bytes) -> bytes:
    """A Parquet file as lines: its metadata, the type of each column, a row each."""
    table = pq.read_table(io.BytesIO(content))
    about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    types = {field.name: str(field.type) for field in table.schema}
    return "\n".join(json.dumps(line, default=str) for line in (about, types, *table.to_pylist())).encode()


def report(name: str, first: Outcome, second: Outcome, meant: list[tuple[str, re.Pattern[str]]]) -> bool:
    """Print a line for the case, and the first difference where there is one; whether both sides are the same."""
    patterns = [pattern for case, pattern in meant if case in ("*", name)]
    files = sum(": attnscope " not in part for part in first.parts)
    differs = [part for part in {**first.parts, **second.parts} if first.parts.get(part) != second.parts.get(part)]
    unmeant = [part for part in differs if not is_meant(part, first, second, patterns)]
    outcome = f"DIFFERENT in {len(unmeant)}" if unmeant else "as meant" if differs else "same"
    broken = [part for part, content in first.parts.items() if part.endswith(EXIT_CODE) and content != b"0"]
    seconds = f"{first.seconds:5.1f} s {second.seconds:5.1f} s"
    print(f"{name:<14} {len(CASES[name]):>3} commands {files:>3} files  {seconds}  {outcome}", flush=True)
    for part in broken:
        stderr = first.parts[part.removesuffix(EXIT_CODE) + STDERR].decode()
        print(f"    {part} {first.parts[part].decode()}: {stderr[-300:]}")
    if unmeant:
        print("\n".join(f"    {line}" for line in difference(unmeant[0], first, second)), flush=True)
        for part in unmeant[1:6]:
            print(f"    also {part}", flush=True)
    return not unmeant and not broken


def is_meant(part: str, first: Outcome, second: Outcome, patterns: list[re.Pattern[str]]) -> bool:
    """Whether every line that differs matches one of the patterns, or the part's own name does."""
    if any(pattern.fullmatch(part) for pattern in patterns):
        return True
    if part not in first.parts or part not in second.parts:
        return False
    changed = [line[1:] for line in diff(part, first, second) if line[:1] in "+-"]
    return bool(changed) and all(any(pattern.search(line) for pattern in patterns) for line in changed)


def diff(part: str, first: Outcome, second: Outcome) -> list[str]:
    """The lines that differ, each after + or -; without the two of the names."""
    sides = [outcome.parts[part].decode("utf-8", "backslashreplace").splitlines() for outcome in (first, second)]
    return [*difflib.unified_diff(*sides, n=0, lineterm="")][2:]


def difference(part: str, first: Outcome, second: Outcome, most: int = 12) -> Iterator[str]:
    """Where the first part that differs does so, in a few lines."""
    yield part
    for outcome, missing in ((first, "written by the second tree alone"), (second, "written by the first tree alone")):
        if part not in outcome.parts:
            yield missing
            return
    sides = first.parts[part], second.parts[part]
    try:
        lines = diff(part, first, second) if all(side.decode("utf-8") is not None for side in sides) else []
    except UnicodeDecodeError:
        lines = []
    if lines:
        yield from (line[:200] for line in lines[:most])
    else:
        yield from (f"{len(side)} bytes, sha256 {hashlib.sha256(side).hexdigest()[:16]}" for side in sides)


if __name__ == "__main__":
    sys.exit(main())
