"""What the oracle expects of one attention call: from raw weights (`full`), or from q, k and v (`scores`).

Shapes: B text, T token, H head, Q query, K key, D head dim, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.modules import ModuleRun
from attnscope.parity.arranged import PLAIN, Arrangement
from attnscope.parity.given import given_of, mask_of, precise
from attnscope.reference.attention import apply_mask, attention_logits, attention_output, logit_terms, softmax
from attnscope.reference.given import UnreadableError
from attnscope.reference.layout import Layout
from attnscope.reference.layouts import UNREAD, UNREAD_ENCODERS, UNREAD_TOWERS
from attnscope.reference.reader import read


@dataclass(frozen=True)
class Expected:
    """What the oracle says one call should be, and what the model's output is.

    output, model_output: of the module (B, T, E) where it is read in full, else of its heads (B, T, H, V). output_of:
    the output with other weights in place of the oracle's. terms: the largest sum of the sizes of a logit's terms in
    each row, (B, H, Q). logits (B, H, Q, K), before the mask, and v_BGKV: where it is read in full.
    """

    weights_BHQK: Tensor
    visible_QK: Tensor
    output: Tensor
    model_output: Tensor
    output_of: Callable[[Tensor], Tensor]
    terms: Callable[[], Tensor]
    logits: Callable[[], Tensor] | None = None
    v_BGKV: Tensor | None = None


def from_weights(
    run: ModuleRun, layout: Layout | None, config: Any, layer: Any, arrangement: Arrangement = PLAIN
) -> Expected:
    """Weights and the module's output, from the hidden states that entered the module and its raw weights.

    Raises UnreadableError where the layer cannot be read so, or comes out in another shape than the model's.
    """
    if layout is None or layer is None:
        known = {**UNREAD, **UNREAD_ENCODERS, **UNREAD_TOWERS}
        raise UnreadableError(known.get(config.model_type, f"no layout is known for {config.model_type}"))
    if arrangement.unknown:
        raise UnreadableError(arrangement.unknown)
    reading = read(given_of(run, layout, config, layer, arrangement=arrangement))
    _same_shape("weights", reading.weights_BHQK, run.calls[0].weights_BHQK)
    _same_shape("output", reading.output_BTE, run.output_BTE)
    assert run.output_BTE is not None
    return Expected(
        reading.weights_BHQK,
        reading.visible_QK,
        reading.output_BTE,
        run.output_BTE,
        reading.output_of,
        reading.terms,
        reading.logits,
        reading.v_BGTV,
    )


def from_call(call: AttentionCall) -> Expected | None:
    """Weights and the heads' output, from what the model passed to its attention; None where it was not observed."""
    spec = call.spec
    if spec is None or call.output_BQHV is None:
        return None
    bias, mask = None if spec.bias is None else precise(spec.bias), mask_of(call)
    q, k, v = (precise(x) for x in (spec.q_BHQD, spec.k_BGKD, spec.v_BGKV))
    logits_BHQK = attention_logits(q, k, scale=spec.scale, softcap=spec.softcap, bias=bias)
    logits_BHQK = apply_mask(logits_BHQK, mask)
    with_sinks_BHQK = _with_sinks(logits_BHQK, spec.sinks)
    weights_BHQK = softmax(logits_BHQK) if spec.sinks_scale_output else with_sinks_BHQK
    share_BHQ1 = with_sinks_BHQK.sum(-1, keepdim=True) if spec.sinks_scale_output else torch.ones(()).to(q)
    visible = call.visible.rows(0, call.visible.queries)
    if mask.dtype != torch.bool:  # what it adds to a visible key is a term of the logit
        bias = (0 if bias is None else bias) + mask.where(visible, 0.0)
    return Expected(
        weights_BHQK,
        visible,
        attention_output(with_sinks_BHQK, v).transpose(1, 2),
        call.output_BQHV,
        output_of=lambda others_BHQK: attention_output(others_BHQK * share_BHQ1, v).transpose(1, 2),
        terms=lambda: logit_terms(q, k, scale=spec.scale, bias=bias, mask=visible, sinks=spec.sinks),
    )


def dtype_of(call: AttentionCall) -> torch.dtype | None:
    """The dtype of the q that the model passed to its attention; None where it was not observed."""
    return None if call.spec is None else call.spec.q_BHQD.dtype


def _with_sinks(logits_BHQK: Tensor, sinks_BHQ: Tensor | None) -> Tensor:
    if sinks_BHQ is None:
        return softmax(logits_BHQK)
    sink_BHQ1 = sinks_BHQ[..., None].to(logits_BHQK).expand(*logits_BHQK.shape[:-1], 1)
    return softmax(torch.cat([logits_BHQK, sink_BHQ1], dim=-1))[..., :-1]


def _same_shape(name: str, ours: Tensor, theirs: Tensor | None) -> None:
    if theirs is not None and ours.shape != theirs.shape:
        raise UnreadableError(f"its layout gives {name} {tuple(ours.shape)}, the model {tuple(theirs.shape)}")
