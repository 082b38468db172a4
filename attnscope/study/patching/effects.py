"""What patches cost the answers of clean texts, and what they give back to those of corrupted ones.

    PatchStudy(loaded, pairs, PatchPlan(over="heads")).run().table()

Shapes: S text of the task (clean and corrupted in turn), P pair, N patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from attnscope.folder.parts import Parts
from attnscope.interventions.base import Measure
from attnscope.interventions.passes import Advance, Passes
from attnscope.interventions.patching import Patch, Patching, estimated
from attnscope.interventions.spec import Method, Over, Selection, Task
from attnscope.interventions.spec import PatchTarget as What
from attnscope.model.selection import DECODER
from attnscope.study.ablation.screen import TRIED
from attnscope.study.ablation.sets import CONTROLS, head_set
from attnscope.study.knockout.effects import COPY
from attnscope.study.knockout.records import key_name
from attnscope.study.patching.pairs import AskedPair, TextPair, pairs_of, pairs_task
from attnscope.study.patching.patches import AskedPatch, patches_over, random_patches
from attnscope.study.records import StudyRecord
from attnscope.study.statistics import (
    FEWEST,
    beside_random,
    effect_columns,
    largest_first,
    largest_of,
    means,
    rank_correlation,
    ratios,
)
from attnscope.study.study import Cost, SetStudy, effects_by_set
from attnscope.utils import display as cells
from attnscope.utils.display import number_of, shortened
from attnscope.utils.tables import as_table, integers, numbers, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

ORDERED = ("layers", "positions", "layers,positions")  # that keep the model's or the text's order
ROUNDED, LEAST = 32, 1e-3  # of the logits' spread: as many eps is what rounding leaves of a gap; a share needs LEAST


@dataclass(frozen=True)
class PatchPlan:
    """What is patched, and how that is measured.

    what: output, pattern, key or value. over: what is patched one at a time, see `patches`. select: the heads, by
    layer, None for all; name: what they are called together. method: by running every patch, or to first order from
    one backward pass, with a few that are run. random: sets of other heads that the chosen ones are compared with,
    where all are patched together.
    """

    what: What = "output"
    over: Over = "none"
    select: Selection | None = None
    name: str = "all heads"
    method: Method = "measure"
    random: int = CONTROLS
    seed: int = 0


@dataclass(frozen=True, repr=False)
class PatchedPairs(StudyRecord):
    """What was measured. asked: the patches. random: those of other heads, where all chosen heads go together. effects:
    (S,) of every patch that was run, by its identity: how much worse the measure gets. intact_S: what was measured
    without a patch. estimates: (S, N) of the asked patches to first order, None where all were run."""

    stem = "patching"

    pairs: tuple[TextPair, ...]
    asked: tuple[AskedPatch, ...]
    random: tuple[Patch, ...]
    effects: Mapping[Any, np.ndarray]
    intact_S: np.ndarray
    estimates: np.ndarray | None
    worse: int
    facts: Mapping[str, Any]

    @property
    def line(self) -> str:
        """What was measured, and the largest share or effect."""
        values = self.statistics["effect"] if self.estimates is None else self.estimates[::2].mean(0)
        best = largest_of(values)
        shares = self.statistics["normalised"] if self.estimates is None else self.normalised(values)
        unit, share = self.unit, shares[best]
        said = [] if np.isnan(share) else [f"{share:.2f} of the gap"]
        low, high = self.statistics["low_all"][best], self.statistics["high_all"][best]
        if self.estimates is None and not (np.isnan(low) and np.isnan(high)):
            at_once = f", all {len(self.asked)}" * (len(self.asked) > 1)
            said.append(f"{cells.effect(values[best])} {cells.interval(low, high)} {unit} (95 %{at_once})")
        said = said or [f"{cells.effect(values[best])} {unit}"]
        count = f"{len(self.pairs)} pair{'s' * (len(self.pairs) > 1)}"
        what = f"{len(self.asked)} patches of the {self.facts['what']}"
        return f"{what}, {count}: largest {self.asked[best].patch.name}, {', '.join(said)}"

    @cached_property
    def order(self) -> list[int]:
        """Places of the patches in the table: of layers and positions their own order, else the largest effect first,
        or estimate where there is one."""
        if self.facts["over"] in ORDERED:
            return list(range(len(self.asked)))
        return largest_first(self.statistics["effect"] if self.estimates is None else self.estimates[::2].mean(0))

    def effect(self, patch: Patch) -> np.ndarray:
        """(P,): what a patch costs the answer of each clean text; NaN where it was not run."""
        return self.effects.get(patch.identity, np.full(len(self.intact_S), np.nan))[::2]

    def restored(self, patch: Patch) -> np.ndarray:
        """(P,): what the same patch gives back to the answer of each corrupted text; NaN where it was not run."""
        return -self.effects.get(patch.identity, np.full(len(self.intact_S), np.nan))[1::2]

    @property
    def gap_P(self) -> np.ndarray:
        """(P,): how much worse the measure is of each corrupted text."""
        return self.worse * (self.intact_S[1::2] - self.intact_S[::2])

    @property
    def gap(self) -> float | None:
        """The mean gap; None where no share is made of it, for which `no_share` has the reason."""
        return None if self.no_share else float(self.gap_P.mean())

    @cached_property
    def gap_ends(self) -> tuple[float, float]:
        """The interval of the mean gap; NaN for an open end, and under FEWEST pairs."""
        ends = means(self.gap_P[:, None])
        return float(ends.low[0]), float(ends.high[0])

    @cached_property
    def no_share(self) -> str:
        """Why the gap makes no shares; empty where it does."""
        gap, least, unit = float(self.gap_P.mean()), self.facts["least_gap"], self.unit
        if gap == 0:
            return "the two texts have the same answer"
        if abs(gap) < least:
            return f"the two texts differ by {abs(gap):.2g} {unit}; rounding allows shares from {least:.2g} on"
        low, high = self.gap_ends
        if len(self.pairs) < FEWEST or low > 0 or high < 0:
            return ""
        return f"the mean gap of {gap:.3g} {unit} may be 0, its interval is {cells.interval(low, high)}"

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """Of every patch as it was asked for, (N,) each, NaN for null: the columns of `effect_columns`, then the
        share of the gap and its interval; the same of what is restored; n."""
        cost_PN, back_PN = (np.stack([of(one.patch) for one in self.asked], 1) for of in (self.effect, self.restored))
        cost, back = effect_columns(cost_PN), effect_columns(back_PN)
        n, _ = cost.pop("n"), back.pop("n")
        del back["p_symmetric"]
        restored = {"restored": back.pop("effect"), **{f"restored_{name}": value for name, value in back.items()}}
        shares = [self._shares(prefix, of_PN) for prefix, of_PN in (("", cost_PN), ("restored_", back_PN))]
        return {**cost, **shares[0], **restored, **shares[1], "n": n}

    def _shares(self, prefix: str, effect_PN: np.ndarray) -> dict[str, np.ndarray]:
        names = [f"{prefix}normalised{end}" for end in ("", "_low", "_high")]
        if self.gap is None:
            return {name: np.full(effect_PN.shape[1], np.nan) for name in names}
        return dict(zip(names, ratios(effect_PN, self.gap_P), strict=True))

    def table(self) -> pa.Table:
        """A row per patch, in `order`; NaN is null. docs/schemas.md says what the columns are."""
        count = len(self.asked)
        none, one_pair = np.full(count, np.nan), self.pairs[0] if len(self.pairs) == 1 else None
        estimates = (
            [none, none] if self.estimates is None else [self.estimates[0::2].mean(0), -self.estimates[1::2].mean(0)]
        )
        # Of several pairs each has positions of its own, which patching.json has.
        places = [None if one_pair is None else ",".join(map(str, one.patch.at[0])) for one in self.asked]
        position = [None if one_pair is None or one.place is None else one_pair.at[one.place] for one in self.asked]
        random_D = np.array([self.effect(one).mean() for one in self.random])
        low, high, p_random = beside_random(self.effect(self.asked[0].patch).mean(), random_D)
        columns: dict[str, Any] = {
            "set": words([one.patch.name for one in self.asked]),
            "layer": pa.array([one.layer for one in self.asked], pa.int32()),
            "head": pa.array([one.head for one in self.asked], pa.int32()),
            "position": pa.array(position, pa.int32()),
            "stack": words([DECODER] * count).dictionary_encode(),
            "at": words(places),
            **{name: numbers(values) for name, values in self.statistics.items() if name != "n"},
            "estimate": numbers(estimates[0]),
            "restored_estimate": numbers(estimates[1]),
            "random_low": numbers(np.full(count, low)),
            "random_high": numbers(np.full(count, high)),
            "p_random": numbers(np.full(count, p_random)),
            "n_random": integers([len(random_D) if self.facts["over"] == "none" else None] * count, np.int32),
        }
        return as_table(columns | {"n": self.statistics["n"].astype(np.int32)}).take(integers(self.order))

    def normalised(self, values: np.ndarray) -> np.ndarray:
        """Effects as a share of the gap between the two texts: 0 as the clean one, 1 as the corrupted one."""
        return values / self.gap if self.gap is not None else np.full(len(values), np.nan)


@dataclass(frozen=True)
class PatchStudy(SetStudy[PatchedPairs]):
    """What answers lose where heads are as in another text, and what that gives back, see `PatchPlan`."""

    kind, readings, schema, stage = "patch", "patching", "patching/2", "patching"

    model: LoadedModel
    pairs: Sequence[TextPair]
    plan: PatchPlan = PatchPlan()

    @classmethod
    def of(cls, model: LoadedModel, questions: Sequence[AskedPair], plan: PatchPlan) -> PatchStudy:
        """The study of some questions. Raises InputError for what cannot be a pair."""
        return cls(model, pairs_of(model, questions, plan.what), plan)

    @cached_property
    def asked(self) -> list[AskedPatch]:
        """The patches that are asked for."""
        plan, whole = self.plan, head_set(self.plan.name, self.selection)
        return patches_over(plan.over, whole, self.model.geometry, self.pairs, plan.what)

    @property
    def sets(self) -> list[Patch]:
        return [one.patch for one in self.asked]

    @cached_property
    def random(self) -> list[Patch]:
        """Those of other heads, which are measured where all chosen heads go together."""
        plan = self.plan
        if plan.over != "none" or plan.method != "measure" or not plan.random:
            return []
        return random_patches(self.asked[0], self.model.geometry, plan.what, plan.random, plan.seed)

    @property
    def task(self) -> tuple[Task, Measure]:
        return pairs_task(self.pairs)

    @property
    def intervention(self) -> Patching:
        return Patching(self.plan.what)

    @property
    def lines(self) -> Iterator[str]:
        """Of one pair which tokens differ and which are patched, and what the answer is."""
        if len(self.pairs) > 1:
            return
        [pair] = self.pairs
        ids, other = pair.clean.prompt.ids, pair.corrupted.prompt.ids
        differ = [
            f"{key_name(pair.clean, place)} -> {key_name(pair.corrupted, partner)}"
            for place, partner in zip(pair.at, pair.partners, strict=True)
            if ids[place] != other[partner]
        ]
        yield f"differ: {shortened(', '.join(differ), 200) or 'none of the patched tokens'}"
        if pair.without:
            yield f"{pair.without} tokens have no partner in the corrupted text and are not patched"
        yield f"answer: {pair.clean.answer_text}"

    @property
    def facts(self) -> dict[str, Any]:
        plan = self.plan
        pairs = [
            {
                "sha256": pair.clean.prompt.sha256,
                "tokens": len(pair.clean.prompt),
                "corrupted_sha256": pair.corrupted.prompt.sha256,
                "corrupted_tokens": len(pair.corrupted.prompt),
                "at": list(pair.at),
                "partners": list(pair.partners),
                "without_partner": pair.without,
                "answer": list(pair.clean.answer),
                "foil": pair.clean.foil,
            }
            for pair in self.pairs
        ]
        how = {"what": plan.what, "over": plan.over, "method": plan.method}
        heads = self.heads_facts([head for one in self.sets for head in one.heads])
        return self.task_facts | how | heads | {"random": plan.random, "seed": plan.seed, "pairs": pairs}

    def cost(self) -> Cost:
        sets = [*self.sets, *self.random]
        return self.cost_of_passes(f"{len(sets)} patches of {number_of(len(self.pairs), 'pair')}", sets)

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> PatchedPairs:
        estimates, sets, order = None, self.sets, dict[str, Any]()
        if self.plan.method == "gradient":
            estimates = estimated(self.passes, sets, advance)
            sets = _tried(sets, estimates)
        # A pair of the same text loses exactly 0, and where all are such nothing is run.
        every = {one.identity: one for one in [*sets, *self.random]}
        alike_S = np.repeat([pair.alike for pair in self.pairs], 2)
        copy, nothing = Patch(COPY, (), ((),) * len(alike_S)), np.zeros(len(alike_S))
        taken = [] if alike_S.all() else list(every.values())
        run = effects_by_set(self.passes, taken, parts, advance, copy)
        effects = {name: np.where(alike_S, 0.0, run.by_set.get(name, nothing)) for name in every}
        if estimates is not None:
            cost_N = np.array([effects.get(one.identity, nothing + np.nan)[::2].mean() for one in self.sets])
            tried_N = np.isfinite(cost_N)
            rank = rank_correlation(estimates[::2].mean(0)[tried_N], cost_N[tried_N])
            order = {"tried": len(sets), "rank_correlation": None if np.isnan(rank) else rank}
        # A share is of the gap, which facts say whether there is: they come first.
        facts |= {"least_gap": least_gap(run.passes)}
        asked, random, worse = tuple(self.asked), tuple(self.random), run.passes.measure.worse
        result = PatchedPairs(tuple(self.pairs), asked, random, effects, run.intact_S, estimates, worse, facts)
        ends = [None if np.isnan(one) else one for one in result.gap_ends]
        measured = {
            "intact": float(run.intact_S[::2].mean()),
            "corrupted": float(run.intact_S[1::2].mean()),
            "gap": result.gap,
            "gap_low": ends[0],
            "gap_high": ends[1],
            "no_share": result.no_share or None,
            **run.facts,
            **run.unshared,
            **order,
        }
        return replace(result, facts=facts | measured)


def least_gap(passes: Passes) -> float:
    """The smallest gap that shares are made of, in the measure's unit: many times what rounding leaves of it.

    What a dtype rounds grows with the logits. Of the demo and two models of stories a gap of two texts is off by 1 to 3
    eps of the logits' spread, 33 at most: 1e-3 of it in float32 is 8,000 eps.
    """
    eps = torch.finfo(getattr(torch, passes.loaded.dtype)).eps
    return max(LEAST, ROUNDED * eps) * passes.logit_spread([0, 1])


def _tried(patches: Sequence[Patch], estimate_SN: np.ndarray) -> list[Patch]:
    """TRIED patches from the largest to the smallest estimate, equally far apart in that order."""
    order = np.argsort(-estimate_SN[::2].mean(0), kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, TRIED).round().astype(int))
    return [patches[place] for place in order[places]]
