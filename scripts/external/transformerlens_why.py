"""TransformerLens judges `why`: a logit taken apart by its stack of head results, behind a norm that is not folded.

Shapes: N component, T token, E model width, H head, D width of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge.generalized_components.joint_qkv_position_embeddings_attention import (
    JointQKVPositionEmbeddingsAttentionBridge,
)

from attnscope.studies.attribution import decompose_logit
from attnscope.studies.attribution_records import LogitQuery
from external.common import Check, Report
from external.transformerlens_models import TOKENS, Both, near

APART = 1e-4
KEYS = (2, 9)
FAULTS = {
    "heads": "TransformerLens' heads, each in the place of the one before",
    "scale": "the norm's scale left out",
    "weight": "the norm's weight left out",
    "rotation": "the side is not rotated",
}


@dataclass(frozen=True)
class Taken:
    """A logit of the last token, and by which side it is taken apart."""

    layer: int
    head: int
    key: int
    side: str

    @property
    def row(self) -> int:
        """The token of the side."""
        return self.key if self.side == "key" else TOKENS - 1


def taken_apart(report: Report, models: Sequence[Both]) -> None:
    """Each component's contribution to logits of every head behind the first layer, by either side."""
    stacks = "`stack_head_results`, `hook_resid_pre` and `apply_ln_to_stack`"
    with report.check(
        f"`why`: contributions to a logit by the key and by the query, by {stacks}, to {APART:g}"
    ) as check:
        for both, taken in cases(models):
            hold_all(check, both, taken, theirs(both, taken))
    with report.check(f"`why`: TransformerLens' terms sum to its own `hook_attn_scores`, to {APART:g}") as check:
        for both, taken in cases(models):
            scores = cached(both)[f"blocks.{taken.layer}.attn.hook_attn_scores"]
            score = scores[0, taken.head, TOKENS - 1, taken.key]
            check.hold(near(theirs(both, taken).sum(), score, APART), f"{both} {taken}")
    for fault, what in FAULTS.items():
        with report.control(f"`why`: {what}") as control:
            for both, taken in cases(models):
                if fault != "rotation" or rotates(both, taken):
                    hold_all(control, both, taken, theirs(both, taken, fault))


def cases(models: Sequence[Both]) -> list[tuple[Both, Taken]]:
    """Every head of every layer but the first, with each key and side."""
    return [
        (both, Taken(layer, head, key, side))
        for both in models
        for (layer, head), key, side in itertools.product(both.heads, KEYS, ("key", "query"))
        if layer
    ]


def hold_all(check: Check, both: Both, taken: Taken, expected_N: Tensor) -> None:
    """A case per component."""
    asked = LogitQuery(taken.layer, taken.head, TOKENS - 1, taken.key, side=taken.side)
    found = decompose_logit(both.ours, both.ids()[0].tolist(), asked)
    for component, ours, own in zip(found.components, found.contribution_N, expected_N.tolist(), strict=True):
        case = f"{both} {taken} {component.name}: {ours:.6f}, expected {own:.6f}"
        check.hold(abs(ours - own) <= APART, case)


_caches: dict[str, Any] = {}


def cached(both: Both) -> Any:
    """What TransformerLens keeps of the first text."""
    if both.name not in _caches:
        with torch.no_grad():
            _, _caches[both.name] = both.theirs.run_with_cache(both.ids()[:1])
    return _caches[both.name]


@torch.no_grad()
def theirs(both: Both, taken: Taken, fault: str = "") -> Tensor:
    """(N,): what each component, and last the biases of the layer, give to TransformerLens' logit."""
    cache, block = cached(both), both.theirs.blocks[taken.layer]
    stack_NTE = components(both, taken.layer, shifted=fault == "heads")
    normed_NTE = stack_NTE if fault == "scale" else cache.apply_ln_to_stack(stack_NTE[:, None], taken.layer)[:, 0]
    if fault != "weight":
        normed_NTE = normed_NTE * block.ln1.w
    bias_E = 0 if getattr(block.ln1, "b", None) is None else block.ln1.b
    weight, bias = (block.attn.W_K, block.attn.b_K) if taken.side == "key" else (block.attn.W_Q, block.attn.b_Q)
    place = taken.head // (both.theirs.cfg.n_heads // len(weight)) if taken.side == "key" else taken.head
    vectors_ND = normed_NTE[:, taken.row] @ weight[place]
    bias_D = (torch.zeros(weight.shape[1]) + bias_E) @ weight[place] + (0 if bias is None else bias[place])
    vectors_ND = torch.cat([vectors_ND, bias_D[None]])
    if fault != "rotation":
        vectors_ND = rotated(both, taken.layer, vectors_ND, taken.row)
    return vectors_ND @ other_side(both, taken) * vectors_ND.shape[-1] ** -0.5


def components(both: Both, layer: int, shifted: bool) -> Tensor:
    """(N, T, E): what entered the first block, then of each block its heads and what else it wrote."""
    cache, count = cached(both), both.theirs.cfg.n_heads
    results_NTE = cache.stack_head_results(layer)[:, 0]
    residuals = [cache[f"blocks.{number}.hook_resid_pre"][0] for number in range(layer + 1)]
    stack = [residuals[0][None]]
    for number in range(layer):
        heads_HTE = results_NTE[number * count : (number + 1) * count]
        rest_TE = residuals[number + 1] - residuals[number] - heads_HTE.sum(0)
        stack += [heads_HTE.roll(1, 0) if shifted else heads_HTE, rest_TE[None]]
    return torch.cat(stack)


def other_side(both: Both, taken: Taken) -> Tensor:
    """(D,): the vector of the side that is not taken apart, as TransformerLens has it, rotated."""
    name, row = ("q", TOKENS - 1) if taken.side == "key" else ("k", taken.key)
    vectors_HD = cached(both)[f"blocks.{taken.layer}.attn.hook_{name}"][0, row]
    group = both.theirs.cfg.n_heads // len(vectors_HD)
    return rotated(both, taken.layer, vectors_HD[taken.head // group][None], row)[0]


def rotates(both: Both, taken: Taken) -> bool:
    """Whether the family rotates its keys and queries."""
    return f"blocks.{taken.layer}.attn.hook_cos" in cached(both)


def rotated(both: Both, layer: int, vectors_ND: Tensor, row: int) -> Tensor:
    """The vectors of one token, rotated by TransformerLens' own code to where the token is."""
    cache, name = cached(both), f"blocks.{layer}.attn.hook_"
    if f"{name}cos" not in cache:
        return vectors_ND
    cos_1D, sin_1D = (cache[f"{name}{one}"][0, row][None, None] for one in ("cos", "sin"))
    rotate = JointQKVPositionEmbeddingsAttentionBridge._apply_rotary_pos_emb
    made, _ = rotate(None, vectors_ND[None, :, None], vectors_ND[None, :, None], cos_1D, sin_1D)
    return made[0, :, 0]
