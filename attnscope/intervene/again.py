"""Rows of a pass that are computed again from q, k and v, put in their places, and held against the model's own.

Shapes: N row of a pass (text, or set and text), H head, Q query, P head that is computed again, r row of a block,
X row that is asked, V width of v.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnscope.attention.again import RowBlock
from attnscope.attention.spec import AttentionSpec
from attnscope.errors import ModelError
from attnscope.seam.call import AttentionCall
from attnscope.seam.checks import relative_error
from attnscope.seam.report import tolerance


def spec_of(call: AttentionCall, output_NQHV: Tensor) -> AttentionSpec:
    """The call's q, k and v. Raises ModelError for a family whose output is not one row per query and head of them."""
    spec = call.spec
    if spec is None or output_NQHV.shape[:3] != (spec.batch, spec.visible.queries, spec.heads):
        raise ModelError(
            f"layer {call.layer}: its heads' outputs are not what its q, k and v give", "choose another family"
        )
    return spec


def put(
    changed_NQHV: Tensor, own_NQHV: Tensor, heads: Sequence[int], block: RowBlock, found_NrPV: Tensor, other_E: Tensor
) -> float:
    """Write a block's rows into `changed`, and return how far those are from the model's own that nothing changed.

    other_E: the rows of the pass that something changed. A row that sees nothing stays as it was.
    """
    text_X, row_X = (block.query_Nr >= 0).nonzero(as_tuple=True)
    query_X, head_P = block.query_Nr[text_X, row_X], torch.tensor(heads, device=text_X.device)
    own_XPV = own_NQHV[text_X[:, None], query_X[:, None], head_P]
    seen_XP1 = ~block.blind()[text_X, row_X][..., None]
    new_XPV = torch.where(seen_XP1, found_NrPV[text_X, row_X], own_XPV.float())
    changed_NQHV[text_X[:, None], query_X[:, None], head_P] = new_XPV.to(changed_NQHV.dtype)
    intact_X = ~torch.isin(text_X, other_E)
    return float(relative_error(new_XPV[intact_X], own_XPV[intact_X])) if bool(intact_X.any()) else 0.0


def check_again(call: AttentionCall, worst: float, dtype: torch.dtype) -> None:
    """Raise ModelError where intact rows that were computed again are not the model's own."""
    allowed = tolerance(dtype)[1]
    if not worst <= allowed:
        raise ModelError(
            f"layer {call.layer}: rows computed again differ from the model's own by {worst:.2g} (allowed "
            f"{allowed:.2g})",
            "choose another family: this one's attention is not what its q, k and v give",
        )
