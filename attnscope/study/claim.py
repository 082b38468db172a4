"""Which study fills a folder: said there before anything is read, so that none goes on with another's readings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError
from attnscope.files import read_json, refuse_links, save_json
from attnscope.model.checkpoint import weights_sha256

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel


def with_weights(facts: Mapping[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """Facts whose `model` is told from another of its name by the sha256 of its weights."""
    return {
        **facts,
        "model": {**facts["model"], "weights_sha256": weights_sha256(loaded.source_folder, loaded.base_folder)},
    }


def claim(folder: Path, readings: str, study: str, facts: Mapping[str, Any], force: bool) -> Path:
    """The folder of a study's readings, with what it is; an earlier run's *.npz stay if that is the same.

    Raises UsageError where another fills it, or what says so is damaged, unless force says to write over it.
    """
    path = folder / readings / f"{study}.json"
    refuse_links([path.parent])
    before = _before(path, force)
    if before is not None and before != facts and not force:
        told = [name for name in facts if before.get(name) != facts[name]]
        raise UsageError(
            f"{folder} holds another {study}: {', '.join(told)} differ",
            "name another folder, or write over it with {force}",
        )
    if before != facts:
        for left in sorted(path.parent.glob("*.npz")):
            left.unlink()
    try:
        save_json(facts, path)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "name another folder") from error
    return path.parent


def _before(path: Path, force: bool) -> dict[str, Any] | None:
    """What a folder says of the study in it; None without one, and where a damaged one is to be written over."""
    if not path.exists():
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) and not force:
        raise UsageError(f"{path} is damaged", "name another folder, or write over it with {force}")
    return found if isinstance(found, dict) else None
