"""Write docs/commands.md and docs/metrics.md, from what the commands print: `python scripts/reference_doc.py`."""

import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "ATTNSCOPE_STAGES": "none"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.reference_pages import command_sections, metrics_page  # noqa: E402

for name, page in (("commands.md", "\n".join(command_sections())), ("metrics.md", metrics_page())):
    (ROOT / "docs" / name).write_text(page, encoding="utf-8")
    print(f"wrote {ROOT / 'docs' / name}")
