"""Measure every family against the oracle and write docs/families.md: `python scripts/families_doc.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.families_table import document, stacks_table, studies_table  # noqa: E402

target = ROOT / "docs" / "families.md"
target.parent.mkdir(exist_ok=True)
target.write_text(f"{document()}\n\n{studies_table()}\n\n{stacks_table()}\n")
print(f"wrote {target}")
