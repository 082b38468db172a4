"""The atlas of a model: what every probe shows of every head, and the roles that follow.

atlas = kept(Path("runs/atlas"))
atlas.roles[3, 0]           # ("induction", "sink")
atlas.named("induction")    # {3: (0, 1)}
atlas_of(loaded)            # what lies in atlas/ of the model's own folder, if it is of these weights
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from attnscope.cells import head_name
from attnscope.errors import InputError, UsageError
from attnscope.files import (
    LONGEST_TEXT,
    FileState,
    check_schema,
    check_types,
    damaged,
    read_json,
    read_small,
    save_json,
    state_of,
)
from attnscope.model.checkpoint import weights_sha256
from attnscope.parquet import read_columns
from attnscope.study.atlas.findings import Finding
from attnscope.study.atlas.roles import MARK, RULES, Rule
from attnscope.study.statistics import Effects, largest_first
from attnscope.tables import as_table, numbers, python_values, save

SCHEMA = "atlas/3"
NAME, TABLE = "atlas.json", "atlas.parquet"
BESIDE = "atlas"  # the folder in a model's own that holds its atlas
MOST_ROWS = 1 << 19  # heads times contrasts: a model of 5,120 heads has 180,000
COLUMNS = ("score", "null", "effect", "low", "high", "low_all", "high_all", "p", "p_symmetric", "t", "n")
STORED = pa.schema(
    {
        **dict.fromkeys(("layer", "head"), pa.int32()),
        **dict.fromkeys(("probe", "against"), pa.string()),
        **{name: pa.int32() if name == "n" else pa.float64() for name in COLUMNS},
    }
)

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """What tells one model's weights from another's: its name, the commit of a Hub model, where its files lie."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def source_folder(self) -> Path | None: ...
    @property
    def base_folder(self) -> Path | None: ...


@dataclass(frozen=True)
class Atlas:
    """What the probes show of every head: heads as (layer, head), findings in order, roles by head, facts."""

    heads: tuple[tuple[int, int], ...]
    findings: Sequence[Finding]
    roles: Mapping[tuple[int, int], tuple[str, ...]]
    facts: Mapping[str, Any]

    def table(self, places: Sequence[int] | None = None, probe: str | None = None) -> pa.Table:
        """A row per contrast and head: layer, head, probe, against, then the columns of `Effects`; NaN is null.

        places: of some of `heads`, in another order. probe: its contrasts alone.
        """
        places = list(range(len(self.heads)) if places is None else places)
        findings = [one for one in self.findings if probe in (None, one.probe)]
        layer, head = np.array(self.heads, np.int32).reshape(-1, 2)[places].T
        named = {
            name: pa.array([getattr(one, name) for one in findings for _ in places], pa.string())
            for name in ("probe", "against")
        }
        values = {
            name: np.concatenate([getattr(one.effects, name)[places] for one in findings]).astype(
                np.int32 if name == "n" else np.float64
            )
            for name in COLUMNS
        }
        times = len(findings)
        return as_table(
            {
                "layer": np.tile(layer, times),
                "head": np.tile(head, times),
                **{name: one.dictionary_encode() for name, one in named.items()},
                **{name: numbers(value) for name, value in values.items()},
            }
        )

    def order(self, probe: str | None = None) -> list[int]:
        """The places of the heads as they are listed: those with a role or a mark first, in the model's order.

        probe: those with a role first, and the largest effect on it first.
        """
        if probe is None:
            marked = self.facts.get("near_uniform", {})
            named = [bool(self.roles[head]) or head_name(*head) in marked for head in self.heads]
            places = list(range(len(self.heads)))
        else:
            named = [bool(self.roles[head]) for head in self.heads]
            places = largest_first(next(one for one in self.findings if one.probe == probe).effects.effect)
        return sorted(places, key=lambda place: not named[place])

    def probes(self) -> list[str]:
        """The probes that were read, each once."""
        return list(dict.fromkeys(one.probe for one in self.findings))

    def rules(self) -> list[Rule]:
        """The conditions of what is said of any head."""
        said = {role for roles in self.roles.values() for role in roles}
        return [rule for rule in RULES if rule.role in said] + [MARK] * bool(self.facts.get("near_uniform"))

    def named(self, role: str) -> dict[int, tuple[int, ...]]:
        """{layer: heads} that have a role; empty where none has."""
        found: dict[int, tuple[int, ...]] = {}
        for (layer, head), roles in self.roles.items():
            if role in roles:
                found[layer] = (*found.get(layer, ()), head)
        return found

    def by_role(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """{role: {layer: heads}} as `selection.select` takes it."""
        return {rule.role: self.named(rule.role) for rule in RULES}

    def fits(self, model: Weights) -> bool | None:
        """Whether this is the atlas of a model's weights; None where neither the commit nor the files tell."""
        return _fits(self.facts, model)

    def save(self, folder: Path) -> None:
        """Write the table, and beside it roles, rules and facts."""
        save(self.table(), folder / TABLE)
        rules = {one.role: one.condition for one in (*RULES, MARK)}
        save_json({**self.facts, "roles": roles_by_head(self.roles), "rules": rules}, folder / NAME)


def kept(folder: Path) -> Atlas:
    """The atlas of a folder that a scan has filled. Raises InputError for another folder."""
    with _damage(folder):
        return _read(_facts_of(folder), columns_of(folder / TABLE, STORED))


def _facts_of(folder: Path) -> dict[str, Any]:
    """What atlas.json says. Raises ValueError for a damaged one, InputError for one of another version."""
    facts: dict[str, Any] = read_json(folder / NAME)
    check_schema(facts, SCHEMA, folder, "scan the model again", InputError)
    check_types(facts, {"model": {"name": str, "revision": (str, NoneType)}, "roles": dict})
    return facts


def _damage(folder: Path) -> AbstractContextManager[None]:
    return damaged(f"{folder} holds no whole atlas", "make one: attnscope scan MODEL --out DIR")


def columns_of(path: Path, schema: pa.Schema, lists: str = "") -> Mapping[str, list[Any]]:
    """The columns of a study's table, those of the schema that it has; None for null and NaN.

    lists: the column whose texts may have any length. Raises OSError as `read_small`, ValueError as `read_columns`, and
    for more rows, or longer names, than any has.
    """
    table = read_columns(pa.BufferReader(read_small(path)), schema, MOST_ROWS)
    columns = {name: [one for part in table[name].chunks for one in python_values(part)] for name in table.column_names}
    for name, values in columns.items():
        if name != lists and any(len(one) > LONGEST_TEXT for one in set(values) if isinstance(one, str)):
            raise ValueError(f"{name} holds a long text")
    return columns


def _read(facts: dict[str, Any], columns: Mapping[str, list[Any]]) -> Atlas:
    places = list(zip(columns["layer"], columns["head"], strict=True))
    heads = tuple(dict.fromkeys(places))
    if places != [*heads] * (len(places) // len(heads)):
        raise ValueError("a contrast lacks heads")
    findings = []
    for start in range(0, len(places), len(heads)):
        part = {name: np.array(columns[name][start : start + len(heads)], np.float64) for name in COLUMNS}
        effects = Effects(**{**part, "n": np.array(columns["n"][start : start + len(heads)], np.int64)})
        findings.append(Finding(columns["probe"][start], columns["against"][start], effects))
    named = {head: _names(facts["roles"].get(head_name(*head), [])) for head in heads}
    return Atlas(heads, findings, named, {name: one for name, one in facts.items() if name not in ("roles", "rules")})


def _names(roles: Any) -> tuple[str, ...]:
    """The roles of a head, a word each. Raises ValueError for what is no list of words."""
    if not isinstance(roles, list) or not all(
        isinstance(one, str) and one.isprintable() and one.split() == [one] for one in roles
    ):
        raise ValueError(f"{roles!r} are not roles")
    return tuple(roles)


def atlas_of(model: Weights, asked: Atlas | Path | str | None = None) -> Atlas | None:
    """The atlas that was asked for, or the one in atlas/ of the model's own folder; None where there is none.

    Raises InputError for a folder without an atlas, UsageError for an atlas of other weights. What lies beside the
    model and is not its atlas is left aside, with a warning.
    """
    if asked is None:
        return _beside(model)
    found = asked if isinstance(asked, Atlas) else kept(Path(asked))
    fits, of = found.fits(model), found.facts["model"]["name"]
    if fits is False:
        raise UsageError(
            f"the atlas is of {of}, which has other weights than {model.name}",
            f"scan this model: attnscope scan {model.name} --out DIR",
        )
    if fits is None:
        logger.warning("cannot tell whether the atlas of %s was made with the weights of %s", of, model.name)
    return found


def _beside(model: Weights) -> Atlas | None:
    folder = model.source_folder / BESIDE if model.source_folder else None
    if folder is None or not (folder / NAME).exists():
        return None
    states = _states(folder)
    try:
        if _fits(_facts_as_they_are(folder, states), model):  # before the table is read: it may be of another
            return _as_it_is(folder, states)
    except InputError as error:
        logger.warning("%s", error)
        return None
    logger.warning("%s is ignored: it was not made with these weights", folder)
    return None


def _fits(facts: Mapping[str, Any], model: Weights) -> bool | None:
    """As `Atlas.fits`, by what its atlas.json says."""
    said = facts["model"]
    if model.revision and (said["name"], said["revision"]) == (model.name, model.revision):
        return True
    scanned, there = said.get("weights_sha256"), weights_sha256(model.source_folder, model.base_folder)
    return scanned == there if scanned and there else None


@lru_cache(maxsize=8)
def _facts_as_they_are(folder: Path, states: tuple[FileState, ...]) -> dict[str, Any]:
    """What the atlas.json of a folder says, read once for many texts; read again where the states are others."""
    with _damage(folder):
        return _facts_of(folder)


@lru_cache(maxsize=8)
def _as_it_is(folder: Path, states: tuple[FileState, ...]) -> Atlas:
    """The atlas of a folder, as `_facts_as_they_are`."""
    return kept(folder)


def _states(folder: Path) -> tuple[FileState, ...]:
    """The state of each file of an atlas that is there."""
    return tuple(state_of(path) for path in (folder / NAME, folder / TABLE) if path.exists())


def roles_by_head(roles: Mapping[tuple[int, int], Sequence[str]]) -> dict[str, list[str]]:
    """{"L3H0": ["induction", "sink"]}: the heads that have a role."""
    return {head_name(*head): list(names) for head, names in roles.items() if names}
