"""The ranked heads as a person sees them: as many columns as the terminal has room for.

Below the table: what its words mean, and what it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnscope.api.captured import LONGEST_TOKEN, RELATION, ROLES, TEXT_ROLE, head_row, score_columns
from attnscope.metrics.metrics import COLUMNS, KNOWN, LENGTHS, LOOKBACKS, MASS, UNIFORM, order_of
from attnscope.model.geometry import NOT_KNOWN
from attnscope.model.selection import as_ranges, is_linear
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet, fitting

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head

WIDE, NARROW = 120, 72  # a screen below these shows the roles of an atlas below each other, or not at all
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


def heads_table(seen: Observation, shown: Sequence[Head], sort: str, width: int) -> HeadsTable:
    """The ranked heads: as many metrics as so many characters have room for, the one that sorts in any case."""
    between = " " if width >= WIDE else "\n"
    null = uniform_rows(seen, shown)
    rows: list[Row] = [head_row(seen, head, between, token_name) for head in shown]
    rows += [{"head": UNIFORM, ROLES: kind, "role": kind, **scores} for kind, scores in null]

    # The relation gives up room before a metric does, down to a few words.
    relation, weight = Column(RELATION, align="left", fit="cut"), Column("weight", cells.score)
    # Head, kv head where that is not the head itself, and role; those of an atlas where they have room.
    heads, kv_heads = seen.columns.head, seen.columns.kv_head
    which = [
        Column("head", align="left"),
        *[Column("kv")] * bool(((heads >= 0) & (kv_heads >= 0) & (heads != kv_heads)).any()),
    ]
    which += [Column(ROLES if seen.atlas else "role", align="left")] * (width >= NARROW or not seen.atlas)
    if any(head.near_uniform for head in shown):
        which.append(Column("unif"))
    room = width - sum(column.width(rows) for column in (*which, weight))
    room -= min(relation.width(rows), max(LEAST_RELATION, width // 3))

    sorted_by, ascending = order_of(sort)
    offered = score_columns(seen)
    room -= 2 * any(column.key == sorted_by for column in offered)  # its arrow
    kept = fitting(offered, rows, room, (sorted_by, MASS.id, UNIFORM, *LENGTHS, *LOOKBACKS))
    hidden = [ROLES] * (seen.atlas is not None and width < NARROW)
    hidden += [column.title for column in offered if column not in kept]
    columns = (*which, *kept, relation, weight)
    # The column that sorts has an arrow; without a metric it is that of the heads.
    titles = {**{metric.id: metric.short for metric in KNOWN.values()}, **COLUMNS, "layer": "head"}
    arrows = {titles[sorted_by]: f" {'▴' if ascending else '▾'}"}
    marked = [replace(column, title=column.title + arrows.get(column.title, ""), name=column.key) for column in columns]
    return HeadsTable(Sheet(rows, marked, dim=len(shown)), hidden)


def uniform_rows(seen: Observation, shown: Sequence[Head]) -> list[tuple[str, dict[str, float]]]:
    """What uniform attention scores, per kind of layer; one unnamed row where all kinds score the same."""
    scores_of: dict[str, dict[str, float]] = {}
    for head in sorted(shown, key=lambda head: head.layer):
        stack = f"{head.stack} " * head.in_other_stack
        visible = seen.of(head.stack).visible[head.layer, head.stack]
        scores_of.setdefault(stack + visible, seen.uniform((head.layer, head.stack)))
    if len({tuple(map(cells.score, scores.values())) for scores in scores_of.values()}) == 1:
        return [("", next(iter(scores_of.values())))]
    return list(scores_of.items())


def token_name(prompt: Prompt, position: int) -> str:
    """A token in a line of a terminal: `bank(8)`, one of too many columns with an ellipsis."""
    from rich.text import Text

    label = prompt.labels[position]
    text = Text(label.strip("·") or label)
    text.truncate(LONGEST_TOKEN, overflow="ellipsis")
    return f"{text.plain}({position})"


WORDS = {  # of the columns that are shown, as many on a line as 80 columns hold
    "kv": "kv: its shared kv head",
    "focus": "focus: how sharply it looks, away from the first token",
    "previous_token": "prev: weight on the token before",
    "induction": "induct: on what followed an earlier copy",
    "sink": "sink: weight on the first token (key 0)",
    "entropy": "entropy: spread of the weights in nats",
    "absolute_mass": "abs mass: sum of a row's |w|",
    "negative_share": "neg: share of |w| below 0",
    "decay_length": "decay: tokens until 1/e is left",
    "write_gate": "write: share of a value that is written",
}
WIDTH = 80
MASS_WORDS = f"{MASS.short}: what the queries give the keys, sorts by how far above uniform"
TEXT_WORDS = f"{TEXT_ROLE}: on this text alone; -: it cannot show it"
RELATION_WORDS = "strongest relation: largest weight minus 1 / keys that the query sees; ignores key 0"

SIGNED_WORDS = "linear heads: metrics are of |w| as a share of its row; a weight keeps its sign"


def legend(table: HeadsTable, shown: Sequence[Head]) -> list[str]:
    """What the table's words mean, and how many columns had no room."""
    lines = column_words(table.names)
    marked = "; unif ≈: nearly uniform" * any(head.near_uniform for head in shown)
    uniform = f"uniform: the same numbers for attention spread uniformly{marked}"
    words_of = {"role": "; role -: this text cannot show it", "roles": "; roles: by a scan of the model"}
    uniform += "".join(words for title, words in words_of.items() if title in table.names)
    masses = [head.mass for head in shown if head.mass is not None]
    if masses and all(map(math.isnan, masses)):
        lines.append(f"{MASS.short} -: no query sees one of the keys")
    elif masses:
        lines.append(MASS_WORDS)
    lines += [uniform, *[TEXT_WORDS] * (TEXT_ROLE in table.names), RELATION_WORDS]
    lines += [SIGNED_WORDS] * any(is_linear(head.stack) for head in shown)
    if table.hidden:
        count = f"{len(table.hidden)} more column{'s' * (len(table.hidden) > 1)}"
        lines.append(f"{count}: a wider terminal, --sort METRIC or a pipe shows them")
    return lines


def column_words(names: Container[str]) -> list[str]:
    """What columns are that may need a word, by their names; as many on a line as 80 columns hold."""
    lines: list[str] = []
    for words in (words for name, words in WORDS.items() if name in names):
        if lines and len(f"{lines[-1]}; {words}") <= WIDTH:
            lines[-1] += f"; {words}"
        else:
            lines.append(words)
    return lines


def without_attention(seen: Observation) -> list[str]:
    """Which layers have no attention, or not it alone: `layers 0,2 have no attention: ssm`."""
    places: dict[tuple[str, str], list[int]] = {}
    for stack, part in seen.stacks.items():
        unread = ((layer, what) for layer, what in part.others.items() if layer not in seen.mixing)
        facts = [(layer, f"have no attention: {what}") for layer, what in unread]
        facts += [(layer, f"have {what} in parallel with their attention") for layer, what in part.partners.items()]
        facts += [(key.layer, f"are called {keys}") for key, keys in part.visible.items() if keys.endswith(NOT_KNOWN)]
        for layer, what in facts:
            places.setdefault((f"{stack} " * (stack in seen.other_stacks), what), []).append(layer)
    return [f"{stack}layers {as_ranges(layers)} {what}" for (stack, what), layers in places.items()]
