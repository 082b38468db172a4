"""`attnscope.knockout`: what an answer loses where heads may not look from some tokens at others.

`attnscope.patch`: what an answer loses where heads are as in another text, and what that gives back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from attnscope.errors import InputError, UsageError, brief, first_line, hints_of
from attnscope.hooks.forward import own_errors
from attnscope.hooks.functions import hearing
from attnscope.interventions.knockout import cut_output
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
from attnscope.model.loaded import LoadedModule, check_loaded
from attnscope.model.loading import holds_model, wrap
from attnscope.model.options import LoadOptions
from attnscope.model.selection import select as selected
from attnscope.model.selection import select_layers
from attnscope.observe.atlas import atlas_of
from attnscope.observe.request import CaptureSpec, Request, TextInputs
from attnscope.studies.ablation_search import CONTROLS
from attnscope.studies.budgets import BELOW, AskedCache, BudgetPlan, BudgetStudy
from attnscope.studies.knockout import KnockoutStudy
from attnscope.studies.patching import AskedPair, PatchPlan, PatchStudy
from attnscope.studies.study import Record
from attnscope.utils.schema import takes_fields
from attnscope.utils.tables import TableRecord

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from attnscope.attention.rows import CutHow
    from attnscope.hooks.calls import AttentionCall
    from attnscope.interventions.spec import Method, Over, PatchTarget, Texts
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.any_module import HeardModule
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
    """Either; a budget where `keep` is given. measure: of a module of any code."""

    measure: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    keep: str | None = field(default=None, kw_only=True)  # type: ignore[assignment]  # the second call needs it


@dataclass(frozen=True)
class ModuleCutCall:
    """What `attnscope.knockout` is called with for a module of any code."""

    model: LoadedModule
    text: Any
    query: str | int | None = "last"
    key: str | int | None = None
    _: KW_ONLY
    measure: Callable[[Any], Any]
    over: str = "none"
    how: CutHow = "mask"
    select: str | None = None
    define: Mapping[str, str] | None = None


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
@overload
@takes_fields(ModuleCutCall)
def knockout(call: ModuleCutCall) -> ModuleCuts: ...
@hints_of(LoadOptions)  # type: ignore[misc]  # a module takes any input as its text
@takes_fields(KnockoutCall)
def knockout(call: KnockoutCall) -> KnockoutResult | BudgetCosts | ModuleCuts:
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

    Of a module of any code, or what `attnscope.wrap` makes of it, text is any input of `capture`, and measure makes a
    number of what the module returns. The effect is the fall of that number. Without a key the heads give nothing in
    these rows, and query=None means all rows.

    Returns what was measured: `table()` has a row per cut, or per budget. Raises InputError for a text, an answer or
    tokens that cannot be meant, ModelError for a family that attends outside the attention interface.

        >>> attnscope.knockout(model, "the bank of the river, the bank of the", key="river", over="heads").table()
        >>> attnscope.knockout(model, text, keep="stream:4+32,h2o:36", over="heads").bearable(0.01)
    """
    model: Any = call.model
    if call.measure is not None and isinstance(model, nn.Module) and not holds_model(model):
        model = wrap(model)
    if isinstance(model, LoadedModule):
        return cuts_of_module(model, call)
    if call.measure is not None:
        raise UsageError("a measure is of a module of any code, and this is a model", "give {answer} instead")
    over = call.over
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


@dataclass(frozen=True, repr=False)
class ModuleCuts(TableRecord):
    """What cuts in a module of any code change of a measure.

    intact: the measure without a cut. cuts: the heads of each, and the measure with it.
    """

    name: str
    stack: str
    over: str
    intact: float
    cuts: Sequence[tuple[Sequence[tuple[int, int]], float]]

    @property
    def line(self) -> str:
        largest, measured = max(self.cuts, key=lambda cut: abs(self.intact - cut[1]))
        where = f"L{largest[0][0]}H{largest[0][1]}" if len(largest) == 1 else f"{len(largest)} heads"
        return f"{self.name}: intact {self.intact:.4g}, largest effect {self.intact - measured:.4g} ({where})"

    def table(self) -> pa.Table:
        """A row per cut: layer, head, heads, stack, effect, measured; null for what a cut has several of."""
        from attnscope.utils.tables import as_table

        layers = [{layer for layer, _ in heads} for heads, _ in self.cuts]
        return as_table(
            {
                "layer": [min(of) if len(of) == 1 else None for of in layers],
                "head": [heads[0][1] if len(heads) == 1 else None for heads, _ in self.cuts],
                "heads": [len(heads) for heads, _ in self.cuts],
                "stack": [self.stack] * len(self.cuts),
                "effect": [self.intact - measured for _, measured in self.cuts],
                "measured": [measured for _, measured in self.cuts],
            }
        )


MODULE_OVER = ("none", "heads", "layers")
OF_MODELS = ("answer", "foil", "atlas", "out", "at", "generate", "keep")  # what needs a model of transformers


def cuts_of_module(loaded: LoadedModule, call: KnockoutCall) -> ModuleCuts:
    """What a module's output loses, by a measure of it, where heads of the row that is shown may not look at keys.

    Raises UsageError for what needs a model of transformers, ModelError for a call whose output cannot be changed.
    """
    from attnscope.observe.any_module import hear

    other = next((name for name in OF_MODELS if getattr(call, name) is not None), None)
    if other is not None:
        what = f"{other} needs a model of transformers, and {loaded.name} is a module of other code"
        raise UsageError(what, f"leave out {{{other}}}")
    if call.measure is None:
        message = f"{loaded.name} is a module of other code: what it returns has no known meaning"
        raise UsageError(message, "give {measure}, which makes a number of it")
    for name, value, known in (("over", call.over, MODULE_OVER), ("how", call.how, ("mask", "zero"))):
        if value not in known:
            raise UsageError(f"{name}: expected one of {', '.join(known)}, got {brief(value)}", f"use {known[0]!r}")
    # One pass says which layers, heads and tokens there are.
    query, key = (None if value is None else str(value) for value in (call.query, call.key))
    request = Request(query=query, key=key, define=call.define or {})
    given: Any = call.text
    heard = hear(loaded, CaptureSpec(given, request, "tiles"))
    [text] = TextInputs(heard.prompt, request.chosen(heard.prompt, heard.source), heard.source).of(
        heard.plain, heard.plain
    )
    # A row of the table cuts one portion of the heads.
    there = heard.heads[heard.plain]
    every_head: Mapping[int, Sequence[int]] = {layer: range(heads) for layer, heads in there.items()}
    chosen = every_head if call.select is None else selected(call.select, there)
    every = [(layer, head) for layer, heads in chosen.items() for head in heads]
    portions = {
        "none": [every],
        "heads": [[head] for head in every],
        "layers": [[(layer, head) for head in heads] for layer, heads in chosen.items()],
    }[call.over]
    cut = partial(_measured, heard, call, (list(text.queries), list(text.key_positions)))
    return ModuleCuts(loaded.name, heard.plain, call.over, cut([]), [(heads, cut(heads)) for heads in portions])


def _measured(
    heard: HeardModule, asked: KnockoutCall, edges: tuple[list[int], list[int]], cut: Sequence[tuple[int, int]]
) -> float:
    """The measure of one pass with a cut, all of them on the same path as one without; edges: queries and keys."""
    assert asked.measure is not None
    of_layers: dict[int, list[int]] = {}
    for layer, head in cut:
        of_layers.setdefault(layer, []).append(head)

    def change(call: AttentionCall) -> Tensor | None:
        place = heard.places.get((call.path, call.call))
        heads = of_layers.get(place.layer, []) if place and place.stack == heard.plain else []
        return cut_output(call, heard.loaded.row, heads, *edges, asked.how) if heads else None

    module, given = heard.loaded.module, heard.given
    with own_errors(module), torch.no_grad(), hearing(module, lambda call: None, change=change):
        output = module(*given.args, **given.kwargs)
    try:
        number = float(asked.measure(output))
    except Exception as error:  # anybody's code
        what = f"the measure of {heard.loaded.name} failed: {first_line(error)}"
        raise InputError(what, "have it make one number of what the module returns") from error
    if not math.isfinite(number):
        raise InputError(f"the measure of {heard.loaded.name} is {number}", "have it make a finite number")
    return number


def chosen_heads(model: LoadedModel, select: str | None, atlas: HeadNames | Path | str | None) -> dict[str, Any]:
    """The fields of a `HeadPlan` that say which heads are chosen; none of them for all heads."""
    if select is None:
        return {}
    model.check_heads("none can be changed")
    names = atlas_of(model, atlas)
    geometry, named = model.geometry, names.by_role() if names else None
    return {"select": select_layers(select, geometry.changeable, geometry.stack, named), "name": select}


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
            message = f"{name}: expected one of {', '.join(known)}, got {str(value)[:20]!r}"
            raise UsageError(message, f"use {known[0]!r}")
    # A record may leave out what all pairs share.
    at = None if call.at is None else str(call.at)
    pairs = AskedPair.of(call.text, {**call.shared(), "corrupted": call.corrupted, "at": at})
    plan = PatchPlan(what=what, over=over, method=method, random=call.random, seed=call.seed, **call.heads())
    return call.run(PatchStudy.of(model, pairs, plan))
