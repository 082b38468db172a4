"""The ranked heads as a person sees them, and what is said below the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.cli import output
from attnscope.measure.metrics import COLUMNS, KNOWN, LENGTHS, LOOKBACKS, MASS, METRICS, order_of
from attnscope.measure.roles import NEEDED_ROWS, unsupported
from attnscope.selection import spelled

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.keep.columns import Head
    from attnscope.observation import Observation
    from attnscope.text.prompt import Prompt

# What narrow screens keep, first to last; metrics not named here come after them.
KEPT_FIRST = (
    *("focus", "previous_token", "induction", "sink", "entropy", "top_key_mass", "duplicate_token", "self"),
    *("distance", "effective_keys", "confidence", "local_mass_32", "entropy_normalised", "off_token_mass"),
)
UNIFORM = "uniform"  # the column beside the mass on named keys
LONGEST_TOKEN = 16
LEAST_RELATION = 24  # characters that the strongest relation keeps where metrics could take them


@dataclass(frozen=True)
class Column:
    """One column: its heading, a cell per row, and whether the cells are numbers."""

    title: str
    cells: Sequence[str]
    number: bool = True

    @property
    def width(self) -> int:
        """The characters that it takes, with the two spaces after it."""
        from rich.cells import cell_len

        return max(map(cell_len, (self.title, *self.cells))) + 2


def heads_sheet(seen: Observation, shown: Sequence[Head], sort: str) -> RichTable:
    """The ranked heads: as many metrics as the terminal has room for, the one that sorts in any case."""
    null = uniform_rows(seen, shown)
    blank = [""] * len(null)
    relation = Column("strongest relation", [*(_relation(seen, head) for head in shown), *blank], number=False)
    weights = (head.strongest.weight if head.strongest else None for head in shown)
    weight = Column("weight", [*map(cells.score, weights), *blank])
    which = _which(seen, shown, [kind for kind, _ in null])
    needed = min(relation.width, max(LEAST_RELATION, output.width() // 3))
    room = output.width() - needed - sum(column.width for column in (*which, weight))
    table, columns = output.sheet(), [*which, *_scores(seen, shown, null, sort, room), relation, weight]
    for column in columns:
        title = output.one_line(_marked(column.title, sort))
        table.add_column(title, justify="right" if column.number else "left", no_wrap=column is not relation)
    for place in range(len(shown) + len(null)):
        if place == len(shown):
            table.add_section()
        row = (output.one_line(column.cells[place]) for column in columns)
        table.add_row(*row, style="dim" if place >= len(shown) else None)
    return table


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


def legend(shown: Sequence[Head], atlas: bool = False) -> list[str]:
    """What the table's words mean, in two lines."""
    masses = [head.mass for head in shown if head.mass is not None]
    mass = "mass: what the queries give the keys, sorts by how far above uniform; " * bool(masses)
    none = "mass -: no query sees one of the keys; " * (bool(masses) and all(map(math.isnan, masses)))
    marked = "unif ≈: nearly uniform; " * any(head.near_uniform for head in shown)
    role = "roles: of the atlas; looks like" if atlas else "role"
    words = f"{none or mass}uniform: attention spread uniformly; {marked}{role} -: this text cannot show it"
    return [words, "strongest relation: largest weight minus 1 / keys that the query sees; ignores key 0"]


def without_attention(seen: Observation) -> list[str]:
    """Which layers have no attention, or not it alone: `layers 0,2 have no attention: ssm`."""
    places: dict[tuple[str, str], list[int]] = {}
    for stack, one in seen.stacks.items():
        said = [(layer, f"have no attention: {what}") for layer, what in one.others.items()]
        said += [(layer, f"have {what} in parallel with their attention") for layer, what in one.partners.items()]
        for layer, what in said:
            places.setdefault((f"{stack} " * (stack in seen.other_stacks), what), []).append(layer)
    return [f"{stack}layers {spelled(layers)} {what}" for (stack, what), layers in places.items()]


def missing_support(seen: Observation) -> list[str]:
    """Why heads have no role, where the text is too short or repeats too little to show it in some layers."""
    if seen.of_two_texts:
        return []  # roles are of one text
    asked = seen.chosen.query
    if asked and len(asked.positions) < NEEDED_ROWS:
        return [f"no roles: they need at least {NEEDED_ROWS} queries, got {len(asked.positions)}"]
    where: dict[str, list[tuple[int, str]]] = {}
    for key, support in seen.support.items():
        has = "this text has" if asked is None else "these queries have"
        for line in unsupported(support, has, key.stack):
            where.setdefault(line, []).append((key.layer, seen.visible[key]))
    return [
        f"not judged{_in_layers(places) * (len(places) < len(seen.support))}: {line}" for line, places in where.items()
    ]


def _in_layers(places: Sequence[tuple[int, str]]) -> str:
    stacks = dict.fromkeys(stack for _, stack in places)
    return f" in layers {spelled([layer for layer, _ in places])} ({', '.join(stacks)})"


def _which(seen: Observation, shown: Sequence[Head], kinds: Sequence[str]) -> list[Column]:
    """Head, kv head where that is not the head itself, role, and the mark of nearly uniform heads where one has it."""
    blank, columns = [""] * len(kinds), seen.columns
    found = [Column("head", [*(head.name for head in shown), *("uniform" for _ in kinds)], number=False)]
    if ((columns.head >= 0) & (columns.head != columns.kv_head)).any():
        found.append(Column("kv", [*(str(head.kv_head) for head in shown), *blank]))
    if seen.atlas:
        found.append(Column("roles", [*(" ".join(head.atlas_roles) or "-" for head in shown), *blank], number=False))
    title = "looks like" if seen.atlas else "role"
    found.append(Column(title, [*(head.role for head in shown), *kinds], number=False))
    if any(head.near_uniform for head in shown):
        found.append(Column("unif", [*("≈" if head.near_uniform else "" for head in shown), *blank]))
    return found


def _scores(
    seen: Observation, shown: Sequence[Head], null: Sequence[tuple[str, dict[str, float]]], sort: str, room: int
) -> list[Column]:
    """The metrics for which there is room; in any case the one that sorts, and what was asked for."""
    sorted_by, _ = order_of(sort)
    asked = [MASS.id, UNIFORM] if MASS.id in seen.columns.scores else []
    asked += [name for name in (*LENGTHS, *LOOKBACKS) if name in seen.columns.scores]
    order = [*asked, *(name for name in dict.fromkeys((*KEPT_FIRST, *METRICS)) if name in METRICS or name in COLUMNS)]
    found: dict[str, Column] = {}
    for name in sorted(order, key=lambda name: name not in (*asked, sorted_by)):
        column = _score(seen, shown, null, name)
        width = column.width + 2 * (name == sorted_by)
        if width <= room or name in (*asked, sorted_by):
            found[name] = column
            room -= width
    return [found[name] for name in order if name in found]


def _score(seen: Observation, shown: Sequence[Head], null: Sequence[tuple[str, dict[str, float]]], name: str) -> Column:
    """A metric of the heads and of uniform attention; the key that receives most; or the mass that uniform gives."""
    if name in KNOWN:
        scores = (*(head.score for head in shown), *(one for _, one in null))
        return Column(KNOWN[name].short, [cells.score(one[name]) for one in scores])
    blank = [""] * len(null)
    if name == UNIFORM:
        return Column(UNIFORM, [*(cells.score(head.uniform) for head in shown if head.uniform is not None), *blank])
    keys = (f"{_token(seen.of(head.stack).keys, head.top_key)} {cells.number(head.top_key_mass)}" for head in shown)
    return Column(COLUMNS[name], [*keys, *blank])


def _marked(title: str, sort: str) -> str:
    """The heading, with an arrow where the heads are sorted by it."""
    name, ascending = order_of(sort)
    sorts = {**{metric.id: metric.short for metric in KNOWN.values()}, **COLUMNS, "layer": "head"}[name]
    return f"{title} {'▴' if ascending else '▾'}" if title == sorts else title


def _relation(seen: Observation, head: Head) -> str:
    """A head's strongest relation: `bank(8) → river(7)`."""
    one, stack = head.strongest, seen.of(head.stack)
    return f"{_token(stack.queries, one.query)} → {_token(stack.keys, one.key)}" if one else cells.MISSING


def _token(prompt: Prompt, position: int) -> str:
    from rich.text import Text

    label = prompt.labels[position]
    text = Text(label.strip("·") or label)
    text.truncate(LONGEST_TOKEN, overflow="ellipsis")
    return f"{text.plain}({position})"
