"""What cuts cost the answers of texts, and what the same weights cost on other keys and the looks of other heads.

    KnockoutStudy(loaded, cases, CutPlan(over="heads")).run().table()

Shapes: S text, N cut, D draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import InputError
from attnscope.folder.parts import Parts
from attnscope.interventions.base import Measure
from attnscope.interventions.knockout import Knockout
from attnscope.interventions.passes import AGREES, Advance
from attnscope.interventions.spec import AskedText, Cut, CutPlan, HeadSet, Task
from attnscope.model.selection import everything, pairs
from attnscope.study.ablation.sets import heads_by_layer
from attnscope.study.knockout.cases import cases_of, task_of
from attnscope.study.knockout.cuts import cuts_over
from attnscope.study.knockout.masses import MassReader, read_masses
from attnscope.study.knockout.nulls import edges_alone, heads_null, permuted_null, reasons
from attnscope.study.knockout.records import KINDS, AskedCut, Case, Knocked, Masses, Null, NullKind, key_name
from attnscope.study.study import HALF, Cost, SetEffects, SetStudy, effects_by_set
from attnscope.utils.display import head_name, number_of, shortened

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

COPY = "intact copy"


@dataclass(frozen=True)
class KnockoutStudy(SetStudy[Knocked]):
    """What is lost where chosen rows of chosen heads may not look at chosen keys, see `CutPlan`.

    key: whether keys were named, or all tokens of each text are cut.
    """

    kind, readings, schema, stage = "knockout", "knockout", "knockout/2", "cutting"

    model: LoadedModel
    cases: Sequence[Case]
    plan: CutPlan = CutPlan()
    key: bool = True

    @classmethod
    def of(cls, model: LoadedModel, questions: Sequence[AskedText], plan: CutPlan) -> KnockoutStudy:
        """The study of some questions. Raises InputError for what cannot be a case."""
        return cls(model, cases_of(model, questions), plan, any(one.key is not None for one in questions))

    @cached_property
    def asked(self) -> list[AskedCut]:
        """The cuts that are asked for."""
        return cuts_over(self.plan.over, self.selection, self.model.geometry, self.cases, self.plan.name)

    @property
    def sets(self) -> list[Cut]:
        return [one.cut for one in self.asked]

    @property
    def task(self) -> tuple[Task, Measure]:
        return task_of(self.cases)

    @property
    def intervention(self) -> Knockout:
        return Knockout(tuple(one.queries for one in self.cases), heads_by_layer(self.sets), self.plan.how)

    @property
    def lines(self) -> Iterator[str]:
        """Of one text which tokens are meant, and what the answer is."""
        if len(self.cases) > 1:
            return
        [case] = self.cases
        for name, places in (("query", case.queries), *[("key", case.keys)] * self.key):
            yield f"{name}: {shortened(', '.join(key_name(case, at) for at in places), 200)}"
        yield f"answer: {case.answer_text}"

    @property
    def facts(self) -> dict[str, Any]:
        plan, heads = self.plan, [head for one in self.sets for head in one.heads]
        texts = [
            {
                "sha256": case.prompt.sha256,
                "tokens": len(case.prompt),
                "queries": list(case.queries),
                "keys": list(case.keys),
                "answer": list(case.answer),
                "foil": case.foil,
            }
            for case in self.cases
        ]
        how = {"how": plan.how, "over": plan.over, **self.heads_facts(heads)}
        return self.task_facts | how | {"random": plan.random, "seed": plan.seed, "texts": texts}

    def cost(self) -> Cost:
        times, cuts = 1 + 2 * self.plan.random, self.sets
        heads = self.compared_heads
        total = len(cuts) * times + len(heads)
        what = f"{len(cuts)} cuts, at most {total} with others, on {number_of(len(self.cases), 'text')}"
        return self.cost_of_passes(what, cuts, times=times, before=self.passes.token_layers(heads))

    @property
    def compared_heads(self) -> list[HeadSet]:
        """Each head of the model alone, where any cut is compared with the looks of other heads."""
        if not self.plan.random or not edges_alone(self.sets):
            return []
        return [HeadSet(head_name(*head), (head,)) for head in pairs(everything(self.model.geometry.heads_by_layer))]

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Knocked:
        # One cut without draws is read and run in the same passes; else what is drawn depends on what the rows give.
        if len(self.sets) == 1 and not self.plan.random:
            masses, run = self._at_once(self.sets[0], advance)
            nulls: dict[NullKind, tuple[Null, ...]] = {kind: (Null(),) for kind in KINDS}
        else:
            masses, nulls = self._compared()
            draws = [cut for kind in KINDS for null in nulls[kind] for cut in null.cuts]
            run = self._measured(draws, masses, parts, advance)
        if all(np.isnan(run.by_set[one.identity]).all() for one in self.sets):
            why = "no query sees any of the keys in the heads that were chosen"
            raise InputError(why, "choose other keys or heads")
        emptied = sorted({head for one in self.sets for head in masses.left_empty(one)})
        measured = {
            "intact": float(run.intact_S.mean()),
            **run.facts,
            "rounding": max(AGREES[self.model.dtype], run.spread or 0.0),
            "without_null": {kind: dict(reasons(nulls[kind])) for kind in KINDS},
            "emptied": [head_name(*head) for head in emptied],
            **run.unshared,
        }
        asked = tuple(self.asked)
        return Knocked(tuple(self.cases), asked, nulls, masses, run.by_set, run.intact_S, facts | measured)

    def _compared(self) -> tuple[Masses, dict[NullKind, tuple[Null, ...]]]:
        """What the rows give to each key, and what each cut is compared with."""
        cuts, plan, heads = self.sets, self.plan, self.compared_heads
        knockout = self.intervention
        reading = replace(self.passes, intervention=replace(knockout, heads=heads_by_layer([*heads, *cuts])))
        masses = read_masses(reading, [one.keys for one in self.cases], rests=plan.random > 0)
        queries, own = knockout.queries, [text for text, case in enumerate(self.cases) if case.own]
        return masses, {
            "permuted": tuple(permuted_null(cut, queries, masses, plan.random, plan.seed, own) for cut in cuts),
            "heads": tuple(heads_null(cut, heads, queries, masses, plan.random) for cut in cuts),
        }

    @property
    def _copy(self) -> Cut:
        return Cut(COPY, (), ((),) * len(self.cases))

    def _at_once(self, cut: Cut, advance: Advance) -> tuple[Masses, SetEffects]:
        """One cut whose intact rows are read in the pass that runs it: two passes' rows in all."""
        passes, knockout = self.passes, self.intervention
        reader = MassReader(Masses(knockout.heads, cut.keys, passes.task.lengths), rests=False)
        sets = [cut, *[self._copy] * (self.model.dtype in HALF)]
        value_SK = replace(passes, intervention=replace(knockout, read=reader)).measured(sets, advance)
        masses = reader.done([len(one) for one in knockout.queries])
        effect_SK = passes.effects(value_SK)
        by_set = {one.identity: _known(one, masses, effect_SK[:, place]) for place, one in enumerate(sets)}
        spread = float(np.abs(effect_SK[:, 1]).max()) if len(sets) > 1 else None
        return masses, SetEffects(passes, value_SK[:, 0], by_set, spread)

    def _measured(self, draws: Sequence[Cut], masses: Masses, parts: Parts, advance: Advance) -> SetEffects:
        """What cuts and draws cost; those that take no weight from any text are not run."""
        every = {one.identity: one for one in [*self.sets, *draws]}
        texts = range(len(self.cases))
        taken = [one for one in every.values() if one.moves or any(masses.of(one, text) > 0 for text in texts)]
        passes = replace(self.passes, intervention=replace(self.intervention, heads=heads_by_layer(taken)))
        run = effects_by_set(passes, taken, parts, advance, self._copy)
        nothing = np.zeros(len(texts))
        by_set = {name: _known(one, masses, run.by_set.get(name, nothing)) for name, one in every.items()}
        return replace(run, by_set=by_set)


def _known(cut: Cut, masses: Masses, effect_S: np.ndarray) -> np.ndarray:
    """The effect in each text: NaN where no row sees a key, exactly 0 where their weight is exactly 0."""
    if not cut.heads or cut.moves:
        return effect_S
    mass_S = np.array([masses.of(cut, text) for text in range(len(effect_S))])
    return np.where(np.isnan(mass_S), np.nan, np.where(mass_S == 0, 0.0, effect_S))
