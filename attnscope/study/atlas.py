"""The atlas of a model: what every probe shows of every head, and the roles that follow.

atlas = kept(Path("runs/atlas"))
atlas.roles[3, 0]           # ("induction", "sink")
atlas.named("induction")    # {3: (0, 1)}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from attnscope.errors import InputError
from attnscope.files import save_json
from attnscope.study.findings import Finding
from attnscope.study.roles import MARK, RULES, Rule
from attnscope.study.statistics import Effects
from attnscope.tables import as_table, numbers, save

SCHEMA = "atlas/1"
NAME, TABLE = "atlas.json", "atlas.parquet"
COLUMNS = ("score", "null", "effect", "low", "high", "low_all", "high_all", "p", "t", "n")


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
            name: pa.array([getattr(one, name) for one in self.findings for _ in range(count)], pa.string())
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

    def save(self, folder: Path) -> None:
        """Write the table, and beside it roles, rules and facts."""
        save(self.table(), folder / TABLE)
        rules = {one.role: one.condition for one in (*RULES, MARK)}
        save_json({**self.facts, "roles": spelled(self.roles), "rules": rules}, folder / NAME)


def kept(folder: Path) -> Atlas:
    """The atlas of a folder that a scan has filled. Raises InputError for another folder."""
    try:
        facts = json.loads((folder / NAME).read_text(encoding="utf-8"))
        table = pq.read_table(folder / TABLE)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no whole atlas", "make one: attnscope scan MODEL --out DIR") from error
    if facts.get("schema") != SCHEMA:
        raise InputError(f"{folder} holds {facts.get('schema')!r}, and {SCHEMA!r} is read", "scan the model again")
    columns = table.to_pydict()
    places = list(zip(columns["layer"], columns["head"], strict=True))
    heads = tuple(dict.fromkeys(places))
    findings = []
    for start in range(0, len(places), len(heads)):
        part = {name: np.array(columns[name][start : start + len(heads)], np.float64) for name in COLUMNS}
        effects = Effects(**{**part, "n": part["n"].astype(np.int64)})
        findings.append(Finding(columns["probe"][start], columns["against"][start], effects))
    named = {(layer, head): tuple(facts["roles"].get(f"L{layer}H{head}", ())) for layer, head in heads}
    told = {name: value for name, value in facts.items() if name not in ("roles", "rules")}
    return Atlas(heads, findings, named, told)


def spelled(roles: Mapping[tuple[int, int], Sequence[str]]) -> dict[str, list[str]]:
    """{"L3H0": ["induction", "sink"]}: the heads that have a role."""
    return {f"L{layer}H{head}": list(names) for (layer, head), names in roles.items() if names}
