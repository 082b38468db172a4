"""RESULTS.md: a section a benchmark, each written by its own script, or all that gpu.sh ran on a card:

python benchmarks/results.py visit
"""

import datetime
import json
import os
import platform
import re
import sys
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


def measured_here(title: str, text: str) -> None:
    """`update_section` for what was measured now, with the machine and the day."""
    update_section(title, f"{text.strip()}\n\n{machine()}, {datetime.date.today()}.")


def machine() -> str:
    """Processor, cores, caches, and the load of the last quarter of an hour, as far as Linux says them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    parts = [name, f"{os.cpu_count()} cores"]
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, size, shared = ((index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
        each = "" if "-" in shared or "," in shared else " each"
        parts += [f"{int(size[:-1]) / 1024:g} MiB of L{level}{each}"] if int(level) > 1 and size.endswith("K") else []
    return ", ".join([*parts, f"load {os.getloadavg()[2]:.1f}"])


def of_a_visit(folder: Path, results: Path = RESULTS) -> list[str]:
    """Put what the parts of a visit said into the file, and name those that failed or were cut off.

    A part that printed a table gives the table, any other the last lines of what it said.
    """
    begun: dict[str, dict] = {}
    ended: dict[str, dict] = {}
    for line in (folder / "visit.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        (begun if "command" in record else ended)[record["part"]] = record
        if "command" in record:  # what a run before it came to is no longer so
            ended.pop(record["part"], None)
    for name, record in begun.items():
        said = (folder / record["file"]).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        table = next((row for row, text in enumerate(said) if text.startswith("|")), None)
        shown = said[max(0, table - 2) :] if table is not None else ["```", *said[-12:], "```"]
        end = ended.get(name)
        how = f"code {end['code']}, {end['seconds']} s" if end else "cut off"
        update_section(f"On a card: {name}", "\n".join([f"`{record['command']}`: {how}.", "", *shown]), results)
    return [name for name in begun if name not in ended or ended[name]["code"]]


if __name__ == "__main__":
    if failed := of_a_visit(Path(sys.argv[1])):
        raise SystemExit(f"these parts failed: {', '.join(failed)}")
