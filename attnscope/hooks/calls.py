"""One attention call, as a model made it: an operator to ask, the model's own function, and how the call held.

A call is checked for consistency: rows sum to 1, masked keys get nothing, P V is the call's own output.

Shapes: B text, H head, Q query, K key, V width of v, R sampled rows, G kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnscope.attention.operator import AttentionOperator, ProbedAttention
from attnscope.attention.rows import Block
from attnscope.attention.spec import KEPT_BYTES, AttentionSpec, Visibility
from attnscope.hooks.report import CallCheck
from attnscope.model.selection import DECODER, StackLayer, consecutive, is_linear


@dataclass(frozen=True)
class CallSite:
    """Which call of a forward pass: its layer, which call of that layer (families that attend twice count up), module.

    path: the module's name in the model. stack: the stack of the layer, see `stacks.py`.
    """

    layer: int
    call: int
    path: str
    module: nn.Module
    stack: str = DECODER

    @property
    def index(self) -> int:
        """Its layer, as sets of heads name it: of a linear layer with its stack."""
        return StackLayer(self.layer, self.stack) if is_linear(self.stack) else self.layer


@dataclass(eq=False)
class AttentionCall:
    """One attention call, as an operator to ask.

    P: the call's attention. spec: q, k, v and how the logits are made, None where the family bypasses the interface.
    weights_BHQK: the model's own matrix, None under fused implementations. output_BQHV: what the model's own attention
    gave, before the output projection; None where it is not known, or attnscope is to give it. seen_values: v where a
    family that bypasses the interface was seen to use it. kernel: the kernel that its rows are of, and in brackets
    transformers' implementation that it belongs to, where that has another name; "attnscope" where it computes them.
    """

    place: CallSite
    P: AttentionOperator
    spec: AttentionSpec | None = None
    weights_BHQK: Tensor | None = None
    output_BQHV: Tensor | None = None
    seen_values: Tensor | None = None
    kernel: str = "eager"

    @property
    def v_BGKV(self) -> Tensor | None:
        """The values, one for H / G heads; None where the family does not show them."""
        return self.seen_values if self.spec is None else self.spec.v_BGKV

    def output_shares(self, start: int, stop: int) -> Tensor | None:
        """What of a block's weighted values the heads write, see `AttentionSpec.output_shares`; None for all."""
        return None if self.spec is None else self.spec.output_shares(start, stop)

    def with_weights(self) -> AttentionCall:
        """The same with the weights that its kernel was seen to give, where these were read out of one."""
        P = self.P
        return replace(self, weights_BHQK=P.weights_BHQK) if isinstance(P, ProbedAttention) else self

    @property
    def layer(self) -> int:
        return self.place.layer

    @property
    def index(self) -> int:
        return self.place.index

    @property
    def call(self) -> int:
        return self.place.call

    @property
    def stack(self) -> str:
        return self.place.stack

    @property
    def path(self) -> str:
        return self.place.path

    @property
    def module(self) -> nn.Module:
        return self.place.module

    @property
    def visible(self) -> Visibility:
        return self.P.visible


ARGUMENTS = ("query", "key", "value", "attention_mask", "scaling", "dropout")  # of an attention function, by position


@dataclass(frozen=True)
class OriginalAttention:
    """The model's own attention function with the arguments of one call, for an engine that wants it run.

    implementation: the name that the model asks transformers for it by.
    """

    attend: Callable[..., Any]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    implementation: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(ARGUMENTS, self.args, strict=False)), **self.kwargs}

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        """Output (B, Q, H, V) and weights (B, H, Q, K), None under fused implementations."""
        output, weights = self.attend(self.module, *self.args, **self.kwargs)
        return output, weights if weights is not None and weights.ndim == 4 else None  # flex gives each row's logsumexp

    def of_values(self, values_BGKV: Tensor) -> Tensor:
        """The output (B, Q, H, V) of other values, all else as it was."""
        arguments = self.arguments | {"value": values_BGKV}
        output, _ = self.attend(self.module, *(arguments.pop(name) for name in ARGUMENTS[:4]), **arguments)
        return cast(Tensor, output)

    def kernel(self, spec: AttentionSpec) -> str:
        """What computes it: eager, of sdpa the kernel that PyTorch takes, flex, or the implementation's own name."""
        if getattr(self.attend, "__name__", "").startswith("eager"):
            return "eager"
        if self.implementation == "sdpa":
            return sdpa_kernel(spec)
        return "flex" if self.implementation == "flex_attention" else self.implementation or "eager"

    def kernel_of(self, spec: AttentionSpec) -> str:
        """The kernel, and in brackets the implementation that it belongs to: flash (sdpa)."""
        kernel = self.kernel(spec)
        return kernel if kernel in ("eager", self.implementation) else f"{kernel} ({self.implementation})"

    def rows(self, spec: AttentionSpec, sample: SampledRows) -> Tensor:
        """The output of some queries alone, (B, R, H, V)."""
        arguments, dtype, row_R = self.arguments, spec.q_BHQD.dtype, sample.row_R
        arguments["query"] = arguments["query"][:, :, row_R]
        for name in ("position_bias", "sinks"):  # one per query, where the family has them
            if isinstance(arguments.get(name), Tensor) and arguments[name].ndim == 4:
                arguments[name] = arguments[name][..., row_R, :]

        def make_mask() -> Tensor:
            seen = torch.cat([spec.visible.rows(start, stop) for start, stop in sample.runs], 2)
            return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

        # Without a mask a function hides by the order of the queries, which these rows no longer have.
        mask = arguments.get("attention_mask")
        if not isinstance(mask, Tensor):
            arguments["attention_mask"] = spec.visible.once(("mask of rows", len(row_R), dtype), make_mask)
        elif mask.shape[-2] > 1:
            arguments["attention_mask"] = mask[..., row_R, :]
        output, _ = self.attend(self.module, *(arguments.pop(name) for name in ARGUMENTS[:4]), **arguments)
        return output


CHECKED_ROWS = 64  # rows of an answer compared with what the model's own attention gives, per call
REPEATED_ROWS = 16  # rows of P V compared with the output that the model made of the same P


def same_numbers(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers in one order, in whatever shape; False where their devices differ.

    A model on two cards gives tensors of both, which torch compares with an error.
    """
    return x.device == other.device and x.numel() == other.numel() and torch.equal(x.reshape(other.shape), other)


class RowChecks:
    """What is measured of rows when they are made, a block of them at a time, and a sample of the rows."""

    def __init__(self, visible: Visibility) -> None:
        self.visible = visible
        self.off: list[Tensor] = []
        self.largest: list[Tensor] = []
        self.samples: dict[int, Tensor] = {}  # by the first query, (B, H, r, K)

    def add(self, block: Block) -> None:
        """Measure a block: how far its rows are from a sum of 1, and its largest weight on a key that is hidden."""
        a, b, device = block.start, block.stop, block.rows.device
        sees_BHr, hidden = _hidden(self.visible, a, b, device)
        self.off.append(((block.row_sum - 1).abs_() * sees_BHr).max())
        shared = [axis for axis in (0, 1) if hidden.shape[axis] == 1]  # by texts or heads: of those the largest
        most = block.rows.amax(shared, keepdim=True) if shared else block.rows
        self.largest.append((most * hidden).max())

    def keep(self, block: Block) -> None:
        """Measure a block whose rows will be gone, and keep those of the sample."""
        self.add(block)
        for start, stop in sampled(self.visible, REPEATED_ROWS, block.rows.device).runs:
            first, last = max(start, block.start), min(stop, block.stop)
            if first < last:
                self.samples[first] = block.rows[:, :, first - block.start : last - block.start].clone()

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """The positions of the rows that were kept, (R,), and these rows, (B, H, R, K)."""
        firsts = sorted(self.samples)
        places = [torch.arange(first, first + self.samples[first].shape[2]) for first in firsts]
        return torch.cat(places), torch.cat([self.samples[first] for first in firsts], 2)


def check_call(call: AttentionCall, route: str, rows: RowChecks | None = None) -> CallCheck:
    """What can be measured of a call as it is; rows: what was measured of rows that are gone."""
    P, mask = call.P, call.P.visible.mask
    check = CallCheck(
        call.layer, call.call, call.path, P.heads, route, keys=P.keys, queries=P.queries, stack=call.stack
    )
    check.sink_logits = call.spec is not None and call.spec.row_sinks is not None
    if mask is not None:
        check.mask = "boolean" if mask.dtype == torch.bool else "additive"
    checks = rows or RowChecks(P.visible)
    if call.weights_BHQK is not None:
        for a, b in P.blocks():
            checks.add(P.block(a, b))
    if checks.off:
        row_sum_error = None if check.sink_logits else torch.stack(checks.off).max()
        check.note(row_sum_error=row_sum_error, masked_weight=torch.stack(checks.largest).max())

    # P V against the call's output; not where sinks take their share of that output alone.
    if not (call.spec is not None and call.spec.sinks_scale_output):
        sample = None if rows is None else rows.sample
        check.note(value_error=value_error(P, call.v_BGKV, call.output_BQHV, sample))
    own = call.weights_BHQK if call.output_BQHV is None else call.output_BQHV
    check.dtype = None if own is None else own.dtype
    return check


def value_error(
    P: AttentionOperator, v_BGKV: Tensor | None, output_BQHV: Tensor | None, sample: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """How far P V is from a call's output over some rows, see `relative_error`; None where they cannot be compared.

    sample: the positions of rows that are gone, and these rows (B, H, R, K); without it they are asked of P.
    """
    shape = None if v_BGKV is None else (P.batch, P.queries, P.heads, v_BGKV.shape[-1])
    if v_BGKV is None or output_BQHV is None or output_BQHV.shape != shape:
        return None
    if sample is None:
        rows = sampled(P.visible, REPEATED_ROWS, P.device)
        weights = [P.rows(start, stop) for start, stop in rows.runs]
        weights_BHRK = torch.cat(weights, 2) if len(weights) > 1 else weights[0]
        own_BRHV = rows.of(output_BQHV)
    else:
        row_R, weights_BHRK = sample
        own_BRHV = output_BQHV[:, row_R.to(output_BQHV.device)]
    expected_BGRV = weights_BHRK.reshape(P.batch, v_BGKV.shape[1], -1, P.keys) @ v_BGKV.float()
    expected_BHRV = expected_BGRV.view(P.batch, P.heads, own_BRHV.shape[1], -1)
    return relative_error(expected_BHRV, own_BRHV.transpose(1, 2))


def _hidden(visible: Visibility, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a block of rows 1 where a row sees any key, (B or 1, H or 1, r), and 1 where a key is hidden from it.

    A row that sees nothing is uniform where it is eager: nothing is hidden from it. Layers share what is small.
    """

    def make() -> tuple[Tensor, Tensor]:
        seen = visible.rows(start, stop).to(device)
        sees_BHr = (visible.counts_BHQ[..., start:stop].to(device) > 0).float()
        hidden = (~seen).float()  # a product is several times as fast as a fill
        return sees_BHr, hidden if visible.mask is None else hidden * sees_BHr[..., None]

    texts, heads, _ = visible.counts_BHQ.shape
    if 4 * texts * heads * (stop - start) * visible.keys > KEPT_BYTES:
        return make()
    return visible.once(("hidden", start, stop, device), make)


def sdpa_kernel(spec: AttentionSpec) -> str:
    """The kernel that PyTorch's own attention takes for a call: flash, efficient, cudnn, or math, which makes N x N.

    With a mask transformers repeats k and v for the heads that share them.
    """
    q, k, v, mask = spec.q_BHQD, spec.k_BGKD, spec.v_BGKV, spec.visible.mask
    causal, shared = mask is None and spec.visible.causal, spec.heads != spec.kv_heads
    if mask is not None and shared:
        k, v = (part[:, :1].expand(-1, spec.heads, -1, -1) for part in (k, v))
        shared = False
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=spec.scale, enable_gqa=shared)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(choice, "unknown")


class SampledRows(NamedTuple):
    """Some queries: their positions, on a device, and the same as ranges."""

    row_R: Tensor
    runs: Sequence[tuple[int, int]]

    def of(self, rows_BQ: Tensor) -> Tensor:
        """These rows of a tensor with one for each query, (B, Q, ...) -> (B, R, ...)."""
        return rows_BQ if len(self.row_R) == rows_BQ.shape[1] else rows_BQ[:, self.row_R]


def sampled(visible: Visibility, count: int, device: torch.device) -> SampledRows:
    """So many rows spread over all; layers that share a mask share them."""

    def make() -> SampledRows:
        places = sampled_rows(visible.queries, count).tolist()  # a look at a device's would make the host wait
        runs = [(run[0], run[-1] + 1) for run in consecutive(places)]
        return SampledRows(sampled_rows(visible.queries, count, device), runs)

    return visible.once(("rows sampled", count, device), make)


def sampled_rows(queries: int, count: int = CHECKED_ROWS, device: torch.device | None = None) -> Tensor:
    """So many rows spread over all, in four runs; all of them where there are fewer. Made on the device, not copied."""
    run = count // 4
    if queries <= count:
        return torch.arange(queries, device=device)
    starts = torch.linspace(0, queries - run, 4).long().tolist()
    return torch.cat([torch.arange(start, start + run, device=device) for start in starts])


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Largest difference over the largest expected magnitude, one number."""
    difference = (actual.float() - expected.float()).abs().max()
    return difference / expected.abs().max().float().clamp_min(1e-30)
