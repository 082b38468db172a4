"""Attention knockout: some keys are cut from some rows of some heads, and these rows are computed again.

Geva et al. 2023 (arXiv 2304.14767) cut the logits of one key for all heads of some layers. Here each cut has heads and
keys of its own, and intact rows are computed again by the same code. A cut may first move weights to other keys: logits
of a row exchange their places before the softmax.

Shapes: B text, N row of a pass (text, or cut and text), P head of a layer that is computed again, R asked row, r row of
a block, K key, E edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.rows import CutHow, RowBlock, RowsAgain, padded
from attnscope.errors import ModelError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import Change
from attnscope.interventions.base import Intervention, Kept
from attnscope.interventions.patching import recompute, spec_of
from attnscope.interventions.spec import Cut, HeadSet
from attnscope.model.selection import DECODER

OnRows = Callable[[AttentionCall, Sequence[int], Sequence[int], RowBlock], object]  # call, texts, heads, a block


@dataclass(frozen=True)
class Knockout(Intervention):
    """Keys are cut from rows. The sets of its passes are Cuts.

    queries: of every text of the task, the rows. heads: of every layer, all that any cut has: they are computed again
    in the intact rows, too. how: see `attention.again`. stack: whose layers the heads are of. read: called with every
    block of the intact rows, before it is computed. first: the place of the first cut in a pass, 0 without the intact
    texts before it.
    """

    queries: tuple[tuple[int, ...], ...]
    heads: Mapping[int, tuple[int, ...]]
    how: CutHow = "mask"
    stack: str = DECODER
    read: OnRows | None = None
    first: int = 1
    name: str = "knockout"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"how": self.how, "queries": [list(positions) for positions in self.queries]}

    def alone(self, kept: Kept) -> Knockout:
        return replace(self, read=None, first=0)

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        cuts = [cut for cut in sets if isinstance(cut, Cut)]

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            heads = self.heads.get(call.layer, ())
            if call.stack != self.stack or not heads:
                return output_NQHV
            spec = spec_of(call, output_NQHV)
            query_BR = padded([self.queries[text] for text in texts], spec.device)
            query_NR = query_BR.repeat(spec.batch // len(texts), 1)

            # The keys are cut from all asked rows: one mask of them holds in every block.
            edges = [
                (at * len(texts) + number, heads.index(head), key)
                for at, cut in enumerate(cuts, self.first)
                for layer, head in cut.heads
                if layer == call.layer
                for number, text in enumerate(texts)
                for key in cut.keys[text]
            ]
            row_E, place_E, key_E = torch.tensor(edges, dtype=torch.long, device=spec.device).view(-1, 3).T
            cut_NPK = torch.zeros(spec.batch, len(heads), spec.visible.keys, dtype=torch.bool, device=spec.device)
            cut_NPK[row_E, place_E, key_E] = True
            cut_NPrK = cut_NPK[:, :, None] if len(row_E) else None

            # Of a cut that moves weights other rows than those of its edges differ from the intact ones.
            from_NPK = None  # the key whose logit each key has
            for at, cut in enumerate(cuts, self.first):
                places = [heads.index(head) for layer, head in cut.heads if layer == call.layer]
                for number, text in enumerate(texts if places and cut.moves else ()):
                    if cut.moves[text]:
                        if from_NPK is None:
                            from_NPK = torch.arange(spec.visible.keys).repeat(spec.batch, len(heads), 1)
                        source, target = zip(*cut.moves[text], strict=True)
                        row_PK = from_NPK[at * len(texts) + number]
                        row_PK[torch.tensor(places)[:, None], torch.tensor(target)] = torch.tensor(source)
            from_NPK = None if from_NPK is None else from_NPK.to(spec.device)
            changed_E = row_E
            if from_NPK is not None:
                changed_E = torch.arange(self.first * len(texts), spec.batch, device=spec.device)

            def output(block: RowBlock) -> Tensor:
                if self.read is not None:
                    self.read(call, texts, heads, block)
                return (block if from_NPK is None else block.moved(from_NPK)).output(cut_NPrK, self.how)

            return recompute(call, output_NQHV, RowsAgain(spec, heads), query_NR, output, changed_E)

        return change


def cut_output(
    call: AttentionCall, row: int, heads: Sequence[int], queries: Sequence[int], keys: Sequence[int], how: CutHow
) -> Tensor:
    """The output of a call of any code, (B, Q, H, V), where some heads of a text may not look from queries at keys.

    row: the text's place in the batch. Raises ModelError where the call shows no values or no output of its heads.
    """
    output_BQHV, v_BGKV = call.output_BQHV, call.v_BGKV
    if output_BQHV is None or v_BGKV is None:
        raise ModelError(
            f"layer {call.layer} ({call.path}) shows no values of its heads, so that nothing can be cut",
            "choose other heads with {select}",
        )
    query_R, head_P = (torch.tensor(list(places), device=output_BQHV.device) for places in (queries, heads))
    weights_PRK = torch.stack([call.P.rows(query, query + 1)[row, head_P, 0] for query in queries], 1)
    weights_PRK[..., list(keys)] = 0
    if how == "mask":  # the softmax over what is left; a row of which nothing is left stays empty
        weights_PRK /= weights_PRK.sum(-1, keepdim=True).clamp_min(torch.finfo(weights_PRK.dtype).tiny)
    v_PKV = v_BGKV[row, head_P * v_BGKV.shape[1] // call.P.heads].float()
    changed = output_BQHV.clone()
    changed[row, query_R[:, None], head_P] = (weights_PRK @ v_PKV).transpose(0, 1).to(changed.dtype)
    return changed
