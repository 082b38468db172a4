"""What patches cost the answers of clean texts, and what they give back to those of corrupted ones.

    found = patched(loaded, pairs, PatchPlan(over="heads"))
    found.table()

Shapes: S text of the task (clean and corrupted in turn), P pair, N patch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from attnscope import cells
from attnscope.cells import head_name
from attnscope.files import save_json
from attnscope.folder.parts import Parts, claim, with_weights
from attnscope.intervene.passes import Advance, Passes, prepared
from attnscope.intervene.patch_gradient import estimated
from attnscope.intervene.patching import Patch, Patching
from attnscope.intervene.what import What
from attnscope.model.libraries import versions
from attnscope.selection import everything
from attnscope.stacks import DECODER
from attnscope.study.ablation.effects import HALF, effects_by_identity, task_facts
from attnscope.study.ablation.screen import TRIED
from attnscope.study.ablation.sets import CONTROLS, head_set
from attnscope.study.knockout.asked import Selection
from attnscope.study.knockout.effects import COPY
from attnscope.study.patching.over import Method, Over
from attnscope.study.patching.pairs import TextPair, pairs_task
from attnscope.study.patching.patches import AskedPatch, patches_over, random_patches
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
from attnscope.tables import TableRecord, as_table, integers, numbers, save, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

SCHEMA = "patching/2"
ORDERED = ("layers", "positions", "layers,positions")  # that keep the model's or the text's order
NAME, TABLE, READINGS = "patching.json", "patching.parquet", "patching"
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
class PatchedPairs(TableRecord):
    """What was measured. asked: the patches. random: those of other heads, where all chosen heads go together. effects:
    (S,) of every patch that was run, by its identity: how much worse the measure gets. intact_S: what was measured
    without a patch. estimates: (S, N) of the asked patches to first order, None where all were run."""

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
        unit, share = self.facts["measure"]["unit"], shares[best]
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
        gap, least, unit = float(self.gap_P.mean()), self.facts["least_gap"], self.facts["measure"]["unit"]
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
        estimate, restored_estimate = self._estimates()
        random_D = np.array([self.effect(one).mean() for one in self.random])
        low, high, p_random = beside_random(self.effect(self.asked[0].patch).mean(), random_D)
        columns: dict[str, Any] = {
            "set": words([one.patch.name for one in self.asked]),
            "layer": pa.array([one.layer for one in self.asked], pa.int32()),
            "head": pa.array([one.head for one in self.asked], pa.int32()),
            "position": pa.array([self._position(one) for one in self.asked], pa.int32()),
            "stack": words([DECODER] * count).dictionary_encode(),
            "at": words([self._places(one) for one in self.asked]),
            **{name: numbers(values) for name, values in self.statistics.items() if name != "n"},
            "estimate": numbers(estimate),
            "restored_estimate": numbers(restored_estimate),
            "random_low": numbers(np.full(count, low)),
            "random_high": numbers(np.full(count, high)),
            "p_random": numbers(np.full(count, p_random)),
            "n_random": integers([len(random_D) if self.facts["over"] == "none" else None] * count, np.int32),
        }
        return as_table(columns | {"n": self.statistics["n"].astype(np.int32)}).take(integers(self.order))

    def normalised(self, values: np.ndarray) -> np.ndarray:
        """Effects as a share of the gap between the two texts: 0 as the clean one, 1 as the corrupted one."""
        return values / self.gap if self.gap is not None else np.full(len(values), np.nan)

    def save(self, folder: Path) -> None:
        """Write the table, and the facts."""
        save(self.table(), folder / TABLE)
        save_json(self.facts, folder / NAME)

    def _estimates(self) -> tuple[np.ndarray, np.ndarray]:
        if self.estimates is None:
            return np.full(len(self.asked), np.nan), np.full(len(self.asked), np.nan)
        return self.estimates[::2].mean(0), -self.estimates[1::2].mean(0)

    def _position(self, one: AskedPatch) -> int | None:
        """The position of one pair's token; null of several pairs."""
        return None if one.place is None or len(self.pairs) > 1 else self.pairs[0].at[one.place]

    def _places(self, one: AskedPatch) -> str | None:
        """Positions of one pair's clean text; null of several pairs, whose positions patching.json has."""
        return ",".join(map(str, one.patch.at[0])) if len(self.pairs) == 1 else None


def patched(
    loaded: LoadedModel,
    pairs: Sequence[TextPair],
    plan: PatchPlan = PatchPlan(),
    folder: Path | None = None,
    *,
    force: bool = False,
    advance: Advance = lambda token_layers: None,
) -> PatchedPairs:
    """Patch, and measure; with a folder, keep each pass's readings, and write table and facts.

    Raises ModelError for a family that attends outside the attention interface, InputError for texts that it cannot
    read side by side, UsageError for a folder that holds other patches, unless force says to write over it.
    """
    asked, random, passes = planned(loaded, pairs, plan)
    facts, parts = _facts(loaded, pairs, plan, asked, passes), Parts()
    if folder is not None:
        facts = with_weights(facts, loaded)
        parts = claim(folder, READINGS, "patch", facts, force)
    estimates, sets = None, [one.patch for one in asked]
    with parts.resumable():
        if plan.method == "gradient":
            estimates = estimated(passes, sets, advance)
            sets = _tried(sets, estimates)
        passes, intact_S, effects = _run(passes, pairs, [*sets, *random], parts, advance)
    facts = facts | {"least_gap": least_gap(passes)}
    found = PatchedPairs(
        tuple(pairs), tuple(asked), tuple(random), effects, intact_S, estimates, passes.measure.worse, facts
    )
    measured = _measured_facts(found, passes, len(sets))
    found = replace(found, facts={"schema": SCHEMA, **facts, **measured, "versions": versions()})
    if folder is not None:
        found.save(folder)
    return found


def planned(
    loaded: LoadedModel, pairs: Sequence[TextPair], plan: PatchPlan
) -> tuple[list[AskedPatch], list[Patch], Passes]:
    """The patches that are asked for, those of other heads, and passes that share no layers. Raises as `patched`."""
    geometry = loaded.geometry
    selection = everything(geometry.heads_by_layer) if plan.select is None else plan.select
    asked = patches_over(plan.over, head_set(plan.name, selection), geometry, pairs, plan.what)
    random: list[Patch] = []
    if plan.over == "none" and plan.method == "measure" and plan.random:
        random = random_patches(asked[0], geometry, plan.what, plan.random, plan.seed)
    task, measure = pairs_task(pairs)
    sets = [one.patch for one in asked]
    return asked, random, prepared(loaded, task, sets, Patching(plan.what), measure=measure, shared=False)


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


def _run(
    passes: Passes, pairs: Sequence[TextPair], patches: Sequence[Patch], parts: Parts, advance: Advance
) -> tuple[Passes, np.ndarray, dict[Any, np.ndarray]]:
    """The passes with shared layers where that pays, the intact measure, and (S,) effects by a patch's identity; of a
    pair of the same text exactly 0."""
    every = {one.identity: one for one in patches}
    copies = [Patch(COPY, (), ((),) * len(passes.task))] if passes.loaded.dtype in HALF else []
    alike_S = np.repeat([pair.alike for pair in pairs], 2)
    sets = [*copies, *([] if alike_S.all() else every.values())]
    passes, intact_S, run = effects_by_identity(passes, sets, parts, advance)
    nothing = np.zeros(len(passes.task))
    effects = {name: np.where(alike_S, 0.0, run.get(name, nothing)) for name in every}
    return passes, intact_S, effects | {one.identity: run[one.identity] for one in copies}


def _facts(
    loaded: LoadedModel, pairs: Sequence[TextPair], plan: PatchPlan, asked: Sequence[AskedPatch], passes: Passes
) -> dict[str, Any]:
    """What tells these patches from others."""
    facts = task_facts(loaded, passes.task, passes.intervention, passes.measure)
    heads = " ".join(sorted(head_name(*head) for one in asked for head in one.patch.heads))
    return facts | {
        "what": plan.what,
        "over": plan.over,
        "method": plan.method,
        "select": plan.name,
        "heads_sha256": hashlib.sha256(heads.encode()).hexdigest(),
        "stack": DECODER,
        "random": plan.random,
        "seed": plan.seed,
        "pairs": [_pair_facts(one) for one in pairs],
    }


def _pair_facts(pair: TextPair) -> dict[str, Any]:
    return {
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


def _measured_facts(found: PatchedPairs, passes: Passes, tried: int) -> dict[str, Any]:
    copy = Patch(COPY, (), ((),) * len(passes.task)).identity
    spread = float(np.abs(found.effects[copy]).max()) if copy in found.effects else None
    order: dict[str, Any] = {}
    if found.estimates is not None:
        cost_N = np.array([found.effect(one.patch).mean() for one in found.asked])
        tried_N = np.isfinite(cost_N)
        order["tried"] = tried
        rank = rank_correlation(found.estimates[::2].mean(0)[tried_N], cost_N[tried_N])
        order["rank_correlation"] = None if np.isnan(rank) else rank
    return {
        "intact": float(found.intact_S[::2].mean()),
        "corrupted": float(found.intact_S[1::2].mean()),
        "gap": found.gap,
        **dict(zip(("gap_low", "gap_high"), (None if np.isnan(one) else one for one in found.gap_ends), strict=True)),
        "no_share": found.no_share or None,
        "intact_by_text": found.intact_S.tolist(),
        "spread": spread,
        "unshared": passes.why_not or None,
        **order,
    }
