"""`attnscope scan --revision a,b,c`: one scan per checkpoint, and what becomes of the heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.cli import output

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.study.atlas.atlas import Atlas


def effects_at(atlases: Mapping[str, Atlas], probe: str, top: int | None) -> RichTable:
    """The effect of one probe at every checkpoint, by head: those with a role at the last first, then by effect."""
    import numpy as np

    from attnscope.show.checkpoints import courses

    last = list(atlases.values())[-1]
    heads = list(last.heads)
    [course] = [one for one in courses(atlases, heads) if one.name == probe]
    sheet = output.sheet()
    for title in ("head", "roles at the last"):
        sheet.add_column(title, no_wrap=True)
    for revision in atlases:
        sheet.add_column(output.one_line(revision), justify="right", no_wrap=True)
    best_N = np.nan_to_num(course.values_RN[-1], nan=-np.inf)
    order = sorted(range(len(heads)), key=lambda place: (not last.roles[heads[place]], -best_N[place]))
    for place in order[:top]:
        head, effects = heads[place], map(cells.signed, course.values_RN[:, place].tolist())
        sheet.add_row(cells.head_name(*head), " ".join(last.roles[head]) or cells.MISSING, *effects)
    return sheet
