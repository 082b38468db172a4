"""What stays as it was, kept as files: `UPDATE_SNAPSHOTS=1 pytest -n 0 FILE` writes what a file of tests finds now."""

import json
import os
from pathlib import Path
from typing import Any

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"


def as_kept(name: str, found: Any) -> bool:
    """Whether this is what `snapshots/NAME.json` holds."""
    path = SNAPSHOTS / f"{name}.json"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(path.read_text(encoding="utf-8"))
    changed = {key: (kept.get(key, "-"), found.get(key, "-")) for key in {**kept, **found}}
    assert found == kept, {key: both for key, both in changed.items() if both[0] != both[1]}
    return True
