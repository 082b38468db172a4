"""What a text is read for: each purpose is a record that JSON can hold, and answers with a record that has no model.

`Observe`: heads, relations, keys, maps, whatever the ask keeps. `Tokenise`: the tokens of a text; no weights are used.
`ExplainHead`: every step of one head for one query, with its numbers. `AttributeLogit`: why a head looks from one query
at one key. `ReadDepth`: what each layer reads of earlier blocks. `KnockoutQuestion`: what an answer loses where heads
may not look from some tokens at others. `ShowPage`: what a page holds of a pass; drawing and writing are somebody
else's. `PURPOSES` has each by its name.

Shapes: C component, Q query, K key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from attnscope.errors import UsageError
from attnscope.inputs.prompt import Prompt, from_ids, isolation_for, reading
from attnscope.inputs.spans import Align
from attnscope.inputs.tokens import TokenSelection
from attnscope.interventions.spec import DRAWS, AskedText, CutPlan
from attnscope.model.selection import MIXING, SEQ2SEQ, is_vision, mixes, select, select_layers
from attnscope.observe.request import RunInfo
from attnscope.utils.stages import Progress

if TYPE_CHECKING:
    from attnscope.api.depth import Depth
    from attnscope.api.why import Why, WhyOptions
    from attnscope.inputs.tensors import GivenTensors
    from attnscope.model.geometry import Geometry, LayerGeometry
    from attnscope.model.loaded import LoadedModel, LoadedModule, LoadedTokenizer
    from attnscope.observe.observation import Observation
    from attnscope.observe.request import CaptureSpec, LayerKey
    from attnscope.observe.run import Run
    from attnscope.steps.records import Explanation
    from attnscope.studies.attribution_records import KeyParts
    from attnscope.studies.knockout import KnockoutStudy
    from attnscope.studies.knockout_records import KnockoutResult
    from attnscope.viewer.page import Plan

Check = Callable[[RunInfo], object]


class Purpose(ABC):
    """What a text is read for. Its fields are what JSON can hold; it is imported without torch.

    name: how a question says it. record: the type of its answer.
    """

    name: ClassVar[str]
    record: ClassVar[str]

    @abstractmethod
    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> Any:
        """The answer. What can be refused is refused before the next costly step.

        tell: hears lines and stages. check: called before a pass whose results may go to a folder; what it raises ends
        the question.
        """


@dataclass(frozen=True)
class Observe(Purpose):
    """An Observation of the text."""

    name = "observe"
    record = "Observation"

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> Observation:
        """See `attnscope.observe.run.run_and_report`."""
        from attnscope.observe.run import run_and_report

        return run_and_report(loaded, ask, tell, check)


@dataclass(frozen=True)
class Tokenised:
    """A text as tokens; name: of the model. max_positions: how many tokens it reads, None where nothing bounds them."""

    prompt: Prompt
    name: str
    max_positions: int | None


@dataclass(frozen=True)
class Tokenise(Purpose):
    """The tokens of a text, which may be longer than the model reads unless the ask says to cut it."""

    name = "tokens"
    record = "Tokenised"

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> Tokenised:
        """The tokens, by a loaded model's tokenizer."""
        from attnscope.model.loaded import LoadedTokenizer

        most = loaded.geometry.max_positions
        return tokenised(LoadedTokenizer(loaded.tokenizer, loaded.name, most, loaded.brought), ask)


def tokenised(loaded: LoadedTokenizer, ask: CaptureSpec) -> Tokenised:
    """The tokens of a text or of ids. Raises as `text.prompt.from_text`."""
    text, most = ask.text, loaded.max_positions if ask.truncate else None
    ask.check_pair()
    if isinstance(text, str):
        with reading(loaded.tokenizer, isolation_for(loaded, ask.chat)) as read:
            prompt = read(text, ask.chat, most, ask.truncate, None, ask.pair)
    else:
        prompt = from_ids(loaded.tokenizer, text, max_tokens=most, truncate=ask.truncate)  # type: ignore[arg-type]
    return Tokenised(prompt, loaded.name, loaded.max_positions)


@dataclass(frozen=True)
class ExplainHead(Purpose):
    """The steps of a head for the token that the ask's query names; head: as `L2H3` or `2.3`."""

    head: str

    name = "explain"
    record = "Explanation"

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> Explanation:
        """The steps; raises as `attnscope.explain`."""
        from attnscope.api.explain import STACKS, followed
        from attnscope.observe.run import prepare, run_lines

        loaded.check_task(*STACKS)
        loaded.check_softmax("explain")
        run = prepare(loaded, ask)
        for line in (*run_lines(run), *run.chosen.notes):
            tell.say(line)
        with tell.stage("forward pass"):
            return followed(run, self.head).explanation


@dataclass(frozen=True)
class AttributeLogit(Purpose):
    """What wrote the logit of the ask's query and key in a head; the fields are those of `WhyOptions`.

    >>> ask = CaptureSpec("the bank of the river", Request(query="last"))
    >>> AttributeLogit("L3H0").answer(loaded, ask, NO_PROGRESS, lambda info: None).line
    """

    head: str
    against: str | int = "mean"
    side: Literal["key", "query", "both"] = "key"
    by: Literal["component", "tokens"] = "component"
    verify: bool = False

    name = "why"
    record = "Why"

    @classmethod
    def of(cls, head: str, options: WhyOptions) -> AttributeLogit:
        """What the options say besides the text and its tokens, which the ask holds."""
        return cls(head, options.against, options.side, options.by, options.verify)

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> Why:
        """The logit with its parts; raises as `attnscope.why`."""
        from attnscope.api.why import STACKS, WhyOptions, taken_apart

        loaded.check_softmax(STACKS[0])
        run, keep = told_run(loaded, ask, tell, STACKS), ask.keep
        options = WhyOptions(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name != "head"},
            query=keep.query or "last",
            key=keep.key,
            define=keep.define,
        )
        with tell.stage("taking the logit apart"):
            return taken_apart(run, self.head, options)


@dataclass(frozen=True)
class ReadDepth(Purpose):
    """How much of what each layer reads each earlier block wrote, for the tokens that the ask's query names."""

    name = "depth"
    record = "Depth"

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> Depth:
        """The shares or weights; raises as `attnscope.depth`."""
        from attnscope.api.depth import STACKS, read_depth

        run = told_run(loaded, ask, tell, STACKS)
        with tell.stage("forward pass"):
            return read_depth(run)


def told_run(loaded: LoadedModel, ask: CaptureSpec, tell: Progress, stacks: Sequence[str]) -> Run:
    """All that comes before a pass, with the lines that say what it is of; stacks: what needs which models."""
    from attnscope.observe.run import asked_lines, prepare, target_lines

    loaded.check_task(*stacks)
    run = prepare(loaded, ask, compared=False)
    for line in (f"{loaded.line}  {len(run.text)} tokens", *target_lines(run), *asked_lines(run)):
        tell.say(line)
    return run


@dataclass(frozen=True)
class KnockedModel:
    """What was measured, and the shape of the model that it was measured of."""

    found: KnockoutResult
    geometry: Geometry


@dataclass(frozen=True)
class KnockoutQuestion(Purpose):
    """The edges from the ask's query to its key are cut, and what follows the text is its answer.

    foil: what is not to follow. over, how, random, seed: as `CutPlan` has them.
    """

    foil: str | tuple[int, ...] | None = None
    over: str = "none"
    how: Literal["mask", "zero"] = "mask"
    random: int = DRAWS
    seed: int = 0

    name = "knockout"
    record = "KnockedModel"

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> KnockedModel:
        """What was measured; raises as `attnscope.knockout`."""
        assert isinstance(ask.text, str | tuple | list)
        keep = ask.keep
        text = AskedText(
            ask.text, keep.query or "last", keep.key, ask.answer, self.foil, keep.define, ask.chat, ask.truncate
        )
        from attnscope.studies.study import PASSED

        tell.say(loaded.line)
        study = self.study(loaded, ask, [text])
        for line in study.lines:
            tell.say(line)
        with tell.stage(study.stage, study.cost().steps, PASSED) as advance:
            return KnockedModel(study.run(advance=advance), loaded.geometry)

    def study(self, loaded: LoadedModel, ask: CaptureSpec, texts: Sequence[AskedText]) -> KnockoutStudy:
        """The study of some texts, of which the ask names the heads."""
        from attnscope.api.knockout import chosen_heads
        from attnscope.studies.knockout import KnockoutStudy

        heads = chosen_heads(loaded, ask.select, ask.atlas)
        plan = CutPlan(over=self.over, how=self.how, random=self.random, seed=self.seed, **heads)
        return KnockoutStudy.of(loaded, texts, plan)


REST = 3  # components that are no heads or blocks: embedding, bias, position


class HeadDivergence(NamedTuple):
    """A head of two texts: the Jensen-Shannon divergence in bits, None without a row on both sides, and the mean mass
    that either side gives to tokens that the other lacks. See `study.comparison.Comparison`."""

    key: LayerKey
    head: int
    js: float | None
    lost: float
    other_lost: float


@dataclass(frozen=True)
class PageSide:
    """One side of a page. chosen: the tokens that were named, of which the observation holds all. whole: the heads
    whose maps stay whole. why: the logits that were taken apart. other: what it is compared with. divergences: of each
    head that both hold whole, its numbers as `attnscope compare` has them."""

    seen: Observation
    chosen: TokenSelection
    whole: Mapping[int, Sequence[int]]
    why: Sequence[KeyParts] = ()
    other: PageSide | None = None
    divergences: Sequence[HeadDivergence] = ()


@dataclass(frozen=True)
class ShowPage(Purpose):
    """The page of a text: what fits into `max_mb`, `bits` per weight.

    whole: heads whose maps stay whole, as "27.3,last". why: of which heads logits are taken apart, for the ask's
    queries or all. compare_text: another text of the same model, next to it; each side has half of the room. align: how
    the tokens of two sides are paired, as `inputs.spans.alignment` says without it. steps: whether q, k and v of
    a short text are kept.
    """

    max_mb: float = 20.0
    bits: int = 8
    whole: str | None = None
    why: str | None = None
    compare_text: str | None = None
    align: Align | None = None
    steps: bool = True

    name = "page"
    record = "PageSide"

    def answer(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, check: Check) -> PageSide:
        """What the page is made of."""
        from attnscope.observe.run import run_info

        runs = self.runs(loaded, ask, tell)
        check(run_info(runs[0]))
        return self.collect(runs, ask.verify, tell)

    def runs(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress, of_two: bool = False) -> list[Run]:
        """The text and what it is compared with, before their forward passes; of_two: another side follows."""
        seq2seq = loaded.geometry.task == SEQ2SEQ
        of_two = of_two or self.compare_text is not None
        if seq2seq and of_two:
            raise UsageError("a page of an encoder-decoder cannot show another text or model", "make a page of each")
        if of_two or not (seq2seq or (ask.picture and not ask.keep.asks)):
            ask = replace(ask, select=None)  # of several stacks those are shown that are named
        runs = [self.prepare(loaded, ask, tell)]
        if self.compare_text is not None:
            runs.append(self.prepare(loaded, replace(other_side(ask), text=self.compare_text), tell))
        return runs

    def prepare(self, loaded: LoadedModel, ask: CaptureSpec, tell: Progress) -> Run:
        """Everything that comes before the forward pass."""
        from attnscope.observe.run import prepare_told

        loaded.check_queries("a page")
        return prepare_told(loaded, ask, tell)

    def of_tensors(self, given: GivenTensors, ask: CaptureSpec, tell: Progress) -> PageSide:
        """What the page holds of layers that were given. Raises UsageError for what needs their model."""
        from torch import Tensor

        from attnscope.model.geometry import LayerGeometry
        from attnscope.observe.tensors import observe_tensors

        if given.last is not None:
            what = f"a page needs the query of every token, and these are of the last {given.last}"
            raise UsageError(what, "use attnscope heads, relations, draw or text")
        layers = []
        for index, layer in [pair for of_stack in given.stacks.values() for pair in of_stack.items()]:
            widths = (0, 0) if isinstance(layer, Tensor) else layer.widths
            layers.append(LayerGeometry(index, "full", layer.shape[0], 0, *widths, None))
        tokens, of_two = len(given.text) + len(given.target or ()), given.target is not None
        observe = partial(observe_tensors, given, tell=tell)
        return self._without_model(given.kind, layers, tokens, of_two, observe, ask, tell)

    def of_module(self, loaded: LoadedModule, ask: CaptureSpec, tell: Progress) -> PageSide:
        """What the page holds of a module of other code. Raises UsageError for what needs a model of transformers."""
        from attnscope.model.geometry import LayerGeometry
        from attnscope.observe.any_module import hear

        heard = hear(loaded, ask, tell)
        layers = [
            LayerGeometry(index, "full", heads, 0, 0, 0, None)
            for of_stack in heard.heads.values()
            for index, heads in of_stack.items()
        ]
        tokens, of_two = len(heard.prompt) + len(heard.source or ()), heard.source is not None
        return self._without_model("weights", layers, tokens, of_two, partial(heard.observe, tell=tell), ask, tell)

    def _without_model(
        self,
        kind: str,
        layers: Sequence[LayerGeometry],
        tokens: int,
        of_two: bool,
        observe: Callable[[CaptureSpec], Observation],
        ask: CaptureSpec,
        tell: Progress,
    ) -> PageSide:
        """What the page holds of layers alone; kind: what is known of them. observe: keeps what is asked."""
        from attnscope.inputs.tokens import chosen_lines
        from attnscope.observe.request import Request
        from attnscope.viewer.page import Plan
        from attnscope.viewer.page_data import first_asked, stacked

        for name in ("why", "compare_text"):
            if getattr(self, name) is not None:
                raise UsageError(f"a page of {kind} alone has no model to ask", f"leave out {{{name}}}")
        whole = dict[int, tuple[int, ...]]()
        if self.whole is not None and not of_two:
            whole = select(self.whole, {layer.index: layer.heads for layer in layers})
        plan = Plan(self.max_mb, 16 if self.bits == 16 else 8, whole)
        keep = plan.request(layers, tokens)
        # The arithmetic of a row is shown where all layers have q, k and v.
        if of_two or not all(layer.head_dim and layer.value_dim for layer in layers):
            keep |= {"operands": False}
        keep |= {"maps": None, "weights": keep["weights"] is True} if of_two else {}
        seen = observe(replace(ask, keep=Request(**keep), select=ask.select if of_two else None))
        # The page holds all tokens: those that were named say where it opens.
        texts = (seen.queries, seen.keys) if stacked(seen) else (seen.queries, None)
        chosen = ask.keep.chosen(*texts)
        if stacked(seen):
            chosen = first_asked({stack: chosen.of(stack) for stack in seen.stacks}, len(seen.keys))
        else:
            for line in chosen_lines(seen.queries, seen.keys, chosen):
                tell.say(line)
        return PageSide(seen, chosen, whole)

    def collect(self, runs: Sequence[Run], verify: bool, tell: Progress) -> PageSide:
        """What the page holds of each; with the first side are the logits that are taken apart."""
        from attnscope.viewer.page import Plan
        from attnscope.viewer.page_data import first_asked

        run = runs[0]
        whole = {}
        if self.whole is not None and not has_stacks(run):
            geometry = run.loaded.geometry
            whole = select_layers(self.whole, geometry.mapped, geometry.stack, run.named, "a page shows")
        plan = Plan(self.max_mb, 16 if self.bits == 16 else 8, whole, steps=self.steps)
        # The logits come first: they are refused where they have no room, which costs no pass.
        why = self.key_parts(run, plan)
        each, sides = replace(plan, max_mb=plan.max_mb / len(runs)), []
        for run in runs:
            seen, chosen = observe_side(run, each, verify, tell), run.chosen
            if run.source is not None:
                chosen = first_asked({stack: read.chosen for stack, read in run.asked.items()}, len(run.source))
            sides.append(PageSide(seen, chosen, whole))
        first, *other = sides
        if not other:
            return replace(first, why=why)
        return replace(first, why=why, other=other[0], divergences=divergences(first.seen, other[0].seen, self.align))

    def key_parts(self, run: Run, plan: Plan) -> list[KeyParts]:
        """The logits of the heads in `why`. Raises UsageError where they have no room, else as `key_parts` does."""
        from attnscope.api.why import STACKS
        from attnscope.studies.attribution import check_model, key_parts

        if self.why is None:
            return []
        loaded, ids = run.loaded, run.prompt.ids
        loaded.check_task(*STACKS)
        loaded.check_softmax(STACKS[0])
        if has_stacks(run):
            raise UsageError("a page of several stacks takes no logits apart", "leave out {why}; ask `attnscope why`")
        heads_by_layer = loaded.geometry.heads_by_layer
        chosen = select_layers(self.why, heads_by_layer, loaded.geometry.stack, run.named, "a logit is of")
        queries = range(len(ids)) if run.chosen.query is None else run.chosen.query.positions
        check_model(loaded)
        # A key's logit has a part of every head, linear ones too, and block before its layer, and of what is neither.
        before = loaded.geometry.changeable.items()
        components = sum(
            len(heads) * (REST + sum(1 + count for other, count in before if int(other) < layer))
            for layer, heads in chosen.items()
        )
        needed, room = plan.why_bytes(components, len(queries), len(ids)), plan.why_room
        if needed > room:
            raise UsageError(
                f"the logits of {sum(map(len, chosen.values()))} heads and {len(queries)} queries take "
                f"{needed / 1e6:.2g} MB, expected at most {room / 1e6:.2g} MB of this page",
                "name fewer heads in {why}, or queries with {query}, or take more room with {max_mb}",
            )
        of_layers = (key_parts(loaded, ids, layer, dict.fromkeys(heads, queries)) for layer, heads in chosen.items())
        return [parts for of_layer in of_layers for parts in of_layer]


def divergences(first: Observation, other: Observation, align: Align | None) -> list[HeadDivergence]:
    """Of each head that both hold whole; of layers without a softmax |w| is read as shares, which have no divergence.

    Raises InputError as `alignment`.
    """
    from attnscope.inputs.spans import alignment, units
    from attnscope.studies.comparison import weights_divergence

    plain = first.prompt.plain, other.prompt.plain
    shared, result = units(*plain, alignment(*plain, align)), list[HeadDivergence]()
    for key in first.weights if shared.size else ():
        # Only of layers whose maps are of tokens alone: others see summaries of tokens.
        of_both = [
            side.weight_heads[key]
            if key in side.weights and side.weights[key].shape[1:] == (len(side.prompt),) * 2
            else ()
            for side in (first, other)
        ]
        heads = [head for head in of_both[0] if head in of_both[1]]
        if not heads:
            continue
        first_HQK, other_HQK = (
            side.weights[key][[held.index(head) for head in heads]]
            for side, held in zip((first, other), of_both, strict=True)
        )
        has_softmax = not mixes(key.stack)
        js_H, _, lost_H, other_lost_H, _ = weights_divergence(first_HQK, other_HQK, shared, not has_softmax)
        for head, js, lost, other_lost in zip(heads, js_H, lost_H, other_lost_H, strict=True):
            bits = float(js) if has_softmax and np.isfinite(js) else None
            result.append(HeadDivergence(key, head, bits, float(lost), float(other_lost)))
    return result


def other_side(ask: CaptureSpec) -> CaptureSpec:
    """How the other side is read: all of it, and no tokens are named."""
    from attnscope.observe.request import Request

    return replace(ask, keep=Request(), select=None, atlas=None, target=None, picture=None)


def observe_side(run: Run, plan: Plan, verify: bool, tell: Progress) -> Observation:
    """One side's forward pass, which keeps what the page has room for."""
    from attnscope.observe.run import answer_lines, asked_lines, run_lines, run_pass

    geometry, keep = run.loaded.geometry, kept_fields(run, plan)
    # A page that has no room for all maps of decoder and vision tower shows the decoder alone.
    if geometry.tower and run.request.stacks is None and keep["weights"] is not True:
        tell.say(
            "the page shows the decoder only, the vision tower does not fit; choose heads, as in "
            "--select vision.3.2,last"
        )
        others = {stack: layers for stack, layers in geometry.other_stacks.items() if not is_vision(stack)}
        loaded = replace(run.loaded, geometry=replace(geometry, other_stacks=others))
        medium = replace(run.prompt.medium, tower=())
        run = replace(run, loaded=loaded, prompt=replace(run.prompt, medium=medium))
        keep = kept_fields(run, plan)
    if has_stacks(run):  # stacks of different texts share no bins, and no steps
        keep |= {"operands": False, "maps": None, "weights": keep["weights"] is True}
    run = run.asking(replace(run.request, **keep))
    whole = replace(run, chosen=TokenSelection())  # the page holds all tokens: those that were named say where it opens
    return run_pass(whole, (*run_lines(run), *answer_lines(run), *asked_lines(run)), verify, tell)


def has_stacks(run: Run) -> bool:
    """Whether several stacks are on one page, over texts of their own."""
    return run.source is not None or bool(run.loaded.geometry.tower)


def kept_fields(run: Run, plan: Plan) -> dict[str, Any]:
    """What to keep of a pass, over all texts of the page, as fields of `Request`."""
    counted = []  # the layers of all stacks with as many heads as the page is to have of each
    for stack, layers in run.loaded.geometry.stacks.items():
        chosen = None if run.request.stacks is None else run.request.stacks.get(stack, {})
        for layer in layers.values():
            counted.append(layer if chosen is None else replace(layer, heads=len(chosen.get(layer.index, ()))))
    other = run.source or next(iter(run.prompt.medium.tower[-1:]), ())
    tokens = len(run.prompt) + len(other) * has_stacks(run)
    without_softmax = [layer for stack in MIXING for layer in run.loaded.geometry.views.get(stack, ())]
    return plan.request([layer for layer in counted if layer.heads], tokens, without_softmax)


PURPOSES: dict[str, type[Purpose]] = {
    kind.name: kind for kind in (Observe, Tokenise, ShowPage, ExplainHead, AttributeLogit, ReadDepth, KnockoutQuestion)
}
