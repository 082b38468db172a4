"""What a knockout measured, as plain data: who prints, draws or sends it knows neither a model nor torch.

First the case of a text and the cuts that are asked for, then the weight of each key, what cuts are compared with, and
the record with its p. Last what may be cut one at a time, as it is written.

Shapes: S text, N cut, D draw, P head of a layer, K key, T token.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from attnscope.errors import UsageError, nearest
from attnscope.inputs.labels import visible_blanks
from attnscope.interventions.spec import Cut, CutPlan, HeadSet
from attnscope.studies.statistics import effect_columns, largest_first, largest_of
from attnscope.studies.study_folder import StudyRecord, stacks_of
from attnscope.utils.display import number_of
from attnscope.utils.tables import as_table, integers, words

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt

NullKind = Literal["permuted", "heads"]
KINDS: tuple[NullKind, ...] = ("permuted", "heads")
TextLayer = tuple[int, int]  # text of the task, layer


@dataclass(frozen=True)
class AnsweredText:
    """A text as it is read. prompt: the text alone. answer: its ids, empty for none; answer_text: as text. foil: an id;
    foil_text: as text."""

    prompt: Prompt
    answer: tuple[int, ...]
    answer_text: str
    foil: int | None
    foil_text: str

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt.ids + self.answer

    @property
    @abstractmethod
    def rows(self) -> tuple[int, ...]:
        """The rows whose next tokens are measured."""

    def facts(self, **own: Any) -> dict[str, Any]:
        """What tells it from another; own: what its study asks of it."""
        prompt = self.prompt
        return {"sha256": prompt.sha256, "tokens": len(prompt), **own, "answer": list(self.answer), "foil": self.foil}


@dataclass(frozen=True)
class Case(AnsweredText):
    """A text with queries that may not look at keys. queries, keys: positions. own: whether the answer is the model's
    own next token."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    own: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that make the answer."""
        last = len(self.prompt) - 1
        return tuple(range(last, last + len(self.answer)))


@dataclass(frozen=True)
class AskedCut:
    """One cut that is asked for. layer, head: where it is of one; of a window of layers, the one in its middle."""

    cut: Cut
    layer: int | None = None
    head: int | None = None


@dataclass
class Masses:
    """What asked rows give to keys. heads: of each layer.

    mass: of a text and layer (P, K), the mean over its rows; seen: in how many rows a key is seen, (P, K); alone:
    whether a row sees nothing but this key, (P, K); emptied: whether a row sees nothing but the keys that are asked,
    (P,); rests: the sink of a head in the whole text, -1 for none, (P,).
    """

    heads: Mapping[int, tuple[int, ...]]
    keys: Sequence[Sequence[int]]
    lengths: Sequence[int]
    mass: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    seen: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    alone: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    emptied: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    rests: dict[TextLayer, np.ndarray] = field(default_factory=dict)

    def of(self, cut: Cut, text: int) -> float:
        """The mean weight that the rows of a cut's heads give to its keys; NaN where no row sees one."""
        keys = list(cut.keys[text])
        total = sum(float(mass_K[keys].sum()) for mass_K in self._of_heads(self.mass, cut, text))
        seen = any(rows_K[keys].any() for rows_K in self._of_heads(self.seen, cut, text))
        return total / len(cut.heads) if seen else np.nan

    def by_text(self, cut: Cut) -> np.ndarray:
        """(S,): the same of every text."""
        return np.array([self.of(cut, text) for text in range(len(cut.keys))])

    def per_key(self, cut: HeadSet, text: int) -> np.ndarray:
        """(K,) the mean weight of each key in a cut's heads and rows."""
        own = [mass_K / len(cut.heads) for mass_K in self._of_heads(self.mass, cut, text)]
        return sum(own, start=np.zeros(self.lengths[text]))

    def seen_by_all(self, cut: HeadSet, text: int, rows: int) -> np.ndarray:
        """(K,) whether each of so many rows sees a key in each head of a cut."""
        by_head = self._of_heads(self.seen, cut, text)
        # A layer that was not read has no row that sees anything.
        seen_K = np.full(self.lengths[text], 0 < len(cut.heads) == len(by_head))
        return np.logical_and.reduce([seen_K, *(rows_K == rows for rows_K in by_head)])

    def resting(self, cut: HeadSet, text: int) -> set[int]:
        """The sinks of a cut's heads."""
        return {int(sink) for sink in self._of_heads(self.rests, cut, text)} - {-1}

    def looking(self, cut: Cut) -> tuple[tuple[int, int], ...]:
        """The heads of a cut in which a row of any text sees any of its keys."""
        return tuple(
            head
            for head, (layer, place) in zip(cut.heads, self._places(cut), strict=True)
            if any(
                (text, layer) in self.seen and self.seen[text, layer][place, list(keys)].any()
                for text, keys in enumerate(cut.keys)
            )
        )

    def left_empty(self, cut: Cut) -> list[tuple[int, int]]:
        """The heads with a row that is left without keys, in any text; the cut is of all asked keys, or of one."""
        return [
            (layer, self.heads[layer][place])
            for layer, place in self._places(cut)
            if any(
                self.emptied[text, layer][place]
                if len(keys) == len(self.keys[text])
                else self.alone[text, layer][place, list(keys)].any()
                for text, keys in enumerate(cut.keys)
                if (text, layer) in self.emptied
            )
        ]

    def _places(self, cut: HeadSet) -> list[tuple[int, int]]:
        return [(layer, self.heads[layer].index(head)) for layer, head in cut.heads]

    def _of_heads(self, values: Mapping[TextLayer, np.ndarray], cut: HeadSet, text: int) -> list[Any]:
        """What is known of each of a cut's heads in a text, but of those in layers that were not read."""
        return [values[text, layer][place] for layer, place in self._places(cut) if (text, layer) in values]


@dataclass(frozen=True)
class Draw:
    """A cut to compare with. moved: these rows with their weights on other keys and nothing cut; None as they are."""

    cut: Cut
    moved: Cut | None = None


@dataclass(frozen=True)
class Null:
    """What a cut is compared with. of: the texts that have any; pool: the keys that exchange places, of the text with
    fewest; why: of each text that has none, why."""

    draws: tuple[Draw, ...] = ()
    of: tuple[int, ...] = ()
    pool: int = 0
    why: tuple[str, ...] = ()

    @property
    def cuts(self) -> list[Cut]:
        """All that has to be run."""
        return [cut for draw in self.draws for cut in (draw.cut, draw.moved) if cut is not None]


@dataclass(frozen=True, repr=False)
class KnockoutResult(StudyRecord):
    """What was measured. asked: the cuts; nulls: of each, by kind. effects: (S,) of every cut by its identity, NaN in a
    text none of whose rows sees its keys, 0 where their weight is 0. intact_S: what was measured without a cut."""

    stem = "knockout"

    cases: tuple[Case, ...]
    asked: tuple[AskedCut, ...]
    nulls: Mapping[NullKind, tuple[Null, ...]]
    masses: Masses
    effects: Mapping[Any, np.ndarray]
    intact_S: np.ndarray
    facts: Mapping[str, Any]

    @property
    def line(self) -> str:
        """What was measured, and the largest effect."""
        effect_N = self.statistics["effect"]
        best = largest_of(effect_N)
        count = number_of(len(self.cases), "text")
        effect = f"{effect_N[best]:+.3f} {self.unit}"
        return f"{len(self.asked)} cuts, {count}: largest {self.asked[best].cut.name}, {effect}"

    @property
    def where(self) -> str:
        """The heads together, in words."""
        select = self.facts["select"]
        return str(select) if select == CutPlan.name else f"heads {select}"

    def effect(self, cut: Cut) -> np.ndarray:
        """(S,): what a cut costs each text's answer."""
        return self.effects[cut.identity]

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """The columns of `effect_columns` of every cut, (N,) each."""
        return effect_columns(np.stack([self.effect(item.cut) for item in self.asked], 1))

    @cached_property
    def order(self) -> list[int]:
        """Places of the cuts in the table: of layers and windows the model's order, else the largest effect first."""
        in_place = self.facts["over"].startswith(("layers", "window"))
        return list(range(len(self.asked))) if in_place else largest_first(self.statistics["effect"])

    def compared(self, place: int, kind: NullKind) -> tuple[float, np.ndarray]:
        """The effect of a cut on the texts that have its null, and that of every draw, (D,)."""
        null, one = self.nulls[kind][place], self.asked[place]
        texts = list(null.of)
        draw_D = [self.effect(draw.cut) - (self.effect(draw.moved) if draw.moved else 0.0) for draw in null.draws]
        return float(self.effect(one.cut)[texts].mean()), np.array([draw[texts].mean() for draw in draw_D])

    def by_token(self) -> np.ndarray:
        """(T,): the effect of each token of one text, as a key that was cut alone; NaN for those that were not."""
        effect_T = np.full(len(self.cases[0].prompt), np.nan)
        for item in self.asked:
            [key] = item.cut.keys[0]
            if key < len(effect_T):
                effect_T[key] = self.effect(item.cut)[0]
        return effect_T

    def table(self) -> pa.Table:
        """A row per cut, in `order`; NaN is null. docs/schemas.md says what the columns are."""
        columns: dict[str, Any] = {
            "set": words([item.cut.name for item in self.asked]),
            **{name: integers([getattr(item, name) for item in self.asked], np.int32) for name in ("layer", "head")},
            "stack": words([stacks_of([item.cut]) for item in self.asked]).dictionary_encode(),
            "queries": words([self._places([case.queries for case in self.cases])] * len(self.asked)),
            "keys": words([self._places(item.cut.keys) for item in self.asked]),
            "mass": np.array([self.mass(item.cut) for item in self.asked]),
            **self.statistics,
        }
        # A cut without draws has a null nowhere: why, the facts say.
        for kind, nulls in ((kind, self.nulls[kind]) for kind in KINDS):
            column = {name: np.full(len(nulls), np.nan) for name in ("null", "low", "high", "p")}
            for place, null in enumerate(nulls):
                if not null.draws:
                    continue
                own, draw_D = self.compared(place, kind)
                column["null"][place] = draw_D.mean()
                column["low"][place], column["high"][place] = np.quantile(draw_D, (0.025, 0.975))
                # Other keys have the same weights, and other heads weights of their own.
                if kind == "permuted":
                    column["p"][place] = p_of_tails(own, draw_D, self.facts["rounding"])
                else:
                    mass_D = np.array([self.mass(draw.cut) for draw in null.draws])
                    mass = self.mass(self.asked[place].cut)
                    column["p"][place] = p_of_size(own, draw_D, self.facts["rounding"], mass_D / mass)
            columns |= {f"{name}_{kind}": values for name, values in column.items()}
            columns[f"n_{kind}"] = integers([len(null.draws) for null in nulls], np.int32)
            if kind == "permuted":
                columns["pool"] = integers([null.pool for null in nulls], np.int32)
        columns["n"] = columns.pop("n")  # the last
        return as_table(columns).take(integers(self.order))

    def mass(self, cut: Cut) -> float:
        """The weight that was cut: mean over rows, heads and the texts that see any of the keys."""
        mass_S = self.masses.by_text(cut)
        return float(np.nanmean(mass_S)) if np.isfinite(mass_S).any() else np.nan

    def _places(self, places: Sequence[Sequence[int]]) -> str | None:
        """Positions of one text; null of several, whose positions knockout.json has."""
        return ",".join(map(str, places[0])) if len(self.cases) == 1 else None


def p_of_tails(own: float, draw_D: np.ndarray, rounding: float) -> float:
    """Twice the smaller share of draws, the cut among them, that reach its effect from above or from below; at most 1.

    NaN where no effect is beyond rounding; two within rounding of each other count as equal.

    >>> p_of_tails(3.0, np.arange(-9.0, 3.0), 0.0)
    0.15384615384615385
    """
    if max(abs(own), np.abs(draw_D).max()) <= rounding:
        return np.nan
    reached = min((draw_D >= own - rounding).sum(), (draw_D <= own + rounding).sum())
    return float(min(1.0, 2 * (1 + reached) / (1 + len(draw_D))))


def p_of_size(own: float, draw_D: np.ndarray, rounding: float, mass_D: np.ndarray | float = 1.0) -> float:
    """The share of draws, the cut among them, whose effect per weight is as large, whatever its sign; NaN as in
    `p_of_tails`. mass_D: their weights over that of the cut.

    >>> p_of_size(-3.0, np.array([1.0, 2.0, 3.0]), 0.0)
    0.5
    """
    if max(abs(own), np.abs(draw_D).max()) <= rounding:
        return np.nan
    return float((1 + (np.abs(draw_D) / mass_D >= abs(own) - rounding).sum()) / (1 + len(draw_D)))


def key_name(case: Case, key: int) -> str:
    """A key as a table names it: `bank(8)`."""
    if key >= len(case.prompt):
        return f"answer({key})"
    label = visible_blanks(case.prompt.plain[key]).strip("·") or case.prompt.labels[key]
    return f"{label.strip() or label}({key})"


OVER = "none, heads, layers, window:N, keys or kv"
WINDOW = re.compile(r"window:([1-9][0-9]{0,3})")


def check_over(over: str, option: str = "over") -> None:
    """Raise UsageError for what nothing can be cut over; option: as it is called where it was given."""
    if over not in ("none", "heads", "layers", "keys", "kv") and not WINDOW.fullmatch(over):
        near = nearest(over, ("none", "heads", "layers", "window:5", "keys")) or "heads"
        raise UsageError(f"{option}: expected {OVER}, got {over[:20]!r}", f"use {{over={near}}}")


def window_of(over: str) -> int:
    """How many layers are cut at a time, of `layers` or `window:N`.

    >>> window_of("window:5")
    5
    """
    match = WINDOW.fullmatch(over)
    return int(match[1]) if match else 1
