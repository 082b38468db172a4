"""Write what the commands of README and the tutorial show into these pages: `python scripts/readme_doc.py`.

Their pictures are those of scripts/gallery.py and scripts/python_doc.py.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "ATTNSCOPE_STAGES": "none"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.samples import PAGES, document  # noqa: E402

for name in PAGES:
    page = ROOT / name
    with tempfile.TemporaryDirectory() as folder:
        page.write_text(document(page.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
    print(f"wrote {page}")
