"""Prompts in, observations out: one forward pass, the path that single texts and corpora share.

    >>> loaded = load(LoadOptions())
    >>> prompt = from_text(loaded.tokenizer, "the financial bank is located on river bank")
    >>> [seen] = observe(loaded, [prompt], Request())
    >>> seen.heads[0].score["entropy"]

Shapes: B text, N heads of all layers, H heads of a layer, Q query, T token, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from attnscope.attention.questions import Features, Received
from attnscope.errors import InputError, UsageError
from attnscope.measure.layers import LayerKey, PerLayer
from attnscope.measure.maps import MAP_SIDE, Maps
from attnscope.measure.metrics import LOOKBACKS, MASS, METRICS
from attnscope.measure.operands import KeptOperands, Operands
from attnscope.measure.per_token import PerToken, TokenWeights
from attnscope.measure.probes import (
    HeadScores,
    KeyMass,
    Layer,
    LayerScores,
    Probe,
    TopKey,
    TopRelation,
    View,
    Weights,
    run_probes,
)
from attnscope.measure.probes import Relation as TopRelations
from attnscope.measure.relations import ChosenKeys, TopKeys
from attnscope.measure.roles import NONE, near_uniform, roles_of
from attnscope.measure.rollout import Rollout, RolloutProbe, spans_of
from attnscope.measure.spans import SpanMass, SpanPairs
from attnscope.measure.texts import Texts
from attnscope.model import padding
from attnscope.observation import HeadColumns, LayerMaps, Observation, Score
from attnscope.seam.call import TOLERANCE, AttentionCall, CallCheck, CaptureReport
from attnscope.seam.differential import differences, strength
from attnscope.seam.engines import ENGINES, Engine
from attnscope.seam.inputs import given, given_of
from attnscope.seam.listen import listen
from attnscope.seam.projection import gram_root, output_projections
from attnscope.stacks import CROSS, CSA, DECODER, DIFFERENCE, ENCODER, HCA, VISION
from attnscope.text.summaries import with_summaries
from attnscope.text.tokens import Chosen, Found, choose, choose_of_two

if TYPE_CHECKING:
    from attnscope.model.geometry import Geometry
    from attnscope.model.loading import LoadedModel
    from attnscope.text.prompt import Prompt


@dataclass(frozen=True)
class Request:
    """What to keep of a forward pass.

    view: how entries are read, and of which heads relations and maps are kept. metrics: ids to measure. key_zero:
    lets key 0 into a head's strongest relation. relations: whether to keep the `top_k` strongest keys of every query
    (None: all), of `group`s if given. maps: the heads to draw ("all", "kept" or None), binned by `bin_rule` to at most
    `map_side` rows, with key 0 in a column of its own if `split_sink`. weights: keep whole matrices. operands: keep q,
    k and v as they were multiplied. Both are of the view's heads, or of {layer: heads}. rollout: the units whose
    attention is rolled out; `bins` are at most MAP_SIDE runs of tokens. per_token: keep what every token gets from the
    chosen queries, or gives to the keys where keys alone are chosen. query, key: the tokens that are asked about, as
    `text/tokens.py` reads them, with the groups of `define`, and the part of the maps that is kept; None for all.
    spans: groups whose mass on each other is kept, of every pair. stacks: of an encoder-decoder the heads of each stack
    that are kept, {"cross": {layer: heads}}, over the view's, which are the decoder's.

        >>> attnscope.capture(model, "the financial bank", request=attnscope.Request(relations=True, top_k=None))
    """

    view: View = View()
    metrics: Sequence[str] = tuple(METRICS)
    key_zero: bool = False
    relations: bool = False
    top_k: int | None = 5
    group: Literal["words", "sentences"] | None = None
    maps: Literal["all", "kept"] | None = None
    bin_rule: Literal["sum", "max"] = "sum"
    split_sink: bool = False
    map_side: int = MAP_SIDE
    weights: bool | Mapping[int, Sequence[int]] = False
    operands: bool | Mapping[int, Sequence[int]] = False
    rollout: Literal["bins", "tokens", "words", "sentences"] | None = None
    per_token: bool = False
    query: str | None = None
    key: str | None = None
    define: Mapping[str, str] = field(default_factory=dict)
    spans: Sequence[str] = ()
    stacks: Mapping[str, Mapping[int, Sequence[int]]] | None = None

    def __post_init__(self) -> None:
        if self.group and self.view.weights != "softmax":
            what = "logits" if self.view.weights == "scores" else "norms"
            raise UsageError(f"{what} of several keys cannot be summed into one", "use {weights=softmax} with {group}")

    def selecting(self, heads: Mapping[str, Mapping[int, Sequence[int]]], geometry: Geometry) -> Request:
        """The same of these heads alone, by stack."""
        view = replace(self.view, heads=heads.get(geometry.kind, {}))
        return replace(self, view=view, stacks=heads if len(geometry.shown) > 1 else None)

    def view_of(self, asked: bool | Mapping[int, Sequence[int]]) -> View:
        """The view, of the heads that `weights` or `operands` asks for."""
        return replace(self.view, heads=asked) if isinstance(asked, Mapping) else self.view

    def of(self, kind: str, plain: str) -> Request:
        """What is asked of one stack; plain: the one that the view's heads are of."""
        heads = self.view.heads
        if self.stacks is not None:
            heads = self.stacks.get(kind, {})
            if kind in (CSA, HCA):  # of long texts these are the decoder's own layers
                heads = {**self.stacks.get(plain, {}), **heads}
        elif heads is not None and kind != plain:
            heads = {}
        rollout = None if kind == CROSS else self.rollout  # of units that are the same on both sides
        per_token = self.per_token and kind != VISION
        return replace(self, view=replace(self.view, heads=heads), rollout=rollout, per_token=per_token)

    @property
    def asks(self) -> bool:
        """Whether the question is of the text's own tokens or units, which a vision tower has none of."""
        return any((self.query, self.key, self.group, self.rollout))

    def chosen(self, prompt: Prompt, source: Prompt | None = None) -> Chosen:
        """The tokens of a text that are asked about. Raises UsageError or InputError for what means none.

        source: what an encoder-decoder's encoder reads, where the prompt is its decoder's.
        """
        asked = self.query, self.key, self.define, self.spans
        return choose(prompt, *asked) if source is None else choose_of_two(prompt, source, *asked)


def observe(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    request: Request,
    *,
    engine: Engine = ENGINES["eager"],
    chosen: Sequence[Chosen] | None = None,
    sources: Sequence[Prompt] | None = None,
    facts: Mapping[str, Any] | None = None,
    advance: Callable[[int], object] = lambda layers: None,
) -> list[Observation]:
    """One forward pass over some prompts; an observation each, in order.

    Prompts of different length are padded on the right, without a mask, which leaves causal rows exact; where it does
    not, there is a pass for each length. engine: who computes the layers' attention. chosen: the tokens that are asked
    about, per prompt; what the request says unless given. sources: what an encoder-decoder's encoder reads, while its
    decoder reads the prompts: the observations are of the decoder, and `beside` has those of encoder and
    cross-attention. facts: what else the observations' manifests are to say. advance: called with 1 whenever a layer
    was read.
    Raises ModelError where a layer that should attend was not heard, InputError where none attends to the tokens.
    """
    if sources is None:
        loaded.check_task("one text at a time", DECODER, ENCODER)
    texts = list(zip(prompts, [None] * len(prompts) if sources is None else sources, strict=True))
    chosen = [request.chosen(*pair) for pair in texts] if chosen is None else chosen
    asked = [Asked(prompt, tokens, source) for (prompt, source), tokens in zip(texts, chosen, strict=True)]

    def one_pass(texts: Sequence[Asked]) -> list[Observation]:
        return _observed(loaded, texts, request, engine, facts or {}, advance)

    if any((one.source or one.prompt).inputs for one in asked):  # whose numbers of parts differ
        return [one_pass([one])[0] for one in asked]
    lengths = {one.lengths for one in asked}
    if len(lengths) == 1 or padding.pads(loaded.model):
        try:
            return one_pass(asked)
        except _PaddingError:
            padding.found(loaded.model, max(lengths)[0], exact=False)
    of_length = {length: iter(one_pass([one for one in asked if one.lengths == length])) for length in lengths}
    return [next(of_length[one.lengths]) for one in asked]


class Asked(NamedTuple):
    """A text, the tokens of it that are asked about, and the text that an encoder-decoder's encoder reads."""

    prompt: Prompt
    chosen: Chosen
    source: Prompt | None = None
    keys: Prompt | None = None  # where they are another text's than the queries

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.prompt), len(self.source or ())

    def of(self, kind: str) -> list[Asked]:
        """What one stack reads: of a vision tower one text for each picture, or part of one, that it is given."""
        if kind == VISION:
            return [Asked(part, Chosen()) for part in self.prompt.tower]
        return [self._of_two(kind)]

    def _of_two(self, kind: str) -> Asked:
        """What one stack of an encoder-decoder reads."""
        chosen = self.chosen.of(kind)
        if self.source is None or kind == DECODER:
            return self._replace(chosen=chosen)
        return Asked(self.prompt, chosen, keys=self.source) if kind == CROSS else Asked(self.source, chosen)

    @property
    def looked_at(self) -> Prompt:
        """The text that the keys are of."""
        return self.keys or self.prompt


def _observed(
    loaded: LoadedModel,
    asked: Sequence[Asked],
    request: Request,
    engine: Engine,
    facts: Mapping[str, Any],
    advance: Callable[[int], object],
) -> list[Observation]:
    """One pass. Raises _PaddingError where prompts of different length are not to be read side by side."""
    prompts = [one.prompt for one in asked]
    mixed = len({len(prompt) for prompt in prompts}) > 1
    check = mixed and padding.to_be_found(loaded.model)
    plain, stacks = loaded.geometry.kind, loaded.geometry.stacks
    readings = {
        kind: _Reading(loaded, texts, request.of(kind, plain), check, advance, kind)
        for kind in stacks
        if (texts := [text for one in asked for text in one.of(kind)])
    }
    views = {
        kind: _Reading(loaded, texts, request.of(kind, plain), check, advance, kind)
        for kind in loaded.geometry.views
        if (texts := _view_of(kind, asked, request, loaded.geometry.rates.get(kind)))
    }
    readings |= views
    factors: dict[str, float | None] = {}
    if request.view.weights == "value":
        beginning, more = given_of(loaded, asked[0].prompt, asked[0].source, most=4)
        out = output_projections(loaded, beginning, **more)
        for reading in readings.values():
            reading.out = out

    def on_call(call: AttentionCall) -> None:
        kind = next((kind for kind, one in views.items() if one.heard(call)), call.kind)
        if kind in readings:
            readings[kind].on_call(call)
        if DIFFERENCE in views and (made := differences(call)):
            views[DIFFERENCE].on_call(made)
            factors[str(call.layer)] = strength(call.module)

    reads, inputs = given(loaded, prompts, _side_by_side([prompt.ids for prompt in prompts]).to(loaded.device))
    if ENCODER in readings and plain != ENCODER:
        targets = {"decoder_input_ids": reads}
        reads, inputs = given(loaded, [one.source or one.prompt for one in asked], readings[ENCODER].texts.ids_BT)
        inputs |= targets
    report = listen(
        loaded.model,
        reads,
        on_call,
        engine=engine,
        expected_layers=[(layer, kind) for kind, layers in stacks.items() for layer in layers if kind != VISION],
        windows=loaded.geometry.windows,
        calls_alone=not ((mixed and padding.to_be_tried(loaded.model, reads.shape[1])) or prompts[0].patches),
        **inputs,
    )
    for check_of in report.calls:
        check_of.kind = next((kind for kind, one in views.items() if one.heard(check_of)), check_of.kind)
    plain = next((kind for kind in (plain, *views) if readings[kind].kv_of), plain)
    if not readings[plain].kv_of:
        raise InputError(
            f"no layer of {loaded.geometry.model_type} attends to the tokens of this text themselves: from some length "
            f"on its keys stand for several tokens, and this text has {len(prompts[0])}",
            "take a shorter text",
        )
    if mixed and padding.to_be_tried(loaded.model, report.tokens):
        _try_alone(loaded, prompts, engine, report)
    report = replace(report, output=None)  # hidden states that nobody asked for
    facts = {**model_facts(loaded, engine, report), **({"lambda": factors} if factors else {}), **facts}

    def seen(kind: str, row: int) -> Observation:
        row = len(readings[kind].prompts) - 1 if kind == VISION else row  # the whole picture follows its parts
        own = report if len(readings) == 1 and not prompts[0].patches else report.of(kind)
        return readings[kind].observation(row, replace(own, tokens=readings[kind].key_count), facts)

    others = [kind for kind in readings if kind != plain and readings[kind].kv_of]
    if prompts[0].tower and VISION not in others and not request.asks:
        facts |= {"unread": ["the vision tower: it attends in windows, or its config does not say its layers"]}
    return [
        replace(seen(plain, row), beside={kind: seen(kind, row) for kind in others}) if others else seen(plain, row)
        for row in range(len(prompts))
    ]


def _view_of(kind: str, asked: Sequence[Asked], request: Request, rate: int | None) -> list[Asked]:
    """What is read of layers with maps of their own; nothing where something is asked of tokens alone."""
    of_tokens = (request.group, request.rollout, request.per_token, request.spans, request.operands)
    if any(of_tokens) or any(one.chosen != Chosen() for one in asked):
        return []
    if rate is None:  # a difference has no logits and no values
        return list(asked) if request.view.weights == "softmax" else []
    return [one._replace(keys=with_summaries(one.prompt, rate, overlap=kind == CSA)) for one in asked]


class _PaddingError(Exception):
    """A text is read in another way beside a longer one than alone."""


def _try_alone(loaded: LoadedModel, prompts: Sequence[Prompt], engine: Engine, report: CaptureReport) -> None:
    """Read the shortest prompt alone: its hidden states must be those that it has beside the longest."""
    row = min(range(len(prompts)), key=lambda place: len(prompts[place]))
    ids_BT = torch.tensor([prompts[row].ids], device=loaded.device)
    alone_TE = listen(loaded.model, ids_BT, lambda call: None, engine=engine).output[0][0].float()
    beside_TE = report.output[0][row, : len(alone_TE)].float()
    difference_T = (beside_TE - alone_TE).norm(dim=-1) / alone_TE.norm(dim=-1)
    _, allowed = TOLERANCE.get(loaded.model.dtype, TOLERANCE[torch.bfloat16])
    if (difference_T > allowed).any():
        raise _PaddingError
    padding.found(loaded.model, report.tokens, exact=True)


def model_facts(loaded: LoadedModel, engine: Engine, report: CaptureReport) -> dict[str, Any]:
    """What a manifest says of the model and of who computed its attention."""
    layers = loaded.geometry.layers
    return {
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "type": loaded.geometry.model_type,
            "layers": len(layers),
            "layers_without_attention": {str(layer.index): layer.kind for layer in layers if not layer.attention},
        },
        "device": loaded.device,
        "dtype": loaded.dtype,
        "attention": report.attention,
        "engine": engine.name,
        "output": engine.output,
    }


def _side_by_side(ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ids of several texts, (B, T): shorter ones are filled up with their last."""
    longest = max(map(len, ids))
    return torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in ids])


def _texts(asked: Sequence[Asked], device: str, kind: str) -> Texts:
    prompts = [one.prompt for one in asked]
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = _side_by_side([prompt.ids_apart for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    query_BT = _marked([one.chosen.query for one in asked], longest, default=True)
    most_keys = max(len(one.looked_at) for one in asked)
    key_BT = _marked([one.chosen.key for one in asked], most_keys, default=False)
    answers = _answers(prompts) if kind == DECODER else None
    return Texts(ids_BT, lengths, query_BT, key_BT, answers, kind).to(torch.device(device))


def _answers(prompts: Sequence[Prompt]) -> torch.Tensor | None:
    """Where each text's answer begins, its length where it has none, (B,); None where none has one."""
    if all(prompt.answer is None for prompt in prompts):
        return None
    return torch.tensor([len(prompt) if prompt.answer is None else prompt.answer for prompt in prompts])


def _marked(found: Sequence[Found | None], longest: int, default: bool) -> torch.Tensor | None:
    """True on each text's named tokens, (B, T); `default` in a text that names none, None where none does."""
    if not any(found):
        return None
    marked_BT = torch.full((len(found), longest), default)
    for row, one in enumerate(found):
        if one is not None:
            marked_BT[row] = False
            marked_BT[row, list(one.positions)] = True
    return marked_BT


def _probes(asked: Sequence[Asked], request: Request) -> dict[str, Probe]:
    prompts, chosen = [one.prompt for one in asked], asked[0].chosen
    always = [name for name in request.metrics if name not in LOOKBACKS and name != MASS.id]
    lookbacks = LOOKBACKS if always and any(prompt.answer is not None for prompt in prompts) else ()
    mass = [MASS.id] if any(one.chosen.key for one in asked) else []
    probes: dict[str, Probe] = {
        "scores": HeadScores((*always, *lookbacks, *mass)),
        "relation": TopRelation(request.key_zero),
        "top_key": TopKey(request.view),
    }
    nothing = all(one.chosen.nothing for one in asked)
    if request.relations and not nothing:
        probes["keys"] = _keys_probe(asked, request)
    if request.maps and not nothing:
        view = request.view if request.maps == "kept" else replace(request.view, heads=None)
        probes["maps"] = Maps(
            len(prompts[0]),
            view,
            request.bin_rule,
            request.split_sink,
            request.map_side,
            chosen.query.positions if chosen.query else None,
            chosen.key.positions if chosen.key else None,
            len(asked[0].looked_at),
        )
    if request.weights:
        probes["weights"] = Weights(request.view_of(request.weights))
    if request.operands:
        probes["operands"] = Operands(request.view_of(request.operands))
    if request.rollout:
        probes["rollout"] = RolloutProbe(_groups(prompts, request.rollout))
    if request.per_token and not nothing:
        probes["per_token"] = PerToken(_towards(asked), request.view)
    if request.spans:
        keys = None if asked[0].keys is None else _spans(asked, request.spans, of_keys=True)
        probes["spans"] = SpanMass(_spans(asked, request.spans), request.view, keys)
    return probes


def _keys_probe(asked: Sequence[Asked], request: Request) -> TopKeys | ChosenKeys:
    """What keeps relations: of all queries and keys, or of those that are asked about."""
    groups = None
    if request.group:
        of_queries = _groups([one.prompt for one in asked], request.group)
        others = asked[0].keys is not None
        groups = of_queries, _groups([one.looked_at for one in asked], request.group) if others else of_queries
    if not any(one.chosen.query or one.chosen.key for one in asked):
        return TopKeys(request.top_k, request.view, groups)

    def units(side: int, text: int) -> Sequence[int]:
        """The tokens that are asked about as queries, or as keys, or the groups that they stand in."""
        one = asked[text]
        prompt, found = (one.looked_at, one.chosen.key) if side else (one.prompt, one.chosen.query)
        places: Sequence[int] = found.positions if found else range(len(prompt))
        return places if groups is None else tuple(groups[side][text, list(places)].unique().tolist())

    query, key = (tuple(units(side, text) for text in range(len(asked))) for side in (0, 1))
    return ChosenKeys(request.top_k, query, key, request.view, groups)


def _towards(asked: Sequence[Asked]) -> Received | Features:
    """What is asked of every token: its mean weight as a key of the chosen queries, or its mass on the chosen keys."""
    on_keys = all(one.chosen.keys_alone for one in asked)
    texts = [one.looked_at if on_keys else one.prompt for one in asked]
    share_BT = torch.zeros(len(asked), max(map(len, texts)))
    for row, one in enumerate(asked):
        found = one.chosen.key if on_keys else one.chosen.query
        positions = list(range(len(texts[row])) if found is None else found.positions)
        share_BT[row, positions] = 1.0 if on_keys else 1 / max(1, len(positions))
    return Features(share_BT[..., None]) if on_keys else Received(share_BT)


def _spans(asked: Sequence[Asked], names: Sequence[str], of_keys: bool = False) -> torch.Tensor:
    """True on the tokens of each text's spans, (B, T, S)."""
    longest = max(len(one.looked_at if of_keys else one.prompt) for one in asked)
    spans = [(one.chosen.key_spans if of_keys else one.chosen.spans) or {} for one in asked]
    marked = [_marked([of_text.get(name) for of_text in spans], longest, default=False) for name in names]
    nowhere_BT = torch.zeros(len(asked), longest, dtype=torch.bool)
    return torch.stack([nowhere_BT if one is None else one for one in marked], -1)


def _groups(prompts: Sequence[Prompt], group: str) -> torch.Tensor:
    """The number of each token's group, (B, T); -1 for padding."""
    groups_BT = torch.full((len(prompts), max(len(prompt) for prompt in prompts)), -1)
    for row, prompt in enumerate(prompts):
        for number, span in enumerate(spans_of(prompt, group)):
            groups_BT[row, span.start : span.stop] = number
    return groups_BT


def _gram_root(call: AttentionCall, out: Mapping[nn.Module, nn.Module]) -> torch.Tensor:
    """What makes norms of a layer's values as they are written. Raises UsageError where they are not v W_O."""
    spec, why = call.spec, ""
    if spec is None:
        why = "does not show the values of its attention"
    elif spec.sinks_scale_output:
        why = "scales what its weights give before it is written"
    elif call.module not in out:
        why = "has no output projection that is given the heads side by side, as they come"
    if spec is None or why:
        raise UsageError(f"this model family {why}, so that no key's share of it is known", "use {weights=softmax}")
    return gram_root(out[call.module], spec.heads, spec.v_BGKV)


class _Reading:
    """One stack in one forward pass: asks every layer, keeps what the probes keep, and cuts it into texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        asked: Sequence[Asked],
        request: Request,
        check: bool,
        advance: Callable[[int], object],
        kind: str,
    ) -> None:
        self.kind, self.keys = kind, [one.looked_at for one in asked]
        self.prompts, self.chosen = [one.prompt for one in asked], [one.chosen for one in asked]
        self.request, self.check, self.advance = request, check, advance
        self.out: Mapping[nn.Module, nn.Module] | None = None  # the output projections, where values are weighed
        self.texts, geometry = _texts(asked, loaded.device, kind), loaded.geometry
        self.key_count = max(len(keys) for keys in self.keys)
        self.layers = geometry.shown[kind]
        self.every = geometry.every.get(kind, ())
        self.probes = _probes(asked, request)
        self.kept: dict[str, dict[LayerKey, Any]] = {name: {} for name in self.probes}
        self.kv_of: dict[LayerKey, tuple[int, int]] = {}

    def heard(self, call: AttentionCall | CallCheck) -> bool:
        """Whether a call of the decoder is of these layers, over tokens and their summaries."""
        queries, keys = (call.P.queries, call.P.keys) if isinstance(call, AttentionCall) else (call.queries, call.keys)
        return call.layer in self.layers and queries < keys == self.key_count and self.kind in (CSA, HCA)

    def on_call(self, call: AttentionCall) -> None:
        """Keep what is asked of a layer's first call over the text's tokens; the report lists what is not read.

        check: whether a layer that chooses its keys ends the pass.
        """
        if self.check and self._chooses_keys(call):
            raise _PaddingError
        if call.call > 0 or (call.P.queries, call.P.keys) != (self.texts.ids_BT.shape[1], self.key_count):
            return
        if self.kind == VISION and call.P.batch != len(self.prompts):  # it is given the picture in other parts
            return
        key, known = LayerKey(call.layer, self.kind), self.layers.get(call.layer)
        kv_heads = call.spec.kv_heads if call.spec else known.kv_heads if known else call.P.heads
        self.kv_of[key] = call.P.heads, kv_heads
        root = None if self.out is None else partial(_gram_root, call, self.out)
        layer = Layer(key, call.P, kv_heads, self.texts.to(call.P.device), gram_root=root)
        for name, found in run_probes(self.probes, layer).items():
            if found is not None:
                self.kept[name][key] = found
        self.advance(1)

    def _chooses_keys(self, call: AttentionCall) -> bool:
        """Whether the keys are not the tokens, or the mask hides some that the layer's causal and window rules show."""
        if call.P.keys != self.texts.ids_BT.shape[1]:
            return True
        if call.visible.mask is None:
            return False
        position_Q, layer = call.visible.position_Q, self.layers.get(call.layer)
        shown_Q = position_Q + 1
        if layer and layer.window:
            chunked = layer.kind == "chunked"
            shown_Q = position_Q % layer.window + 1 if chunked else shown_Q.clamp(max=layer.window)
        return bool((call.visible.counts_BHQ < shown_Q).any())

    def observation(self, row: int, report: CaptureReport, facts: Mapping[str, Any]) -> Observation:
        """One text's part of what was kept, cut to its length."""
        prompt, count, rollout = self.prompts[row], len(self.prompts[row]), self._rollout(row)
        keys_count = len(self.keys[row])
        weighed = count if self.chosen[row].keys_alone else keys_count
        if rollout is not None:
            facts = {**facts, "rollout": rollout.facts([layer.index for layer in self.every])}
        keys = {key: kept[row] for key, kept in self.kept.get("keys", {}).items()}
        operands = {key: self._operands(kept, row) for key, kept in self.kept.get("operands", {}).items()}
        matrices = {key: one[row, :, :count, :keys_count] for key, one in self.kept.get("weights", {}).items()}
        return Observation(
            queries=prompt,
            keys=self.keys[row],
            columns=self.columns[row],
            view=self.request.view,
            group=self.request.group,
            support=PerLayer({key: counts[min(row, len(counts) - 1)] for key, counts in self.supports.items()}),
            visible=PerLayer({key: self._visible(key) for key in self.kv_of}),
            received=self._received(row)[:keys_count],
            report=report,
            kv_of=PerLayer(self.kv_of),
            facts=facts,
            maps=self._maps(),
            weights=PerLayer(matrices),
            weight_heads=PerLayer({key: self._weight_heads(key) for key in matrices}),
            operands=PerLayer(operands),
            rollout=rollout,
            kept_keys=PerLayer(keys) if self.request.relations else None,
            per_token=PerLayer(
                {
                    key: TokenWeights(one.heads, one.weight[row, :, :weighed], one.uniform[row, :, :weighed])
                    for key, one in self.kept.get("per_token", {}).items()
                }
            ),
            chosen=self.chosen[row],
            spans=PerLayer({key: self._pairs(kept, row) for key, kept in self.kept.get("spans", {}).items()}),
            without={layer.index: layer.kind for layer in self.every if not layer.attention},
        )

    @staticmethod
    def _pairs(kept: SpanPairs, row: int) -> SpanPairs:
        return SpanPairs(kept.heads, kept.mass[row], kept.uniform[row])

    def _operands(self, kept: KeptOperands, row: int) -> KeptOperands:
        """One text's part, cut to its length; text and batch stay apart: B is 1."""
        queries, keys, bias = len(self.prompts[row]), len(self.keys[row]), kept.bias_BHTT
        counts = {"q_BHTD": queries, "k_BHTD": keys, "v_BHTV": keys}
        cut = {name: getattr(kept, name)[row : row + 1, :, :count] for name, count in counts.items()}
        return kept._replace(**cut, bias_BHTT=None if bias is None else bias[row : row + 1, :, :queries, :keys])

    def _weight_heads(self, key: LayerKey) -> Sequence[int]:
        """The heads (kv heads, where they are averaged) whose matrices were kept of a layer."""
        heads, kv_heads = self.kv_of[key]
        chosen = self.request.view_of(self.request.weights).heads
        kept = range(heads) if chosen is None else chosen.get(key.layer, ())
        return sorted({head * kv_heads // heads for head in kept}) if self.request.view.by_kv else list(kept)

    def _visible(self, key: LayerKey) -> str:
        known = self.layers.get(key.layer)
        return known.in_words if known else "full"

    def _received(self, row: int) -> np.ndarray:
        """The mean mass that each token of a text receives, over the kept heads, (T,)."""
        found: list[KeyMass] = list(self.kept["top_key"].values())
        heads = sum(one.kept for one in found)
        total_T = sum((one.received[row] for one in found), torch.zeros(self.key_count))
        return (total_T / max(heads, 1)).numpy()

    def _maps(self) -> LayerMaps | None:
        probe = self.probes.get("maps")
        return LayerMaps.of(probe, self.kept["maps"]) if isinstance(probe, Maps) else None

    def _rollout(self, row: int) -> Rollout | None:
        probe = self.probes.get("rollout")
        if not isinstance(probe, RolloutProbe) or self.request.rollout is None:
            return None
        group = self.request.rollout
        return probe.rolled(row, spans_of(self.prompts[row], group), group)

    @cached_property
    def supports(self) -> dict[LayerKey, list[dict[str, int]]]:
        """The rows behind each layer's scores, per text; texts that share a mask may share one entry."""
        known: dict[int, list[dict[str, int]]] = {}  # layers that share a mask share them
        found: dict[LayerKey, list[dict[str, int]]] = {}
        for key, scores in self.kept["scores"].items():
            if id(scores.support) not in known:
                known[id(scores.support)] = _least_of_heads(scores.support)
            found[key] = known[id(scores.support)]
        return found

    @cached_property
    def columns(self) -> list[HeadColumns]:
        """The heads of all layers as columns, one set per text."""
        which, scores = _which(self.kv_of, self.request.view), list(self.kept["scores"].values())
        value = self._of_heads(scores, "values")
        null, support = self._of_heads(scores, "uniform"), self._of_heads(scores, "support")
        named, relation = bool(scores) and METRICS.keys() <= value.keys(), self._relations()
        top_key, top_key_mass = self._top_keys()
        found = []
        for row in range(len(self.prompts)):
            values, nulls, rows = ({name: one[row] for name, one in part.items()} for part in (value, null, support))
            unnamed = np.full(len(which["layer"]), None)
            mine = {name: Score(values[name], nulls[name]) for name in values}
            relations = dict(zip(RELATIONS, (part[row] for part in relation), strict=True))
            found.append(
                HeadColumns(
                    **which,
                    role=roles_of(values, nulls, rows, self.kind) if named else np.full_like(unnamed, NONE),
                    near_uniform=near_uniform(values, rows) if named else unnamed,
                    scores=mine,
                    top_key=top_key[row],
                    top_key_mass=top_key_mass[row],
                    **relations,
                )
            )
        return found

    def _of_heads(self, scores: Sequence[LayerScores], part: str) -> dict[str, np.ndarray]:
        """A part of the layers' scores, (B, N) each: means over kv heads where the view averages them."""
        count, by_kv = len(self.prompts), self.request.view.by_kv

        def of_layer(one: LayerScores, name: str) -> np.ndarray:
            values = getattr(one, part)[name].expand(count, one.heads)
            if not by_kv:
                return values.numpy()
            grouped = values.unflatten(1, (one.kv_heads, -1))
            return (grouped.amin(-1) if part == "support" else grouped.mean(-1)).numpy()

        names = list(getattr(scores[0], part)) if scores else []
        return {name: np.concatenate([of_layer(one, name) for one in scores], axis=1) for name in names}

    def _top_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """The key that each head's queries look at most, and its mean mass, (B, N) each."""
        found: list[KeyMass] = list(self.kept["top_key"].values())
        if not found:
            return np.empty((len(self.prompts), 0), np.int32), np.empty((len(self.prompts), 0), np.float32)
        return torch.cat([one.key for one in found], 1).int().numpy(), torch.cat([one.mass for one in found], 1).numpy()

    def _relations(self) -> list[np.ndarray]:
        """Weight, query and key of every head's strongest relation, (B, N) each; of a kv head, its heads' strongest."""
        parts = []
        for key, relation in self.kept["relation"].items():
            if self.request.view.by_kv:
                weight = relation.weight.unflatten(1, (self.kv_of[key][1], -1))
                best = weight.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
                relation = TopRelations(*(part.view_as(weight).gather(-1, best)[..., 0] for part in relation))
            parts.append([part.numpy() for part in relation])
        if not parts:
            return [np.empty((len(self.prompts), 0))] * 3
        return [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]


RELATIONS = ("relation_weight", "relation_query", "relation_key")


def _least_of_heads(counts: Mapping[str, torch.Tensor]) -> list[dict[str, int]]:
    """Each text's counts (B or 1, H or 1), the least of any head."""
    least = torch.stack(torch.broadcast_tensors(*(count.amin(1) for count in counts.values())), -1).tolist()
    return [dict(zip(counts, row, strict=True)) for row in least]


def _which(kv_of: Mapping[LayerKey, tuple[int, int]], view: View) -> dict[str, np.ndarray]:
    """Which head each place of the columns is, and whether the view keeps it."""
    names: dict[str, list[Any]] = {name: [] for name in ("layer", "kind", "head", "kv_head", "kept")}
    for key, (heads, kv_heads) in kv_of.items():
        chosen = range(heads) if view.heads is None else view.heads.get(key.layer, ())
        wanted = {head * kv_heads // heads for head in chosen} if view.by_kv else set(chosen)
        for number in range(kv_heads if view.by_kv else heads):
            kv_head = number if view.by_kv else number * kv_heads // heads
            parts = key.layer, key.kind, -1 if view.by_kv else number, kv_head, number in wanted
            for name, part in zip(names, parts, strict=True):
                names[name].append(part)
    kinds = {"kind": object, "kept": bool}
    return {name: np.array(column, dtype=kinds.get(name, np.int32)) for name, column in names.items()}
