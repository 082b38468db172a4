"""What a knockout measured, as plain data: who prints, draws or sends it knows neither a model nor torch.

Shapes: S text, N cut, D draw, P head of a layer, K key, T token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from attnscope.files import save_json
from attnscope.intervene.sets import Cut
from attnscope.study.knockout.asked import CutPlan
from attnscope.study.statistics import effect_columns, largest_of
from attnscope.tables import TableRecord, as_table, integers, numbers, save, words
from attnscope.text.labels import visible_blanks

if TYPE_CHECKING:
    from attnscope.text.prompt import Prompt

NAME, TABLE = "knockout.json", "knockout.parquet"
HIGH = 0.95  # of the draws lie below the column `high_`
STATISTICS = ("effect", "low", "high", "p")
NullKind = Literal["distance", "mass"]
KINDS: tuple[NullKind, ...] = ("distance", "mass")
TextLayer = tuple[int, int]  # text of the task, layer


@dataclass(frozen=True)
class Case:
    """A text as it is read. prompt: the text alone. queries, keys: positions. answer: its ids; said: as text. foil: an
    id; foil_said: as text."""

    prompt: Prompt
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    answer: tuple[int, ...]
    said: str
    foil: int | None = None
    foil_said: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt.ids + self.answer

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

    def of(self, cut: Cut, text: int, key: Sequence[int] | None = None) -> float:
        """The mean weight that the rows of a cut's heads give to its keys, or to others; NaN where no row sees one."""
        keys = list(cut.keys[text] if key is None else key)
        total, seen = 0.0, 0
        for layer, place in self._places(cut):
            if (text, layer) in self.mass:
                total += float(self.mass[text, layer][place, keys].sum())
                seen += int(self.seen[text, layer][place, keys].sum())
        return total / len(cut.heads) if seen else np.nan

    def per_key(self, cut: Cut, text: int) -> tuple[np.ndarray, np.ndarray, set[int]]:
        """(K,) the mean weight of each key in a cut's heads and rows; whether any row sees it; where the heads rest."""
        mass_K, seen_K, rests = np.zeros(self.lengths[text]), np.zeros(self.lengths[text], bool), set[int]()
        for layer, place in self._places(cut):
            if (text, layer) in self.mass:
                mass_K += self.mass[text, layer][place] / len(cut.heads)
                seen_K |= self.seen[text, layer][place] > 0
                rests.add(int(self.rests[text, layer][place]))
        return mass_K, seen_K, rests - {-1}

    def left_empty(self, cut: Cut) -> list[tuple[int, int]]:
        """The heads with a row that is left without keys, in any text; the cut is of all asked keys, or of one."""
        return [
            (layer, self.heads[layer][place])
            for layer, place in self._places(cut)
            if any(
                (text, layer) in self.emptied and self._empties(cut, text, layer, place)
                for text in range(len(self.lengths))
            )
        ]

    def _empties(self, cut: Cut, text: int, layer: int, place: int) -> bool:
        keys = list(cut.keys[text])
        if len(keys) == len(self.keys[text]):
            return bool(self.emptied[text, layer][place])
        return bool(self.alone[text, layer][place, keys].any())

    def _places(self, cut: Cut) -> list[tuple[int, int]]:
        return [(layer, self.heads[layer].index(head)) for layer, head in cut.heads]


@dataclass(frozen=True)
class Null:
    """The cuts that one is compared with. of: the texts that have any. A text with fewer draws than another repeats."""

    draws: tuple[Cut, ...]
    of: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Knocked(TableRecord):
    """What was measured. asked: the cuts; nulls: of each, by kind. effects: (S,) of every cut by its identity, NaN in a
    text none of whose rows sees its keys, 0 where their weight is 0. intact_S: what was measured without a cut."""

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
        count = f"{len(self.cases)} text{'s' * (len(self.cases) > 1)}"
        said = f"{effect_N[best]:+.3f} {self.facts['measure']['unit']}"
        return f"{len(self.asked)} cuts, {count}: largest {self.asked[best].cut.name}, {said}"

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
        """Of every cut: effect, low, high, p (NaN for null), and n, the texts behind it; (N,) each."""
        return effect_columns(np.stack([self.effect(one.cut) for one in self.asked], 1))

    def by_token(self) -> np.ndarray:
        """(T,): of one text whose keys were cut one by one, the effect of each token, NaN for those that were not."""
        effect_T = np.full(len(self.cases[0].prompt), np.nan)
        for one in self.asked:
            [key] = one.cut.keys[0]
            if key < len(effect_T):
                effect_T[key] = self.effect(one.cut)[0]
        return effect_T

    def table(self) -> pa.Table:
        """A row per cut; NaN is null. docs/schemas.md says what the columns are."""
        found = self.statistics
        columns: dict[str, Any] = {
            "set": words([one.cut.name for one in self.asked]),
            "layer": integers([one.layer for one in self.asked], np.int32),
            "head": integers([one.head for one in self.asked], np.int32),
            "stack": words([self.facts["stack"]] * len(self.asked)).dictionary_encode(),
            "queries": words([self._places([one.queries for one in self.cases])] * len(self.asked)),
            "keys": words([self._places(one.cut.keys) for one in self.asked]),
            "mass": numbers(np.array([self.mass(one.cut) for one in self.asked])),
            **{name: numbers(found[name]) for name in STATISTICS},
        }
        for kind in KINDS:
            columns |= self._null_columns(kind)
        return as_table(columns | {"n": found["n"].astype(np.int32)})

    def mass(self, cut: Cut, texts: Sequence[int] | None = None) -> float:
        """The weight that was cut: mean over rows, heads and the texts that see any of the keys."""
        found = np.array([self.masses.of(cut, text) for text in (range(len(self.cases)) if texts is None else texts)])
        return float(np.nanmean(found)) if np.isfinite(found).any() else np.nan

    def _places(self, places: Sequence[Sequence[int]]) -> str | None:
        """Positions of one text; null of several, whose positions knockout.json has."""
        return ",".join(map(str, places[0])) if len(self.cases) == 1 else None

    def _null_columns(self, kind: NullKind) -> dict[str, pa.Array]:
        found = np.full((4, len(self.asked)), np.nan)
        count = np.zeros(len(self.asked), np.int32)
        for place, (one, null) in enumerate(zip(self.asked, self.nulls[kind], strict=True)):
            texts = list(null.of)
            if not texts:
                continue
            draw_D = np.array([np.nanmean(self.effect(draw)[texts]) for draw in null.draws])
            own = np.nanmean(self.effect(one.cut)[texts])
            taken = np.mean([self.mass(draw, texts) for draw in null.draws])
            found[:, place] = draw_D.mean(), np.quantile(draw_D, HIGH), 100 * (draw_D < own).mean(), taken
            count[place] = len(null.draws)
        names = (f"null_{kind}", f"high_{kind}", f"percentile_{kind}")
        columns = dict(zip(names, map(numbers, found[:3]), strict=True)) | {f"n_{kind}": numbers(count)}
        return columns | ({"null_cut_mass": numbers(found[3])} if kind == "mass" else {})

    def save(self, folder: Path) -> None:
        """Write the table, and the facts."""
        save(self.table(), folder / TABLE)
        save_json(self.facts, folder / NAME)


def key_name(case: Case, key: int) -> str:
    """A key as a table names it: `bank(8)`."""
    if key >= len(case.prompt):
        return f"answer({key})"
    label = visible_blanks(case.prompt.plain[key]).strip("·") or case.prompt.labels[key]
    return f"{label.strip() or label}({key})"
