"""All heads screened to first order, and how far the screen can be trusted: some heads are ablated too.

    found = screened(prepared(loaded, task, []))
    found.table(), found.correlations

Shapes: S sequence, K set, N head of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.interventions.patching import BACKWARD, FirstOrder, first_order
from attnscope.interventions.spec import HeadSet
from attnscope.study.ablation.questions import HeadRecord, HeadStudy
from attnscope.study.statistics import largest_first, rank_correlation
from attnscope.utils.display import head_name
from attnscope.utils.tables import as_table, integers

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.folder.parts import Parts
    from attnscope.interventions.passes import Advance, Passes

TRIED = 8  # heads that are ablated to see how far the screen can be trusted


@dataclass(frozen=True, repr=False)
class Screen(HeadRecord):
    """The screen of every head (means over the sequences), and what ablation costs where it was tried, else NaN."""

    stem = "gradient"

    heads: tuple[tuple[int, int], ...]
    signed_N: np.ndarray
    size_N: np.ndarray
    ablated_N: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correlations(self) -> tuple[float, float]:
        """Spearman's with ablation, over the heads that were tried: of the signed effect, and of both sizes."""
        tried_N = np.isfinite(self.ablated_N)
        true = self.ablated_N[tried_N]
        return rank_correlation(self.signed_N[tried_N], true), rank_correlation(self.size_N[tried_N], np.abs(true))

    def table(self) -> pa.Table:
        """A row per head: layer, head, signed, size, ablated, in the measure's unit; the largest `signed` first."""
        layer, head = (np.array(part, np.int32) for part in zip(*self.heads, strict=True))
        columns = {"signed": self.signed_N, "size": self.size_N, "ablated": self.ablated_N}
        return as_table({"layer": layer, "head": head, **columns}).take(integers(largest_first(self.signed_N)))


@dataclass(frozen=True)
class ScreenStudy(HeadStudy[Screen]):
    """All heads to first order, and some of them ablated."""

    kind, readings, schema = "gradient", "gradient", "gradient/1"

    def token_layers(self, passes: Passes) -> int:
        return (BACKWARD + 1 + TRIED) * passes.token_layers([])

    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Screen:
        return replace(screened(passes, advance), facts=facts)


def screened(passes: Passes, advance: Advance = lambda token_layers: None) -> Screen:
    """Screen all heads, and ablate the few that say how far the screen can be trusted."""
    found = first_order(passes, advance)
    tried = tried_of(found)
    effect_SK = passes.effects(passes.measured(tried, advance))
    ablated_N = np.full(len(found.heads), np.nan)
    ablated_N[[found.heads.index(one.heads[0]) for one in tried]] = effect_SK.mean(0)
    return Screen(found.heads, found.signed_SN.mean(0), found.size_SN.mean(0), ablated_N)


def tried_of(found: FirstOrder) -> list[HeadSet]:
    """TRIED heads from the largest to the smallest signed effect, equally far apart in that order."""
    order = np.argsort(-found.signed_SN.mean(0), kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, TRIED).round().astype(int))
    return [HeadSet(head_name(*head), (head,)) for head in (found.heads[place] for place in order[places])]
