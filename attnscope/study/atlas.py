"""The atlas of a model: all findings as one table, the roles, and the folder that a scan fills probe by probe.

    atlas = scan(loaded, plan(loaded), folder=Path("runs/atlas"))
    atlas.roles[3, 0]      # ("induction", "sink")

A trial's readings are written as soon as they are made, so a scan that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.errors import UsageError
from attnscope.figures import About, Style
from attnscope.files import save_json, whole_file
from attnscope.model.libraries import versions
from attnscope.study.copying import Copying, copying_of
from attnscope.study.picture import save_probes
from attnscope.study.pool import begins, token_pool
from attnscope.study.probes import SEQUENCES, Measure, Trial, trials
from attnscope.study.roles import RULES, roles_of
from attnscope.study.scan import Finding, Readings, compare, read
from attnscope.tables import as_table, numbers, save

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel

SCHEMA = "atlas/1"
NAME, TABLE, PICTURE, READINGS = "atlas.json", "atlas.parquet", "probes.png", "readings"
COLUMNS = ("score", "null", "effect", "low", "high", "low_all", "high_all", "p", "t", "n")


@dataclass(frozen=True)
class Plan:
    """What a scan will read: trials, and what tells this scan from another."""

    trials: Sequence[Trial]
    seed: int
    facts: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Of all sequences of all trials."""
        return sum(trial.tokens for trial in self.trials)


@dataclass(frozen=True)
class Atlas:
    """What the probes show of every head: heads as (layer, head), findings in order, roles by head, facts."""

    heads: tuple[tuple[int, int], ...]
    findings: Sequence[Finding]
    roles: Mapping[tuple[int, int], tuple[str, ...]]
    facts: Mapping[str, Any]

    def table(self) -> pa.Table:
        """A row per contrast and head: layer, head, probe, against, then the columns of `Effects`; NaN is null."""
        count = len(self.heads)
        layer, head = (np.array(part, np.int32) for part in zip(*self.heads, strict=True))
        named = {
            name: pa.array([getattr(one.contrast, name) for one in self.findings for _ in range(count)], pa.string())
            for name in ("probe", "against")
        }
        values = {
            name: np.concatenate([getattr(one.effects, name) for one in self.findings]).astype(
                np.int32 if name == "n" else np.float64
            )
            for name in COLUMNS
        }
        times = len(self.findings)
        return as_table(
            {
                "layer": np.tile(layer, times),
                "head": np.tile(head, times),
                **{name: one.dictionary_encode() for name, one in named.items()},
                **{name: numbers(value) for name, value in values.items()},
            }
        )

    def probes(self) -> list[str]:
        """The probes that were read, each once."""
        return list(dict.fromkeys(one.contrast.probe for one in self.findings))


def plan(loaded: LoadedModel, *, seed: int = 0, sequences: int = SEQUENCES, pool: Sequence[int] | None = None) -> Plan:
    """The trials that a model's vocabulary and positions allow. Raises as `token_pool`."""
    drawn_from, begin = token_pool(loaded, pool), begins(loaded)
    copying = copying_of(loaded, [*begin, *drawn_from[:3]])
    made = trials(
        drawn_from,
        begin,
        loaded.geometry.max_positions,
        seed,
        sequences,
        copying if isinstance(copying, Copying) else None,
    )
    ids = hashlib.sha256(b"".join(arm.ids_ST.tobytes() for trial in made for arm in trial.arms.values()))
    facts = {
        "model": {"name": loaded.name, "revision": loaded.revision, "type": loaded.geometry.model_type},
        "dtype": loaded.dtype,
        "seed": seed,
        "sequences": sequences,
        "pool": {"tokens": len(drawn_from), "first": drawn_from[0], "last": drawn_from[-1]},
        "ids_sha256": ids.hexdigest(),
        "not_measured": {"copying": copying} if isinstance(copying, str) else {},
    }
    return Plan(made, seed, facts)


def scan(
    loaded: LoadedModel,
    planned: Plan,
    folder: Path | None = None,
    *,
    force: bool = False,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Atlas:
    """Read every trial and compare; with a folder, keep each trial's readings and write table, picture and atlas.json.

    advance: called with the tokens of every pass, and of what an earlier run had read. Raises UsageError for a folder
    that holds another scan, unless force says to write over it.
    """
    if folder is not None:
        _claim(folder, planned, force)
    findings: list[Finding] = []
    heads: tuple[tuple[int, int], ...] = ()
    for trial in planned.trials:
        readings = _readings(loaded, trial, folder, advance)
        findings += compare(trial, readings, planned.seed)
        heads = readings.heads
    named = dict(zip(heads, roles_of(findings, len(heads)), strict=True))
    atlas = Atlas(heads, findings, named, {"schema": SCHEMA, **planned.facts, "versions": versions()})
    if folder is not None:
        save(atlas.table(), folder / TABLE)
        save_probes(atlas, folder / PICTURE, Style(about=About(line=loaded.name, model=loaded.name)))
        save_json({**atlas.facts, "roles": spelled(named), "rules": {one.role: one.condition for one in RULES}},
                  folder / NAME)  # fmt: skip
    return atlas


def spelled(roles: Mapping[tuple[int, int], Sequence[str]]) -> dict[str, list[str]]:
    """{"L3H0": ["induction", "sink"]}: the heads that have a role."""
    return {f"L{layer}H{head}": list(names) for (layer, head), names in roles.items() if names}


def _claim(folder: Path, planned: Plan, force: bool) -> None:
    """Say in the folder which scan fills it; refuse one that another fills."""
    path = folder / READINGS / "scan.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if before is not None and before != planned.facts and not force:
        told = [name for name in planned.facts if before.get(name) != planned.facts[name]]
        raise UsageError(
            f"{folder} holds another scan: {', '.join(told)} differ",
            "name another folder, or write over it with {force}",
        )
    if before != planned.facts:
        for left in sorted((folder / READINGS).glob("*.npz")):
            left.unlink()
    try:
        save_json(planned.facts, path)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "name another folder") from error


def _readings(loaded: LoadedModel, trial: Trial, folder: Path | None, advance: Callable[[int], object]) -> Readings:
    """The trial's readings, from the folder where an earlier run left them."""
    path = None if folder is None else folder / READINGS / f"{trial.name.replace(' ', '-')}.npz"
    if path is not None and path.exists():
        advance(trial.tokens)
        return _load(path)
    readings = read(loaded, trial, advance)
    if path is not None:
        _save(readings, path)
    return readings


def _save(readings: Readings, path: Path) -> None:
    columns: dict[str, Any] = {f"{one.arm}|{one.name}": value for one, value in readings.values.items()}
    with whole_file(path) as stream:
        np.savez_compressed(stream, heads=np.array(readings.heads), **columns)


def _load(path: Path) -> Readings:
    with np.load(path, allow_pickle=False) as found:
        heads = tuple((int(layer), int(head)) for layer, head in found["heads"])
        return Readings(heads, {Measure(*name.split("|")): found[name] for name in found.files if name != "heads"})
