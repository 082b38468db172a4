"""What patches cost the answers of clean texts, and what they give back to those of corrupted ones.

    question = AskedPair("Mary and John. John saw", corrupted="Mary and John. Mary saw", answer=" Mary")
    PatchStudy(loaded, pairs_of(loaded, [question]), PatchPlan(over="heads")).run().table()

A pair is a clean and a corrupted text with one answer, and which of their tokens belong together. Patched one at a time
are heads, kv groups, layers, positions, or each position in each layer.

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

from attnscope.errors import InputError, UsageError
from attnscope.hooks.generation import check_causal
from attnscope.inputs.spans import alignment, units
from attnscope.inputs.tokens import find
from attnscope.interventions.base import Measure
from attnscope.interventions.passes import Advance
from attnscope.interventions.patching import Patch, Patching, estimated
from attnscope.interventions.spec import SHARED, AskedText, HeadPlan, Method, PatchTarget, Task
from attnscope.model.selection import is_linear, stack_of
from attnscope.studies.ablation_search import CONTROLS, controls_of, head_set, portions, tried_of, whole_groups
from attnscope.studies.intervals import FEWEST
from attnscope.studies.knockout import COPY, CaseReader, case_of, read_cases, task_of
from attnscope.studies.knockout_records import Case, key_name
from attnscope.studies.statistics import (
    beside_random,
    effect_columns,
    largest_first,
    largest_of,
    means,
    rank_correlation,
    ratios,
)
from attnscope.studies.study import Cost, SetStudy, cost_of_passes, effects_by_set
from attnscope.studies.study_folder import Parts, StudyRecord, stacks_of
from attnscope.utils import display as cells
from attnscope.utils.display import number_of, shortened
from attnscope.utils.tables import as_table, integers, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

AS_MANY = "use texts with the same number of tokens"


@dataclass(frozen=True)
class AskedPair(AskedText):
    """What is asked of one pair, of which the text itself is the clean one. corrupted: the other, or its token ids. at:
    the tokens of the clean text that are patched, None for all that have a partner. answer, foil: behind either text.

    Raises UsageError where there is no corrupted text.
    """

    FIELDS = ("corrupted", "at", "answer", "foil")

    corrupted: str | Sequence[int] = None  # type: ignore[assignment]  # which is refused
    at: str | None = None

    def __post_init__(self) -> None:
        if self.corrupted is None:
            raise self.refused("no corrupted text was given", "give one with {corrupted}")


@dataclass(frozen=True)
class TextPair:
    """A pair as it is read. at: positions of the clean text; partners: those of the corrupted text, in the same places.
    without: how many tokens of the clean text have no partner."""

    clean: Case
    corrupted: Case
    at: tuple[int, ...]
    partners: tuple[int, ...]
    without: int = 0

    @property
    def alike(self) -> bool:
        """Whether both texts are the same, so that no patch changes anything."""
        return self.clean.ids == self.corrupted.ids


def pairs_of(loaded: LoadedModel, questions: Sequence[AskedPair], what: PatchTarget = "output") -> list[TextPair]:
    """The pairs of some questions. Raises InputError for what cannot be one, with the line where there are several."""
    check_causal(loaded, "patching")
    loaded.check_logits("patching")

    def pair_of(question: AskedPair, reader: CaseReader) -> TextPair:
        clean, other = case_of(question, reader), replace(question, text=question.corrupted)
        # The corrupted text has the answer of the clean one behind it, in the same tokens.
        prompt = reader.prompt(other)
        if isinstance(question.answer, str) and reader.answer(other, prompt, question.answer) != clean.answer:
            raise InputError(
                "the answer is tokenised otherwise after the corrupted text", "end both texts with the same word"
            )
        tokens, room = len(prompt) + len(clean.answer), loaded.geometry.max_positions
        if room is not None and tokens > room:
            raise InputError(
                f"the corrupted text has {tokens} tokens with its answer, the model reads {room}", "cut it"
            )
        corrupted = replace(clean, prompt=prompt, queries=(len(prompt) - 1,), keys=tuple(range(len(prompt))))
        # Only a token with a partner can be patched: what else would it be given?
        partner = partners(clean, corrupted)
        if question.at is None:
            at = tuple(sorted(partner))
            if not at:
                raise InputError("the two texts have no token in common", "name texts that differ in some words alone")
        else:
            at = find(clean.prompt, question.at, question.define).positions
            alone = next((place for place in at if place not in partner), None)
            if alone is not None:
                raise InputError(
                    f"{key_name(clean, alone)} has no partner in the corrupted text", "choose other tokens"
                )
        pair = TextPair(clean, corrupted, at, tuple(partner[place] for place in at), len(clean.prompt) - len(partner))
        # Patterns are over all keys, and keys carry their position: neither moves to another place.
        if what == "pattern" and len(clean.prompt) != len(prompt):
            raise InputError(
                f"patterns are patched between texts of equal length, got {len(clean.prompt)} and {len(prompt)} tokens",
                f"{AS_MANY}, or {{what=output}}",
            )
        moved = next((both for both in zip(at, pair.partners, strict=True) if both[0] != both[1]), None)
        if what == "key" and moved is not None:
            raise InputError(
                f"keys are patched at equal positions: {key_name(clean, moved[0])} is token {moved[1]} there",
                f"{AS_MANY}, or {{what=value}}",
            )
        return pair

    return read_cases(loaded, questions, pair_of)


def partners(clean: Case, corrupted: Case) -> dict[int, int]:
    """Which token of the corrupted text each token of the clean one belongs to, one to one; some belong to none."""
    a, b = clean.prompt.plain, corrupted.prompt.plain
    of_clean, of_corrupted = units(a, b, alignment(a, b)).members
    both = zip(of_clean, of_corrupted, strict=True)
    return {one[0]: other[0] for one, other in both if len(one) == len(other) == 1}


@dataclass(frozen=True)
class AskedPatch:
    """One patch that is asked for. layer, head: where it is of one. place: which of the asked tokens, where it is of
    one."""

    patch: Patch
    layer: int | None = None
    head: int | None = None
    place: int | None = None


ORDERED = ("layers", "positions", "layers,positions")  # that keep the model's or the text's order
ROUNDED, LEAST = 32, 1e-3  # of the logits' spread: as many eps is what rounding leaves of a gap; a share needs LEAST


@dataclass(frozen=True, kw_only=True)
class PatchPlan(HeadPlan):
    """What is patched, and how that is measured.

    what: output, pattern, key or value. method: by running every patch, or to first order from one backward pass, with
    a few that are run. random: sets of other heads that the chosen ones are compared with, where all are patched
    together.
    """

    what: PatchTarget = "output"
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
        values, statistics, unit = self.values_N, self.statistics, self.unit
        best = largest_of(values)
        shares = statistics["normalised"] if self.estimates is None else self.normalised(values)
        amounts = [] if np.isnan(shares[best]) else [f"{shares[best]:.2f} of the gap"]
        low, high = statistics["low_all"][best], statistics["high_all"][best]
        if self.estimates is None and not (np.isnan(low) and np.isnan(high)):
            at_once = f", all {len(self.asked)}" * (len(self.asked) > 1)
            amounts.append(f"{cells.effect(values[best])} {cells.interval(low, high)} {unit} (95 %{at_once})")
        amounts = amounts or [f"{cells.effect(values[best])} {unit}"]
        what = f"{len(self.asked)} patches of the {self.facts['what']}"
        count = number_of(len(self.pairs), "pair")
        return f"{what}, {count}: largest {self.asked[best].patch.name}, {', '.join(amounts)}"

    @property
    def values_N(self) -> np.ndarray:
        """The mean effect of every patch on clean texts, or its estimate where there is one."""
        return self.statistics["effect"] if self.estimates is None else self.estimates[::2].mean(0)

    @cached_property
    def order(self) -> list[int]:
        """Places of the patches in the table: of layers and positions their own order, else the largest first."""
        return list(range(len(self.asked))) if self.facts["over"] in ORDERED else largest_first(self.values_N)

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
        cost_PN, back_PN = (np.stack([of(item.patch) for item in self.asked], 1) for of in (self.effect, self.restored))
        cost, back = effect_columns(cost_PN), effect_columns(back_PN)
        n, _ = cost.pop("n"), back.pop("n")
        del back["p_symmetric"]
        restored = {"restored": back.pop("effect"), **{f"restored_{name}": value for name, value in back.items()}}
        for columns, prefix, effect_PN in ((cost, "", cost_PN), (restored, "restored_", back_PN)):
            none_3N = np.full((3, effect_PN.shape[1]), np.nan)
            shares = none_3N if self.gap is None else ratios(effect_PN, self.gap_P)
            names = (f"{prefix}normalised{end}" for end in ("", "_low", "_high"))
            columns.update(zip(names, shares, strict=True))
        return {**cost, **restored, "n": n}

    def table(self) -> pa.Table:
        """A row per patch, in `order`; NaN is null. docs/schemas.md says what the columns are."""
        count = len(self.asked)
        one_pair, estimates = self.pairs[0] if len(self.pairs) == 1 else None, np.full((2, count), np.nan)
        if self.estimates is not None:
            estimates = np.stack([self.estimates[0::2].mean(0), -self.estimates[1::2].mean(0)])
        # Of several pairs each has positions of its own, which patching.json has.
        places = [None if one_pair is None else ",".join(map(str, item.patch.at[0])) for item in self.asked]
        position = [None if one_pair is None or item.place is None else one_pair.at[item.place] for item in self.asked]
        random_D = np.array([self.effect(patch).mean() for patch in self.random])
        beside = beside_random(self.effect(self.asked[0].patch).mean(), random_D)
        random = dict(zip(("random_low", "random_high", "p_random"), beside, strict=True))
        columns: dict[str, Any] = {
            "set": words([item.patch.name for item in self.asked]),
            **{name: integers([getattr(item, name) for item in self.asked], np.int32) for name in ("layer", "head")},
            "position": integers(position, np.int32),
            "stack": words([stacks_of([item.patch]) for item in self.asked]).dictionary_encode(),
            "at": words(places),
            **self.statistics,
            "estimate": estimates[0],
            "restored_estimate": estimates[1],
            **{name: np.full(count, value) for name, value in random.items()},
            "n_random": integers([len(random_D) if self.facts["over"] == "none" else None] * count, np.int32),
        }
        columns["n"] = columns.pop("n")  # the last
        return as_table(columns).take(integers(self.order))

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
        """The patches that are asked for; of keys and values of whole kv groups.

        Raises UsageError where tokens are to be patched one by one, and pairs have other numbers of them.
        """
        plan, pairs, geometry = self.plan, self.pairs, self.model.geometry
        over, shared, whole = plan.over, plan.what in SHARED, head_set(plan.name, self.selection)
        if shared:
            whole = whole_groups(whole, geometry)
        if plan.what in ("pattern", "key") and any(is_linear(stack_of(layer)) for layer, _ in whole.heads):
            raise UsageError(
                f"a linear layer has no {plan.what} that is patched: it has a state, and no softmax over keys",
                "use {what=output} or {what=value}",
            )
        both = [positions for pair in pairs for positions in (pair.at, pair.partners)]
        if over == "none":
            return [AskedPatch(Patch(whole.name, whole.heads, tuple(both)))]
        if over in ("heads", "kv", "layers"):
            patches = []
            for part in portions("kv" if shared and over != "layers" else over, whole, geometry):
                # A group of one head is that head, whatever it was asked as.
                head = part.heads[0][1] if len(part.heads) == 1 and over != "layers" else None
                patches.append(AskedPatch(Patch(part.name, part.heads, tuple(both)), part.layer, head))
            return patches
        # The first token of each pair is one patch, the second another: pairs need as many.
        counts = sorted({len(pair.at) for pair in pairs})
        if len(counts) > 1:
            raise UsageError(
                f"one by one, pairs need as many tokens, got {counts[0]} and {counts[-1]}", "name as many with {at}"
            )
        # Of one pair a token has a name, of several a place among those asked.
        names = [f"token {place}" for place in range(counts[0])]
        if len(pairs) == 1:
            names = [key_name(pairs[0].clean, position) for position in pairs[0].at]
        one_by_one = [(tuple((positions[place],) for positions in both), place) for place in range(counts[0])]
        if over == "positions":
            return [AskedPatch(Patch(names[place], whole.heads, at), place=place) for at, place in one_by_one]
        return [
            AskedPatch(Patch(f"{layer.name} {names[place]}", layer.heads, at), layer.layer, place=place)
            for layer in portions("layers", whole, geometry)
            for at, place in one_by_one
        ]

    @property
    def sets(self) -> list[Patch]:
        return [item.patch for item in self.asked]

    @cached_property
    def random(self) -> list[Patch]:
        """Those of as many other heads in each layer, at the same tokens; where all chosen heads go together."""
        plan, own = self.plan, self.asked[0].patch
        if plan.over != "none" or plan.method != "measure" or not plan.random:
            return []
        how: dict[str, Any] = {"by_kv": plan.what in SHARED, "seed": plan.seed, "count": plan.random}
        return [Patch(heads.name, heads.heads, own.at) for heads in controls_of(own, [own], self.model.geometry, **how)]

    @property
    def task(self) -> tuple[Task, Measure]:
        task, measure = task_of([case for pair in self.pairs for case in (pair.clean, pair.corrupted)])
        return replace(task, name="pairs", together=2), measure

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
            pair.clean.facts(
                corrupted_sha256=pair.corrupted.prompt.sha256,
                corrupted_tokens=len(pair.corrupted.prompt),
                at=list(pair.at),
                partners=list(pair.partners),
                without_partner=pair.without,
            )
            for pair in self.pairs
        ]
        how = {"what": plan.what, "over": plan.over, "method": plan.method}
        drawn = {"random": plan.random, "seed": plan.seed}
        return self.task_facts | how | self.heads_facts(self.sets) | drawn | {"pairs": pairs}

    def cost(self) -> Cost:
        sets = [*self.sets, *self.random]
        what = f"{len(sets)} patches of {number_of(len(self.pairs), 'pair')}: at most"
        return cost_of_passes(what, self.passes, sets)

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> PatchedPairs:
        estimates, sets, order = None, self.sets, dict[str, Any]()
        if self.plan.method == "gradient":
            estimates = estimated(self.passes, sets, advance)
            sets = [sets[place] for place in tried_of(estimates[::2].mean(0))]
        # A pair of the same text loses exactly 0, and where all are such nothing is run.
        every = {patch.identity: patch for patch in [*sets, *self.random]}
        alike_S = np.repeat([pair.alike for pair in self.pairs], 2)
        copy, nothing = Patch(COPY, (), ((),) * len(alike_S)), np.zeros(len(alike_S))
        taken = [] if alike_S.all() else list(every.values())
        run = effects_by_set(self.passes, taken, parts, advance, copy)
        effects = {name: np.where(alike_S, 0.0, run.by_set.get(name, nothing)) for name in every}
        if estimates is not None:
            cost_N = np.array([effects.get(patch.identity, nothing + np.nan)[::2].mean() for patch in self.sets])
            tried_N = np.isfinite(cost_N)
            rank = rank_correlation(estimates[::2].mean(0)[tried_N], cost_N[tried_N])
            order = {"tried": len(sets), "rank_correlation": None if np.isnan(rank) else rank}
        # A share is of the gap, which facts say whether there is: they come first. Shares are of a gap that is many
        # times what rounding leaves of it. What a dtype rounds grows with the logits: of the demo and two models of
        # stories a gap of two texts is off by 1 to 3 eps of the logits' spread, 33 at most; LEAST is 8,000 of float32.
        eps = torch.finfo(getattr(torch, self.model.dtype)).eps
        facts |= {"least_gap": max(LEAST, ROUNDED * eps) * run.passes.logit_spread([0, 1])}
        patches, random, worse = tuple(self.asked), tuple(self.random), run.passes.measure.worse
        result = PatchedPairs(tuple(self.pairs), patches, random, effects, run.intact_S, estimates, worse, facts)
        ends = [None if np.isnan(end) else end for end in result.gap_ends]
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
