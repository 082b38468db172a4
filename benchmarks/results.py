"""RESULTS.md: a section a benchmark, each written by its own script."""

import re
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
