"""The ranked heads as a person sees them: as many columns as the terminal has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnscope.metrics.metrics import COLUMNS, KEPT_FIRST, KNOWN, LENGTHS, LOOKBACKS, MASS, METRICS, order_of
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet, fitting

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head

UNIFORM = "uniform"  # the column beside the mass on named keys
TEXT_ROLE, LEADING = "text role", KEPT_FIRST[:5]  # what an atlas' roles leave room for after the first metrics
WIDE, NARROW = 120, 72  # a screen below these shows the roles of an atlas below each other, or not at all
RELATION, ROLES = "strongest relation", "roles"
LONGEST_TOKEN = 16
LEAST_RELATION = 24  # characters that the strongest relation keeps where metrics could take them


@dataclass(frozen=True)
class HeadsTable:
    """The sheet that is shown, and the titles of the columns that it has no room for."""

    sheet: Sheet
    hidden: Sequence[str]

    @property
    def names(self) -> set[str]:
        """The ids of the metrics that are shown, and the titles of the other columns."""
        return {column.key for column in self.sheet.columns}


def ranked(seen: Observation, shown: Sequence[Head], sort: str, width: int) -> HeadsTable:
    """The ranked heads: as many metrics as so many characters have room for, the one that sorts in any case."""
    between = " " if width >= WIDE else "\n"
    null = uniform_rows(seen, shown)
    rows: list[Row] = [head_row(seen, head, between) for head in shown]
    rows += [{"head": UNIFORM, ROLES: kind, "role": kind, **scores} for kind, scores in null]

    # The relation gives up room before a metric does, down to a few words.
    relation, weight = Column(RELATION, align="left", fit="cut"), Column("weight", cells.score)
    which = which_columns(seen, roles=width >= NARROW)
    if any(head.near_uniform for head in shown):
        which.append(Column("unif"))
    room = width - sum(column.width(rows) for column in (*which, weight))
    room -= min(relation.width(rows), max(LEAST_RELATION, width // 3))

    sorted_by, _ = order_of(sort)
    offered = score_columns(seen)
    room -= 2 * any(column.key == sorted_by for column in offered)  # its arrow
    kept = fitting(offered, rows, room, (sorted_by, MASS.id, UNIFORM, *LENGTHS, *LOOKBACKS))
    hidden = [ROLES] * (seen.atlas is not None and width < NARROW)
    hidden += [column.title for column in offered if column not in kept]
    columns = (*which, *kept, relation, weight)
    marked = [replace(column, title=_marked(column.title, sort), name=column.key) for column in columns]
    return HeadsTable(Sheet(rows, marked, dim=len(shown)), hidden)


def head_row(seen: Observation, head: Head, between: str = " ") -> Row:
    """What the columns show of a head; between: what is between the roles of an atlas."""
    relation, stack = head.strongest, seen.of(head.stack)
    return {
        "head": head.name,
        "kv": str(head.kv_head),
        "role": head.role,
        ROLES: between.join(head.atlas_roles) or cells.MISSING,
        TEXT_ROLE: head.text_role,
        "unif": "≈" * bool(head.near_uniform),
        **head.score,
        UNIFORM: head.uniform,
        "top_key_mass": f"{_token(stack.keys, head.top_key)} {cells.number(head.top_key_mass)}",
        RELATION: f"{_token(stack.queries, relation.query)} → {_token(stack.keys, relation.key)}"
        if relation
        else cells.MISSING,
        "weight": relation.weight if relation else None,
    }


def uniform_rows(seen: Observation, shown: Sequence[Head]) -> list[tuple[str, dict[str, float]]]:
    """What uniform attention scores, per kind of layer; one unnamed row where all kinds score the same."""
    found: dict[str, dict[str, float]] = {}
    for head in sorted(shown, key=lambda head: head.layer):
        stack = f"{head.stack} " * head.in_other_stack
        visible = seen.of(head.stack).visible[head.layer, head.stack]
        found.setdefault(stack + visible, seen.uniform((head.layer, head.stack)))
    if len({tuple(map(cells.score, scores.values())) for scores in found.values()}) == 1:
        return [("", next(iter(found.values())))]
    return list(found.items())


def which_columns(seen: Observation, roles: bool = True) -> list[Column]:
    """Head, kv head where that is not the head itself, and role; roles: whether those of an atlas have room."""
    columns = [Column("head", align="left")]
    columns += [Column("kv")] * bool(((seen.columns.head >= 0) & (seen.columns.head != seen.columns.kv_head)).any())
    columns += [Column(ROLES if seen.atlas else "role", align="left")] * (roles or not seen.atlas)
    return columns


def score_columns(seen: Observation) -> list[Column]:
    """The metrics, those that were asked for first; with an atlas, after the leading ones the roles on the text."""
    named = [MASS.id, UNIFORM] if MASS.id in seen.columns.scores else []
    named += [name for name in (*LENGTHS, *LOOKBACKS) if name in seen.columns.scores]
    order = dict.fromkeys((*named, *KEPT_FIRST, *METRICS))
    titles = {UNIFORM: UNIFORM, **COLUMNS, **{name: metric.short for name, metric in KNOWN.items()}}
    columns = [Column(titles[name], cells.score, name) for name in order if name in (*named, *METRICS, *COLUMNS)]
    if seen.atlas:
        columns.insert(len(named) + len(LEADING), Column(TEXT_ROLE, align="left"))
    return columns


def _marked(title: str, sort: str) -> str:
    """The heading, with an arrow where the heads are sorted by it."""
    name, ascending = order_of(sort)
    sorts = {**{metric.id: metric.short for metric in KNOWN.values()}, **COLUMNS, "layer": "head"}[name]
    return f"{title} {'▴' if ascending else '▾'}" if title == sorts else title


def _token(prompt: Prompt, position: int) -> str:
    from rich.text import Text

    label = prompt.labels[position]
    text = Text(label.strip("·") or label)
    text.truncate(LONGEST_TOKEN, overflow="ellipsis")
    return f"{text.plain}({position})"
