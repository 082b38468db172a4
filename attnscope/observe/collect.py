"""Prompts in, observations out: one forward pass, the path that single texts and corpora share.

    >>> loaded = load(LoadOptions())
    >>> prompt = from_text(loaded.tokenizer, "the financial bank is located on river bank")
    >>> [seen] = observe(loaded, [prompt], Request())
    >>> seen.heads[0].score["entropy"]

What reads one stack in a pass asks its layers as they are read, and cuts what is kept into texts. Which stack a call
belongs to, and what a family has besides plain stacks, is chosen before the pass.

Shapes: B text, N heads of all layers, H heads of a layer, Q query, K key, T token, k kept keys, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnscope.attention.channels import QUICK, ChannelMap
from attnscope.errors import InputError, UsageError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.forward import batch_inputs, text_inputs
from attnscope.hooks.generation import watched_states
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import ProjectionInputs, differences, norms_behind, plain_and_gated, strength
from attnscope.hooks.report import GIVEN, CallCheck, CaptureReport, tolerance
from attnscope.inputs.answers import of_patches, with_summaries
from attnscope.inputs.tokens import TokenSelection, chosen_lines
from attnscope.metrics.texts import Texts
from attnscope.model import loaded as padding
from attnscope.model.selection import (
    CAUSAL_LM,
    CHANNELS,
    CSA,
    DIFFERENCE,
    ENCODER,
    ENCODER_ONLY,
    GATED_AFTER,
    GLOBAL,
    MIXING,
    OF_TWO_TEXTS,
    OVER_PATCHES,
    POOLING,
    UNPOOLING,
    VISION,
    VISION_ONLY,
    as_ranges,
    has_summaries,
    is_causal,
    is_vision,
    metrics_stack,
    mixes,
)
from attnscope.observe.collectors import LayerBatcher, PendingTransfers, marked, wanted_collectors
from attnscope.observe.observation import Observation
from attnscope.observe.request import Layer, LayerKey, PerLayer, Request, TextInputs
from attnscope.observe.value_norms import Directions, Projections

if TYPE_CHECKING:
    from attnscope.attention.operator import AttentionOperator
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.geometry import LayerGeometry
    from attnscope.model.loaded import LoadedModel


def texts_of(asked: Sequence[TextInputs], device: str, stack: str) -> Texts:
    """The texts of a stack side by side, and the tokens of them that are asked about."""
    prompts = [text.prompt for text in asked]
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = side_by_side([prompt.ids_apart for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    query_BT = marked([text.chosen.query for text in asked], longest, default=True)
    most_keys = max(len(text.key_prompt) for text in asked)
    key_BT = marked([text.chosen.key for text in asked], most_keys, default=False)
    answer_B = None
    if is_causal(stack) and any(prompt.answer is not None for prompt in prompts):  # of others where it would begin
        answer_B = torch.tensor([len(prompt) if prompt.answer is None else prompt.answer for prompt in prompts])
    unasked = prompts[0].medium.unasked
    virtual = unasked * prompts[0].medium.virtual
    texts = Texts(ids_BT, lengths, query_BT, key_BT, answer_B, stack, unasked, virtual)
    return texts.to(torch.device(device))


def side_by_side(ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ids of several texts, (B, T): shorter ones are filled up with their last."""
    longest = max(map(len, ids))
    return torch.tensor([[*own, *[own[-1]] * (longest - len(own))] for own in ids])


class PaddingError(Exception):
    """A text is read in another way with a longer one than alone."""


@dataclass(frozen=True)
class LayerSource:
    """Layers that are to come, whoever makes their weights, and what is kept of them.

    plain: the stack that the view's heads are of. shown: the layers with heads, by stack and index; every: all layers.
    device: of the ids. directions: where values must point, for a view of "logit". asks_all: whether layers are asked
    of which no head is kept.
    """

    request: Request
    plain: str
    shown: Mapping[str, Mapping[int, LayerGeometry]]
    every: Mapping[str, Sequence[LayerGeometry]]
    advance: Callable[[int], object]
    device: str = "cpu"
    directions: Directions | None = None
    asks_all: bool = True

    @property
    def checks_padding(self) -> bool:
        """Whether a layer that chooses its keys ends the pass."""
        return False

    @property
    def out(self) -> Projections | None:
        """How heads write, where that is asked."""
        return None


@dataclass(frozen=True, kw_only=True)
class Pass(LayerSource):
    """One forward pass to come: the texts, what is kept of them, and who computes it; the rest as of `observe`."""

    loaded: LoadedModel
    asked: Sequence[TextInputs]
    engine: Engine
    facts: Mapping[str, Any]
    states: Callable[[torch.Tensor], object] | None

    @property
    def is_mixed(self) -> bool:
        """Whether its prompts differ in length."""
        return len({len(text.prompt) for text in self.asked}) > 1

    @cached_property
    def checks_padding(self) -> bool:
        """Where texts differ in length, and the family does not say whether padding is exact."""
        return self.is_mixed and padding.padding_is_unknown(self.loaded.model)

    @cached_property
    def out(self) -> Projections | None:
        """Found in passes over the beginning of a text."""
        if self.request.view.weights != "value":
            return None
        first, loaded = self.asked[0], self.loaded
        beginning, more = text_inputs(loaded, first.prompt, first.source, most=4)
        modules = sum(len(layers) for layers in loaded.geometry.stacks.values())
        plain, gated = plain_and_gated(loaded, beginning, modules, **more)
        every = plain | gated
        return Projections(every, norms_behind(loaded, every, beginning, **more), ProjectionInputs(gated))


class StackCollector:
    """One stack in one forward pass: its collectors ask every layer, and what they keep is cut into texts.

    asked: what the stack reads of the texts of the pass.
    """

    def __init__(self, forward: LayerSource, stack: str, asked: Sequence[TextInputs]) -> None:
        self.forward, self.stack, self.asked = forward, stack, asked
        self.request = forward.request.of(stack, forward.plain)
        self.prompts, self.chosen = [text.prompt for text in asked], [text.chosen for text in asked]
        self.keys = [text.key_prompt for text in asked]
        self.key_count = max(map(len, self.keys))
        self.texts = texts_of(asked, forward.device, stack)
        self._texts = {stack: self.texts}
        self.layers, self.every = forward.shown[stack], forward.every.get(stack, ())
        self.collectors = wanted_collectors(asked, self.request)
        self._kept: dict[str, dict[LayerKey, Any]] = {name: {} for name in self.collectors}
        self._batcher, self._pending = LayerBatcher(self.collectors), PendingTransfers()
        self.kv_of: dict[LayerKey, tuple[int, int]] = {}
        self.passed_over: list[int] = []  # layers whose maps take long, without a selection of them

    @property
    def must_read(self) -> bool:
        """Whether the stack's layers were named, or the model has no other."""
        others = (layers for stack, layers in self.forward.shown.items() if stack != self.stack)
        return self.request.view.heads is not None or not any(others)

    def heard(self, call: AttentionCall | CallCheck) -> bool:
        """Whether a call of the decoder is of these layers, over tokens and their summaries."""
        queries, keys = (call.P.queries, call.P.keys) if isinstance(call, AttentionCall) else (call.queries, call.keys)
        return call.layer in self.layers and queries < keys == self.key_count and has_summaries(self.stack)

    def on_call(self, call: AttentionCall) -> None:
        """Keep what is asked of a layer's first call over the text's tokens; the report lists what is not read."""
        if self.forward.checks_padding and self._chooses_keys(call):
            raise PaddingError
        if call.call > 0 or (call.P.queries, call.P.keys) != (self.texts.ids_BT.shape[1], self.key_count):
            return
        if call.P.batch != len(self.prompts):  # a tower may be given its picture in other parts
            return
        if isinstance(call.P, ChannelMap) and self.request.view.channel is not None:
            call = replace(call, P=call.P.of_channel(self.request.view.channel))
        elif isinstance(call.P, ChannelMap) and call.P.work > QUICK and not self.must_read:
            self.passed_over.append(call.layer)
            self.forward.advance(1)
            return
        # What a whole weight on a key writes: where values weigh it may be known only when the heads were projected.
        directions, out = self.forward.directions, self.forward.out
        written = None if directions is None else partial(directions.written, call)
        layer = replace(
            self.layer(call.layer, call.P, None if call.spec is None else call.spec.kv_heads), written=written
        )
        if not (self.forward.asks_all and not mixes(self.stack)) and not self.request.keeps(layer):
            self.forward.advance(1)
        elif out is None:
            self.ask(layer)
        else:
            out.when_known(call, lambda norms: self.ask(replace(layer, written=norms)))

    def layer(self, index: int, P: AttentionOperator, kv_heads: int | None = None) -> Layer:
        """A layer of the stack as it is asked; kv_heads: without it those of the layer's geometry."""
        key, known, visible = LayerKey(index, self.stack), self.layers.get(index), P.visible
        if kv_heads is None:
            kv_heads = known.kv_heads if known else P.heads
        self.kv_of[key] = P.heads, kv_heads
        # The metrics of the stack that its queries look as.
        stack = metrics_stack(self.stack, visible.once("ahead", lambda: float(visible.ahead)))
        if stack not in self._texts:
            self._texts[stack] = replace(self.texts, stack=stack, asked={})
        return Layer(key, P, kv_heads, self._texts[stack].to(P.device))

    def ask(self, layer: Layer) -> None:
        """Ask a layer what its collectors want to know of it."""
        self._keep(self._pending.add(layer.P.device, self._batcher.add(layer)))
        self.forward.advance(1)

    def _keep(self, ready: Mapping[LayerKey, Mapping[str, Any]]) -> None:
        for key, of_layer in ready.items():
            for name, collected in of_layer.items():
                if collected is not None:
                    self._kept[name][key] = collected

    def _chooses_keys(self, call: AttentionCall) -> bool:
        """Whether the keys are not the tokens, or the mask hides some that the layer's causal and window rules show."""
        if call.P.keys != self.texts.ids_BT.shape[1]:
            return True
        if call.visible.mask is None:
            return False
        position_Q, layer = call.visible.position_Q, self.layers.get(call.layer)
        shown_Q = position_Q + 1
        if layer and layer.window:
            chunked = layer.type == "chunked"
            shown_Q = position_Q % layer.window + 1 if chunked else shown_Q.clamp(max=layer.window)
        return bool((call.visible.counts_BHQ < shown_Q).any())

    @cached_property
    def of_texts(self) -> dict[str, Sequence[Any]]:
        """What was kept, one entry per text."""
        self._keep(self._pending.all() | self._batcher.all())
        return {name: collector.of_texts(self._kept[name], self.asked) for name, collector in self.collectors.items()}

    def observation(self, row: int, report: CaptureReport, facts: Mapping[str, Any]) -> Observation:
        """One text's part of what was kept, cut to its length."""
        kept = {name: texts[row] for name, texts in self.of_texts.items()}
        heads, rollout = kept.pop("heads"), kept.get("rollout")
        if rollout is not None:
            facts = {**facts, "rollout": rollout.facts([layer.index for layer in self.every])}
        without = (layer for layer in self.every if not layer.attention)
        return Observation(
            queries=self.prompts[row],
            keys=self.keys[row],
            text_columns=heads.columns,
            view=self.request.view,
            group=self.request.group,
            support=heads.support,
            visible=PerLayer({key: self._visible(key) for key in self.kv_of}),
            received=heads.received,
            report=report,
            kv_of=PerLayer(self.kv_of),
            facts=facts,
            kept=kept,
            chosen=self.chosen[row],
            without={layer.index: layer.type for layer in without if (layer.index, self.stack) not in self.kv_of},
            within={layer.index: layer.parallel for layer in self.every if layer.attention and layer.parallel},
        )

    def _visible(self, key: LayerKey) -> str:
        if mixes(self.stack):  # its geometry has the form of its rule
            return "full"
        layer = self.layers.get(key.layer)
        if layer is None:  # such as one that attends although its config calls it something else
            layer = next((other for other in self.every if other.index == key.layer), None)
            layer = layer and replace(layer, of_unknown_type=True)
        return layer.in_words if layer else "full"


@dataclass
class StackRouter:
    """What reads the stacks of a pass: each call belongs to the stack that it names, or to a view of that stack.

    readings: by stack. stacks: of which one has to be read. views: of the readings those of layers with maps of their
    own, as over summaries of tokens. facts: what the manifest says of what was read.
    """

    readings: dict[str, StackCollector]
    stacks: Sequence[str]
    views: Mapping[str, StackCollector]
    facts: dict[str, Any] = field(default_factory=dict, init=False)

    def stack_of(self, call: AttentionCall | CallCheck) -> str:
        """The stack of the reading that a call belongs to."""
        return next((stack for stack, reading in self.views.items() if reading.heard(call)), call.stack)

    def on_call(self, call: AttentionCall) -> None:
        """Let its reading read a call."""
        reading = self.readings.get(self.stack_of(call))
        if reading is not None:
            reading.on_call(call)
        # Of heads that are differences of two softmaxes both are read, and their difference as a view.
        if DIFFERENCE in self.views and (difference := differences(call)):
            self.views[DIFFERENCE].on_call(difference)
            self.facts.setdefault("lambda", {})[str(call.layer)] = strength(call.module)

    def first_read(self, report: CaptureReport, model_type: str) -> str:
        """The first of the stacks of which a layer was read. Raises InputError where none was; report: of the pass."""
        for stack in self.stacks:
            if self.readings[stack].kv_of:
                return stack
        # None was read: what its layers attend from and to instead says why.
        reading = self.readings[self.stacks[0]]
        tokens = len(reading.prompts[0])
        sizes = {(call.queries, call.keys) for call in report.calls if call.stack == reading.stack}
        heard = " or ".join(f"{queries} queries and {keys} keys" for queries, keys in sorted(sizes))
        message = (
            f"no layer of {model_type} attends from the {tokens} tokens of this text to the same {tokens}, "
            f"but with {heard}"
        )
        if all(queries == tokens for queries, _ in sizes):
            raise InputError(f"{message}: from some length on a key represents several tokens", "take a shorter text")
        raise InputError(f"{message}: its code adds tokens to this text", "choose another")


@dataclass
class OverPatches(StackRouter):
    """Stacks over tokens and over patches of them: the first call that pools says where the patches are."""

    collector: Callable[[str, Sequence[TextInputs]], StackCollector]
    prompt: Prompt
    parts: int

    def on_call(self, call: AttentionCall) -> None:
        if call.stack == POOLING and not self.readings.keys() & OVER_PATCHES:
            seen_QK = call.visible.rows(0, call.P.queries)[0, 0]
            patches = [seen_K.nonzero()[:, 0].tolist() for seen_K in seen_QK[:: self.parts]]
            whole, apart = of_patches(self.prompt, patches), of_patches(self.prompt, patches, self.parts)
            texts = {POOLING: (apart, self.prompt), GLOBAL: (whole, None), UNPOOLING: (self.prompt, apart)}
            for stack, (queries, keys) in texts.items():
                self.readings[stack] = self.collector(stack, [TextInputs(queries, TokenSelection(), keys=keys)])
        super().on_call(call)


def stacks_of(forward: Pass) -> StackRouter:
    """What reads the stacks of a pass."""
    geometry, asked, request = forward.loaded.geometry, forward.asked, forward.request
    collector = partial(StackCollector, forward)
    of_stacks = {
        stack: [part for text in asked for part in text.of(stack, geometry.stack)] for stack in geometry.stacks
    }
    # Keys that are not tokens have no answer to what is asked of tokens: then maps of their own are not read.
    of_tokens = any((request.group, request.rollout, request.per_token, request.spans, request.operands))
    of_tokens = of_tokens or any(text.chosen != TokenSelection() for text in asked)
    if request.view.channel is not None and CHANNELS not in geometry.views:
        raise UsageError(
            f"{geometry.model_type} has no layers whose channels have maps of their own", "leave out {channel}"
        )
    # A run that could show nothing of the heads named is refused; otherwise what lacks an answer is left out.
    lacking = {stack: _lacking(stack, request.view.weights, of_tokens) for stack in geometry.views}
    chosen = list(request.stacks or ())
    if chosen and all(lacking.get(stack) for stack in chosen):
        raise UsageError(f"{chosen[0]} layers have {lacking[chosen[0]]}", "choose heads of attention")
    # Keys of a view with a rate are summaries, made of the text's own tokens.
    of_views: dict[str, list[TextInputs]] = {}
    for stack in geometry.views:
        if lacking[stack] or (mixes(stack) and request.rolls_out_alone):
            continue
        of_views[stack] = list(asked)
        if (rate := geometry.rates.get(stack)) is not None:
            summarised = [with_summaries(text.prompt, rate, overlap=stack == CSA) for text in asked]
            of_views[stack] = [text._replace(keys=keys) for text, keys in zip(asked, summarised, strict=True)]
    views = {stack: collector(stack, texts) for stack, texts in of_views.items() if texts}
    readings = {stack: collector(stack, texts) for stack, texts in of_stacks.items() if texts} | views
    stacks = geometry.stack, *views
    if geometry.over_patches and not of_tokens and not views:
        return OverPatches(readings, stacks, views, collector, asked[0].prompt, geometry.rates[POOLING])
    return StackRouter(readings, stacks, views)


def _lacking(stack: str, weights: str, of_tokens: bool) -> str:
    """What layers with maps of their own have instead of what is shown, in words; "" where they have that."""
    if mixes(stack):
        return NO_SOFTMAX.get(weights, "")
    if of_tokens:
        return "no answer to what is asked of tokens"
    return "no logits and no values of their own" if stack == DIFFERENCE and weights != "softmax" else ""


def observe(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    request: Request,
    *,
    engine: Engine = ENGINES["eager"],
    chosen: Sequence[TokenSelection] | None = None,
    sources: Sequence[Prompt] | None = None,
    facts: Mapping[str, Any] | None = None,
    advance: Callable[[int], object] = lambda layers: None,
    directions: Directions | None = None,
    states: Callable[[torch.Tensor], object] | None = None,
) -> list[Observation]:
    """One forward pass over some prompts; an observation each, in order.

    Prompts of different length are padded on the right, without a mask, which leaves causal rows exact; where it does
    not, there is a pass for each length. engine: who computes the layers' attention. chosen: the tokens that are asked
    about, per prompt; what the request says unless given. sources: what an encoder-decoder's encoder reads, while its
    decoder reads the prompts: the observations are of the decoder, and `beside` has those of encoder and
    cross-attention. facts: what else the observations' manifests are to say. advance: called with 1 whenever a layer
    was read. directions: of one prompt, where its values must point to raise a logit, for a view of "logit". states:
    called with the last hidden states of each pass, (B, T, E), which then does not end with the last layer's attention.
    Raises ModelError where a layer that should attend was not heard, InputError where none attends to the tokens.
    """
    if sources is None:
        loaded.check_task("one text at a time", CAUSAL_LM, ENCODER_ONLY, VISION_ONLY, patches=True)
    texts = list(zip(prompts, [None] * len(prompts) if sources is None else sources, strict=True))
    chosen = [request.chosen(*pair) for pair in texts] if chosen is None else chosen
    asked = [TextInputs(prompt, tokens, source) for (prompt, source), tokens in zip(texts, chosen, strict=True)]

    geometry = loaded.geometry
    every = Pass(
        *(request, geometry.numbered, geometry.shown, geometry.every, advance, loaded.device, directions),
        asks_all=not engine.probes,
        loaded=loaded,
        asked=asked,
        engine=engine,
        facts=facts or {},
        states=states,
    )
    # Texts are read side by side where that leaves each as it would be alone; those with numbers of parts are not.
    alone = any((text.source or text.prompt).medium.inputs or text.prompt.medium.unasked for text in asked)
    if geometry.over_patches or alone:
        return [_observed(replace(every, asked=[text]))[0] for text in asked]
    lengths = {text.lengths for text in asked}
    if len(lengths) == 1 or padding.pads(loaded.model):
        try:
            return _observed(every)
        except PaddingError:
            padding.remember_padding(loaded.model, max(lengths)[0], exact=False)
    # Where a pass has shown that padding is not exact, each length has one of its own.
    alike = {length: [text for text in asked if text.lengths == length] for length in lengths}
    of_length = {length: iter(_observed(replace(every, asked=texts))) for length, texts in alike.items()}
    return [next(of_length[text.lengths]) for text in asked]


def _observed(forward: Pass) -> list[Observation]:
    """The observations of a pass. Raises PaddingError where its prompts are not to be read side by side."""
    loaded, asked, request, states = forward.loaded, forward.asked, forward.request, forward.states
    prompts, mixed, out = [text.prompt for text in asked], forward.is_mixed, forward.out
    stacks = stacks_of(forward)
    readings, plain = stacks.readings, loaded.geometry.stack
    # What the model's forward is given: of an encoder-decoder the source first.
    ids_BT = readings[plain].texts.ids_BT
    if prompts[0].medium.patches:  # whose tokens are told apart there
        ids_BT = side_by_side([prompt.ids for prompt in prompts]).to(loaded.device)
    if plain == ENCODER or ENCODER not in readings:
        reads, inputs = batch_inputs(loaded, prompts, ids_BT)
    else:
        sources = [text.source or text.prompt for text in asked]
        reads, inputs = batch_inputs(loaded, sources, readings[ENCODER].texts.ids_BT)
        inputs = inputs | {"decoder_input_ids": ids_BT}
    # The pass may end with the last call, unless somebody wants what follows it.
    of_tower = readings.get(VISION)
    gated = out.gated if out and out.gated.out else None
    whole = bool(gated) or bool(states) or (mixed and padding.padding_is_untried(loaded.model, reads.shape[1]))
    with (
        gated.watched() if gated else nullcontext(),
        watched_states(loaded.model, states) if states else nullcontext(),
    ):
        report = listen(
            loaded.model,
            reads,
            stacks.on_call,
            engine=forward.engine,
            expected_layers=[
                (layer, stack) for stack, layers in loaded.geometry.in_every_pass.items() for layer in layers
            ],
            windows=loaded.geometry.windows,
            patches=of_tower.prompts[0].medium.windows if of_tower else (),
            calls_alone=not (whole or prompts[0].medium.patches),
            computed=request.view.weights != "softmax",
            mixers=any(mixes(stack) and reading.request.view.heads != {} for stack, reading in readings.items()),
            **inputs,
        )
    for call in report.calls:
        call.stack = stacks.stack_of(call)
    plain = stacks.first_read(report, loaded.geometry.model_type)
    # The shortest prompt alone must have the hidden states that it has beside the longest.
    if mixed and padding.padding_is_untried(loaded.model, report.tokens):
        row = min(range(len(prompts)), key=lambda place: len(prompts[place]))
        ids_BT, inputs = text_inputs(loaded, prompts[row])
        report_alone = listen(loaded.model, ids_BT, lambda call: None, engine=forward.engine, computed=False, **inputs)
        alone_TE = report_alone.output[0][0].float()
        beside_TE = report.output[0][row, : len(alone_TE)].float()
        difference_T = (beside_TE - alone_TE).norm(dim=-1) / alone_TE.norm(dim=-1)
        if (difference_T > tolerance(loaded.model.dtype, "bfloat16")[1]).any():
            raise PaddingError
        padding.remember_padding(loaded.model, report.tokens, exact=True)
    report = replace(report, output=None)  # hidden states that nobody asked for
    facts = {**model_facts(loaded, forward.engine, report), **stacks.facts, **forward.facts}

    def observation(stack: str, row: int) -> Observation:
        row = len(readings[stack].prompts) - 1 if is_vision(stack) else row  # the whole picture follows its parts
        own = report if len(readings) == 1 and not prompts[0].medium.patches else report.of(stack)
        return readings[stack].observation(row, replace(own, tokens=readings[stack].key_count), facts)

    # Stacks that called, and of which nothing could be kept, are named in the manifest.
    others = [stack for stack in readings if stack != plain and readings[stack].kv_of]
    unread = [
        f"{stack}: its layers attend over something else than tokens"
        for stack in OF_TWO_TEXTS
        if stack in readings and not readings[stack].kv_of and any(call.stack == stack for call in report.calls)
    ]
    if prompts[0].medium.tower and VISION not in others and not request.asks:
        unread.append("the vision tower: it attends in windows, or its config does not say its layers")
    for stack in MIXING if request.stacks is None else [stack for stack in MIXING if stack in request.stacks]:
        if (left := loaded.geometry.views.get(stack)) and (lacking := NO_SOFTMAX.get(request.view.weights)):
            unread.append(f"{stack} layers {as_ranges([layer.index for layer in left])}: they have {lacking}")
    # A layer that ran without its rule, as one whose forward was replaced, would be missing silently.
    called = {(call.stack, call.layer) for call in report.calls}
    for stack, reading in readings.items():
        heads, mixers = reading.request.view.heads, loaded.geometry.views.get(stack, ()) if mixes(stack) else ()
        wanted = [layer.index for layer in mixers if heads is None or layer.index in heads]
        if silent := [index for index in wanted if (stack, index) not in called]:
            unread.append(f"{stack} layers {as_ranges(silent)}: no call of their rule was heard")
    if (of_channels := readings.get(CHANNELS)) and of_channels.passed_over:
        layers = as_ranges(sorted(of_channels.passed_over))
        unread.append(f"channels layers {layers}: their maps of this text take long; {{select=channels.*}} reads them")
    if unread:
        facts |= {"unread": unread}
    return [
        replace(observation(plain, row), other_stacks={stack: observation(stack, row) for stack in others})
        for row in range(len(prompts))
    ]


NO_SOFTMAX = {  # what layers without a softmax have of what a view shows
    "scores": "no logits",
    "value": f"no norm of what a key writes: {GATED_AFTER}",
    "logit": f"no effect of a key on a logit: {GATED_AFTER}",
}


class ReadyLayer(NamedTuple):
    """A layer with attention from outside a pass: an operator to ask, what is known of it, and its check.

    written: what a whole weight on a key writes, see `Layer`; None where that is not known.
    """

    P: AttentionOperator
    geometry: LayerGeometry
    check: CallCheck
    written: Callable[..., torch.Tensor] | None = None


def observe_layers(
    layers: Mapping[LayerKey, ReadyLayer],
    texts: TextInputs,
    request: Request,
    facts: Mapping[str, Any],
    *,
    plain: str,
    attention: str = GIVEN,
    advance: Callable[[int], object] = lambda layers: None,
    say: Callable[[str], object] = lambda line: None,
) -> Observation:
    """The observation of layers that were computed outside a pass of attnscope's, as of a pass.

    texts: of both axes; of an encoder-decoder the prompt is its target, and `source` what its encoder reads. plain: the
    stack that is observed; the others follow as `other_stacks`. attention: who computed them, as the report says it.
    say: called with a line for tokens that were chosen by name.

        >>> observe_layers({LayerKey(0, "decoder"): layer}, TextInputs(prompt, chosen), Request(), {}, plain="decoder")
    """
    shown: dict[str, dict[int, LayerGeometry]] = {}
    for key, layer in layers.items():
        shown.setdefault(key.stack, {})[key.layer] = layer.geometry
    report = CaptureReport([layer.check for layer in layers.values()], attention=attention)
    every = {stack: tuple(of_stack.values()) for stack, of_stack in shown.items()}
    source = LayerSource(request, plain, shown, every, advance)  # on the CPU, and each layer is asked
    of_stacks: dict[str, Observation] = {}
    with torch.no_grad():
        # A stack has texts of its own: the same names may choose other tokens in each.
        for stack in shown:
            [text] = texts.of(stack, plain)
            for line in chosen_lines(text.prompt, text.key_prompt, text.chosen, f"{stack}: " * (len(shown) > 1)):
                say(line)
            collector = StackCollector(source, stack, [text])
            for key, layer in layers.items():
                if key.stack == stack:
                    collector.ask(replace(collector.layer(key.layer, layer.P), written=layer.written))
            own = replace(report.of(stack), tokens=len(text.key_prompt))
            of_stacks[stack] = collector.observation(0, own, facts)
    return replace(of_stacks[plain], other_stacks={stack: of for stack, of in of_stacks.items() if stack != plain})


def model_facts(loaded: LoadedModel, engine: Engine, report: CaptureReport) -> dict[str, Any]:
    """What a manifest says of the model and of who computed its attention."""
    layers, heard = loaded.geometry.layers, report.of(loaded.geometry.stack).layers
    without = {str(layer.index): layer.type for layer in layers if not (layer.attention or layer.index in heard)}
    surprising = [layer for layer in layers if layer.of_unknown_type or (layer.index in heard and not layer.attention)]
    unknown = {str(layer.index): layer.type for layer in surprising}
    both = {str(layer.index): layer.parallel for layer in layers if layer.attention and layer.parallel}
    return {
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "type": loaded.geometry.model_type,
            "layers": len(layers),
            "layers_without_attention": without,
            **({"layers_of_unknown_type": unknown} if unknown else {}),
            **({"parallel_to_attention": both} if both else {}),
            **({"replaced": dict(loaded.replaced)} if loaded.replaced else {}),
            **({"arithmetic": loaded.arithmetic.facts} if loaded.arithmetic else {}),
        },
        "device": loaded.device,
        "dtype": loaded.dtype,
        "attention": report.attention,
        "engine": engine.name,
        "output": engine.output,
    }
