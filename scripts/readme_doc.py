"""Write what README's first command shows, and its two pictures, into README and docs/images.

python scripts/readme_doc.py
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from attnscope.cli import run  # noqa: E402
from helpers.readme import document  # noqa: E402

ONE_HEAD = ("heatmap", "the financial bank is located on river bank", "--select", "L1H4", "--out", "runs/bank", "-q")

readme = ROOT / "README.md"
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    readme.write_text(document(readme.read_text(encoding="utf-8"), folder), encoding="utf-8")
    with contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr):
        run(ONE_HEAD)
    shutil.copy(folder / "runs/story/overview.png", ROOT / "docs/images/overview.png")
    shutil.copy(folder / "runs/bank/heads/L01H04.png", ROOT / "docs/images/L01H04.png")
print(f"wrote {readme}")
