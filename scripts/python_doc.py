"""Run docs/python.ipynb and write docs/python.md and its pictures: `python scripts/python_doc.py`."""

import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "ATTNSCOPE_STAGES": "none"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.notebook import cells_of, document, pictures, run  # noqa: E402

docs = ROOT / "docs"
shown = list(run(cells_of(docs / "python.ipynb")))
for name, png in pictures(shown).items():
    (docs / "images" / name).write_bytes(png)
(docs / "python.md").write_text(document(shown), encoding="utf-8")
print(f"wrote {docs / 'python.md'}")
