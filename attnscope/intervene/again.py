"""Rows of a pass that are computed again from q, k and v, put in their places, and compared with the model's own.

Shapes: N row of a pass (text, or set and text), H head, Q query, P head that is computed again, R asked row, r row of
a block, X row of a text, E row of the pass that something changes, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnscope.attention.rows import RowBlock, RowsAgain
from attnscope.attention.spec import AttentionSpec
from attnscope.errors import ModelError
from attnscope.hooks.calls import AttentionCall, relative_error
from attnscope.hooks.report import tolerance


def spec_of(call: AttentionCall, output_NQHV: Tensor) -> AttentionSpec:
    """The call's q, k and v. Raises ModelError for a family that gives no output row per query and head of them."""
    spec = call.spec
    if spec is None or output_NQHV.shape[:3] != (spec.batch, spec.visible.queries, spec.heads):
        raise ModelError(
            f"layer {call.layer}: its heads' outputs are not what its q, k and v give", "choose another family"
        )
    return spec


def recompute(
    call: AttentionCall,
    output_NQHV: Tensor,
    rows: RowsAgain,
    query_NR: Tensor,
    compute: Callable[[RowBlock], Tensor],
    changed_E: Tensor,
) -> Tensor:
    """The call's output with some rows of some heads computed again; compute: gives those of a block, (N, r, P, V).

    changed_E: the rows of the pass that something changes. A row that sees nothing stays as it was. Raises ModelError
    where the others, which nothing changes, are not the model's own.
    """
    changed_NQHV, worst, allowed = output_NQHV.clone(), 0.0, tolerance(output_NQHV.dtype)[1]
    head_P = torch.tensor(rows.heads, device=output_NQHV.device)
    for block in rows.blocks(query_NR):
        text_X, row_X = (block.query_Nr >= 0).nonzero(as_tuple=True)  # -1: this text has fewer rows
        query_X = block.query_Nr[text_X, row_X]
        own_XPV = output_NQHV[text_X[:, None], query_X[:, None], head_P]

        # Families write different things where a row sees no key, and none of them follows from q, k and v.
        seen_XP1 = ~block.blind()[text_X, row_X][..., None]
        new_XPV = torch.where(seen_XP1, compute(block)[text_X, row_X], own_XPV.float())
        changed_NQHV[text_X[:, None], query_X[:, None], head_P] = new_XPV.to(changed_NQHV.dtype)

        # The intact rows of the same pass show whether this family's attention is what its q, k and v give.
        intact_X = ~torch.isin(text_X, changed_E)
        if bool(intact_X.any()):
            worst = max(worst, float(relative_error(new_XPV[intact_X], own_XPV[intact_X])))
    if not worst <= allowed:
        raise ModelError(
            f"layer {call.layer}: rows computed again differ from the model's own by {worst:.2g} (allowed "
            f"{allowed:.2g})",
            "choose another family: this one's attention is not what its q, k and v give",
        )
    return changed_NQHV
