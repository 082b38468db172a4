"""What cuts cost the answers of texts, and what the same weights cost on other keys and the looks of other heads.

    found = knocked_out(loaded, cases, CutPlan(over="heads"))
    found.table()

Shapes: S text, N cut, D draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.cells import head_name
from attnscope.errors import InputError
from attnscope.folder.parts import Parts, claim, with_weights
from attnscope.intervene.knockout import Knockout
from attnscope.intervene.passes import AGREES, Advance, Passes, prepared
from attnscope.intervene.sets import Cut, HeadSet
from attnscope.model.libraries import versions
from attnscope.selection import everything, pairs
from attnscope.stacks import DECODER
from attnscope.study.ablation.effects import HALF, effects_by_identity, task_facts
from attnscope.study.ablation.sets import heads_by_layer
from attnscope.study.knockout.asked import CutPlan
from attnscope.study.knockout.cases import task_of
from attnscope.study.knockout.cuts import cuts_over
from attnscope.study.knockout.masses import MassReader, read_masses
from attnscope.study.knockout.nulls import edges_alone, heads_null, permuted_null, reasons
from attnscope.study.knockout.records import KINDS, AskedCut, Case, Knocked, Masses, Null, NullKind

if TYPE_CHECKING:
    from attnscope.model.geometry import Geometry
    from attnscope.model.loaded import LoadedModel

SCHEMA, READINGS = "knockout/2", "knockout"
COPY = "intact copy"


def knocked_out(
    loaded: LoadedModel,
    cases: Sequence[Case],
    plan: CutPlan = CutPlan(),
    folder: Path | None = None,
    *,
    force: bool = False,
    advance: Advance = lambda token_layers: None,
) -> Knocked:
    """Cut, and measure; with a folder, keep each pass's readings, and write table and facts.

    Raises ModelError for a family that attends outside the attention interface, InputError where no row sees a key,
    UsageError for a folder that holds another knockout, unless force says to write over it.
    """
    asked, passes = planned(loaded, cases, plan)
    facts, parts = _facts(loaded, cases, plan, asked, passes), Parts()
    if folder is not None:
        facts = with_weights(facts, loaded)
        parts = claim(folder, READINGS, "knockout", facts, force)
    with parts.resumable():
        if len(asked) == 1 and not plan.random:
            masses, intact_S, effects = _at_once(passes, asked[0].cut, advance)
            nulls: dict[NullKind, tuple[Null, ...]] = {kind: (Null(),) for kind in KINDS}
        else:
            cuts = [one.cut for one in asked]
            masses, nulls = _compared(passes, cases, cuts, plan)
            draws = [cut for kind in KINDS for null in nulls[kind] for cut in null.cuts]
            passes, intact_S, effects = _measured(passes, cuts, draws, masses, parts, advance)
    found = Knocked(tuple(cases), tuple(asked), nulls, masses, effects, intact_S, {})
    found = replace(found, facts={"schema": SCHEMA, **facts, **_measured_facts(found, passes), "versions": versions()})
    if all(np.isnan(found.effect(one.cut)).all() for one in asked):
        raise InputError("no query sees any of the keys in the heads that were chosen", "choose other keys or heads")
    if folder is not None:
        found.save(folder)
    return found


def planned(loaded: LoadedModel, cases: Sequence[Case], plan: CutPlan) -> tuple[list[AskedCut], Passes]:
    """The cuts that are asked for, and passes that share no layers. Raises as `knocked_out`."""
    geometry = loaded.geometry
    selection = everything(geometry.heads_by_layer) if plan.select is None else plan.select
    asked = cuts_over(plan.over, selection, geometry, cases, plan.name)
    task, measure = task_of(cases)
    cuts = [one.cut for one in asked]
    knockout = Knockout(tuple(one.queries for one in cases), heads_by_layer(cuts), plan.how)
    return asked, prepared(loaded, task, cuts, knockout, measure=measure, shared=False)


def _compared(
    passes: Passes, cases: Sequence[Case], cuts: Sequence[Cut], plan: CutPlan
) -> tuple[Masses, dict[NullKind, tuple[Null, ...]]]:
    """What the rows give to each key, and what each cut is compared with."""
    knockout = passes.intervention
    assert isinstance(knockout, Knockout)
    heads = every_head(passes.loaded.geometry) if plan.random and edges_alone(cuts) else []
    reading = replace(passes, intervention=replace(knockout, heads=heads_by_layer([*heads, *cuts])))
    masses = read_masses(reading, [one.keys for one in cases], rests=plan.random > 0)
    queries, own = knockout.queries, [text for text, case in enumerate(cases) if case.own]
    return masses, {
        "permuted": tuple(permuted_null(cut, queries, masses, plan.random, plan.seed, own) for cut in cuts),
        "heads": tuple(heads_null(cut, heads, queries, masses, plan.random) for cut in cuts),
    }


def every_head(geometry: Geometry) -> list[HeadSet]:
    """Each head of the model alone."""
    return [HeadSet(head_name(*head), (head,)) for head in pairs(everything(geometry.heads_by_layer))]


def _at_once(passes: Passes, cut: Cut, advance: Advance) -> tuple[Masses, np.ndarray, dict[Any, np.ndarray]]:
    """One cut whose intact rows are read in the pass that runs it: two passes' rows in all."""
    knockout = passes.intervention
    assert isinstance(knockout, Knockout)
    reader = MassReader(Masses(knockout.heads, cut.keys, passes.task.lengths), rests=False)
    sets = [cut, *_copies(passes)]
    value_SK = replace(passes, intervention=replace(knockout, read=reader)).measured(sets, advance)
    masses = reader.done([len(one) for one in knockout.queries])
    effect_SK = passes.effects(value_SK)
    found = {one.identity: effect_SK[:, place] for place, one in enumerate(sets)}
    return masses, value_SK[:, 0], {name: _known(one, masses, found[name]) for name, one in _by_identity(sets)}


def _measured(
    passes: Passes, cuts: Sequence[Cut], draws: Sequence[Cut], masses: Masses, parts: Parts, advance: Advance
) -> tuple[Passes, np.ndarray, dict[Any, np.ndarray]]:
    """The passes with shared layers where that pays, the intact measure, and (S,) effects by a cut's identity."""
    every = dict(_by_identity([*cuts, *draws]))
    texts = range(len(passes.task))
    taken = [one for one in every.values() if one.moves or any(masses.of(one, text) > 0 for text in texts)]
    sets = [*_copies(passes), *taken]
    knockout = passes.intervention
    assert isinstance(knockout, Knockout)
    passes = replace(passes, intervention=replace(knockout, heads=heads_by_layer(taken)))
    passes, intact_S, run = effects_by_identity(passes, sets, parts, advance)
    every |= dict(_by_identity(_copies(passes)))
    nothing = np.zeros(len(passes.task))
    return passes, intact_S, {name: _known(one, masses, run.get(name, nothing)) for name, one in every.items()}


def _by_identity(cuts: Sequence[Cut]) -> list[tuple[Any, Cut]]:
    return [(one.identity, one) for one in cuts]


def _copies(passes: Passes) -> list[Cut]:
    """In half precision, a second intact row: what it differs by is noise."""
    return [Cut(COPY, (), ((),) * len(passes.task))] if passes.loaded.dtype in HALF else []


def _known(cut: Cut, masses: Masses, effect_S: np.ndarray) -> np.ndarray:
    """The effect in each text: NaN where no row sees a key, exactly 0 where their weight is exactly 0."""
    if not cut.heads or cut.moves:
        return effect_S
    mass_S = np.array([masses.of(cut, text) for text in range(len(effect_S))])
    return np.where(np.isnan(mass_S), np.nan, np.where(mass_S == 0, 0.0, effect_S))


def _facts(
    loaded: LoadedModel, cases: Sequence[Case], plan: CutPlan, asked: Sequence[AskedCut], passes: Passes
) -> dict[str, Any]:
    """What tells this knockout from another."""
    facts = task_facts(loaded, passes.task, passes.intervention, passes.measure)
    heads = " ".join(sorted(head_name(*head) for one in asked for head in one.cut.heads))
    return facts | {
        "how": plan.how,
        "over": plan.over,
        "select": plan.name,
        "heads_sha256": hashlib.sha256(heads.encode()).hexdigest(),
        "stack": DECODER,
        "random": plan.random,
        "seed": plan.seed,
        "texts": [_text_facts(one) for one in cases],
    }


def _text_facts(case: Case) -> dict[str, Any]:
    return {
        "sha256": case.prompt.sha256,
        "tokens": len(case.prompt),
        "queries": list(case.queries),
        "keys": list(case.keys),
        "answer": list(case.answer),
        "foil": case.foil,
    }


def _measured_facts(found: Knocked, passes: Passes) -> dict[str, Any]:
    emptied = sorted({head for one in found.asked for head in found.masses.left_empty(one.cut)})
    copy = Cut(COPY, (), ((),) * len(found.cases)).identity
    spread = float(np.abs(found.effects[copy]).max()) if copy in found.effects else None
    return {
        "intact": float(found.intact_S.mean()),
        "intact_by_text": found.intact_S.tolist(),
        "spread": spread,
        "rounding": max(AGREES[passes.loaded.dtype], spread or 0.0),
        "without_null": {kind: dict(reasons(found.nulls[kind])) for kind in KINDS},
        "emptied": [head_name(*head) for head in emptied],
        "unshared": passes.why_not or None,
    }
