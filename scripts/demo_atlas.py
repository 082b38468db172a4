"""Scan the embedded model as `attnscope scan demo` does, and put the atlas into its folder.

python scripts/demo_atlas.py        # a minute on two cores; after each training of the model
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from attnscope.cli import run
from attnscope.model.sources import DEMO_FOLDER
from attnscope.observe.atlas import BESIDE, NAME, TABLE

out = DEMO_FOLDER / BESIDE
with tempfile.TemporaryDirectory() as name:
    code = run(["scan", "demo", "--device", "cpu", "--out", name, "--format", "table"])
    if code:
        sys.exit(code)
    out.mkdir(exist_ok=True)
    for file in (NAME, TABLE):
        shutil.copy(Path(name) / file, out / file)
print(f"wrote {out}", file=sys.stderr)
