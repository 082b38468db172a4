"""What replaces a head's output: its mean over other sequences, nothing, or what it gave for another sequence.

Shapes: B text, S sequence, N row of a pass, P head of a row, T token, G group of positions, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from attnscope.errors import InputError
from attnscope.hooks.calls import AttentionCall, CallSite
from attnscope.hooks.engines import Change
from attnscope.interventions.base import Intervention, OnOutput
from attnscope.interventions.spec import HeadSet, Task

Replacement = Literal["mean", "zero", "resample"]
Call = tuple[int, int]  # layer, and which call of it
Replace = Callable[[CallSite, Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Replacing(Intervention):
    """A head's output, before the output projection, is replaced.

    instead: what by; `prepared` finds the means, and takes another sequence's for "resample".
    """

    name: Replacement = "zero"
    instead: Replace = field(default_factory=lambda: zeros)

    @property
    def least(self) -> int:
        """Another sequence's output takes two."""
        return 2 if self.name == "resample" else 1

    @property
    def learns(self) -> bool:
        """A mean is of what the heads give for all texts."""
        return self.name == "mean"

    def check(self, task: Task) -> None:
        if len(task) < 2 and self.name != "zero":
            raise InputError(f"{self.name} takes what heads give for other sequences, and there is one", "give more")
        if self.name == "resample" and not task.one_length:
            raise InputError(
                "resample takes another sequence's output at the same position, and lengths differ",
                "use {replace=mean}",
            )

    def learnt(self, task: Task, each: Callable[[OnOutput], None]) -> Replacing:
        if not self.learns:
            return replace(self, instead=zeros if self.name == "zero" else of_the_next)
        summing = Summing(max(task.lengths), task.one_length)
        each(summing.add)
        return replace(self, instead=Means(summing.sums))

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        return replacing(sets, lengths, self.instead)


def replacing(sets: Sequence[HeadSet], lengths: Sequence[int], instead: Replace) -> Change:
    """An engine's `change` for a pass of some texts and, after them, the same texts once per set: in the set's rows
    the outputs of its heads are replaced.

        >>> engine = replace(ENGINES["eager"], change=replacing([one], lengths, zeros))
        >>> listen(model, ids_BT.repeat(2, 1), on_call, engine=engine)
    """
    batch = len(lengths)

    def change(call: AttentionCall, output_NTHV: Tensor) -> Tensor:
        pairs = [(at, head) for at, chosen in enumerate(sets, 1) for layer, head in chosen.heads if layer == call.layer]
        if not pairs:
            return output_NTHV
        instead_BTHV = instead(call.place, output_NTHV[:batch], lengths)
        row_P, head_P = torch.tensor(pairs, device=output_NTHV.device).T
        changed = output_NTHV.clone()
        changed.view(-1, batch, *changed.shape[1:])[row_P, :, :, head_P] = instead_BTHV.permute(2, 0, 1, 3)[head_P]
        return changed

    return change


def zeros(place: CallSite, output_BTHV: Tensor, lengths: Sequence[int]) -> Tensor:
    """Nothing."""
    return torch.zeros_like(output_BTHV)


def of_the_next(place: CallSite, output_BTHV: Tensor, lengths: Sequence[int]) -> Tensor:
    """What the head gave, at the same position, for the next sequence of the batch: right of its kind, and wrong."""
    return output_BTHV.roll(-1, 0)


@dataclass(frozen=True)
class Means:
    """The mean output of every head over all sequences but the one that is read.

    sums: of every call, over all sequences, (G, H, V), and of how many tokens each group is, (G,).
    """

    sums: Mapping[Call, tuple[Tensor, Tensor]]

    def __call__(self, place: CallSite, output_BTHV: Tensor, lengths: Sequence[int]) -> Tensor:
        sum_GHV, count_G = self.sums[place.layer, place.call]
        own_BGHV, own_BG = grouped(output_BTHV, lengths, len(count_G))
        others_BG = (count_G - own_BG).clamp_min(1)[..., None, None]
        mean_BGHV = (sum_GHV - own_BGHV) / others_BG
        group_T = groups(output_BTHV.shape[1], len(count_G)).to(output_BTHV.device)
        return mean_BGHV[:, group_T].to(output_BTHV.dtype)


class Summing:
    """Adds up the outputs of many batches, for `Means`.

    one_length: positions are kept apart; else the first alone, which sees nothing but itself.
    """

    def __init__(self, longest: int, one_length: bool) -> None:
        self.groups = longest if one_length else min(longest, 2)
        self.sums: dict[Call, tuple[Tensor, Tensor]] = {}

    def add(self, place: CallSite, output_BTHV: Tensor, lengths: Sequence[int]) -> None:
        own_BGHV, own_BG = grouped(output_BTHV, lengths, self.groups)
        before = self.sums.get((place.layer, place.call), (0, 0))
        self.sums[place.layer, place.call] = before[0] + own_BGHV.sum(0), before[1] + own_BG.sum(0)


def groups(tokens: int, count: int) -> Tensor:
    """(T,): the group of each position; where there are fewer than positions, the last group has the others."""
    return torch.arange(tokens).clamp_max(count - 1)


def grouped(output_BTHV: Tensor, lengths: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """The outputs of each text summed over the positions of a group, (B, G, H, V) in float32, padding left out; and of
    how many tokens, (B, G)."""
    batch, tokens = output_BTHV.shape[:2]
    device = output_BTHV.device
    group_T = groups(tokens, count).to(device)
    there_BT = torch.arange(tokens, device=device) < torch.tensor(lengths, device=device)[:, None]
    shape = (batch, count, *output_BTHV.shape[2:])
    real_BTHV = output_BTHV.float() * there_BT[..., None, None]
    sums = torch.zeros(shape, device=device).index_add_(1, group_T, real_BTHV)
    counts = torch.zeros((batch, count), device=device).index_add_(1, group_T, there_BT.float())
    return sums, counts
