"""What the sweep finds, and the answers that they give.

Shapes: B text, H head, G kv head, R heads of a kv head, Q query, K key, S note of a row, r rows of a head in a job,
n keys of a job, c weighted sums over rows; in a job b texts and g kv heads; in a question m groups of keys, and i of
queries.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.compiled.asked import SweepQuestions
from attnscope.attention.compiled.jobs import Job
from attnscope.attention.compiled.records import Each, RecordValues
from attnscope.attention.compiled.shapes import (
    ENERGY,
    ENERGY_REST,
    FACTOR,
    MOMENT,
    NOTES,
    REST,
    SQUARES,
    TOTAL,
)
from attnscope.attention.questions import Entropy, GroupMass, MaxWeight, Question, RowSum, SumOfSquares, TopK
from attnscope.attention.rows import TINY, of_found
from attnscope.attention.spec import AttentionSpec


class Answers:
    """What is found of every row, which the sweep writes here itself, and of keys over all rows."""

    def __init__(self, spec: AttentionSpec, asked: SweepQuestions, with_output: bool) -> None:
        self.spec, self.asked = spec, asked
        B, H, Q = spec.batch, spec.heads, spec.visible.queries
        notes = NOTES + len(asked.places) + len(asked.labels) + len(asked.windows)
        self.notes_SBHQ = torch.empty(notes, B, H, Q)
        self.output_BQHV = torch.empty(B, Q, H, spec.v_BGKV.shape[-1]) if with_output else None
        self.features = [torch.empty(B, H, Q, question.features.shape[-1]) for question in asked.features]
        self.top_heads = asked.top_heads(H)
        self.top_index_H = torch.full((H,), -1, dtype=torch.int32)
        self.top_index_H[self.top_heads] = torch.arange(len(self.top_heads), dtype=torch.int32)
        shape = B, len(self.top_heads), Q, asked.most
        self.top = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
        self.received = [torch.zeros(B, H, spec.visible.keys, dtype=torch.float64) for _ in asked.received]
        self.groups = [torch.zeros(B, H, *question.counts, dtype=torch.float64) for question in asked.groups]
        self._lock = threading.Lock()
        self._turns: dict[tuple[int, int], int] = {}
        self._waiting: dict[tuple[int, int, int], tuple[Job, Tensor]] = {}

    def places(self, job: Job) -> RecordValues:
        """Where the sweep writes what it finds in a job's rows."""
        notes, (weights, keys) = self.notes_SBHQ, (part[job.texts, None, :, job.rows] for part in self.top)
        copies = self._copies(job)
        return {
            "notes": Each(self._of_job(notes[0], job)),
            "note_step": 4 * notes.stride(0),
            "head_step": 4 * notes.stride(2),
            "copies": Each(copies),
            "copied": copies.shape[2],
            "top_index": Each(self.top_index_H.view(1, self.spec.kv_heads, -1)[:, job.groups]),
            "top_weights": Each(weights),
            "top_keys": Each(keys),
            "top_step": 4 * self.top[0].stride(1),
        }

    def _of_job(self, answer_BHQ: Tensor, job: Job) -> Tensor:
        """The part of a (B, H, Q, ...) answer that a job writes, (b, g, R, r, ...)."""
        return answer_BHQ.unflatten(1, (self.spec.kv_heads, -1))[job.texts, job.groups, :, job.rows]

    def _copies(self, job: Job) -> Tensor:
        """(b, g, products, 6): of each its first column, its width, address, bytes from row to row and from head to
        head; is it P V?
        """
        start, output = 0, [] if self.output_BQHV is None else [self.output_BQHV.transpose(1, 2)]
        answers = [*output, *self.features]
        copies = torch.empty(*job.shape, len(answers), 6, dtype=torch.int64)
        for number, answer in enumerate(answers):
            mine, width = self._of_job(answer, job), answer.shape[-1]
            steps = 4 * mine.stride(3), 4 * mine.stride(2)
            copies[:, :, number] = torch.tensor([start, width, 0, *steps, int(number < len(output))])
            copies[:, :, number, 2] = torch.from_numpy(Each(mine).addresses)
            start += width
        return copies

    def shares(self, job: Job) -> Tensor:
        """What each row of a job counts in each of the sums over rows, (b, c, r)."""
        texts = job.shape[0]
        parts = [_of(question.query_share_BQ, job).float()[:, None] for question in self.asked.received]
        parts += [_groups(question, job)[1][None] for question in self.asked.groups]
        return torch.cat([part.expand(texts, -1, -1) for part in parts], 1) if parts else torch.empty(texts, 0, 0)

    def add_in_turn(self, job: Job, columns_bgcRn: Tensor) -> None:
        """Add up what the jobs of a kv head say of keys, in the jobs' own order whichever was done first."""
        who, keys = (job.texts.start, job.groups.start), job.keys
        with self._lock:
            self._waiting[*who, job.turn] = job, columns_bgcRn[..., keys].clone()
            while (following := (*who, self._turns.get(who, 0))) in self._waiting:
                self._add(*self._waiting.pop(following))
                self._turns[who] = following[-1] + 1

    def _add(self, job: Job, columns_bgcRn: Tensor) -> None:
        for number, answer in enumerate(self.received):
            mine = answer.unflatten(1, (self.spec.kv_heads, -1))[job.texts, job.groups, :, job.keys]
            mine += columns_bgcRn[:, :, number]
        start = len(self.received)
        for question, answer in zip(self.asked.groups, self.groups, strict=True):
            group_i, members_ir = _groups(question, job)
            mass_iRn = columns_bgcRn[0, 0, start : start + len(members_ir)].double()
            start += len(members_ir)
            key_n = question.key_group_BK[job.texts.start, job.keys]
            real = key_n >= 0
            mass_iRm = torch.zeros(*mass_iRn.shape[:2], answer.shape[-1], dtype=torch.float64)
            mass_iRm.index_add_(2, key_n[real], mass_iRn[..., real])
            mine = answer.unflatten(1, (self.spec.kv_heads, -1))[job.texts.start, job.groups.start]
            mine.index_add_(1, group_i, mass_iRm.transpose(0, 1))

    def answers(self) -> dict[Question, Any]:
        asked, notes = self.asked, iter(self.notes_SBHQ[NOTES:])
        answers: dict[Question, Any] = {question: self._statistic(question) for question in asked.statistics}
        answers |= {question: next(notes).clone() for question in [*asked.places, *asked.labels, *asked.windows]}
        answers |= dict(zip(asked.features, self.features, strict=True))
        answers |= {question: answer.float() for question, answer in zip(asked.received, self.received, strict=True)}
        answers |= {question: answer.float() for question, answer in zip(asked.groups, self.groups, strict=True)}
        return answers | {question: self._top(question) for question in asked.top}

    def _statistic(self, question: Question) -> Tensor:
        notes = self.notes_SBHQ
        if isinstance(question, RowSum):
            return notes[TOTAL] * notes[FACTOR]
        if isinstance(question, MaxWeight):
            return notes[FACTOR].clone()
        if isinstance(question, SumOfSquares):
            return notes[SQUARES] / notes[TOTAL].square().clamp_min(TINY)
        total = notes[TOTAL].clamp_min(TINY)
        if isinstance(question, Entropy):
            total = notes[REST].clamp_min(TINY) if question.skip_key0 else total
            energy = notes[ENERGY_REST if question.skip_key0 else ENERGY]
            return (total.log() - energy / total).clamp_min(0.0)  # with p = exp t / Z: H = ln Z - (sum exp t * t) / Z
        return notes[MOMENT] / total

    def _top(self, question: TopK) -> tuple[Tensor, Tensor]:
        heads = None if question.heads is None else tuple(map(self.top_heads.index, question.heads))
        return of_found(self.top, replace(question, heads=heads))


def _of(table_BQ: Tensor, job: Job) -> Tensor:
    return table_BQ[job.texts if len(table_BQ) > 1 else slice(None), job.rows]


def _groups(question: GroupMass, job: Job) -> tuple[Tensor, Tensor]:
    """The groups of a job's queries, of its one text, and which rows are in each, (i, r)."""
    group_r = question.query_group_BQ[job.texts.start, job.rows]
    group_i = group_r.unique()
    group_i = group_i[group_i >= 0]
    return group_i, (group_r == group_i[:, None]).float()
