"""Which kind of result fills a folder, by the files that say so; no other kind is written next to it.

refuse_other_kind(folder, "atlas.json", force=False)   # of a scan: refused where a run or a dataset lies
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError
from attnscope.files import read_json
from attnscope.folder.claim import OVER
from attnscope.shown import visible

COMMAND = "command"  # in a manifest: which command line made it; of Python there is none
LONGEST_SAID = 40  # letters of a value in a message

# What each is called, and the files by which it is known: of a finished one, and of one that was started.
KINDS: Mapping[str, tuple[str, ...]] = {
    "a run": ("manifest.json", "unfinished.json"),
    "a dataset": ("run.json", "journal.jsonl"),
    "a scan": ("atlas.json", "checkpoints.parquet", "readings/scan.json", "texts/corpus.json"),
    "an ablation": (
        "ablation.json",
        *(f"{name}/{name}.json" for name in ("ablation", "pairs", "prune", "gradient")),
    ),
    "a knockout": ("knockout.json", "knockout/knockout.json"),
    "cache budgets": ("budgets.json", "budgets/budget.json"),
    "patches": ("patching.json", "patching/patch.json"),
    "a comparison": ("compare.json",),
    "the parts of a logit": ("why.json",),
}


def kinds_in(folder: Path) -> dict[str, str]:
    """What fills a folder: of each kind the first of its files that is there.

    >>> kinds_in(Path("runs/ioi"))
    {'a dataset': 'run.json'}
    """
    names = ((kind, name) for kind, own in KINDS.items() for name in reversed(own))
    return {kind: name for kind, name in names if os.path.lexists(folder / name)}


def refuse_other_kind(folder: Path, name: str, force: bool) -> None:
    """Raise UsageError where another kind of result fills the folder than the one with a file of this name.

    force lets it be written next to that.
    """
    own = next((kind for kind, names in KINDS.items() if name in names), None)  # None: a study that is not listed
    others = [(kind, file) for kind, file in kinds_in(folder).items() if kind != own]
    if not others or force:
        return
    kind, file = others[0]
    try:
        content = read_json(folder / file)
    except (OSError, ValueError):
        content = None
    command = command_of(content) if isinstance(content, dict) else ""
    filled_by = f"of `{clipped(command)}`" if command else f"({file.rpartition('/')[2]})"
    raise UsageError(f"{folder} holds {kind} {filled_by}", OVER)


def command_of(manifest: Mapping[str, Any]) -> str:
    """The command line that a manifest names, in letters that show; "" where it names none."""
    command = manifest.get(COMMAND)
    return visible(command[: LONGEST_SAID + 1]) if isinstance(command, str) else ""


def clipped(text: str) -> str:
    """A text for a message, at most LONGEST_SAID letters of it."""
    return text if len(text) <= LONGEST_SAID else f"{text[:LONGEST_SAID]}…"
