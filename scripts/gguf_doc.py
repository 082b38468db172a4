"""Read a GGUF file of each architecture and write the table of docs/models.md: `python scripts/gguf_doc.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.gguf_table import BEGIN, END, table  # noqa: E402

target = ROOT / "docs" / "models.md"
before, _, rest = target.read_text("utf-8").partition(BEGIN)
target.write_text(before + table() + rest.partition(END)[2], "utf-8")
print(f"wrote {target}")
