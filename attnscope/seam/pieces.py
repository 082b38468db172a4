"""Calls over pieces of a text, such as a vision tower's over its windows, as the one call that they amount to.

Shapes: B text, H head, Q query, K key, D width of a head, W piece of equal size, N token of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnscope.attention.tiling import PieceAttention
from attnscope.seam.call import AttentionCall
from attnscope.seam.report import CallCheck, settle


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
    return AttentionCall(calls[0].place, P, spec, None, output_BQHV)


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

    def largest(name: str) -> float | None:
        numbers = [getattr(check, name) for check in checks]
        return None if None in numbers else max(numbers)

    return replace(
        checks[0],
        row_sum_error=largest("row_sum_error"),
        masked_weight=largest("masked_weight"),
        value_error=largest("value_error"),
        keys=sum(check.keys for check in checks),
        queries=sum(check.queries for check in checks),
        answered_by={kind: reader for check in checks for kind, reader in check.answered_by.items()},
    )
