"""`attnscope.knockout`: what an answer loses where heads may not look from some tokens at others.

`attnscope.patch`: what an answer loses where heads are as in another text, and what that gives back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from attnscope.studies.budgets import (
    BELOW,
    AskedCache,
    BudgetPlan,
    BudgetStudy,
)
from attnscope.studies.knockout import KnockoutStudy
from attnscope.studies.patching import AskedPair, PatchPlan, PatchStudy

if TYPE_CHECKING:
    from attnscope.attention.rows import CutHow
    from attnscope.interventions.spec import Method, Over, PatchTarget, Selection, Texts
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.atlas import HeadNames
    from attnscope.studies.budgets import BudgetCosts
    from attnscope.studies.knockout_records import KnockoutResult
    from attnscope.studies.patching import PatchedPairs


@overload
def knockout(
    model: LoadedModel,
    text: Texts,
    query: str | int = "last",
    key: str | int | None = None,
    *,
    answer: str | Sequence[int] | None = None,
    foil: str | Sequence[int] | None = None,
    over: str = "none",
    select: str | None = None,
    how: CutHow = "mask",
    random: int = DRAWS,
    seed: int = 0,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    atlas: HeadNames | Path | str | None = None,
    out: Path | str | None = None,
    force: bool = False,
) -> KnockoutResult: ...


@overload
def knockout(
    model: LoadedModel,
    text: Texts,
    *,
    keep: str,
    at: str | int | None = None,
    answer: str | Sequence[int] | None = None,
    generate: int | None = None,
    foil: str | Sequence[int] | None = None,
    over: str = "none",
    select: str | None = None,
    below: float = BELOW,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    atlas: HeadNames | Path | str | None = None,
    out: Path | str | None = None,
    force: bool = False,
) -> BudgetCosts: ...


@hints_of(LoadOptions)
def knockout(
    model: LoadedModel,
    text: Texts,
    query: str | int = "last",
    key: str | int | None = None,
    *,
    keep: str | None = None,
    at: str | int | None = None,
    answer: str | Sequence[int] | None = None,
    generate: int | None = None,
    foil: str | Sequence[int] | None = None,
    over: str = "none",
    select: str | None = None,
    how: CutHow = "mask",
    random: int = DRAWS,
    seed: int = 0,
    below: float = BELOW,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    atlas: HeadNames | Path | str | None = None,
    out: Path | str | None = None,
    force: bool = False,
) -> KnockoutResult | BudgetCosts:
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
    check_loaded(model)
    folder = None if out is None else Path(out)
    shared: dict[str, Any] = {"answer": answer, "foil": foil, "define": define or {}, "chat": chat}
    spelled = None if key is None else str(key)
    # A cache chooses its keys itself, so that queries and keys have no meaning with a budget.
    if keep is not None:
        check_budgets(keep, over, query=None if query == "last" else str(query), key=spelled, how=how)
        caches = AskedCache.of(text, {**shared, "at": at, "generate": generate})
        check_below(below)
        plan = BudgetPlan(keep, over, chosen_heads(model, select, atlas), select or BudgetPlan.name, below)
        return BudgetStudy.of(model, caches, plan).run(folder, force=force)
    # A record may leave out what all texts share.
    check_no_budget(at, generate)
    shared |= {"query": str(query), "key": spelled}
    asked = asked_of(text, shared, each_key=over == "keys")
    cuts = CutPlan(over, chosen_heads(model, select, atlas), select or CutPlan.name, how, random, seed)
    return KnockoutStudy.of(model, asked, cuts).run(folder, force=force)


def chosen_heads(model: LoadedModel, select: str | None, atlas: HeadNames | Path | str | None) -> Selection | None:
    """The heads that are chosen, by layer; None for all."""
    if select is None:
        return None
    found = atlas_of(model, atlas)
    return selected(select, model.geometry.heads_by_layer, found.by_role() if found else None)


@hints_of(LoadOptions)
def patch(
    model: LoadedModel,
    text: Texts,
    corrupted: str | Sequence[int] | None = None,
    *,
    at: str | int | None = None,
    answer: str | Sequence[int] | None = None,
    foil: str | Sequence[int] | None = None,
    what: PatchTarget = "output",
    over: Over = "none",
    select: str | None = None,
    method: Method = "measure",
    random: int = 100,
    seed: int = 0,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    atlas: HeadNames | Path | str | None = None,
    out: Path | str | None = None,
    force: bool = False,
) -> PatchedPairs:
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
    check_loaded(model)
    # A wrong word is refused here: a type is of no help to a program that is not checked.
    for name, value, known in (("what", what, WHAT), ("over", over, OVER), ("method", method, METHODS)):
        if value not in known:
            raise UsageError(
                f"{name}: expected one of {', '.join(known)}, got {str(value)[:20]!r}", f"use {known[0]!r}"
            )
    # A record may leave out what all pairs share.
    shared = {"corrupted": corrupted, "at": None if at is None else str(at), "answer": answer, "foil": foil}
    asked = AskedPair.of(text, {**shared, "define": define or {}, "chat": chat})
    plan = PatchPlan(what, over, chosen_heads(model, select, atlas), select or PatchPlan.name, method, random, seed)
    return PatchStudy.of(model, asked, plan).run(None if out is None else Path(out), force=force)
