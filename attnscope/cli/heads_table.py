"""The ranked heads as a person sees them: as many columns as the terminal has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope import cells
from attnscope.cli import output
from attnscope.measure.metrics import COLUMNS, KEPT_FIRST, KNOWN, LENGTHS, LOOKBACKS, MASS, METRICS, order_of

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.keep.columns import Head
    from attnscope.observation import Observation
    from attnscope.text.prompt import Prompt

UNIFORM = "uniform"  # the column beside the mass on named keys
TEXT_ROLE, LEADING = "text role", KEPT_FIRST[:5]  # what an atlas' roles leave room for after the first metrics
WIDE, NARROW = 120, 72  # a screen below these shows the roles of an atlas below each other, or not at all
RELATION, ROLES = "strongest relation", "roles"
LONGEST_TOKEN = 16
LEAST_RELATION = 24  # characters that the strongest relation keeps where metrics could take them


@dataclass(frozen=True)
class Column:
    """One column: its heading, a cell per row, whether the cells are numbers; name: of a metric, its id."""

    title: str
    cells: Sequence[str]
    number: bool = True
    name: str = ""

    @property
    def width(self) -> int:
        """The characters that it takes, with the two spaces after it."""
        from rich.cells import cell_len

        return max(map(cell_len, (self.title, *"\n".join(self.cells).split("\n")))) + 2


@dataclass(frozen=True)
class HeadsTable:
    """The columns that are shown, of so many heads and then rows of uniform attention, and the titles of the others."""

    columns: Sequence[Column]
    heads: int
    sort: str
    hidden: Sequence[str]

    @property
    def names(self) -> set[str]:
        """The ids of the metrics that are shown, and the titles of the other columns."""
        return {column.name or column.title for column in self.columns}

    def sheet(self) -> RichTable:
        """The table of a terminal."""
        table, rows = output.sheet(), len(self.columns[0].cells)
        for column in self.columns:
            title = output.one_line(_marked(column.title, self.sort))
            justify: Literal["right", "left"] = "right" if column.number else "left"
            table.add_column(title, justify=justify, no_wrap=column.title != RELATION)
        for place in range(rows):
            if place == self.heads:
                table.add_section()
            row = (output.one_line(column.cells[place]) for column in self.columns)
            table.add_row(*row, style="dim" if place >= self.heads else None)
        return table


def ranked(seen: Observation, shown: Sequence[Head], sort: str) -> HeadsTable:
    """The ranked heads: as many metrics as the terminal has room for, the one that sorts in any case."""
    null = uniform_rows(seen, shown)
    blank = [""] * len(null)
    relation = Column(RELATION, [*(_relation(seen, head) for head in shown), *blank], number=False)
    weights = (head.strongest.weight if head.strongest else None for head in shown)
    weight = Column("weight", [*map(cells.score, weights), *blank])
    which = _which(seen, shown, [kind for kind, _ in null])
    needed = min(relation.width, max(LEAST_RELATION, output.width() // 3))
    room = output.width() - needed - sum(column.width for column in (*which, weight))
    offered = _scores(seen, shown, null, sort)
    roles = [ROLES] * (seen.atlas is not None and output.width() < NARROW)
    fitting = _fitting(offered, sort, room)
    columns = [*which, *(column for column in offered if column in fitting), relation, weight]
    hidden = roles + [column.title for column in offered if column not in fitting]
    return HeadsTable(columns, len(shown), sort, hidden)


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


def _which(seen: Observation, shown: Sequence[Head], kinds: Sequence[str]) -> list[Column]:
    """Head, kv head where that is not the head itself, role, and the mark of nearly uniform heads where one has it."""
    blank, columns = [""] * len(kinds), seen.columns
    found = [Column("head", [*(head.name for head in shown), *(UNIFORM for _ in kinds)], number=False)]
    if ((columns.head >= 0) & (columns.head != columns.kv_head)).any():
        found.append(Column("kv", [*(str(head.kv_head) for head in shown), *blank]))
    if seen.atlas and output.width() >= NARROW:
        between = " " if output.width() >= WIDE else "\n"
        found.append(Column(ROLES, [*(between.join(head.atlas_roles) or "-" for head in shown), *kinds], number=False))
    elif not seen.atlas:
        found.append(Column("role", [*(head.role for head in shown), *kinds], number=False))
    if any(head.near_uniform for head in shown):
        found.append(Column("unif", [*("≈" if head.near_uniform else "" for head in shown), *blank]))
    return found


def _scores(
    seen: Observation, shown: Sequence[Head], null: Sequence[tuple[str, dict[str, float]]], sort: str
) -> list[Column]:
    """The metrics, those that were asked for first; with an atlas, after the leading ones the roles on the text."""
    named = [MASS.id, UNIFORM] if MASS.id in seen.columns.scores else []
    named += [name for name in (*LENGTHS, *LOOKBACKS) if name in seen.columns.scores]
    order = dict.fromkeys((*named, *KEPT_FIRST, *METRICS))
    found = [_score(seen, shown, null, name) for name in order if name in (*named, *METRICS, *COLUMNS)]
    if seen.atlas:
        of_text = Column(TEXT_ROLE, [*(head.text_role for head in shown), *("" for _ in null)], number=False)
        found.insert(len(named) + len(LEADING), of_text)
    return found


def _fitting(offered: Sequence[Column], sort: str, room: int) -> list[Column]:
    """The columns that there is room for; in any case the one that sorts, and what was asked for."""
    sorted_by, _ = order_of(sort)
    always = (sorted_by, MASS.id, UNIFORM, *LENGTHS, *LOOKBACKS)
    found = []
    for column in sorted(offered, key=lambda column: column.name not in always):
        width = column.width + 2 * (column.name == sorted_by)
        if width <= room or column.name in always:
            found.append(column)
            room -= width
    return found


def _score(seen: Observation, shown: Sequence[Head], null: Sequence[tuple[str, dict[str, float]]], name: str) -> Column:
    """A metric of the heads and of uniform attention; the key that receives most; or the mass that uniform gives."""
    if name in KNOWN:
        scores = (*(head.score for head in shown), *(one for _, one in null))
        return Column(KNOWN[name].short, [cells.score(one[name]) for one in scores], name=name)
    blank = [""] * len(null)
    if name == UNIFORM:
        given = (cells.score(head.uniform) for head in shown if head.uniform is not None)
        return Column(UNIFORM, [*given, *blank], name=name)
    keys = (f"{_token(seen.of(head.stack).keys, head.top_key)} {cells.number(head.top_key_mass)}" for head in shown)
    return Column(COLUMNS[name], [*keys, *blank], name=name)


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
