"""One change to a model's attention while it runs: where, what instead, and by what it is measured.

Where: a set of heads, and, where an intervention has them, queries and keys. What instead: zero, a mean, another text's
output, keys that are cut before the softmax. A measure is a number per text, from the logits of some of its rows.
Passes, shared layers, statistics, random sets and the parts on disk take any intervention and any measure. The first
intervention is here: a head's output is replaced by its mean over other sequences, by nothing, or by what the head gave
for another sequence.

    passes = prepared(loaded, task, sets, measure=LogitDifference(answers, foils))

Shapes: B text, N row of a pass, P head of a row, T token, G group of positions, H head, V width of v or vocabulary, K
set, R row that is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnscope.errors import InputError
from attnscope.hooks.calls import AttentionCall, CallSite
from attnscope.hooks.engines import Change, Engine
from attnscope.interventions.spec import HeadSet, Task

OnOutput = Callable[[CallSite, Tensor, Sequence[int]], None]  # a call's place, its output (B, T, H, V), texts' lengths
Call = tuple[int, int]  # layer, and which call of it
Kept = dict[Call, Any]  # of each call of an intact row that runs alone, what rows of sets need


class Described(ABC):
    """What a study is made of. name: what tables and facts call it."""

    name: str

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else tells it from another, in JSON's own types."""
        return {}

    def check(self, task: Task) -> None:  # noqa: B027  # any task will do
        """Raise InputError for a task that it is not for."""


class Intervention(Described):
    """What is put in place of something, in the heads of a set."""

    @property
    def least(self) -> int:
        """Texts that a pass needs at least."""
        return 1

    @property
    def learns(self) -> bool:
        """Whether it has to read all texts once before it can be made."""
        return False

    def learnt(self, task: Task, each: Callable[[OnOutput], None]) -> Intervention:
        """The same, after it took what it needs from the task; each: calls with what every head gives for each text."""
        return self

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        """The engine for such passes as `change` is for."""
        return replace(engine, change=self.change(sets, lengths, texts))

    def alone(self, kept: Kept) -> Intervention | None:
        """The same for passes of one row each, of a set; None where rows need each other. kept: what `keeping` kept."""
        return None

    def keeping(self, sets: Sequence[HeadSet], kept: Kept) -> Intervention:
        """The same for passes of one intact row each: keeps what rows of the sets need of it."""
        return self

    def target(self, texts: Sequence[int], place: int) -> int:
        """The place of the text whose rows need what the intact row of another keeps: its own."""
        return place

    @abstractmethod
    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        """An engine's `change` for a pass of some texts and, after them, the same texts once per set.

        lengths: of the texts, before padding. texts: which of the task's they are, for what differs from text to text.
        """


class Measure(Described):
    """A number per text, differentiable in the logits.

    unit: of its numbers. worse: 1 where more of it is worse, as of a loss; -1 where less is. compares: whether it looks
    at the intact rows for the changed ones, as a divergence does: they are then of one pass, however long the text.
    """

    unit: str
    worse: int = 1
    compares: bool = False

    def rows(self, task: Task, text: int) -> Sequence[int]:
        """The positions of a text whose logits it reads, ascending."""
        return task.rows[text]

    @abstractmethod
    def __call__(self, logits_KRV: Tensor, task: Task, text: int) -> Tensor:
        """(K,) float64, of one text of the task, from its rows: intact, then with every set's heads changed.

        Of a long text each of these may come alone, but where the measure `compares`.
        """


class Loss(Measure):
    """The loss of the next token, mean over a text's rows."""

    name = "loss"
    unit = "nats per token"

    def __call__(self, logits_KRV: Tensor, task: Task, text: int) -> Tensor:
        next_R = torch.tensor([task.ids[text][row + 1] for row in task.rows[text]], device=logits_KRV.device)
        log_KRV = logits_KRV.float().log_softmax(-1)
        return -log_KRV.gather(-1, next_R[None, :, None].expand(len(log_KRV), -1, -1))[..., 0].double().mean(-1)


LOSS = Loss()


class AnswerLoss(Loss):
    """The loss of a text's answer: the sum over its rows, each of which makes a token of it."""

    name = "answer_loss"
    unit = "nats"

    def __call__(self, logits_KRV: Tensor, task: Task, text: int) -> Tensor:
        return len(task.rows[text]) * super().__call__(logits_KRV, task, text)


@dataclass(frozen=True)
class LogitDifference(Measure):
    """How far the logit of an answer is above that of a foil, at the last token of each text.

    answers, foils: a token of each text (Wang et al. 2022, arXiv 2211.00593). at: the row of each text, where that is
    not its last.
    """

    answers: Sequence[int]
    foils: Sequence[int]
    at: Sequence[int] | None = None
    name = "logit_difference"
    unit = "logits"
    worse = -1

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"answers": list(self.answers), "foils": list(self.foils)}

    def check(self, task: Task) -> None:
        counts = len(self.answers), len(self.foils)
        if counts != (len(task), len(task)):
            raise InputError(
                f"expected an answer and a foil of each of {len(task)} texts, got {counts[0]} and {counts[1]}",
                "give one of each per text",
            )

    def rows(self, task: Task, text: int) -> Sequence[int]:
        return (task.lengths[text] - 1 if self.at is None else self.at[text],)

    def __call__(self, logits_KRV: Tensor, task: Task, text: int) -> Tensor:
        answer_K, foil_K = (logits_KRV[:, -1, tokens[text]].double() for tokens in (self.answers, self.foils))
        return answer_K - foil_K


Replacement = Literal["mean", "zero", "resample"]
Replace = Callable[[CallSite, Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Replacing(Intervention):
    """A head's output, before the output projection, is replaced.

    instead: what by; `prepared` finds the means, and takes another sequence's for "resample". kept: in a pass of one
    row, the heads' outputs of an intact row; None where intact texts are in the pass.
    """

    name: Replacement = "zero"
    instead: Replace = field(default_factory=lambda: zeros)
    kept: Kept | None = None

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
        return replacing(sets, lengths, self.instead, self.kept)

    def alone(self, kept: Kept) -> Replacing:
        return replace(self, kept=kept)

    def keeping(self, sets: Sequence[HeadSet], kept: Kept) -> Intervention:
        return self if self.name == "zero" else KeptOutputs(sets, kept, of_others=self.name == "resample")

    def target(self, texts: Sequence[int], place: int) -> int:
        return (place - 1) % len(texts) if self.name == "resample" else place


@dataclass(frozen=True)
class KeptOutputs(Intervention):
    """Nothing is changed: what heads of some sets give is kept, where a row of a set has no intact output of its own.

    of_others: the row is another text's, which never has. Else it has the intact output in the set's first layer.
    """

    sets: Sequence[HeadSet]
    kept: Kept
    of_others: bool
    name = "kept outputs"

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        def change(call: AttentionCall, output_BTHV: Tensor) -> Tensor:
            heads = {
                head
                for chosen in self.sets
                for layer, head in chosen.heads
                if layer == call.index and (self.of_others or call.place.call or layer > chosen.heads[0][0])
            }
            if heads:
                head_P = torch.tensor(sorted(heads), device=output_BTHV.device)
                self.kept[call.index, call.place.call] = head_P, output_BTHV[:, :, head_P]
            return output_BTHV

        return change


def replacing(sets: Sequence[HeadSet], lengths: Sequence[int], instead: Replace, kept: Kept | None = None) -> Change:
    """An engine's `change` for a pass of some texts and, after them, the same texts once per set: in the set's rows
    the outputs of its heads are replaced. kept: see `Replacing`.

        >>> engine = replace(ENGINES["eager"], change=replacing([one], lengths, zeros))
        >>> listen(model, ids_BT.repeat(2, 1), on_call, engine=engine)
    """
    batch = len(lengths)

    def change(call: AttentionCall, output_NTHV: Tensor) -> Tensor:
        heads_of = ([head for layer, head in chosen.heads if layer == call.index] for chosen in sets)
        pairs = [(at, head) for at, heads in enumerate(heads_of, int(kept is None)) for head in heads]
        if not pairs:
            return output_NTHV
        intact_BTHV = output_NTHV[:batch]
        if kept and (call.index, call.place.call) in kept:
            intact_BTHV = intact_BTHV.index_copy(2, *kept[call.index, call.place.call])
        instead_BTHV = instead(call.place, intact_BTHV, lengths)
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
        sum_GHV, count_G = self.sums[place.index, place.call]
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
        before = self.sums.get((place.index, place.call), (0, 0))
        self.sums[place.index, place.call] = before[0] + own_BGHV.sum(0), before[1] + own_BG.sum(0)


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
