"""What the sweep finds, and the answers that they give.

Shapes: B text, H head, Q query, K key, S note of a row, R heads of a job, r rows of a head in a job, n keys of a job,
c weighted sums over rows, g and m groups of queries and of keys.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.attention.compiled.asked import Asked
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
from attnscope.attention.tiled.tiles import Place

if TYPE_CHECKING:
    from attnscope.attention.compiled.sweeping import Job


class Answers:
    """What is found of every row, which the sweep writes here itself, and of keys over all rows."""

    def __init__(self, spec: AttentionSpec, asked: Asked, with_output: bool) -> None:
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
        self.groups = [torch.zeros(B, H, *_sizes(question), dtype=torch.float64) for question in asked.groups]
        self._lock = threading.Lock()
        self._turns: dict[tuple[int, int], int] = {}
        self._waiting: dict[tuple[int, int, int], tuple[Place, Tensor]] = {}

    def places(self, job: Job) -> dict[str, int | Tensor | None]:
        """Where the sweep writes what it finds in a job's rows."""
        text, heads, rows = job.place.text, job.place.heads.start, job.place.rows.start
        notes = self.notes_SBHQ
        return {
            "notes": notes[:, text:, heads:, rows:],
            "note_step": 4 * notes.stride(0),
            "head_step": 4 * notes.stride(2),
            "copies": (copies := self._copies(text, heads, rows)),
            "copied": len(copies),
            "top_index": self.top_index_H[heads:],
            "top_weights": self.top[0][text:, :, rows:],
            "top_keys": self.top[1][text:, :, rows:],
            "top_step": 4 * self.top[0].stride(1),
        }

    def _copies(self, text: int, heads: int, rows: int) -> Tensor:
        """Of each product its first column, its width, address, bytes from row to row and head to head; is it P V?"""
        found, start = [], 0
        output = [] if self.output_BQHV is None else [self.output_BQHV.transpose(1, 2)]
        for number, answer in enumerate([*output, *self.features]):
            width, place = answer.shape[-1], answer[text:, heads:, rows:].data_ptr()
            found.append([start, width, place, 4 * answer.stride(2), 4 * answer.stride(1), int(number < len(output))])
            start += width
        return torch.tensor(found, dtype=torch.int64)

    def shares(self, place: Place) -> Tensor:
        """What each row of a job counts in each of the sums over rows, (c, r)."""
        parts = [_of(question.query_share_BQ, place)[None].float() for question in self.asked.received]
        parts += [_groups(question, place)[1] for question in self.asked.groups]
        return torch.cat(parts) if parts else torch.empty(0, 0)

    def add_in_turn(self, job: Job, columns_cRn: Tensor) -> None:
        """Add up what the jobs of a kv head say of keys, in the jobs' own order whichever came first."""
        who, keys = (job.place.text, job.place.groups.start), job.place.keys
        with self._lock:
            self._waiting[*who, job.turn] = job.place, columns_cRn[..., keys].clone()
            while (following := (*who, self._turns.get(who, 0))) in self._waiting:
                self._add(*self._waiting.pop(following))
                self._turns[who] = following[-1] + 1

    def _add(self, place: Place, columns_cRn: Tensor) -> None:
        for answer, column in zip(self.received, columns_cRn, strict=False):
            answer[place.text, place.heads, place.keys] += column
        start = len(self.received)
        for question, answer in zip(self.asked.groups, self.groups, strict=True):
            group_g, members_gr = _groups(question, place)
            mass_gRn = columns_cRn[start : start + len(members_gr)].double()
            start += len(members_gr)
            key_n = question.key_group_BK[place.text, place.keys]
            known = key_n >= 0
            mass_gRm = torch.zeros(*mass_gRn.shape[:2], answer.shape[-1], dtype=torch.float64)
            mass_gRm.index_add_(2, key_n[known], mass_gRn[..., known])
            answer[place.text, place.heads] = answer[place.text, place.heads].index_add(
                1, group_g, mass_gRm.transpose(0, 1)
            )

    def answers(self) -> dict[Question, Any]:
        asked, notes = self.asked, iter(self.notes_SBHQ[NOTES:])
        found: dict[Question, Any] = {question: self._statistic(question) for question in asked.statistics}
        found |= {question: next(notes).clone() for question in [*asked.places, *asked.labels, *asked.windows]}
        found |= dict(zip(asked.features, self.features, strict=True))
        found |= {question: answer.float() for question, answer in zip(asked.received, self.received, strict=True)}
        found |= {question: answer.float() for question, answer in zip(asked.groups, self.groups, strict=True)}
        return found | {question: self._top(question) for question in asked.top}

    def _statistic(self, question: Question) -> Tensor:
        notes = self.notes_SBHQ
        total = notes[TOTAL].clamp_min(TINY)
        if isinstance(question, RowSum):
            return notes[TOTAL] * notes[FACTOR]
        if isinstance(question, MaxWeight):
            return notes[FACTOR].clone()
        if isinstance(question, SumOfSquares):
            return notes[SQUARES] / total.square()
        if isinstance(question, Entropy):
            total = notes[REST].clamp_min(TINY) if question.skip_key0 else total
            energy = notes[ENERGY_REST if question.skip_key0 else ENERGY]
            return (total.log() - energy / total).clamp_min(0.0)  # with p = exp t / Z: H = ln Z - (sum exp t * t) / Z
        return notes[MOMENT] / total

    def _top(self, question: TopK) -> tuple[Tensor, Tensor]:
        heads = None if question.heads is None else tuple(map(self.top_heads.index, question.heads))
        return of_found(self.top, replace(question, heads=heads))


def _of(table_BQ: Tensor, place: Place) -> Tensor:
    return table_BQ[place.text if len(table_BQ) > 1 else 0, place.rows]


def _sizes(question: GroupMass) -> tuple[int, int]:
    return int(question.query_group_BQ.max()) + 1, int(question.key_group_BK.max()) + 1


def _groups(question: GroupMass, place: Place) -> tuple[Tensor, Tensor]:
    """The groups of a tile's queries, and which rows are in each, (g, r)."""
    group_r = question.query_group_BQ[place.text, place.rows]
    group_g = group_r.unique()
    group_g = group_g[group_g >= 0]
    return group_g, (group_r == group_g[:, None]).float()
