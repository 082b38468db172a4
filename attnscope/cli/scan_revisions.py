"""`attnscope scan --revision a,b,c`: one scan per checkpoint, and what becomes of the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.cli import output

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.selection import HeadIndex
    from attnscope.study.atlas.atlas import Atlas


def effects_at(atlases: Mapping[str, Atlas], probe: str, heads: Sequence[HeadIndex]) -> RichTable:
    """The effect of one probe at every checkpoint, a row per head."""
    from attnscope.show.checkpoints import courses

    last = list(atlases.values())[-1]
    [course] = [one for one in courses(atlases, list(last.heads)) if one.name == probe]
    sheet = output.sheet()
    for title in ("head", "roles at the last"):
        sheet.add_column(title, no_wrap=True)
    for revision in atlases:
        sheet.add_column(output.one_line(revision), justify="right", no_wrap=True)
    for head in heads:
        effects = map(cells.signed, course.values_RN[:, last.heads.index(head)].tolist())
        sheet.add_row(cells.head_name(*head), " ".join(last.roles[head]) or cells.MISSING, *effects)
    return sheet
