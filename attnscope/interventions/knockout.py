"""Attention knockout: some keys are cut from some rows of some heads, and these rows are computed again.

Geva et al. 2023 (arXiv 2304.14767) cut the logits of one key for all heads of some layers. Here each cut has heads and
keys of its own, and intact rows are computed again by the same code. A cut may first move weights to other keys: logits
of a row exchange their places before the softmax.

A linear layer has no softmax and no mask. There a cut token writes nothing into the layer's state, as the asked rows
read it, and no other token has more weight for it: the layer's own rule is run again.

Shapes: B text, N row of a pass (text, or cut and text), P head of a layer that is computed again, R asked row, r row of
a block, K key, E edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscope.attention.linear import LinearRule
from attnscope.attention.rows import CutHow, RowBlock, RowsAgain, padded
from attnscope.errors import ModelError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import Change
from attnscope.interventions.base import Intervention, Kept
from attnscope.interventions.patching import put_back, recompute, rule_of, spec_of
from attnscope.interventions.spec import Cut, HeadSet
from attnscope.model.selection import DECODER, LINEAR


class MapRows(NamedTuple):
    """Rows of a linear layer's map, as a reader of blocks asks of them: |w| as a share of its row's sum."""

    query_Nr: Tensor
    weights_NPrK: Tensor
    seen_NPrK: Tensor
    start: int = 0


# A call, texts, heads, a block.
OnRows = Callable[[AttentionCall, Sequence[int], Sequence[int], RowBlock | MapRows], object]


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
    name = "knockout"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"how": self.how, "queries": [list(positions) for positions in self.queries]}

    def alone(self, kept: Kept) -> Knockout:
        return replace(self, read=None, first=0)

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        cuts = [cut for cut in sets if isinstance(cut, Cut)]

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            heads = self.heads.get(call.index, ())
            if call.stack not in (self.stack, LINEAR) or not heads:
                return output_NQHV
            query_BR = padded([self.queries[text] for text in texts], output_NQHV.device)
            query_NR = query_BR.repeat(len(output_NQHV) // len(texts), 1)

            # The keys are cut from all asked rows: one mask of them holds in every block.
            shape, device = (len(output_NQHV), len(heads), call.P.keys), output_NQHV.device
            cut_NPK, from_NPK = torch.zeros(shape, dtype=torch.bool), None  # from: the key whose logit each key has
            for at, cut in enumerate(cuts, self.first):
                places = [heads.index(head) for layer, head in cut.heads if layer == call.index]
                place_P1 = torch.tensor(places, dtype=torch.long)[:, None]
                for number, text in enumerate(texts if places else ()):
                    row = at * len(texts) + number
                    cut_NPK[row, place_P1, torch.tensor(cut.keys[text], dtype=torch.long)] = True
                    for source, target in cut.moves[text] if cut.moves else ():
                        if from_NPK is None:
                            from_NPK = torch.arange(shape[2]).repeat(*shape[:2], 1)
                        from_NPK[row, place_P1, target] = source
            cut_NPK, from_NPK = cut_NPK.to(device), None if from_NPK is None else from_NPK.to(device)
            changed_E = cut_NPK.flatten(1).any(1).nonzero()[:, 0]
            cut_NPrK = cut_NPK[:, :, None] if len(changed_E) else None
            if from_NPK is not None:
                # Of a cut that moves weights other rows than those of its edges differ from the intact ones.
                changed_E = torch.arange(self.first * len(texts), shape[0], device=device)
            if (rule := rule_of(call)) is not None:
                if self.read is not None:
                    self.read(call, texts, heads, map_rows(call, heads, query_BR))
                if not len(changed_E):
                    return output_NQHV
                asked_NQ = torch.zeros(output_NQHV.shape[:2], dtype=torch.bool, device=device)
                row_X, place_X = (query_NR >= 0).nonzero(as_tuple=True)
                asked_NQ[row_X, query_NR[row_X, place_X]] = True
                again_NQHV, touched_NH = rule_without(rule, heads, cut_NPK, from_NPK, self.how)
                return put_back(call, output_NQHV, again_NQHV, asked_NQ[..., None] & touched_NH[:, None])

            def output(block: RowBlock) -> Tensor:
                if self.read is not None:
                    self.read(call, texts, heads, block)
                return (block if from_NPK is None else block.moved(from_NPK)).output(cut_NPrK, self.how)

            rows = RowsAgain(spec_of(call, output_NQHV), heads)
            return recompute(call, output_NQHV, rows, query_NR, output, changed_E)

        return change


def rule_without(
    rule: LinearRule, heads: Sequence[int], cut_NPK: Tensor, from_NPK: Tensor | None, how: CutHow
) -> tuple[Tensor, Tensor]:
    """A linear layer's output where some tokens write nothing, (N, Q, H, V), and which heads that is of, (N, H).

    There is no softmax to share a weight out again. mask: such a token leaves the state alone, and erases nothing of it
    either; zero: its value is 0, so that its column of the map is. from_NPK: the token that writes the value of each.
    """
    values_NTHV, head_P = rule.values_BTHV.clone(), torch.tensor(heads, device=cut_NPK.device)
    touched_NP = cut_NPK.any(-1)
    if from_NPK is not None:
        touched_NP = touched_NP | (from_NPK != torch.arange(from_NPK.shape[-1], device=from_NPK.device)).any(-1)
        values_NPKV = values_NTHV[:, :, head_P].transpose(1, 2)
        onto_NPKV = from_NPK[..., None].expand_as(values_NPKV)
        values_NTHV[:, :, head_P] = torch.zeros_like(values_NPKV).scatter(2, onto_NPKV, values_NPKV).transpose(1, 2)
        cut_NPK = torch.zeros_like(cut_NPK).scatter(2, from_NPK, cut_NPK)
    touched_NH = touched_NP.new_zeros(len(touched_NP), values_NTHV.shape[2])
    touched_NH[:, head_P] = touched_NP
    cut_NTH = cut_NPK.new_zeros(values_NTHV.shape[:3])
    cut_NTH[:, :, head_P] = cut_NPK.transpose(1, 2)
    if how == "zero":
        return rule.run(values_NTHV.masked_fill(cut_NTH[..., None], 0.0)), touched_NH
    return rule.without(cut_NTH, values_NTHV), touched_NH


def map_rows(call: AttentionCall, heads: Sequence[int], query_BR: Tensor) -> MapRows:
    """The rows of some heads; query_BR: their positions in each text, -1 where it has fewer."""
    first, last = int(query_BR.clamp_min(0).min()), int(query_BR.max())
    size_BPqK = call.P.rows(first, last + 1)[: len(query_BR), list(heads)].abs()
    place_BR = (query_BR - first).clamp_min(0)
    text_B1 = torch.arange(len(query_BR), device=query_BR.device)[:, None]
    size_BPRK = size_BPqK.transpose(1, 2)[text_B1, place_BR].transpose(1, 2)
    shares_BPRK = size_BPRK / size_BPRK.sum(-1, keepdim=True).clamp_min(torch.finfo(size_BPRK.dtype).tiny)
    seen_qK = call.visible.rows(first, last + 1)[0, 0]
    return MapRows(query_BR, shares_BPRK, seen_qK[place_BR][:, None].expand_as(shares_BPRK))


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
