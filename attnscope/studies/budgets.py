"""What a smaller cache costs texts or their answers, and the share of the keys that it keeps.

    questions = [AskedCache("Mary and John went out. John gave a book to", answer=" Mary")]
    cases = budget_cases(loaded, questions, "stream:4+64,top:64")
    record = BudgetStudy(loaded, cases, BudgetPlan("stream:4+64,top:64", over="heads")).run()
    record.table()
    record.bearable(0.01)      # {"stream:4+64": "0-2,3.2-5", ...}

A case is a text with the end of its prompt, and the rows that count: those of its answer. Without an answer the rows of
the whole text count, with `at` those from the end of the prompt on. All chosen heads have a budget together, and heads,
kv groups or layers have it alone.

Heads that can bear a budget are chosen by their effects, and an effect of chosen heads on the texts that chose them is
too small. So they are chosen on the first half of the texts, and measured together on the other.

Shapes: S text, N budget of a set of heads, K of those the ones of chosen heads, P head of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from torch import Tensor

from attnscope.errors import InputError, UsageError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.generation import check_causal, continuation, say_ignored
from attnscope.inputs.answers import check_answer, check_room
from attnscope.inputs.tokens import find
from attnscope.interventions.base import Measure
from attnscope.interventions.kv_cache import CacheBudget, HeadBudget, KeptShares
from attnscope.interventions.passes import Advance, Passes
from attnscope.interventions.spec import AskedText, HeadPlan, Task, check_below, written_budgets
from attnscope.model.selection import everything, is_linear, stack_of, written_heads
from attnscope.studies.ablation_search import head_set, heads_by_layer, portions
from attnscope.studies.intervals import FEWEST
from attnscope.studies.knockout import CaseReader, read_cases, task_of, text_of_ids
from attnscope.studies.knockout_records import AnsweredText
from attnscope.studies.statistics import effect_columns, largest_of
from attnscope.studies.study import Cost, SetEffects, SetStudy, cost_of_passes, effects_by_set
from attnscope.studies.study_folder import Parts, StudyRecord
from attnscope.utils.display import layer_name, number_of, shortened
from attnscope.utils.tables import as_table, integers, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

BELOW = 0.01  # in the unit of the effects: what a head may lose and still be listed as one that can bear the budget


FOLLOW = "give {answer} of several tokens, {generate=32}, or {at=TOKEN}, where the prompt ends"


@dataclass(frozen=True)
class AskedCache(AskedText):
    """What is asked of one text. at: the last token of the prompt, None for the end of the text. generate: how many
    tokens of its own the model is to give as the answer."""

    FIELDS = ("at", "answer", "foil")

    at: str | None = None
    generate: int | None = None


@dataclass(frozen=True)
class CacheCase(AnsweredText):
    """A text with the prompt that a cache keeps. end: the tokens of the prompt. start: the first row that counts."""

    end: int
    start: int

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(range(self.start, self.stop))

    @property
    def stop(self) -> int:
        """The rows that anything depends on: all but the last."""
        return len(self.ids) - 1


def budget_cases(loaded: LoadedModel, questions: Sequence[AskedCache], keep: str) -> list[CacheCase]:
    """The cases of some questions; keep: the budgets, as they are written.

    Raises InputError for what cannot be one, with the line where there are several; UsageError where a budget chooses
    at the end of the prompt and no row follows it.
    """
    check_causal(loaded, "a budget of a cache")
    loaded.check_logits("a budget of a cache")
    once = [name for name, budget in written_budgets(keep).items() if budget.once]
    if any(question.generate for question in questions):
        say_ignored(loaded)

    def case_of(question: AskedCache, read: CaseReader) -> CacheCase:
        prompt = read.prompt(question)
        last = len(prompt) - 1
        end = 1 + (last if question.at is None else max(find(prompt, question.at, question.define).positions))
        check_answer(question.generate, question.answer, question.truncate)
        # The answer is what the question names, or what the model itself puts after the text.
        answer: tuple[int, ...] = ()
        if question.answer is not None:
            answer = read.answer(question, prompt, question.answer)
        elif question.generate is not None:
            check_room(replace(prompt, answer=len(prompt)), question.generate, loaded.geometry.max_positions)
            answer = tuple(continuation(loaded, prompt.ids, question.generate, UNCHECKED).ids)
        start = last if answer else 0 if question.at is None else end
        # A foil only says by how much its answer is the likelier.
        if question.foil is not None and not answer:
            read.answer(question, prompt, question.foil)
            raise UsageError(
                "a foil is compared with an answer, and there is none", "give {answer}, or leave out {foil}"
            )
        foil, foil_text = read.foil(question, prompt, answer)
        case = CacheCase(prompt, answer, text_of_ids(loaded, answer), foil, foil_text, end, start)
        if not case.rows:
            why = f"no token follows token {start}" if start else "the text is one token, and no token follows it"
            raise InputError(why, "give a longer text")
        # A budget that chooses at the end of the prompt changes only the rows after it, and those that depend on them.
        if once and (case.rows[0] if foil is not None else case.rows[-1]) < end:
            why = "its one token is made by the prompt's last row" if answer else "the prompt is the whole text"
            raise UsageError(f"{once[0]} cuts rows after the prompt, and none counts: {why}", FOLLOW)
        return case

    return read_cases(loaded, questions, case_of)


@dataclass(frozen=True)
class AskedBudget:
    """One budget that is measured. condition: of all chosen heads "together", of what goes "alone", or of the heads
    that are "bearable": together, on other texts than those on which each alone cost little. layer, head: where it is
    of one."""

    budget: HeadBudget
    condition: Literal["together", "alone", "bearable"] = "together"
    layer: int | None = None
    head: int | None = None


CONDITIONS = ("together", "bearable", "alone")  # in the order of the table
COPY = HeadBudget("intact copy", ())  # in half precision: what it differs by is noise


@dataclass(frozen=True)
class BudgetPlan(HeadPlan):
    """Which heads have which budgets. keep: as they are written, by commas. below: what heads may lose alone and still
    be measured together, on the other half of the texts."""

    keep: str
    below: float = BELOW

    @property
    def kinds(self) -> list[str]:
        """The budgets, each once."""
        return list(written_budgets(self.keep))


@dataclass(frozen=True, repr=False)
class BudgetCosts(StudyRecord):
    """What was measured. asked: the budgets. effect_SN: what each costs each text, exactly 0
    in a text of which it drops nothing, NaN in those that chose its heads. kept_N: the share of the keys that its heads
    keep, mean over rows, heads and texts. intact_S: what was measured without a budget. widths: how many heads each
    layer has."""

    stem = "budgets"

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
        count, budget = number_of(len(self.cases), "text"), self.asked[worst].budget
        cost = f"{budget.keep}, {budget.name}, {effect_N[worst]:+.3f} {self.unit}"
        return f"{len(self.asked)} budgets, {count}: costliest {cost}"

    @property
    def kinds(self) -> list[str]:
        """The budgets as they are written, in their order."""
        return list(dict.fromkeys(item.budget.keep for item in self.asked))

    @cached_property
    def families(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The columns of `effect_columns`, NaN for null: of the budgets over all texts, and, where there are any, of
        those of chosen heads, over the texts that did not choose them."""
        chosen = sum(item.condition == "bearable" for item in self.asked)  # the last ones
        fixed = len(self.asked) - chosen
        families = [self.effect_SN[:, :fixed], self.effect_SN[self.facts["choosing_texts"] :, fixed:]]
        return [effect_columns(effect_SN) for effect_SN in families[: 1 + bool(chosen)]]

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """The columns of both families, (N,) each."""
        return {name: np.concatenate([family[name] for family in self.families]) for name in self.families[0]}

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
        columns: dict[str, Any] = {
            "keep": words([item.budget.keep for item in self.asked]),
            "set": words([item.budget.name for item in self.asked]),
            "condition": words([item.condition for item in self.asked]).dictionary_encode(),
            **{name: integers([getattr(item, name) for item in self.asked], np.int32) for name in ("layer", "head")},
            "stack": words([self.facts["stack"]] * len(self.asked)).dictionary_encode(),
            "kept": self.kept_N,
            **self.statistics,
        }
        return as_table(columns).take(integers(self.order))

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


@dataclass(frozen=True)
class BudgetStudy(SetStudy[BudgetCosts]):
    """What texts or their answers lose where heads keep the keys of a cache budget alone, see `BudgetPlan`."""

    kind, readings, schema, stage = "budget", "budgets", "budgets/2", "cutting"

    model: LoadedModel
    cases: Sequence[CacheCase]
    plan: BudgetPlan

    @classmethod
    def of(cls, model: LoadedModel, questions: Sequence[AskedCache], plan: BudgetPlan) -> BudgetStudy:
        """The study of some questions. Raises as `budget_cases`, UsageError for heads that cache no keys, and
        ModelError for a model without any that do."""
        model.check_softmax("a budget of keys")
        chosen = everything(model.geometry.unnamed) if plan.select is None else plan.select
        if linear := [layer for layer in chosen if is_linear(stack_of(layer))]:
            raise UsageError(
                f"{layer_name(linear[0])} caches no keys: a linear layer has a state of one size",
                "choose heads of attention with {select}",
            )
        return cls(model, budget_cases(model, questions, plan.keep), plan)

    @cached_property
    def asked(self) -> list[AskedBudget]:
        """The budgets that are asked for: of each kind all chosen heads together, and what goes alone."""
        over, asked, whole = self.plan.over, list[AskedBudget](), head_set(self.plan.name, self.selection)
        alone = [] if over == "none" else portions(over, whole, self.model.geometry)
        for kind in self.plan.kinds:
            asked.append(AskedBudget(HeadBudget(whole.name, whole.heads, kind)))
            asked += [AskedBudget(HeadBudget(one.name, one.heads, kind), "alone", one.layer, one.head) for one in alone]
        return asked

    @property
    def sets(self) -> list[HeadBudget]:
        return [item.budget for item in self.asked]

    @property
    def task(self) -> tuple[Task, Measure]:
        return task_of(self.cases)

    @cached_property
    def intervention(self) -> CacheBudget:
        ends, stops = zip(*((case.end, case.stop) for case in self.cases), strict=True)
        return CacheBudget(ends, stops, heads_by_layer(self.sets))

    @cached_property
    def shares(self) -> Mapping[tuple[str, int, int], np.ndarray]:
        """What every budget keeps of each text and layer, a share of each head, (P,); in one pass over each text."""
        shares: dict[tuple[str, int, int], np.ndarray] = {}

        def note(kind: str, text: int, layer: int, share_P: Tensor) -> None:
            shares[kind, text, layer] = share_P.numpy()

        reading = replace(self.passes, intervention=KeptShares(self.intervention, self.plan.kinds, note), layers=None)
        for batch in reading.batches(0):
            reading.run(batch, [])
        return shares

    def kept(self, budget: HeadBudget, text: int) -> np.ndarray:
        """The share of the keys that each head of a budget keeps in a text, mean over rows; 1 where it loses none."""
        heads, shares = self.intervention.heads, self.shares
        return np.array([shares[budget.keep, text, layer][heads[layer].index(head)] for layer, head in budget.heads])

    @property
    def lines(self) -> Iterator[str]:
        """Of one text where the prompt ends, and what is measured."""
        if len(self.cases) > 1:
            return
        [case] = self.cases
        last = case.end - 1
        if last < len(case.prompt) - 1:
            yield f"the prompt ends with token {last}: {case.prompt.labels[last]}"
        yield (
            f"answer: {shortened(case.answer_text, 200)}" if case.answer else f"measured: {len(case.rows)} next tokens"
        )

    @property
    def facts(self) -> dict[str, Any]:
        texts = [case.facts(end=case.end, rows=[case.start, case.stop]) for case in self.cases]
        how = {"keep": self.plan.kinds, "over": self.plan.over}
        # The first set is of all heads that any other has.
        return self.task_facts | how | self.heads_facts(self.sets[:1]) | {"texts": texts}

    @property
    def choosing(self) -> int:
        """How many of the first texts choose the heads that can bear a budget, so that the others show what those lose
        together; 0 where either half would have no interval, and where nothing is measured alone."""
        half = len(self.cases) // 2
        return half if self.plan.over != "none" and half >= FEWEST else 0

    def cost(self) -> Cost:
        together = [item.budget for item in self.asked if item.condition == "together"]
        shares = self.passes.token_layers([])
        held = self.passes.token_layers(together) // 2 if self.choosing else 0
        what = f"{len(self.sets)} budgets of heads, on {number_of(len(self.cases), 'text')}"
        return cost_of_passes(f"{what}: at most", self.passes, self.sets, before=shares + held)

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> BudgetCosts:
        asked, first, widths = self.asked, self.choosing, self.model.geometry.heads_by_layer
        run = self.effects(self.passes, self.sets, parts, advance)
        effect_SN = np.stack([run.by_set[budget.identity] for budget in self.sets], 1)
        # Of each kind of budget the heads that can bear it by the effects on the first texts are chosen together.
        chosen: list[AskedBudget] = []
        high_N = effect_columns(effect_SN[:first])["high_all"] if first else np.empty(0)
        for kind in self.plan.kinds if first else ():
            heads = tuple(_bearing(asked, effect_SN[:first], high_N, kind, self.plan.below))
            if heads:
                chosen.append(AskedBudget(HeadBudget(written_heads(heads, widths), heads, kind), "bearable"))
        # They are measured on the other texts, unless the same set was measured already.
        known = {name: effect_S[first:] for name, effect_S in run.by_set.items()}
        if new := [item.budget for item in chosen if item.budget.identity not in known]:
            others = replace(self, cases=self.cases[first:])
            task, measure = others.task
            cache = replace(self.intervention, ends=others.intervention.ends, stops=others.intervention.stops)
            passes = replace(run.passes, task=task, measure=measure, intervention=cache)
            known |= self.effects(passes, new, parts, advance, first).by_set
        chosen_SK = np.full((len(self.cases), len(chosen)), np.nan)
        for place, item in enumerate(chosen):
            chosen_SK[first:, place] = known[item.budget.identity]
        asked, effect_SN = [*asked, *chosen], np.hstack([effect_SN, chosen_SK])
        # A budget keeps its share of the keys in the texts that it was measured on.
        texts = {"bearable": range(first, len(self.cases))}
        every = [texts.get(item.condition, range(len(self.cases))) for item in asked]
        kept_N = np.array(
            [np.mean([self.kept(one.budget, text).mean() for text in of]) for one, of in zip(asked, every, strict=True)]
        )
        measured = {"intact": float(run.intact_S.mean()), **run.facts, "below": self.plan.below}
        facts |= {**measured, "choosing_texts": first, **run.unshared}
        return BudgetCosts(tuple(self.cases), tuple(asked), effect_SN, kept_N, run.intact_S, widths, facts)

    def effects(
        self, passes: Passes, budgets: Sequence[HeadBudget], parts: Parts, advance: Advance, first: int = 0
    ) -> SetEffects:
        """What budgets cost; those that lose no key of any text are not run. first: the text of the study that is the
        first of the passes."""
        every = {budget.identity: budget for budget in budgets}
        texts = range(first, first + len(passes.task))
        lost = {name: [self.kept(budget, text).min() < 1 for text in texts] for name, budget in every.items()}
        sets = [budget for name, budget in every.items() if any(lost[name])]
        run = effects_by_set(passes, sets, parts, advance, COPY)
        return replace(run, by_set={name: np.where(lost[name], run.by_set.get(name, 0.0), 0.0) for name in every})


def _bearing(
    asked: Sequence[AskedBudget], effect_SN: np.ndarray, high_N: np.ndarray, kind: str, below: float
) -> list[tuple[int, int]]:
    """The heads that lose less than `below` alone: by the upper ends, and without one in every text."""
    worst_N = np.where(np.isnan(high_N), effect_SN.max(0), high_N)
    alone = [
        item.budget for item, worst in zip(asked, worst_N, strict=True) if item.condition == "alone" and worst < below
    ]
    return sorted(head for one in alone if one.keep == kind for head in one.heads)
