"""What a head's weights are made of, for those who ask: q, k and v as they were multiplied, scale, cap, bias, sinks.

Shapes: B text, H kept head, T token, D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.attention.questions import Question
from attnscope.attention.spec import AttentionSpec
from attnscope.observe.collector import Answers, Collector
from attnscope.observe.layers import Layer, View
from attnscope.observe.records import KeptOperands
from attnscope.observe.request import Request, TextInputs


@dataclass(frozen=True)
class OperandCollector(Collector):
    """q, k and v of the heads of a view; nothing of a layer whose weights do not follow from them by one formula."""

    view: View

    name = "operands"

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> OperandCollector:
        """q, k and v of the heads that the request names."""
        return cls(request.view_of(request.operands))

    def questions(self, layer: Layer) -> Sequence[Question]:
        return []

    def collect(self, layer: Layer, answers: Answers) -> KeptOperands | None:
        spec, heads = layer.P.spec, self.view.kept(layer)
        if spec is None or not heads or spec.sinks_scale_output or _many(spec.sinks):
            return None
        kv_heads = [head * spec.kv_heads // spec.heads for head in heads]
        bias = _added(spec)
        return KeptOperands(
            heads,
            spec.q_BHQD[:, heads].float().cpu(),
            spec.k_BGKD[:, kv_heads].float().cpu(),
            spec.v_BGKV[:, kv_heads].float().cpu(),
            spec.scale,
            spec.softcap,
            None if bias is None else bias.expand(spec.batch, spec.heads, -1, -1)[:, heads].float().cpu(),
            None if spec.sinks is None else spec.sinks[0, heads, 0].float().cpu(),
        )

    def of_text(self, collected: KeptOperands, row: int, text: TextInputs) -> KeptOperands:
        """Those of one text; its batch of one stays."""
        queries, keys, bias = len(text.prompt), len(text.looked_at), collected.bias_BHTT
        counts = {"q_BHTD": queries, "k_BHTD": keys, "v_BHTV": keys}
        cut = {name: getattr(collected, name)[row : row + 1, :, :count] for name, count in counts.items()}
        return collected._replace(**cut, bias_BHTT=None if bias is None else bias[row : row + 1, :, :queries, :keys])


def _many(sinks: Tensor | None) -> bool:
    """Whether sink logits differ from query to query, or from text to text."""
    return sinks is not None and (sinks.shape[0] > 1 or sinks.shape[-1] > 1)


def _added(spec: AttentionSpec) -> Tensor | None:
    """What is added to q . k and which keys are hidden, (B or 1, H or 1, T, T); None where queries see one run of keys.

    A run ends with the query's own key: a causal mask with or without a window.
    """
    visible, mask = spec.visible, spec.visible.mask
    seen = visible.rows(0, visible.queries)
    finite = mask is not None and mask.dtype != torch.bool and bool((mask.masked_fill(~seen, 0) != 0).any())
    if spec.bias is None and not finite and bool((seen == _run(seen)).all()):
        return None
    added = torch.zeros_like(seen, dtype=torch.float32)
    if spec.bias is not None:
        added = added + spec.bias.float()
    if finite and mask is not None:
        added = added + mask[..., : visible.keys].float()
    return added.masked_fill(~seen, -torch.inf)


def _run(seen: Tensor) -> Tensor:
    """All keys from the first that a query sees to its own."""
    key_K = torch.arange(seen.shape[-1], device=seen.device)
    return (key_K >= seen.byte().argmax(-1, keepdim=True)) & (key_K <= key_K[:, None])
