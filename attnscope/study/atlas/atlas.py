"""The atlas of a model: what every probe shows of every head, and the roles that follow.

atlas = kept(Path("runs/atlas"))
atlas.roles[3, 0]           # ("induction", "sink")
atlas.probes()              # ["induction p10", ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from attnscope.observe.atlas import COLUMNS, NAME, TABLE, HeadNames, damage, read_atlas, roles_by_head
from attnscope.study.atlas.findings import Finding
from attnscope.study.atlas.roles import MARK, RULES, Rule
from attnscope.study.records import StudyRecord
from attnscope.study.statistics import Effects, largest_first
from attnscope.utils.display import head_name
from attnscope.utils.files import save_json
from attnscope.utils.tables import as_table, numbers, save


@dataclass(frozen=True)
class Atlas(HeadNames, StudyRecord):
    """What the probes show of every head: roles by head, facts, findings in order."""

    stem = "atlas"

    findings: Sequence[Finding]

    @property
    def line(self) -> str:
        """How many heads have each role."""
        counts = {role: sum(map(len, heads.values())) for role, heads in self.by_role().items()}
        said = ", ".join(f"{count} {role}" for role, count in counts.items() if count) or "no role"
        return f"{len(self.heads)} heads of {self.facts['model']['name']}: {said}"

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
        """The conditions of the roles and the mark that any head has."""
        said = {role for roles in self.roles.values() for role in roles}
        return [rule for rule in RULES if rule.role in said] + [MARK] * bool(self.facts.get("near_uniform"))

    def save(self, folder: Path) -> None:
        """Write the table, and a file of roles, rules and facts."""
        save(self.table(), folder / TABLE)
        rules = {one.role: one.condition for one in (*RULES, MARK)}
        save_json({**self.facts, "roles": roles_by_head(self.roles), "rules": rules}, folder / NAME)


def kept(folder: Path) -> Atlas:
    """The atlas of a folder that a scan has filled. Raises InputError for another folder."""
    with damage(folder):
        names, columns = read_atlas(folder)
        count, findings = len(names.heads), []
        for start in range(0, len(columns["layer"]), count):
            part = {name: np.array(columns[name][start : start + count], np.float64) for name in COLUMNS}
            effects = Effects(**{**part, "n": np.array(columns["n"][start : start + count], np.int64)})
            findings.append(Finding(columns["probe"][start], columns["against"][start], effects))
        return Atlas(names.roles, names.facts, findings)
