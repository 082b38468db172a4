"""RESULTS.md: a section a benchmark, each written by its own script; and the file of a visit to a card, by gpu.sh.

python benchmarks/results.py gpu.jsonl              # its tables
python benchmarks/results.py gpu.jsonl --write      # and into RESULTS.md
python benchmarks/results.py gpu.jsonl --keep NAME --limit 60 -- COMMAND      # adds what the command prints
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def update_section(title: str, text: str, results: Path = RESULTS) -> None:
    """Put `## title` and its text into the file, in the place of the section of that title if there is one."""
    before = results.read_text(encoding="utf-8") if results.exists() else "# Results\n"
    section = f"## {title}\n\n{text.strip()}\n"
    found = re.search(rf"^## {re.escape(title)}$.*?(?=^## |\Z)", before, re.MULTILINE | re.DOTALL)
    if found is None:
        after = f"{before.rstrip()}\n\n{section}"
    else:
        rest = before[found.end() :]
        after = before[: found.start()] + section + ("\n" + rest if rest else "")
    results.write_text(after, encoding="utf-8")


def keep(path: Path, name: str, limit: float, command: list[str]) -> int:
    """Run a command and add a line of JSON with what it printed, how it ended and how long it took."""
    start, code = time.perf_counter(), 124
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        code, printed, complaints = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:
        printed, complaints = (part.decode() if part else "" for part in (stopped.stdout, stopped.stderr))
    part = {"part": name, "command": command, "exit": code, "seconds": round(time.perf_counter() - start, 1)}
    part |= {"printed": printed[-20_000:], "complaints": complaints[-2_000:]}
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(part) + "\n")
    print(f"{name}: exit {code}, {part['seconds']:.0f} s", file=sys.stderr)
    return code


def section(part: dict) -> str:
    """A part in Markdown: its command, how it ended, its tables, or what it complained of."""
    end = "" if part["exit"] == 0 else ", stopped at its limit" if part["exit"] == 124 else f", exit {part['exit']}"
    said = part["printed"].strip() or f"    {part['complaints'].strip()[-300:]}"
    command = " ".join("python" if word.endswith("/python") else word for word in part["command"])
    return f"`{command}`, {part['seconds']:.0f} s{end}.\n\n{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="write the tables into RESULTS.md")
    parser.add_argument("--keep", metavar="NAME")
    parser.add_argument("--limit", type=float, default=600, help="seconds that the command may take")
    ours = [*sys.argv[1:], "--"]
    options = parser.parse_args(ours[: ours.index("--")])
    if options.keep:
        sys.exit(keep(options.file, options.keep, options.limit, ours[ours.index("--") + 1 : -1]))
    for line in options.file.read_text(encoding="utf-8").splitlines():
        part = json.loads(line)
        title, text = f"CUDA: {part['part']}", section(part)
        print(f"## {title}\n\n{text}\n")
        if options.write:
            update_section(title, text)


if __name__ == "__main__":
    main()
