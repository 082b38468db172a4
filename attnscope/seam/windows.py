"""A vision tower that attends window by window: its calls of a layer, handed on as one when the layer is done.

Windows of equal size are the texts of one batch, so that a layer is asked once per size, not once per window.

Shapes: B text, H head, Q query, K key, T patch, W window of equal size, N patch of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import RowsAttention
from attnscope.seam.call import AttentionCall, CallPlace
from attnscope.seam.engines import Engine, OnCall, check_own, full_precision
from attnscope.seam.own import OwnAttention
from attnscope.seam.pieces import joined_calls, joined_checks
from attnscope.seam.report import CallCheck


@dataclass(frozen=True)
class Heard:
    """One call that was heard; weights_BHQK: the model's own, None under fused implementations."""

    place: CallPlace
    spec: AttentionSpec
    own: OwnAttention
    output_BQHV: Tensor
    weights_BHQK: Tensor | None


class InWindows:
    """Keeps a tower's calls until their module is done, and hands those over the first picture on as one.

    patches: of each window of the first picture, in the order in which the tower reads them.
    """

    def __init__(self, patches: Sequence[Sequence[int]], engine: Engine, on_call: OnCall) -> None:
        self.patches, self.engine, self.on_call = patches, engine, on_call
        self.order_T = torch.tensor(list(chain(*patches)))
        self.groups = of_equal_size(patches)
        self.waiting: dict[nn.Module, list[Heard]] = {}

    def run(self, place: CallPlace, spec: AttentionSpec, own: OwnAttention) -> tuple[Tensor, CallCheck | None]:
        """A call's output, and how it held; None of one that is handed on when its module is done."""
        if spec.q_BHQD.shape[2] == len(self.order_T):
            return self.engine.run(place, spec, own, lambda call: self.on_call(joined_calls([call], [self.order_T])))

        # Calls can be joined that are of one text, all of whose queries see all of its keys, by q and k alone.
        seen = spec.visible.by_position and not spec.visible.causal and spec.q_BHQD.shape[2] == spec.visible.keys
        plain = seen and spec.batch == 1 and spec.bias is None and spec.sinks is None
        if self.engine.alters or not plain:
            return self.engine.run(place, spec, own, self.on_call)
        output, weights = own()
        self.waiting.setdefault(own.module, []).append(Heard(place, spec, own, output, weights))
        return output, None

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


def _as_batch(calls: Sequence[Heard]) -> tuple[AttentionCall, CallCheck]:
    """Calls of equal size as those of one batch of texts, and how they held."""
    q, k, v = (torch.cat([getattr(call.spec, name) for call in calls]) for name in ("q_BHQD", "k_BGKD", "v_BGKV"))
    spec = replace(calls[0].spec, q_BHQD=q, k_BGKD=k, v_BGKV=v)
    matrices = [call.weights_BHQK for call in calls if call.weights_BHQK is not None]
    weights = torch.cat(matrices) if matrices else None
    P = RowsAttention(spec) if weights is None else DenseAttention(weights, spec.visible, spec)
    call = AttentionCall(calls[0].place, P, spec, weights, torch.cat([call.output_BQHV for call in calls]))
    with full_precision(P.device):
        check = check_own(call, calls[0].own)
    tokens = P.batch * P.keys
    return call, replace(check, keys=tokens, queries=tokens)


def _checks_by_size(every: Sequence[Heard]) -> list[CallCheck]:
    """How calls held, those of one size together."""
    by_size: dict[int, list[Heard]] = {}
    for call in every:
        by_size.setdefault(call.spec.q_BHQD.shape[2], []).append(call)
    return [_as_batch(calls)[1] for calls in by_size.values()]


def of_equal_size(patches: Sequence[Sequence[int]]) -> list[tuple[list[int], Tensor]]:
    """The numbers of the windows of each size and their patches, (W, N); the window of patch 0 is alone.

    >>> [(numbers, patch_WN.shape) for numbers, patch_WN in of_equal_size([[0, 1], [2, 3], [4, 5], [6]])]
    [([0], torch.Size([1, 2])), ([1, 2], torch.Size([2, 2])), ([3], torch.Size([1, 1]))]
    """
    by_size: dict[tuple[int, bool], list[int]] = {}
    for number, part in enumerate(patches):
        by_size.setdefault((len(part), 0 in part), []).append(number)
    return [(numbers, torch.tensor([patches[number] for number in numbers])) for numbers in by_size.values()]
