"""Attention answered by one pass of the compiled sweep: every question of the closed set from one reading of each tile.

The cores take job after job, each some rows of a kv head's heads. Of short texts a job takes several, and several kv
heads: what a job costs however few its rows are is then paid once. What the sweep does not know (how many keys hold a
row, the strongest of chosen keys) is left to the tiles.

Shapes: B text, H head, G kv head, R heads of a kv head, Q query, K key, D width of q and k, V width of v, C columns
that P is multiplied by, P panel of keys, S note of a row, r rows of a head in a job, n keys of a job, c weighted sums
over rows; in a job b texts and g kv heads; in a question m groups of keys, and i of queries.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.kernels_cpu import layout
from attnscope.attention.kernels_cpu.layout import BLOCK, LANES, PANEL, STRIP, Each, Job, SweepQuestions, Texts, records
from attnscope.attention.kernels_cpu.object_code import installed
from attnscope.attention.kernels_cpu.object_code import sweep as compiled_sweep
from attnscope.attention.questions import Entropy, GroupMass, MaxWeight, Question, RowSum, SumOfSquares
from attnscope.attention.rows import TINY, top_of
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiles import Room, reach, work_through
from attnscope.attention.tiling import TiledAttention
from attnscope.utils.memory import give_back_memory, second_cache


class Answers:
    """What is found of every row, which the sweep writes here itself, and of keys over all rows."""

    def __init__(self, spec: AttentionSpec, questions: SweepQuestions, with_output: bool) -> None:
        self.spec, self.questions = spec, questions
        B, H, Q = spec.batch, spec.heads, spec.visible.queries
        notes = layout.NOTES + len(questions.places) + len(questions.labels) + len(questions.windows)
        self.notes_SBHQ = torch.empty(notes, B, H, Q)
        self.output_BQHV = torch.empty(B, Q, H, spec.v_BGKV.shape[-1]) if with_output else None
        self.features = [torch.empty(B, H, Q, question.features.shape[-1]) for question in questions.features]
        self.top_heads = questions.top_heads(H)
        self.top_index_H = torch.full((H,), -1, dtype=torch.int32)
        self.top_index_H[self.top_heads] = torch.arange(len(self.top_heads), dtype=torch.int32)
        shape = B, len(self.top_heads), Q, questions.most
        self.top = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
        self.received = [torch.zeros(B, H, spec.visible.keys, dtype=torch.float64) for _ in questions.received]
        self.groups = [torch.zeros(B, H, *question.counts, dtype=torch.float64) for question in questions.groups]
        self._lock = threading.Lock()
        self._turns: dict[tuple[int, int], int] = {}
        self._waiting: dict[tuple[int, int, int], tuple[Job, Tensor]] = {}

    def places(self, job: Job) -> layout.RecordValues:
        """Where the sweep writes what it finds in a job's rows."""
        notes, (weights, keys) = self.notes_SBHQ, (part[job.texts, None, :, job.rows] for part in self.top)

        # Of each product its first column, its width, address, bytes from row to row and from head to head; is it P V?
        output = [] if self.output_BQHV is None else [self.output_BQHV.transpose(1, 2)]
        start, answers = 0, [*output, *self.features]
        copies = torch.empty(*job.shape, len(answers), 6, dtype=torch.int64)
        for number, answer in enumerate(answers):
            mine, width = self._of_job(answer, job), answer.shape[-1]
            steps = 4 * mine.stride(3), 4 * mine.stride(2)
            copies[:, :, number] = torch.tensor([start, width, 0, *steps, int(number < len(output))])
            copies[:, :, number, 2] = torch.from_numpy(Each(mine).addresses)
            start += width
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

    def shares(self, job: Job) -> Tensor:
        """What each row of a job counts in each of the sums over rows, (b, c, r)."""
        texts = job.shape[0]
        tables = [question.query_share_BQ for question in self.questions.received]
        parts = [
            table_BQ[job.texts if len(table_BQ) > 1 else slice(None), job.rows].float()[:, None] for table_BQ in tables
        ]
        parts += [_groups(question, job)[1][None] for question in self.questions.groups]
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
        for question, answer in zip(self.questions.groups, self.groups, strict=True):
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
        questions, notes = self.questions, iter(self.notes_SBHQ[layout.NOTES :])
        answers: dict[Question, Any] = {question: self._statistic(question) for question in questions.statistics}
        answers |= {question: next(notes) for question in [*questions.places, *questions.labels, *questions.windows]}
        answers |= dict(zip(questions.features, self.features, strict=True))
        over_rows = zip([*questions.received, *questions.groups], [*self.received, *self.groups], strict=True)
        answers |= {question: answer.float() for question, answer in over_rows}
        for question in questions.top:
            heads = None if question.heads is None else tuple(map(self.top_heads.index, question.heads))
            answers[question] = top_of(self.top, replace(question, heads=heads))
        return answers

    def _statistic(self, question: Question) -> Tensor:
        notes = self.notes_SBHQ
        if isinstance(question, RowSum):
            return notes[layout.TOTAL] * notes[layout.FACTOR]
        if isinstance(question, MaxWeight):
            return notes[layout.FACTOR]
        if isinstance(question, SumOfSquares):
            return notes[layout.SQUARES] / notes[layout.TOTAL].square().clamp_min(TINY)
        total = notes[layout.TOTAL].clamp_min(TINY)
        if isinstance(question, Entropy):
            total = notes[layout.REST].clamp_min(TINY) if question.skip_key0 else total
            energy = notes[layout.ENERGY_REST if question.skip_key0 else layout.ENERGY]
            return (total.log() - energy / total).clamp_min(0.0)  # with p = exp t / Z: H = ln Z - (sum exp t * t) / Z
        return notes[layout.MOMENT] / total


def _groups(question: GroupMass, job: Job) -> tuple[Tensor, Tensor]:
    """The groups of a job's queries, of its one text, and which rows are in each, (i, r)."""
    group_r = question.query_group_BQ[job.texts.start, job.rows]
    group_i = group_r.unique()
    group_i = group_i[group_i >= 0]
    return group_i, (group_r == group_i[:, None]).float()


CPU = torch.device("cpu")
MOST_ROWS, FEWEST_ROWS = 256, 64  # that are read at once, all heads of a kv head together
LONG = 4096  # keys of a call whose threads free tens of megabytes, which the model's next layer would take anew
JOBS, JOB_SCORES = 32, (2**18, 2**21)  # of a text at least, and what each of them reads


class Sweeping:
    """One pass over a call, for the answers to some questions, and the output with `with_output`."""

    def __init__(self, spec: AttentionSpec, questions: SweepQuestions, with_output: bool) -> None:
        self.spec, self.questions, self.with_output = spec, questions, with_output
        self.panels = -(-spec.visible.keys // PANEL)
        self.scale = torch.tensor([spec.scale], dtype=torch.float32)
        self.softcap = None if spec.softcap is None else torch.tensor([spec.softcap], dtype=torch.float32)
        self.spans_Q2 = None if spec.visible.by_position else spec.visible.reach_Q2.long().contiguous()
        self.sinks = None if spec.sinks is None else spec.sinks.float().expand(spec.batch, spec.heads, -1)
        # Layers that share a mask are asked the same of it.
        visible, places, labels = spec.visible, tuple(questions.places), tuple(questions.labels)
        self.place_BQ = visible.once(("places", spec.batch, places), lambda: questions.place_tables(spec))
        padded = self.panels * PANEL
        self.own_BQ, self.label_BK = visible.once(
            ("labels", spec.batch, labels), lambda: questions.label_tables(spec, padded)
        )
        self.gaps = torch.tensor([question.gap for question in questions.labels], dtype=torch.int64)
        self.widths = torch.tensor([question.width for question in questions.windows], dtype=torch.int64)

    def run(self) -> Answers:
        sweep, answers = compiled_sweep(), Answers(self.spec, self.questions, self.with_output)

        def begin() -> Callable[[Job], None]:
            rooms = Rooms()
            return lambda job: self._read(job, rooms, sweep, answers)

        work_through(self._jobs(), begin, torch.get_num_threads())
        if self.spec.visible.keys >= LONG:
            give_back_memory()
        return answers

    def _jobs(self) -> Iterator[Job]:
        """Every job, those of the most keys first: they end together, and their memory is enough for the others."""
        R, G, B = self.spec.heads // self.spec.kv_heads, self.spec.kv_heads, self.spec.batch
        ranges = list(self._ranges(R))[::-1]
        scores = max((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in ranges)
        texts, groups = self._together(R * scores)
        for first in range(0, B, texts):
            some = slice(first, min(B, first + texts))
            inputs = self._texts(some)
            for turn, (rows, keys, queries) in enumerate(ranges):
                for g in range(0, G, groups):
                    yield Job(some, slice(g, min(G, g + groups)), rows, keys, inputs, queries, turn)

    def _together(self, scores: int) -> tuple[int, int]:
        """How many texts, and how many kv heads, a job takes whose rows have so many scores per text and kv head."""
        (least, most), threads, G = JOB_SCORES, torch.get_num_threads(), self.spec.kv_heads
        per_core = self.spec.batch * G * scores // (4 * threads) if threads > 1 else most
        fits = max(1, min(most, max(least, per_core)) // scores)
        if self.questions.groups:  # each text has groups of its own
            return 1, 1
        return (1, fits) if fits < G else (fits // G, G)

    def _ranges(self, R: int) -> Iterator[tuple[slice, slice, int]]:
        """Rows, the keys that any of them may see, and how many rows fit the cache at once."""
        visible, start = self.spec.visible, 0
        # What a job brings for all of its rows is there for those alone that are read at once.
        alone = not visible.by_position or self.spec.bias is not None or self.questions.groups
        least, most = JOB_SCORES
        scores = min(most, max(least, self.spec.heads * visible.queries * visible.keys // JOBS)) / R
        while start < visible.queries:
            low, high = reach(visible, start, start + 1)
            rows = math.sqrt((high - low) ** 2 + 2 * scores) - (high - low)  # of a triangle below them
            rows = max(1, round(rows / BLOCK)) * BLOCK
            first, past = reach(visible, start, min(visible.queries, start + rows))
            fitting = min(MOST_ROWS, max(FEWEST_ROWS, _numbers() // max(PANEL, past - first)))
            queries = max(1, fitting // (R * BLOCK)) * BLOCK
            stop = min(visible.queries, start + (min(rows, queries) if alone else rows))
            yield slice(start, stop), slice(*reach(visible, start, stop)), min(queries, stop - start)
            start = stop

    def _texts(self, some: slice) -> Texts:
        """Keys and columns in the order in which they are read; written there at once, for they are large."""
        spec, G, keys = self.spec, self.spec.kv_heads, self.spec.visible.keys
        k_bGKD, whole = spec.k_BGKD[some], keys // PANEL
        b, D = len(k_bGKD), k_bGKD.shape[-1]
        k_bGPDn = torch.empty(b, G, self.panels, D, PANEL)
        k_bGPDn[:, :, :whole] = k_bGKD[:, :, : whole * PANEL].unflatten(2, (whole, PANEL)).transpose(3, 4)
        k_bGPDn[:, :, whole:, :, : keys - whole * PANEL] = k_bGKD[:, :, None, whole * PANEL :].transpose(3, 4)
        k_bGPDn[:, :, whole:, :, keys - whole * PANEL :] = 0
        parts = [spec.v_BGKV[some]] * self.with_output
        parts += [feature[:, None].expand(-1, G, -1, -1) for feature in self.questions.columns(some)]
        strips = -(-sum(part.shape[-1] for part in parts) // STRIP)
        columns_bGcKs = torch.zeros(b if parts else 1, G if parts else 1, strips, self.panels * PANEL, STRIP)
        place = 0
        for part in parts:
            first = -place % STRIP or STRIP  # columns that still go into the strip before
            for columns in part.tensor_split(tuple(range(first, part.shape[-1], STRIP)), -1):
                strip, start = divmod(place, STRIP)
                columns_bGcKs[:, :, strip, :keys, start : start + columns.shape[-1]] = columns
                place += columns.shape[-1]
        q_bHQD = spec.q_BHQD[some].float()
        q_bHQD = q_bHQD if q_bHQD.stride(-1) == 1 else q_bHQD.contiguous()
        return Texts(q_bHQD.unflatten(1, (G, -1)), k_bGPDn, columns_bGcKs)

    def _read(self, job: Job, rooms: Rooms, sweep: Callable[[int, int], int], answers: Answers) -> None:
        spec, visible, questions, texts, rows = self.spec, self.spec.visible, self.questions, job.texts, job.rows
        masked, inputs = not visible.by_position, job.inputs
        q_bgRrD, columns = inputs.q_bGRQD[:, job.groups, :, rows], inputs.columns_bGcKs
        first, past = job.panels

        # What is added to the job's logits: position bias and mask, (b, g, R, r, n of whole panels), any but n 1.
        bias, mask = spec.bias, visible.as_mask
        parts = [] if bias is None else [self._part(bias, job).float()]
        if mask is not None:
            mask = self._part(mask, job)
            parts.append(torch.where(mask, 0.0, layout.HIDDEN) if mask.dtype == torch.bool else mask.float())
        extra = None
        if parts:
            sizes = [max(part.shape[axis] for part in parts) for axis in range(4)]
            extra = torch.zeros(*sizes, (past - first) * PANEL)
            inside = extra[..., job.keys.start - first * PANEL : job.keys.stop - first * PANEL]
            for part in parts:
                inside += part
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.unflatten(1, (spec.kv_heads, -1))[texts, job.groups]
            sinks = sinks[..., rows] if sinks.shape[-1] > 1 else sinks
        shares_bcr = answers.shares(job)
        count = shares_bcr.shape[1]
        sums = rooms.of("columns", *job.shape, count, job.heads, self.panels * PANEL).zero_()

        # What is one for all texts, heads or rows has a step of 0: the sweep reads it again for each.
        def step(table: Tensor | None, axis: int) -> int:
            return 4 * table.stride(axis) if table is not None and table.shape[axis] > 1 else 0

        values: layout.RecordValues = {
            "heads": job.heads,
            "rows": rows.stop - rows.start,
            "queries": job.queries,
            "first": rows.start + visible.offset,
            "keys": visible.keys,
            "panels": self.panels,
            "causal": int(visible.causal and not masked),
            "window": 0 if masked or visible.window is None else visible.window,
            "spans": None if self.spans_Q2 is None else self.spans_Q2[rows],
            "scale": self.scale,
            "softcap": self.softcap,
            # Each kv head of a text has addresses of its own, so that the sweep knows nothing of either.
            "q": Each(q_bgRrD),
            "q_head": 4 * q_bgRrD.stride(2),
            "q_row": 4 * q_bgRrD.stride(3),
            "k": Each(inputs.k_bGPDn[:, job.groups]),
            "v": Each(columns[:, job.groups] if columns.shape[1] > 1 else columns),
            "depth": q_bgRrD.shape[-1],
            "strips": columns.shape[2],
            "sinks": None if sinks is None else Each(sinks),
            "sink_head": 0 if sinks is None else 4 * sinks.stride(2),
            "sink_row": step(sinks, 3),
            "sinks_scale": int(spec.sinks_scale_output),
            "extra": None if extra is None else Each(extra),
            "extra_head": step(extra, 2),
            "extra_row": step(extra, 3),
            "extra_panel": first,
            "places": len(questions.places),
            "labels": len(questions.labels),
            "gaps": self.gaps,
            "windows": len(questions.windows),
            "widths": self.widths,
            "top": questions.most,
            # Sums over rows are a job's own: jobs of one kv head would add to the same keys at once.
            "count": count,
            "shares": Each(shares_bcr[:, None]),
            "share_step": 4 * shares_bcr.stride(1),
            "columns": Each(sums),
        }
        # Tables of the questions begin at the job's first row; they are one after the other, a step apart.
        place_nBQ, own_nBQ = (table[..., rows.start :] for table in (self.place_BQ, self.own_BQ))
        for name, table_nBX in (("place", place_nBQ), ("own", own_nBQ), ("label", self.label_BK)):
            values[name] = Each(table_nBX[0, texts, None]) if len(table_nBX) else None
            values[f"{name}_step"] = 4 * table_nBX.stride(0)
        # The record has addresses alone: what they are of must outlive the sweep, and does in `values`.
        values |= answers.places(job) | rooms.of_job(job, questions, count)
        of_job = records(values, job.shape)
        sweep(of_job.ctypes.data, len(of_job))
        if count:
            answers.add_in_turn(job, sums)

    def _part(self, table: Tensor, job: Job) -> Tensor:
        """The part of a (B, H, Q, K) tensor, any of its sizes 1, that a job is of: (b, g, R, r, n), or 1."""
        table = table[job.texts] if table.shape[0] > 1 else table
        grouped = table.unflatten(1, (self.spec.kv_heads, -1))[:, job.groups] if table.shape[1] > 1 else table[:, None]
        grouped = grouped[..., job.rows, :] if grouped.shape[3] > 1 else grouped
        return grouped[..., job.keys] if grouped.shape[-1] > 1 else grouped


class Rooms:
    """A worker's memory, by what it is for."""

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}

    def of(self, name: str, *shape: int) -> Tensor:
        return self._rooms.setdefault(name, Room()).of(shape, CPU)

    def of_job(self, job: Job, questions: SweepQuestions, count: int) -> layout.RecordValues:
        """What the sweep writes on its way, one kv head of one text after the other."""
        padded, most = job.padded, questions.most
        return {
            "packed": self.of("packed", padded, job.inputs.q_bGRQD.shape[-1]),
            "tile": self.of("tile", job.panels[1] - job.panels[0], padded, PANEL),
            "state": self.of("state", padded, layout.STATE // 4),
            "sums": self.of("sums", padded, layout.SUMS + len(questions.labels), layout.LANES),
            "classes": self.of("classes", padded, PANEL),
            "reach": self.of("reach", padded, layout.REACH // 4),
            "ranges": self.of("ranges", padded // BLOCK, 4),
            "out": self.of("out", padded, job.inputs.columns_bGcKs.shape[2], STRIP),
            "best": self.of("best", padded * most + LANES),  # they are read a register at a time
            "best_keys": self.of("best_keys", padded, most),
            "weights": self.of("weights", count, padded),
        }


@lru_cache(maxsize=1)
def _numbers() -> int:
    """How many logits are kept at once: a cache full. What they push out costs less than all keys for fewer rows."""
    return second_cache() // 4


PAYS = 2**22  # scores of a call: below, loading the kernel takes longer than some layers save


class CompiledAttention(TiledAttention):
    """The tiles' operator, with the kernel questions first."""

    kernel = "numba"

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        if self.spec.device.type != "cpu":
            return {}
        known = SweepQuestions.of(questions)
        wants_output = self.with_output and self._output is None
        if not (known.some or wants_output):
            return {}
        answers = Sweeping(self.spec, known, wants_output).run()
        if answers.output_BQHV is not None:
            self._output = answers.output_BQHV.to(self.spec.q_BHQD.dtype)
        return answers.answers()


def usable(spec: AttentionSpec) -> bool:
    """Whether the kernel reads such a call, and saves more than loading it takes."""
    scores = spec.batch * spec.heads * spec.visible.queries * spec.visible.keys
    return spec.device.type == "cpu" and scores >= PAYS and installed()
