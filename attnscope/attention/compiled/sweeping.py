"""One pass of the compiled sweep over a call: the cores take job after job, each some rows of a kv head's heads.

Shapes: B text, H head, G kv head, R heads of a kv head, Q query, K key, D width of q and k, C columns that P is
multiplied by, P panel of keys, r rows of a head in a job, n keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.compiled.answers import Answers
from attnscope.attention.compiled.asked import Asked
from attnscope.attention.compiled.object_code import sweep as compiled_sweep
from attnscope.attention.compiled.shapes import BLOCK, HIDDEN, LANES, NAMES, PANEL, REACH, STATE, STRIP, SUMS
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled.tiles import Place, part, reach
from attnscope.attention.tiled.workers import Room, work_through
from attnscope.memory import second_cache

CPU = torch.device("cpu")
MOST_ROWS, FEWEST_ROWS = 256, 64  # that are read at once, all heads of a kv head together
SHARE_OF_CACHE = 1.0  # for their logits: what leaves it costs less than reading all keys for fewer rows
JOBS, JOB_SCORES = 32, (2**18, 2**21)  # of a text at least, and what each of them reads
Given = dict[str, "int | Tensor | None"]


@dataclass(eq=False)
class Text:
    """What the jobs of one text read; columns (G or 1, strips, P * 64, STRIP)."""

    q_HQD: Tensor
    k_GPDn: Tensor
    columns_GcKs: Tensor


@dataclass(eq=False)
class Job:
    """Rows of a kv head's heads; queries: how many are read at once; turn: the job's number among those of its head."""

    place: Place
    text: Text
    queries: int
    turn: int

    @property
    def heads(self) -> int:
        return self.place.heads.stop - self.place.heads.start

    @property
    def padded(self) -> int:
        """Rows that are read at once, in whole blocks."""
        return -(-self.queries * self.heads // BLOCK) * BLOCK

    @property
    def panels(self) -> tuple[int, int]:
        return self.place.keys.start // PANEL, -(-self.place.keys.stop // PANEL)


class Sweeping:
    """One pass over a call, for the answers of what is asked, and the output with `with_output`."""

    def __init__(self, spec: AttentionSpec, asked: Asked, with_output: bool) -> None:
        self.spec, self.asked, self.with_output = spec, asked, with_output
        self.panels = -(-spec.visible.keys // PANEL)
        self.scale = torch.tensor([spec.scale], dtype=torch.float32)
        self.softcap = None if spec.softcap is None else torch.tensor([spec.softcap], dtype=torch.float32)
        self.spans_Q2 = None if spec.visible.mask is None else spec.visible.reach_Q2.long().contiguous()
        self.sinks = None if spec.sinks is None else spec.sinks.float().expand(spec.batch, spec.heads, -1)
        self.place_BQ = asked.place_tables(spec)
        self.own_BQ, self.label_BK = asked.label_tables(spec, self.panels * PANEL)
        self.gaps = torch.tensor([question.gap for question in asked.labels], dtype=torch.int64)
        self.widths = torch.tensor([question.width for question in asked.windows], dtype=torch.int64)

    def run(self) -> Answers:
        sweep, answers = compiled_sweep(), Answers(self.spec, self.asked, self.with_output)

        def begin() -> Callable[[Job], None]:
            rooms = Rooms()
            return lambda job: self._read(job, rooms, sweep, answers)

        work_through(self._jobs(), begin, torch.get_num_threads())
        return answers

    def _jobs(self) -> Iterator[Job]:
        """Every job, those of the most keys first: they end together, and their memory is enough for the others."""
        R = self.spec.heads // self.spec.kv_heads
        ranges = list(self._ranges(R))[::-1]
        for number in range(self.spec.batch):
            text = self._text(number)
            for turn, (rows, keys, queries) in enumerate(ranges):
                for g in range(self.spec.kv_heads):
                    place = Place(number, slice(g, g + 1), slice(g * R, g * R + R), rows, keys)
                    yield Job(place, text, queries, turn)

    def _ranges(self, R: int) -> Iterator[tuple[slice, slice, int]]:
        """Rows, the keys that any of them may see, and how many rows fit the cache at once."""
        visible, start = self.spec.visible, 0
        alone = visible.mask is not None or self.spec.bias is not None or self.asked.groups  # what a job brings for all
        least, most = JOB_SCORES
        scores = min(most, max(least, self.spec.heads * visible.queries * visible.keys // JOBS)) / R
        while start < visible.queries:
            low, high = reach(visible, start, start + 1)
            rows = math.sqrt((high - low) ** 2 + 2 * scores) - (high - low)  # of a triangle below them
            rows = max(1, round(rows / BLOCK)) * BLOCK
            queries = _fitting(R, reach(visible, start, min(visible.queries, start + rows)))
            stop = min(visible.queries, start + (min(rows, queries) if alone else rows))
            yield slice(start, stop), slice(*reach(visible, start, stop)), min(queries, stop - start)
            start = stop

    def _text(self, number: int) -> Text:
        """Keys and columns in the order in which they are read; written there at once, for they are large."""
        G, keys = self.spec.kv_heads, self.spec.visible.keys
        k_GKD, whole = self.spec.k_BGKD[number], keys // PANEL
        k_GPDn = torch.zeros(G, self.panels, k_GKD.shape[-1], PANEL)
        k_GPDn[:, :whole] = k_GKD[:, : whole * PANEL].unflatten(1, (whole, PANEL)).transpose(2, 3)
        k_GPDn[:, whole:, :, : keys - whole * PANEL] = k_GKD[:, None, whole * PANEL :].transpose(2, 3)
        parts = [self.spec.v_BGKV[number]] * self.with_output + self.asked.columns(number)
        strips = -(-sum(one.shape[-1] for one in parts) // STRIP)
        columns_GcKs = torch.zeros(G if parts else 1, strips, self.panels * PANEL, STRIP)
        place = 0
        for one in parts:
            first = -place % STRIP or STRIP  # columns that still go into the strip before
            for columns in one.tensor_split(tuple(range(first, one.shape[-1], STRIP)), -1):
                strip, start = divmod(place, STRIP)
                columns_GcKs[:, strip, :keys, start : start + columns.shape[-1]] = columns
                place += columns.shape[-1]
        q_HQD = self.spec.q_BHQD[number].float()
        return Text(q_HQD if q_HQD.stride(-1) == 1 else q_HQD.contiguous(), k_GPDn, columns_GcKs)

    def _read(self, job: Job, rooms: Rooms, sweep: Callable[[int], int], answers: Answers) -> None:
        shares_cr = answers.shares(job.place)
        given = self._calls(job) | self._inputs(job) | self._masks(job) | self._questions(job) | answers.places(job)
        given |= rooms.of_job(job, self.asked, len(shares_cr), self.panels)
        given |= {"count": len(shares_cr), "shares": shares_cr, "share_step": 4 * shares_cr.shape[-1]}
        record = np.array([_integer(given[name]) for name in NAMES], dtype=np.int64)
        sweep(record.ctypes.data)
        if len(shares_cr):
            columns = given["columns"]
            assert isinstance(columns, Tensor)
            answers.add_in_turn(job, columns)

    def _calls(self, job: Job) -> Given:
        visible, place = self.spec.visible, job.place
        masked = visible.mask is not None
        return {
            "heads": job.heads,
            "rows": place.rows.stop - place.rows.start,
            "queries": job.queries,
            "first": place.rows.start + visible.keys - visible.queries,
            "keys": visible.keys,
            "panels": self.panels,
            "causal": int(visible.causal and not masked),
            "window": 0 if masked or visible.window is None else visible.window,
            "spans": None if self.spans_Q2 is None else self.spans_Q2[place.rows],
            "scale": self.scale,
            "softcap": self.softcap,
        }

    def _inputs(self, job: Job) -> Given:
        text, group, place = job.text, job.place.groups.start, job.place
        q_HrD, sinks = text.q_HQD[place.heads, place.rows], self.sinks
        if sinks is not None:
            sinks = sinks[place.text, place.heads, place.rows if sinks.shape[-1] > 1 else slice(None)]
        return {
            "q": q_HrD,
            "q_head": 4 * q_HrD.stride(0),
            "q_row": 4 * q_HrD.stride(1),
            "k": text.k_GPDn[group],
            "v": text.columns_GcKs[group if len(text.columns_GcKs) > 1 else 0],
            "depth": q_HrD.shape[-1],
            "strips": text.columns_GcKs.shape[1],
            "sinks": sinks,
            "sink_head": 0 if sinks is None else 4 * sinks.stride(0),
            "sink_row": 4 * sinks.stride(1) if sinks is not None and sinks.shape[-1] > 1 else 0,
            "sinks_scale": int(self.spec.sinks_scale_output),
        }

    def _masks(self, job: Job) -> Given:
        extra = self._extra(job)
        return {
            "extra": extra,
            "extra_head": 4 * extra.stride(0) if extra is not None and len(extra) > 1 else 0,
            "extra_row": 4 * extra.stride(1) if extra is not None and extra.shape[1] > 1 else 0,
            "extra_panel": job.panels[0],
        }

    def _extra(self, job: Job) -> Tensor | None:
        """What is added to a job's logits: position bias and mask, (R or 1, r or 1, n of whole panels)."""
        bias, mask, keys = self.spec.bias, self.spec.visible.mask, job.place.keys
        parts = [] if bias is None else [part(bias, job.place).float()]
        if mask is not None:
            mask = part(mask, job.place)
            parts.append(torch.where(mask, 0.0, HIDDEN) if mask.dtype == torch.bool else mask.float())
        if not parts:
            return None
        sizes = [max(one.shape[axis] for one in parts) for axis in (0, 1)]
        first, past = job.panels
        extra = torch.zeros(*sizes, (past - first) * PANEL)
        inside = extra[..., keys.start - first * PANEL : keys.stop - first * PANEL]
        for one in parts:
            inside += one
        return extra

    def _questions(self, job: Job) -> Given:
        place = job.place
        return {
            "places": len(self.asked.places),
            "place": self.place_BQ[:, place.text :, place.rows.start :],
            "place_step": 4 * self.place_BQ.stride(0),
            "labels": len(self.asked.labels),
            "own": self.own_BQ[:, place.text :, place.rows.start :],
            "own_step": 4 * self.own_BQ.stride(0),
            "label": self.label_BK[:, place.text :],
            "label_step": 4 * self.label_BK.stride(0),
            "gaps": self.gaps,
            "windows": len(self.asked.windows),
            "widths": self.widths,
            "top": self.asked.most,
        }


class Rooms:
    """A worker's memory, by what it is for."""

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}

    def of(self, name: str, *shape: int) -> Tensor:
        return self._rooms.setdefault(name, Room()).of(shape, CPU)

    def of_job(self, job: Job, asked: Asked, count: int, panels: int) -> Given:
        """What the sweep writes on its way."""
        padded, most = job.padded, asked.most
        return {
            "packed": self.of("packed", padded, job.text.q_HQD.shape[-1]),
            "tile": self.of("tile", job.panels[1] - job.panels[0], padded, PANEL),
            "state": self.of("state", padded, STATE // 4),
            "sums": self.of("sums", padded, SUMS + len(asked.labels), LANES),
            "classes": self.of("classes", padded, PANEL),
            "reach": self.of("reach", padded, REACH // 4),
            "ranges": self.of("ranges", padded // BLOCK, 4),
            "out": self.of("out", padded, job.text.columns_GcKs.shape[1], STRIP),
            "best": self.of("best", padded, most),
            "best_keys": self.of("best_keys", padded, most),
            "weights": self.of("weights", count, padded),
            "columns": self.of("columns", count, job.heads, panels * PANEL).zero_(),
        }


def _fitting(R: int, keys: tuple[int, int]) -> int:
    """How many rows of each of R heads are read at once over these keys."""
    rows = min(MOST_ROWS, max(FEWEST_ROWS, _numbers() // max(PANEL, keys[1] - keys[0])))
    return max(1, rows // (R * BLOCK)) * BLOCK


@lru_cache(maxsize=1)
def _numbers() -> int:
    """How many logits are kept at once."""
    return int(second_cache() * SHARE_OF_CACHE) // 4


def _integer(value: int | Tensor | None) -> int:
    """A number as it is, a tensor by its address, None as 0."""
    if value is None:
        return 0
    return value if isinstance(value, int) else value.data_ptr()
