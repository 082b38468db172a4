"""A folder that a scan fills bit by bit, and what in it says of which scan it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError
from attnscope.files import save_json

READINGS = "readings"


def claim(folder: Path, name: str, facts: Mapping[str, Any], force: bool) -> None:
    """Say in the folder which scan, or whose texts, fill it; what was read of another is removed.

    name: of the file that says it; the readings of texts bear it, those of a scan are all there are. Raises UsageError
    for a folder that another fills, unless force says to write over it.
    """
    path = folder / READINGS / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if before is not None and before != facts and not force:
        told = [one for one in facts if before.get(one) != facts[one]]
        raise UsageError(
            f"{folder} holds another scan: {', '.join(told)} differ",
            "name another folder, or write over it with {force}",
        )
    if before != facts:
        for left in sorted((folder / READINGS).glob("*.npz" if name == "scan" else f"{name}-*.npz")):
            left.unlink()
    try:
        save_json(facts, path)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "name another folder") from error
