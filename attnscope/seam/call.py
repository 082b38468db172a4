"""One attention call, as a model made it, and how it held against itself.

Shapes: B text, H head, G kv head, Q query, K key, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.tiled import TiledAttention
from attnscope.attention.visibility import Logits, Visibility
from attnscope.errors import ModelError

CHECKED_ROWS = 64  # rows of an answer compared with what the model's own attention gives, each call
REPEATED_ROWS = 16  # rows of P V compared with the output that the model made of the same P


@dataclass(eq=False)
class AttentionCall:
    """One attention call, as the model made it.

    layer: which layer; call: which call of that layer (families that attend twice a layer count up).
    q_BHQD, k_BGKD, v_BGKD: after position encoding, None where the family bypasses the interface.
    weights_BHQK: the model's own matrix, None under fused implementations. output_BQHD: before the output projection,
    None where attnscope is to give it.
    """

    layer: int
    call: int
    path: str
    module: nn.Module
    weights_BHQK: Tensor | None
    visible: Visibility
    logits: Logits | None = None
    v_BGKD: Tensor | None = None
    output_BQHD: Tensor | None = None
    sinks: Tensor | None = None  # (B or 1, H, Q or 1) sink logits
    sinks_scale_output: bool = False  # they leave the rows alone and scale the output

    @property
    def takes_rows(self) -> bool:
        """Whether sink logits take a share of the rows, which then sum to less than 1."""
        return self.sinks is not None and not self.sinks_scale_output

    @cached_property
    def P(self) -> AttentionOperator:
        """The call's attention as an operator: the model's own matrix, or answered from q and k.

        Raises ModelError where the model returned neither.
        """
        if self.weights_BHQK is not None:
            P: AttentionOperator = DenseAttention(self.weights_BHQK, self.visible, self.logits)
        elif self.logits is not None:
            answers = self.output_BQHD is None
            P = TiledAttention(self.logits, self.sinks, self.v_BGKD, answers, self.sinks_scale_output)
        else:
            raise ModelError(
                f"layer {self.layer} showed neither weights nor queries and keys",
                'load the model with attn_implementation="eager"',
            )
        P.whole_rows = self.logits is not None and not self.takes_rows
        return P


@dataclass
class CallCheck:
    """How one call held, None where it could not be measured.

    row_sum_error: largest |row sum - 1| (None with sink logits). masked_weight: largest weight on a key that the mask
    hides. value_error: largest |P V - output| over some rows, relative to the largest |output|.
    """

    layer: int
    call: int
    path: str
    heads: int
    route: str
    row_sum_error: float | None
    masked_weight: float | None
    value_error: float | None
    sink_logits: bool = False
    keys: int = 0
    mask: str = "none"  # that the model itself built: boolean or additive, of N x N
    kernel: str = "eager"  # that gave the layer's output; eager and math make N x N a head

    def failures(self, dtype: torch.dtype) -> list[str]:
        """What did not hold to what the dtype allows, in words."""
        row, value = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
        limits = (
            ("row sums off by", self.row_sum_error, row),
            ("weight on masked keys", self.masked_weight, 0.0),
            ("P V differs from the layer's own output by", self.value_error, value),
        )
        return [
            f"layer {self.layer}: {what} {found:.2g} (allowed {limit:.2g})"
            for what, found, limit in limits
            if found is not None and not found <= limit
        ]


TOLERANCE = {  # row sums, and P V against the output: what rounding alone does
    torch.float64: (1e-10, 1e-6),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (3e-2, 5e-2),
}


@dataclass
class CaptureReport:
    """What one forward pass was: its calls in order, and whether each held."""

    calls: list[CallCheck] = field(default_factory=list)
    tokens: int = 0

    @property
    def layers(self) -> list[int]:
        """The layers that were heard, in order, each once."""
        return list(dict.fromkeys(check.layer for check in self.calls))


def check_call(call: AttentionCall, route: str) -> CallCheck:
    """Hold one call against itself: rows sum to 1, masked keys get nothing, P V is the call's own output."""
    check = CallCheck(
        call.layer, call.call, call.path, call.P.heads, route, None, None, None, call.takes_rows, call.P.keys
    )
    mask = call.visible.mask
    if mask is not None:
        check.mask = "boolean" if mask.dtype == torch.bool else "additive"
    if call.weights_BHQK is not None:
        check.row_sum_error, check.masked_weight = _matrix_errors(call)
    if call.v_BGKD is not None and call.output_BQHD is not None:
        check.value_error = _value_error(call, call.v_BGKD, call.output_BQHD)
    return check


def sdpa_kernel(call: AttentionCall) -> str:
    """The kernel that PyTorch's own attention takes for a call: flash, efficient, cudnn, or math, which makes N x N."""
    assert call.logits is not None
    assert call.v_BGKD is not None
    q, k, mask = call.logits.q_BHQD, call.logits.k_BGKD, call.visible.mask
    causal, shared = mask is None and call.visible.causal, q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, call.v_BGKD, mask, 0.0, causal, scale=call.logits.scale, enable_gqa=shared)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(choice, "unknown")


def sampled_rows(queries: int, count: int = CHECKED_ROWS) -> Tensor:
    """So many rows spread over all, in four runs; all of them where there are fewer."""
    run = count // 4
    if queries <= count:
        return torch.arange(queries)
    starts = torch.linspace(0, queries - run, 4).long()
    return (starts[:, None] + torch.arange(run)).flatten()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    difference = (found.float() - expected.float()).abs().max()
    return float(difference / expected.abs().max().float().clamp_min(1e-30))


def _matrix_errors(call: AttentionCall) -> tuple[float | None, float]:
    """Largest |row sum - 1| (None with sink logits), and the largest weight on a masked key."""
    P = call.P
    seen_BHQ = call.visible.counts_BHQ.to(P.device) > 0
    row_sum = None if call.takes_rows else float(((P.mass - 1).abs() * seen_BHQ).max())
    blind = not bool(seen_BHQ.all())  # rows that see nothing are uniform in eager attention
    largest = []
    for a, b in P.blocks():
        hidden = P.rows(a, b) * (~call.visible.rows(a, b).to(P.device)).float()  # several times as fast as a fill
        largest.append((hidden * seen_BHQ[..., a:b, None] if blind else hidden).max())
    return row_sum, float(torch.stack(largest).max())


def _value_error(call: AttentionCall, v_BGKD: Tensor, output_BQHD: Tensor) -> float | None:
    """Largest |P V - output| over some rows; None where the call's output is not P V."""
    P, G = call.P, v_BGKD.shape[1]
    if call.sinks_scale_output or output_BQHD.shape != (P.batch, P.queries, P.heads, v_BGKD.shape[-1]):
        return None
    row_R = sampled_rows(P.queries, REPEATED_ROWS)
    runs = row_R.split(REPEATED_ROWS // 4)
    weights_BHRK = torch.cat([P.rows(int(run[0]), int(run[-1]) + 1) for run in runs], 2)
    expected_BGRD = weights_BHRK.reshape(P.batch, G, -1, P.keys) @ v_BGKD.float()
    expected_BHRD = expected_BGRD.view(P.batch, P.heads, len(row_R), -1)
    return relative_error(expected_BHRD, output_BQHD[:, row_R.to(P.device)].transpose(1, 2))
