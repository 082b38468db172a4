"""Calls over pieces of a text, such as a vision tower's over its windows, as the one call that they amount to.

A tower that attends window by window has its calls of a layer handed on as one when the layer is done. Windows of equal
size are the texts of one batch, so that a layer is asked once per size, not once per window.

Shapes: B text, H head, Q query, K key, T patch, W window or piece of equal size, N patch or token of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import PieceAttention, RowsAttention
from attnscope.hooks.calls import AttentionCall, CallSite, OriginalAttention
from attnscope.hooks.engines import Engine, OnCall, check_own, full_precision
from attnscope.hooks.report import CallCheck, settle


def joined_calls(calls: Sequence[AttentionCall], places: Sequence[Tensor]) -> AttentionCall:
    """One call over the tokens of several; places: of each call, where the tokens of its texts are in the whole, (N,)
    or (W, N).

    >>> joined_calls(calls, [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]).P.keys
    8
    """
    back = torch.cat([place.flatten() for place in places]).argsort().to(calls[0].P.device)

    # Tokens one after the other as the calls have them, then in the order of the whole.
    spec, specs = None, [call.spec for call in calls if call.spec is not None]
    if len(specs) == len(calls):
        q, k, v = (
            torch.cat([getattr(own, name).transpose(0, 1).flatten(1, 2) for own in specs], 1)[None, :, back]
            for name in ("q_BHQD", "k_BGKD", "v_BGKV")
        )
        spec = replace(specs[0], q_BHQD=q, k_BGKD=k, v_BGKV=v)
    P = PieceAttention([call.P for call in calls], places, spec)
    outputs = [call.output_BQHV.flatten(0, 1) for call in calls if call.output_BQHV is not None]
    output_BQHV = torch.cat(outputs)[back][None] if len(outputs) == len(calls) else None
    return AttentionCall(calls[0].place, P, spec, None, output_BQHV, kernel=calls[0].kernel)


def in_one(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Calls over one stretch of tokens after the other as one call, its weights in one matrix; others as they are.

    >>> [call.P.keys for call in in_one(calls)]
    [8]
    """
    # Each call must be over one text, all of whose queries see all of its keys: then none sees another call's tokens.
    whole = all(
        call.spec is not None and call.P.batch == 1 and call.visible.by_position and call.P.queries == call.P.keys
        for call in calls
    )
    if len(calls) == 1 or not whole:
        return list(calls)
    places = torch.arange(sum(call.P.keys for call in calls)).split([call.P.keys for call in calls])
    joined = joined_calls(calls, places)
    own = all(call.weights_BHQK is not None for call in calls)
    return [replace(joined, weights_BHQK=joined.P.dense() if own else None)]


def joined_checks(checks: Sequence[CallCheck]) -> CallCheck:
    """How such calls held, as of one: the largest of what is off; None where one was not measured."""
    settle(checks)
    largest: dict[str, Any] = {}
    for name in ("row_sum_error", "masked_weight", "value_error"):
        numbers = [getattr(check, name) for check in checks]
        largest[name] = None if None in numbers else max(numbers)
    return replace(
        checks[0],
        **largest,
        keys=sum(check.keys for check in checks),
        queries=sum(check.queries for check in checks),
        answered_by={kind: reader for check in checks for kind, reader in check.answered_by.items()},
    )


class PendingCall(NamedTuple):
    """One call that was heard; weights_BHQK: the model's own, None under fused implementations."""

    place: CallSite
    spec: AttentionSpec
    original: OriginalAttention
    output_BQHV: Tensor
    weights_BHQK: Tensor | None


class WindowedTower:
    """Keeps a tower's calls until their module is done, and hands those over the first picture on as one.

    patches: of each window of the first picture, in the order in which the tower reads them.
    """

    def __init__(self, patches: Sequence[Sequence[int]], engine: Engine, on_call: OnCall) -> None:
        self.patches, self.engine, self.on_call = patches, engine, on_call
        self.order_T = torch.tensor(list(chain(*patches)))
        # The numbers of the windows of a size; that of patch 0 is alone.
        by_size: dict[tuple[int, bool], list[int]] = {}
        for number, part in enumerate(patches):
            by_size.setdefault((len(part), 0 in part), []).append(number)
        self.groups = [(numbers, torch.tensor([patches[number] for number in numbers])) for numbers in by_size.values()]
        self.waiting: dict[nn.Module, list[PendingCall]] = {}

    def run(self, place: CallSite, spec: AttentionSpec, original: OriginalAttention) -> tuple[Tensor, CallCheck | None]:
        """A call's output, and how it held; None of one that is handed on when its module is done."""
        if spec.q_BHQD.shape[2] == len(self.order_T):
            return self.engine.run(
                place, spec, original, lambda call: self.on_call(joined_calls([call], [self.order_T]))
            )

        # Calls can be joined that are of one text, all of whose queries see all of its keys, by q and k alone.
        seen = spec.visible.by_position and not spec.visible.causal and spec.q_BHQD.shape[2] == spec.visible.keys
        plain = seen and spec.batch == 1 and spec.bias is None and spec.sinks is None
        if self.engine.alters or not plain:
            return self.engine.run(place, spec, original, self.on_call)
        call = PendingCall(place, spec, original, *self.engine.outcome(spec, original))
        self.waiting.setdefault(original.module, []).append(call)
        return call.output_BQHV, None

    def done(self, module: nn.Module) -> list[CallCheck]:
        """How the calls of a module held, which has made all: of the first picture as one, of others by their size."""
        waiting, counts = self.waiting.pop(module, []), [len(part) for part in self.patches]
        first, further = waiting[: len(counts)], waiting[len(counts) :]
        if [call.spec.q_BHQD.shape[2] for call in first] != counts:  # this layer does not attend in these windows
            return _checks_by_size(waiting)
        batches = [_as_batch([first[number] for number in numbers]) for numbers, _ in self.groups]
        calls, checks = zip(*batches, strict=True)
        self.on_call(joined_calls(calls, [patch_WN for _, patch_WN in self.groups]))
        return [joined_checks(checks), *_checks_by_size(further)]


def _as_batch(calls: Sequence[PendingCall]) -> tuple[AttentionCall, CallCheck]:
    """Calls of equal size as those of one batch of texts, and how they held."""
    q, k, v = (torch.cat([getattr(call.spec, name) for call in calls]) for name in ("q_BHQD", "k_BGKD", "v_BGKV"))
    spec = replace(calls[0].spec, q_BHQD=q, k_BGKD=k, v_BGKV=v)
    matrices = [call.weights_BHQK for call in calls if call.weights_BHQK is not None]
    weights = torch.cat(matrices) if matrices else None
    P = RowsAttention(spec) if weights is None else DenseAttention(weights, spec.visible, spec)
    output, kernel = torch.cat([call.output_BQHV for call in calls]), calls[0].original.kernel_of(calls[0].spec)
    call = AttentionCall(calls[0].place, P, spec, weights, output, kernel=kernel)
    with full_precision(P.device):
        check = check_own(call, calls[0].original)
    tokens = P.batch * P.keys
    return call, replace(check, keys=tokens, queries=tokens)


def _checks_by_size(every: Sequence[PendingCall]) -> list[CallCheck]:
    """How calls held, those of one size together."""
    by_size: dict[int, list[PendingCall]] = {}
    for call in every:
        by_size.setdefault(call.spec.q_BHQD.shape[2], []).append(call)
    return [_as_batch(calls)[1] for calls in by_size.values()]
