"""Attention knockout: some keys are cut from some rows of some heads, and these rows are computed again.

Geva et al. 2023 (arXiv 2304.14767) cut the logits of one key for all heads of some layers. Here each cut has heads and
keys of its own, and the intact rows of the same pass are computed again by the same code.

Shapes: B text of a pass, N row of a pass (text, or cut and text), H head, P head of a layer that is computed again,
R asked row, r row of a block, K key, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.again import CutHow, RowBlock, RowsAgain, padded
from attnscope.errors import ModelError
from attnscope.intervene.intervention import HeadSet, Intervention
from attnscope.seam.call import TOLERANCE, AttentionCall
from attnscope.seam.checks import relative_error
from attnscope.seam.engines import Change, Engine
from attnscope.stacks import DECODER


@dataclass(frozen=True)
class Cut(HeadSet):
    """Heads, and the keys of each text of the task that are cut from them in the rows that are asked."""

    keys: tuple[tuple[int, ...], ...] = ()

    @property
    def identity(self) -> Hashable:
        return self.heads, self.keys


OnRows = Callable[[AttentionCall, Sequence[int], Sequence[int], RowBlock], object]  # call, texts, heads, a block


@dataclass(frozen=True)
class Knockout(Intervention):
    """Keys are cut from rows. The sets of its passes are Cuts.

    queries: of every text of the task, the rows. heads: of every layer, all that any cut has: they are computed again
    in the intact rows, too. how: see `attention.again`. stack: whose layers the heads are of. read: called with every
    block of the intact rows, before it is computed.
    """

    queries: tuple[tuple[int, ...], ...]
    heads: Mapping[int, tuple[int, ...]]
    how: CutHow = "mask"
    stack: str = DECODER
    read: OnRows | None = None
    emptied: set[tuple[int, int]] = field(default_factory=set, compare=False)
    name: str = "knockout"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"how": self.how, "queries": [list(one) for one in self.queries]}

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        return replace(engine, change=self.cutting([one for one in sets if isinstance(one, Cut)], texts))

    def cutting(self, cuts: Sequence[Cut], texts: Sequence[int]) -> Change:
        """An engine's `change` for a pass of some texts and, behind them, the same texts once per cut."""

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            heads = self.heads.get(call.layer, ())
            if call.stack != self.stack or not heads:
                return output_NQHV
            spec = _spec(call, output_NQHV)
            query_BR = padded([self.queries[text] for text in texts], spec.device)
            query_NR = query_BR.repeat(spec.batch // len(texts), 1)
            edges = _edges(call.layer, heads, cuts, texts, spec.device)
            changed, worst = output_NQHV.clone(), 0.0
            for block in RowsAgain(spec, heads).blocks(query_NR):
                if self.read is not None:
                    self.read(call, texts, heads, block)
                worst = max(worst, self._write(changed, output_NQHV, heads, block, edges, call.layer))
            _check(call, worst, output_NQHV.dtype)
            return changed

        return change

    def _write(
        self,
        changed_NQHV: Tensor,
        own_NQHV: Tensor,
        heads: tuple[int, ...],
        block: RowBlock,
        edges: Sequence[Tensor],
        layer: int,
    ) -> float:
        """Put a block's rows in their places; returns how far rows without a cut are from the model's own."""
        N, P, K = len(block.query_Nr), len(heads), block.spec.visible.keys
        row_E, place_E, key_E = edges
        cut_NPrK = None
        if len(row_E):
            cut_NPK = torch.zeros(N, P, K, dtype=torch.bool, device=row_E.device)
            cut_NPK[row_E, place_E, key_E] = True
            cut_NPrK = cut_NPK[:, :, None]
        found_NrPV = block.output(cut_NPrK, self.how)
        text_X, row_X = (block.query_Nr >= 0).nonzero(as_tuple=True)
        query_X, head_P = block.query_Nr[text_X, row_X], torch.tensor(heads, device=row_E.device)
        own_XPV = own_NQHV[text_X[:, None], query_X[:, None], head_P]
        seen_XP1 = ~block.blind()[text_X, row_X][..., None]  # a row that sees nothing stays as it was
        if cut_NPrK is not None and self.how == "mask":
            empty_NP = (block.blind(cut_NPrK) & ~block.blind()).any(1)
            self.emptied.update((layer, heads[place]) for place in empty_NP.any(0).nonzero()[:, 0].tolist())
        new_XPV = torch.where(seen_XP1, found_NrPV[text_X, row_X], own_XPV.float())
        changed_NQHV[text_X[:, None], query_X[:, None], head_P] = new_XPV.to(changed_NQHV.dtype)
        intact_X = ~torch.isin(text_X, row_E)
        return float(relative_error(new_XPV[intact_X], own_XPV[intact_X])) if bool(intact_X.any()) else 0.0


def _edges(
    layer: int, heads: Sequence[int], cuts: Sequence[Cut], texts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every edge that is cut in a layer: the pass' row, the head's place among those asked, the key."""
    found = [
        (batch_row, heads.index(head), key)
        for at, cut in enumerate(cuts, start=1)
        for of, head in cut.heads
        if of == layer
        for number, text in enumerate(texts)
        for batch_row in [at * len(texts) + number]
        for key in cut.keys[text]
    ]
    edge_E3 = torch.tensor(found, dtype=torch.long, device=device).view(-1, 3)
    return edge_E3[:, 0], edge_E3[:, 1], edge_E3[:, 2]


def _spec(call: AttentionCall, output_NQHV: Tensor) -> Any:
    """The call's q, k and v. Raises ModelError for a family whose output is not one row per query and head of them."""
    spec = call.spec
    if spec is None or output_NQHV.shape[:3] != (spec.batch, spec.visible.queries, spec.heads):
        raise ModelError(
            f"layer {call.layer}: its heads' outputs are not what its q, k and v give", "choose another family"
        )
    return spec


def _check(call: AttentionCall, worst: float, dtype: torch.dtype) -> None:
    """Raise ModelError where intact rows that were computed again are not the model's own."""
    allowed = TOLERANCE.get(dtype, TOLERANCE[torch.float32])[1]
    if not worst <= allowed:
        raise ModelError(
            f"layer {call.layer}: rows computed again differ from the model's own by {worst:.2g} (allowed "
            f"{allowed:.2g})",
            "choose another family: this one's attention is not what its q, k and v give",
        )
