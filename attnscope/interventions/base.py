"""One change to a model's attention while it runs: where, what instead, and by what it is measured.

Where: a set of heads, and, where an intervention has them, queries and keys. What instead: zero, a mean, another text's
output, keys that are cut before the softmax. A measure is a number per text, from the logits of some of its rows.
Passes, shared layers, statistics, random sets and the parts on disk take any intervention and any measure.

    passes = prepared(loaded, task, sets, measure=LogitDifference(answers, foils))

Shapes: B text, N row of a pass, T token, H head, V width of v, K set, R row that is read, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import InputError
from attnscope.hooks.calls import CallSite
from attnscope.hooks.engines import Change, Engine
from attnscope.interventions.spec import HeadSet, Task

OnOutput = Callable[[CallSite, Tensor, Sequence[int]], None]  # a call's place, its output (B, T, H, V), texts' lengths


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

    @abstractmethod
    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        """An engine's `change` for a pass of some texts and, after them, the same texts once per set.

        lengths: of the texts, before padding. texts: which of the task's they are, for what differs from text to text.
        """


class Measure(Described):
    """A number per text, differentiable in the logits.

    unit: of its numbers. worse: 1 where more of it is worse, as of a loss; -1 where less is.
    """

    unit: str
    worse: int = 1

    def rows(self, task: Task, text: int) -> Sequence[int]:
        """The positions of a text whose logits it reads, ascending."""
        return task.rows[text]

    @abstractmethod
    def __call__(self, logits_KRV: Tensor, task: Task, text: int) -> Tensor:
        """(K,) float64, of one text of the task, from its rows: intact, then with every set's heads changed."""


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
