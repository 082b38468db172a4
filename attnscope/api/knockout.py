"""`attnscope.knockout`: what an answer loses where heads may not look from some tokens at others.

`attnscope.patch`: what an answer loses where heads are as in another text, and what that gives back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from attnscope.errors import UsageError, hints_of
from attnscope.interventions.spec import (
    DRAWS,
    METHODS,
    OVER,
    WHAT,
    CutPlan,
    asked_of,
    check_below,
    check_budgets,
    check_no_budget,
)
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.model.selection import select as selected
from attnscope.observe.atlas import atlas_of
from attnscope.studies.ablation_search import CONTROLS
from attnscope.studies.budgets import BELOW, AskedCache, BudgetPlan, BudgetStudy
from attnscope.studies.knockout import KnockoutStudy
from attnscope.studies.patching import AskedPair, PatchPlan, PatchStudy
from attnscope.studies.study import Record
from attnscope.utils.schema import takes_fields

if TYPE_CHECKING:
    from attnscope.attention.rows import CutHow
    from attnscope.interventions.spec import Method, Over, PatchTarget, Texts
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.atlas import HeadNames
    from attnscope.studies.budgets import BudgetCosts
    from attnscope.studies.knockout_records import KnockoutResult
    from attnscope.studies.patching import PatchedPairs
    from attnscope.studies.study import Study


@dataclass(frozen=True)
class AnswerCall:
    """What `knockout` and `patch` ask of every text: its answer, the heads, and the folder of the study."""

    model: LoadedModel
    text: Texts
    _: KW_ONLY
    answer: str | Sequence[int] | None = None
    foil: str | Sequence[int] | None = None
    select: str | None = None
    define: Mapping[str, str] | None = None
    chat: bool = False
    atlas: HeadNames | Path | str | None = None
    out: Path | str | None = None
    force: bool = False

    def shared(self) -> dict[str, Any]:
        """What a record of a text may leave out."""
        return {"answer": self.answer, "foil": self.foil, "define": self.define or {}, "chat": self.chat}

    def heads(self) -> dict[str, Any]:
        """Those that `select` names, as of `chosen_heads`."""
        return chosen_heads(self.model, self.select, self.atlas)

    def run(self, study: Study[Record]) -> Record:
        """Run the study, in its folder where one was named."""
        return study.run(None if self.out is None else Path(self.out), force=self.force)


@dataclass(frozen=True)
class CutCall(AnswerCall):
    """What `attnscope.knockout` is called with for a knockout of named keys."""

    query: str | int = "last"
    key: str | int | None = None
    _: KW_ONLY
    over: str = "none"
    how: CutHow = "mask"
    random: int = DRAWS
    seed: int = 0


@dataclass(frozen=True)
class BudgetCall(AnswerCall):
    """What `attnscope.knockout` is called with for the budget of a cache."""

    _: KW_ONLY
    keep: str
    at: str | int | None = None
    generate: int | None = None
    over: str = "none"
    below: float = BELOW


@dataclass(frozen=True)
class KnockoutCall(CutCall, BudgetCall):
    """Either; a budget where `keep` is given."""

    keep: str | None = field(default=None, kw_only=True)  # type: ignore[assignment]  # the second call needs it


@dataclass(frozen=True)
class PatchCall(AnswerCall):
    """What `attnscope.patch` is called with."""

    corrupted: str | Sequence[int] | None = None
    _: KW_ONLY
    at: str | int | None = None
    what: PatchTarget = "output"
    over: Over = "none"
    method: Method = "measure"
    random: int = CONTROLS
    seed: int = 0


@overload
@takes_fields(CutCall)
def knockout(call: CutCall) -> KnockoutResult: ...
@overload
@takes_fields(BudgetCall)
def knockout(call: BudgetCall) -> BudgetCosts: ...
@hints_of(LoadOptions)
@takes_fields(KnockoutCall)
def knockout(call: KnockoutCall) -> KnockoutResult | BudgetCosts:
    """What an answer loses where heads may not look from the queries at the keys (Geva et al. 2023, arXiv 2304.14767).

    text: one text, or token ids; or records of {"text", "query", "key", "answer", "foil"}, each of which may leave out
    what all share. query, key: tokens of the text, as "last" or "Mary"; key: all where each is cut
    alone. answer: what is to follow, the model's own next token without it; with a foil the effect is the fall of
    logit(answer) - logit(foil), else nats. over: what is cut at a time: "none", "heads", "layers", "window:N", "keys",
    "kv". select: the heads, as "27.3,last"; all without it. how: "mask", the rest of a row takes the weight, or "zero".
    random: draws of other keys to compare with. out: a folder for table and facts, where a stopped run resumes.

    keep: budgets of a KV cache instead of queries and keys, by commas: "stream:A+N" and "top:N" in every row, "h2o:N",
    and "received:N" and "snap:N@W", which choose at the end of the prompt. at: the last token of the prompt, in a text
    that continues. generate: so many tokens of the model's own as the answer. Without an answer the effect is over all
    tokens of the text, those after `at` alone where it is given. below: the heads that lose less alone, in the first
    half of 64 texts or more, are measured together in the other half. random and seed have no meaning then. Records are
    of {"text", "at", "answer", "foil"}.

    Returns what was measured: `table()` has a row per cut, or per budget. Raises InputError for a text, an answer or
    tokens that cannot be meant, ModelError for a family that attends outside the attention interface.

        >>> attnscope.knockout(model, "the bank of the river, the bank of the", key="river", over="heads").table()
        >>> attnscope.knockout(model, text, keep="stream:4+32,h2o:36", over="heads").bearable(0.01)
    """
    model, over = call.model, call.over
    check_loaded(model)
    shared, key = call.shared(), None if call.key is None else str(call.key)
    # A cache chooses its keys itself, so that queries and keys have no meaning with a budget.
    if call.keep is not None:
        query = None if call.query == "last" else str(call.query)
        check_budgets(call.keep, over, query=query, key=key, how=call.how)
        caches = AskedCache.of(call.text, {**shared, "at": call.at, "generate": call.generate})
        check_below(call.below)
        budgets = BudgetPlan(call.keep, call.below, over=over, **call.heads())
        return call.run(BudgetStudy.of(model, caches, budgets))
    check_no_budget(call.at, call.generate)
    # A record may leave out what all texts share.
    questions = asked_of(call.text, {**shared, "query": str(call.query), "key": key}, each_key=over == "keys")
    plan = CutPlan(over=over, how=call.how, random=call.random, seed=call.seed, **call.heads())
    return call.run(KnockoutStudy.of(model, questions, plan))


def chosen_heads(model: LoadedModel, select: str | None, atlas: HeadNames | Path | str | None) -> dict[str, Any]:
    """The fields of a `HeadPlan` that say which heads are chosen; none of them for all heads."""
    if select is None:
        return {}
    names = atlas_of(model, atlas)
    heads = selected(select, model.geometry.heads_by_layer, names.by_role() if names else None)
    return {"select": heads, "name": select}


@hints_of(LoadOptions)
@takes_fields(PatchCall)
def patch(call: PatchCall) -> PatchedPairs:
    """What an answer loses where heads are as in the corrupted text (Wang et al. 2022, arXiv 2211.00593).

    text, corrupted: two texts, or token ids of both; or records of {"text", "corrupted", "at", "answer", "foil"}, each
    of which may leave out what all share. at: tokens of the text, all that have a partner in the corrupted one without
    it. answer: what is to follow both, the model's own next token of the text without it; with a foil the effect is the
    fall of logit(answer) - logit(foil), else nats. what: "output", "pattern", "key", "value". over: what is patched
    at a time: "none", "heads", "kv", "layers", "positions", "layers,positions". method: "measure" runs every patch,
    "gradient" estimates all from one backward pass and runs a few. random: sets of other heads to compare with, where
    all are patched together. out: a folder for table and facts, where a stopped run resumes.

    Returns what was measured: `table()` has a row per patch. Raises InputError for texts that cannot be a pair,
    ModelError for a family that attends outside the attention interface.

        >>> attnscope.patch(model, "the bank of the river, the", "the bank of the field, the", over="heads").table()
    """
    model, what, over, method = call.model, call.what, call.over, call.method
    check_loaded(model)
    # A wrong word is refused here: a type is of no help to a program that is not checked.
    for name, value, known in (("what", what, WHAT), ("over", over, OVER), ("method", method, METHODS)):
        if value not in known:
            raise UsageError(
                f"{name}: expected one of {', '.join(known)}, got {str(value)[:20]!r}", f"use {known[0]!r}"
            )
    # A record may leave out what all pairs share.
    at = None if call.at is None else str(call.at)
    pairs = AskedPair.of(call.text, {**call.shared(), "corrupted": call.corrupted, "at": at})
    plan = PatchPlan(what=what, over=over, method=method, random=call.random, seed=call.seed, **call.heads())
    return call.run(PatchStudy.of(model, pairs, plan))
