"""`attnscope scan --revision a,b,c`: one scan per checkpoint, and what becomes of the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.sheets import Column, Sheet

if TYPE_CHECKING:
    from attnscope.selection import HeadIndex
    from attnscope.study.atlas.atlas import Atlas


def effects_at(atlases: Mapping[str, Atlas], probe: str, heads: Sequence[HeadIndex]) -> Sheet:
    """The effect of one probe at every checkpoint, a row per head."""
    from attnscope.show.checkpoints import courses

    last = list(atlases.values())[-1]
    [course] = [one for one in courses(atlases, list(last.heads)) if one.name == probe]
    rows = [
        {
            "head": cells.head_name(*head),
            "roles": " ".join(last.roles[head]) or cells.MISSING,
            **{f"at {name}": value for name, value in zip(atlases, values, strict=True)},
        }
        for head in heads
        for values in [course.values_RN[:, last.heads.index(head)].tolist()]
    ]
    columns = [Column("head", align="left"), Column("roles at the last", name="roles", align="left")]
    return Sheet(rows, [*columns, *(Column(name, cells.signed, f"at {name}") for name in atlases)])
