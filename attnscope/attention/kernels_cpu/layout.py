"""What the compiled kernel and its callers agree on: sizes, records, questions by how they are answered, and jobs.

PANEL: keys that are read together. LANES: numbers of a vector register. BLOCK, STRIP: rows and columns of one product
that stays in registers. The sweep is given numbers: one record of NAMES for each kv head of each text of a job, which
is what one core reads at once. Nothing heavy is imported here.

Shapes: B text, H head, G kv head, R heads of a kv head, Q query, K key, D width of q and k, M feature, P panel of keys,
n keys, s columns of a strip; in a job b texts, and c strips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.rows import asked_key
from attnscope.attention.spec import AttentionSpec

PANEL = 64
LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
BLOCK = 6 if LANES == 8 else 8  # AVX2 has 16 registers, the others 32
STRIP = 2 * LANES
DEPTH = 128  # numbers of q and k that are summed at once: of 512 the error would be twice that of a good library's
MOST_TOP = 32  # strongest keys of a row that are kept in order while it is read
HIDDEN = -1e30  # as `visibility.HIDDEN`, which what is compiled is not kept by

# What the kernel notes of every row, by place; then one number per chosen key, per pair of labels, per window.
TOTAL, REST, ENERGY, ENERGY_REST, SQUARES, MOMENT, FACTOR = range(7)
NOTES = 7

STATE, REACH = 16, 32  # bytes that are kept of a row: numbers, and where it stands
SUMS = 4  # registers of sums of a row, before those of the labels

# What the kernel is given, one 64-bit integer each: tensors by their address, strides in bytes.
NAMES = (
    *("q", "q_head", "q_row", "scale", "k", "v", "depth", "strips", "panels"),
    *("packed", "tile", "state", "sums", "classes", "reach", "ranges", "out", "best", "best_keys"),
    *("heads", "rows", "queries", "first", "keys", "causal", "window", "spans"),
    *("softcap", "extra", "extra_head", "extra_row", "extra_panel", "sinks", "sink_head", "sink_row", "sinks_scale"),
    *("notes", "note_step", "head_step", "copied", "copies"),
    *("top", "top_index", "top_weights", "top_keys", "top_step"),
    *("places", "place", "place_step", "labels", "own", "own_step", "label", "label_step", "gaps"),
    *("windows", "widths", "count", "shares", "share_step", "weights", "columns"),
)
RECORD = 8 * len(NAMES)  # bytes


class Each(NamedTuple):
    """A tensor whose first two dimensions are a job's texts and kv heads, or 1: each is given its own part."""

    tensor: Tensor

    @property
    def addresses(self) -> np.ndarray:
        """(texts or 1, kv heads or 1)."""
        tensor = self.tensor
        (texts, groups), (text, group) = tensor.shape[:2], tensor.stride()[:2]
        steps = text * np.arange(texts)[:, None] + group * np.arange(groups)
        return tensor.data_ptr() + tensor.element_size() * steps


RecordValues = dict[str, int | Tensor | Each | None]  # tensors by their address, None as 0


def records(values: RecordValues, shape: tuple[int, int]) -> np.ndarray:
    """(texts * kv heads, NAMES) int64; what is given must outlive the sweep."""
    rows = np.empty((*shape, len(NAMES)), dtype=np.int64)
    own = {number: value for number, name in enumerate(NAMES) if isinstance(value := values[name], Each)}
    shared = (0 if isinstance(value := values[name], Each) else value for name in NAMES)
    rows[:] = [value.data_ptr() if isinstance(value, Tensor) else value or 0 for value in shared]
    for number, each in own.items():
        rows[..., number] = each.addresses
    return rows.reshape(-1, len(NAMES))


# The list of SweepQuestions that each kind of question belongs to.
LISTS: Mapping[type[ask.Question], str] = {
    **dict.fromkeys((ask.RowSum, ask.Entropy, ask.SumOfSquares, ask.MaxWeight, ask.Distance), "statistics"),
    **dict.fromkeys((ask.At, ask.Back, ask.Key), "places"),
    ask.EqualLabels: "labels",
    ask.Window: "windows",
    ask.Features: "features",
    ask.Received: "received",
    ask.GroupMass: "groups",
    ask.TopK: "top",
}
INT32 = 2**31 - 1


@dataclass(eq=False)
class SweepQuestions:
    """The questions that the sweep answers, those of each way in the order in which it notes them."""

    statistics: list[ask.Question] = field(default_factory=list)
    places: list[ask.At | ask.Back | ask.Key] = field(default_factory=list)
    labels: list[ask.EqualLabels] = field(default_factory=list)
    windows: list[ask.Window] = field(default_factory=list)
    features: list[ask.Features] = field(default_factory=list)
    received: list[ask.Received] = field(default_factory=list)
    groups: list[ask.GroupMass] = field(default_factory=list)
    top: list[ask.TopK] = field(default_factory=list)

    @classmethod
    def of(cls, questions: Sequence[ask.Question]) -> SweepQuestions:
        result = cls()
        for question in questions:
            fits = True
            if isinstance(question, ask.MaxWeight):
                fits = not question.skip_key0
            elif isinstance(question, ask.TopK):
                fits = question.k + question.skip_key0 <= MOST_TOP
            elif isinstance(question, ask.EqualLabels):
                both = question.query_label_BQ, question.key_label_BK
                fits = all(part.numel() == 0 or int(part.abs().max()) <= INT32 for part in both)
            if fits and type(question) in LISTS:
                getattr(result, LISTS[type(question)]).append(question)
        return result

    @property
    def some(self) -> bool:
        """Whether the sweep answers any."""
        return any(getattr(self, name) for name in LISTS.values())

    @property
    def most(self) -> int:
        """How many of a row's strongest settle every TopK."""
        return max((question.k + question.skip_key0 for question in self.top), default=0)

    def top_heads(self, heads: int) -> list[int]:
        """The heads that any TopK asks about."""
        every = (range(heads) if question.heads is None else question.heads for question in self.top)
        return sorted({head for some in every for head in some})

    def place_tables(self, spec: AttentionSpec) -> Tensor:
        """(n, B, Q) int32: the key that each question asks of each query, -1 where there is none."""
        keys, shape = spec.visible.keys, (spec.batch, spec.visible.queries)
        tables = [asked_key(question, spec.visible).cpu().expand(shape) for question in self.places]
        return _stacked([table.where((table >= 0) & (table < keys), -1) for table in tables])

    def label_tables(self, spec: AttentionSpec, padded: int) -> tuple[Tensor, Tensor]:
        """The queries' labels (n, B, Q), and the keys' (n, B, padded): int32; what is filled up no query sees."""
        own = [question.query_label_BQ.cpu().expand(spec.batch, -1) for question in self.labels]
        keys = [question.key_label_BK.cpu().expand(spec.batch, -1) for question in self.labels]
        missing = padded - spec.visible.keys
        return _stacked(own), _stacked([torch.nn.functional.pad(table, (0, missing)) for table in keys])

    def columns(self, texts: slice) -> list[Tensor]:
        """The features of some texts' keys, (b, K, M) each."""
        every = [question.features for question in self.features]
        parts = [table if table.ndim == 2 else table[texts] for table in every]
        return [part.expand(texts.stop - texts.start, -1, -1).float() for part in parts]


def _stacked(tables: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tables)).int().contiguous() if tables else torch.zeros(0, 1, 1, dtype=torch.int32)


@dataclass(eq=False)
class Texts:
    """What the jobs of some texts read."""

    q_bGRQD: Tensor
    k_bGPDn: Tensor
    columns_bGcKs: Tensor  # (b, G or 1, strips, P * 64, STRIP)


@dataclass(eq=False)
class Job:
    """The same rows of the heads of some kv heads of some texts.

    queries: how many are read at once. turn: the job's number among those of its texts and kv heads.
    """

    texts: slice
    groups: slice
    rows: slice
    keys: slice
    inputs: Texts
    queries: int
    turn: int

    @property
    def heads(self) -> int:
        """Of one kv head."""
        return self.inputs.q_bGRQD.shape[2]

    @property
    def padded(self) -> int:
        """Rows that are read at once, in whole blocks."""
        return -(-self.queries * self.heads // BLOCK) * BLOCK

    @property
    def panels(self) -> tuple[int, int]:
        return self.keys.start // PANEL, -(-self.keys.stop // PANEL)

    @property
    def shape(self) -> tuple[int, int]:
        """How many texts, and how many kv heads of each."""
        return self.texts.stop - self.texts.start, self.groups.stop - self.groups.start
