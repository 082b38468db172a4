"""Write what README's first command shows into README: `python scripts/readme_doc.py`.

Its pictures are those of scripts/gallery.py and scripts/python_doc.py.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.readme import document  # noqa: E402

readme = ROOT / "README.md"
with tempfile.TemporaryDirectory() as folder:
    readme.write_text(document(readme.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
print(f"wrote {readme}")
