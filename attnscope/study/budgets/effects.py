"""What a smaller cache costs texts or their answers, beside the share of the keys that it keeps.

    found = budgeted(loaded, cases, BudgetPlan("stream:4+64,top:64", over="heads"))
    found.table()
    found.bearable(0.01)      # {"stream:4+64": "0-2,3.2-5", ...}

Heads that can bear a budget are chosen by their effects, and an effect of chosen heads on the texts that chose them is
too small. So they are chosen on the first half of the texts, and measured together on the other.

Shapes: S text, N budget of a set of heads, K of those the ones whose heads were chosen, P head of a layer.
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
from torch import Tensor

from attnscope.cells import head_name
from attnscope.files import save_json
from attnscope.folder.parts import Parts, claim, with_weights
from attnscope.intervene.budget_names import written_budgets
from attnscope.intervene.budgets import CacheBudget, HeadBudget, KeptShares
from attnscope.intervene.passes import Advance, Passes, prepared
from attnscope.model.libraries import versions
from attnscope.selection import everything, written_heads
from attnscope.stacks import DECODER
from attnscope.study.ablation.effects import HALF, effects_by_identity, task_facts
from attnscope.study.ablation.sets import heads_by_layer
from attnscope.study.budgets.asked import BELOW, check_below
from attnscope.study.budgets.cases import CacheCase, budget_task
from attnscope.study.budgets.sets import AskedBudget, budgets_over
from attnscope.study.statistics import FEWEST, effect_columns, largest_of
from attnscope.tables import TableRecord, as_table, integers, numbers, save, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

SCHEMA = "budgets/2"
NAME, TABLE, READINGS = "budgets.json", "budgets.parquet", "budgets"
CONDITIONS = ("together", "bearable", "alone")  # in the order of the table
COPY = HeadBudget("intact copy", ())  # in half precision: what it differs by is noise
Shares = Mapping[tuple[str, int, int], np.ndarray]  # of a budget, a text and a layer: what each head keeps, (P,)


@dataclass(frozen=True)
class BudgetPlan:
    """Which heads have which budgets. keep: as they are written, by commas. over: what has one at a time, see `sets`.
    select: the heads, by layer, None for all; name: what they are called together. below: what heads may lose alone
    and still be measured together, on the other half of the texts."""

    keep: str
    over: str = "none"
    select: Mapping[int, Sequence[int]] | None = None
    name: str = "all heads"
    below: float = BELOW

    @property
    def kinds(self) -> list[str]:
        """The budgets, each once."""
        return list(written_budgets(self.keep))


@dataclass(frozen=True, repr=False)
class BudgetCosts(TableRecord):
    """What was measured. asked: the budgets. effect_SN: what each costs each text, exactly 0
    in a text of which it drops nothing, NaN in those that chose its heads. kept_N: the share of the keys that its heads
    keep, mean over rows, heads and texts. intact_S: what was measured without a budget. widths: how many heads each
    layer has."""

    cases: tuple[CacheCase, ...]
    asked: tuple[AskedBudget, ...]
    effect_SN: np.ndarray
    kept_N: np.ndarray
    intact_S: np.ndarray
    widths: Mapping[int, int]
    facts: Mapping[str, Any]

    @property
    def line(self) -> str:
        """What was measured, and the largest cost."""
        effect_N = self.statistics["effect"]
        worst = largest_of(effect_N)
        count, budget = f"{len(self.cases)} text{'s' * (len(self.cases) > 1)}", self.asked[worst].budget
        said = f"{budget.keep}, {budget.name}, {effect_N[worst]:+.3f} {self.unit}"
        return f"{len(self.asked)} budgets, {count}: costliest {said}"

    @property
    def unit(self) -> str:
        """Of the effects."""
        return str(self.facts["measure"]["unit"])

    @property
    def kinds(self) -> list[str]:
        """The budgets as they are written, in their order."""
        return list(dict.fromkeys(one.budget.keep for one in self.asked))

    @cached_property
    def families(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The columns of `effect_columns`, NaN for null: of the budgets over all texts, and, where there are any, of
        those whose heads were chosen, over the texts that did not choose them."""
        chosen = sum(one.condition == "bearable" for one in self.asked)  # the last ones
        asked = len(self.asked) - chosen
        families = [self.effect_SN[:, :asked], self.effect_SN[self.facts["choosing_texts"] :, asked:]]
        return [effect_columns(effect_SN) for effect_SN in families[: 1 + bool(chosen)]]

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """The columns of both families, (N,) each."""
        return {name: np.concatenate([one[name] for one in self.families]) for name in self.families[0]}

    @cached_property
    def order(self) -> list[int]:
        """Places of the budgets in the table: of each budget all heads together first, then those that can bear it,
        then what goes alone, heads by effect, layers in order."""
        by_effect = self.facts["over"] in ("heads", "kv")

        def rank(place: int) -> tuple[int, int, float]:
            budget, condition = self.asked[place].budget, self.asked[place].condition
            effect = float(self.statistics["effect"][place]) if by_effect and condition == "alone" else 0.0
            return self.kinds.index(budget.keep), CONDITIONS.index(condition), -effect

        return sorted(range(len(self.asked)), key=rank)

    def table(self) -> pa.Table:
        """A row per budget and set of heads, in `order`; NaN is null. docs/schemas.md says what the columns are."""
        found = self.statistics
        columns: dict[str, Any] = {
            "keep": words([one.budget.keep for one in self.asked]),
            "set": words([one.budget.name for one in self.asked]),
            "condition": words([one.condition for one in self.asked]).dictionary_encode(),
            "layer": pa.array([one.layer for one in self.asked], pa.int32()),
            "head": pa.array([one.head for one in self.asked], pa.int32()),
            "stack": words([self.facts["stack"]] * len(self.asked)).dictionary_encode(),
            "kept": numbers(self.kept_N),
            **{name: numbers(values) for name, values in found.items() if name != "n"},
        }
        return as_table(columns | {"n": found["n"].astype(np.int32)}).take(integers(self.order))

    def bearable(self, below: float = BELOW) -> dict[str, str]:
        """The heads that each budget costs less than `below`, as `select` takes them, empty for none.

        Each head, kv group or layer is judged alone, over all texts: by the upper end of the interval that holds for
        all at once. Where there is none, under 32 texts or where few of them carry what is lost, no text may lose as
        much. What they lose together is measured on other texts than those that chose them, from 64 texts on: the
        rows of the table that are "bearable". Raises UsageError for a limit that is no number above 0.

            >>> attnscope.knockout(model, text, keep="stream:4+32", over="heads").bearable(0.05)
            {'stream:4+32': '0-2,3.2-5'}
        """
        check_below(below)
        return {kind: written_heads(self.bearing(kind, below), self.widths) for kind in self.kinds}

    def bearing(self, kind: str, below: float = BELOW) -> list[tuple[int, int]]:
        """The heads that one of the budgets costs less than `below`, as (layer, head)."""
        return _bearing(self.asked, self.effect_SN, self.statistics["high_all"], kind, below)

    def save(self, folder: Path) -> None:
        """Write the table, and the facts."""
        save(self.table(), folder / TABLE)
        save_json(self.facts, folder / NAME)


def budgeted(
    loaded: LoadedModel,
    cases: Sequence[CacheCase],
    plan: BudgetPlan,
    folder: Path | None = None,
    *,
    force: bool = False,
    advance: Advance = lambda token_layers: None,
) -> BudgetCosts:
    """Give heads a budget, and measure; with a folder, keep each pass's readings, and write table and facts.

    Raises ModelError for a family that attends outside the attention interface, UsageError for a folder that holds
    another study, unless force says to write over it.
    """
    asked, passes = planned_budgets(loaded, cases, plan)
    facts, parts = _facts(loaded, cases, plan, asked, passes), Parts()
    if folder is not None:
        facts = with_weights(facts, loaded)
        parts = claim(folder, READINGS, "budget", facts, force)
    with parts.resumable():
        shares = read_shares(passes, plan.kinds)
        passes, intact_S, effects = _measured(passes, asked, shares, parts, advance)
        effect_SN = np.stack([effects[one.budget.identity] for one in asked], 1)
        first, widths = choosing_texts(len(cases), plan.over), loaded.geometry.heads_by_layer
        chosen = _chosen(asked, effect_SN[:first], plan, widths) if first else []
        known = {name: effect_S[first:] for name, effect_S in effects.items()}
        if new := [one for one in chosen if one.budget.identity not in known]:
            known |= _measured(_passes_over(passes, cases[first:]), new, shares, parts, advance, first)[2]
    chosen_SK = np.full((len(cases), len(chosen)), np.nan)
    for place, one in enumerate(chosen):
        chosen_SK[first:, place] = known[one.budget.identity]
    asked, effect_SN = [*asked, *chosen], np.hstack([effect_SN, chosen_SK])
    kept_N = np.array([np.mean(_kept(shares, passes, one, first)) for one in asked])
    spread = float(np.abs(effects[COPY.identity]).max()) if COPY.identity in effects else None
    measured = {"intact": float(intact_S.mean()), "intact_by_text": intact_S.tolist(), "spread": spread}
    measured |= {"below": plan.below, "choosing_texts": first}
    facts |= {**measured, "unshared": passes.why_not or None, "versions": versions()}
    found = BudgetCosts(tuple(cases), tuple(asked), effect_SN, kept_N, intact_S, widths, {"schema": SCHEMA, **facts})
    if folder is not None:
        found.save(folder)
    return found


def choosing_texts(count: int, over: str) -> int:
    """How many of the first texts choose the heads that can bear a budget, so that the others show what those lose
    together; 0 where either half would have no interval, and where nothing is measured alone."""
    return count // 2 if over != "none" and count // 2 >= FEWEST else 0


def planned_budgets(
    loaded: LoadedModel, cases: Sequence[CacheCase], plan: BudgetPlan
) -> tuple[list[AskedBudget], Passes]:
    """The budgets that are asked for, and passes that share no layers. Raises as `budgeted`."""
    selection = everything(loaded.geometry.heads_by_layer) if plan.select is None else plan.select
    asked = budgets_over(plan.over, selection, loaded.geometry, plan.kinds, plan.name)
    task, measure = budget_task(cases)
    sets, ends, stops = [one.budget for one in asked], [one.end for one in cases], [one.stop for one in cases]
    cache = CacheBudget(tuple(ends), tuple(stops), heads_by_layer(sets))
    return asked, prepared(loaded, task, sets, cache, measure=measure, shared=False)


def read_shares(passes: Passes, kinds: Sequence[str]) -> Shares:
    """What every budget keeps of each text, layer and head, in one pass over each text."""
    cache, found = passes.intervention, dict[tuple[str, int, int], np.ndarray]()
    assert isinstance(cache, CacheBudget)

    def note(kind: str, text: int, layer: int, share_P: Tensor) -> None:
        found[kind, text, layer] = share_P.numpy()

    reading = replace(passes, intervention=KeptShares(cache, kinds, note), layers=None)
    for batch in reading.batches(0):
        reading.run(batch, [])
    return found


def shares_of(shares: Shares, passes: Passes, one: HeadBudget, text: int) -> np.ndarray:
    """The share of the keys that each head of a budget keeps in a text, mean over rows; 1 where it loses none."""
    cache = passes.intervention
    assert isinstance(cache, CacheBudget)
    return np.array([shares[one.keep, text, layer][cache.heads[layer].index(head)] for layer, head in one.heads])


def _bearing(
    asked: Sequence[AskedBudget], effect_SN: np.ndarray, high_N: np.ndarray, kind: str, below: float
) -> list[tuple[int, int]]:
    """The heads that lose less than `below` alone: by the upper ends, and without one in every text."""
    worst_N = np.where(np.isnan(high_N), effect_SN.max(0), high_N)
    alone = [
        one.budget for one, worst in zip(asked, worst_N, strict=True) if one.condition == "alone" and worst < below
    ]
    return sorted(head for one in alone if one.keep == kind for head in one.heads)


def _chosen(
    asked: Sequence[AskedBudget], effect_SN: np.ndarray, plan: BudgetPlan, widths: Mapping[int, int]
) -> list[AskedBudget]:
    """Of each kind of budget the heads that can bear it by the effects on some texts, where there are any."""
    high_N = effect_columns(effect_SN)["high_all"]
    heads = {kind: tuple(_bearing(asked, effect_SN, high_N, kind, plan.below)) for kind in plan.kinds}
    return [
        AskedBudget(HeadBudget(written_heads(some, widths), some, kind), "bearable")
        for kind, some in heads.items()
        if some
    ]


def _passes_over(passes: Passes, cases: Sequence[CacheCase]) -> Passes:
    """The passes over some of the cases."""
    task, measure = budget_task(cases)
    ends, stops = tuple(one.end for one in cases), tuple(one.stop for one in cases)
    assert isinstance(passes.intervention, CacheBudget)
    return replace(
        passes, task=task, measure=measure, intervention=replace(passes.intervention, ends=ends, stops=stops)
    )


def _kept(shares: Shares, passes: Passes, one: AskedBudget, first: int) -> list[float]:
    """The share of the keys that a budget keeps, for each text that it is measured on."""
    texts = range(first if one.condition == "bearable" else 0, len(passes.task))
    return [float(shares_of(shares, passes, one.budget, text).mean()) for text in texts]


def _measured(
    passes: Passes, asked: Sequence[AskedBudget], shares: Shares, parts: Parts, advance: Advance, first: int = 0
) -> tuple[Passes, np.ndarray, dict[Any, np.ndarray]]:
    """The passes with shared layers where that pays, the intact measure, and (S,) effects by a budget's identity.

    first: the text in `shares` that is the first of the passes."""
    every = {one.budget.identity: one.budget for one in asked}
    texts = range(first, first + len(passes.task))
    lost = {name: [shares_of(shares, passes, one, text).min() < 1 for text in texts] for name, one in every.items()}
    copies = [COPY] if passes.loaded.dtype in HALF else []
    sets = [*copies, *(one for name, one in every.items() if any(lost[name]))]
    passes, intact_S, run = effects_by_identity(passes, sets, parts, advance)
    found = {name: np.where(lost[name], run.get(name, 0.0), 0.0) for name in every}
    return passes, intact_S, found | {one.identity: run[one.identity] for one in copies}


def _facts(
    loaded: LoadedModel, cases: Sequence[CacheCase], plan: BudgetPlan, asked: Sequence[AskedBudget], passes: Passes
) -> dict[str, Any]:
    """What tells this study from another."""
    heads = " ".join(sorted({head_name(*head) for one in asked for head in one.budget.heads}))
    return task_facts(loaded, passes.task, passes.intervention, passes.measure) | {
        "keep": plan.kinds,
        "over": plan.over,
        "select": plan.name,
        "heads_sha256": hashlib.sha256(heads.encode()).hexdigest(),
        "stack": DECODER,
        "texts": [_text_facts(one) for one in cases],
    }


def _text_facts(case: CacheCase) -> dict[str, Any]:
    return {
        "sha256": case.prompt.sha256,
        "tokens": len(case.prompt),
        "end": case.end,
        "rows": [case.start, case.stop],
        "answer": list(case.answer),
        "foil": case.foil,
    }
