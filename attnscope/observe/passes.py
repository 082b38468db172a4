"""Prompts in, observations out: one forward pass, the path that single texts and corpora share.

    >>> loaded = load(LoadOptions())
    >>> prompt = from_text(loaded.tokenizer, "the financial bank is located on river bank")
    >>> [seen] = observe(loaded, [prompt], Request())
    >>> seen.heads[0].score["entropy"]

Shapes: B text, N heads of all layers, H heads of a layer, Q query, T token, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnscope.errors import InputError
from attnscope.model import padding
from attnscope.observation import Observation
from attnscope.observe.probing import side_by_side
from attnscope.observe.reading import PaddingError, Reading
from attnscope.observe.request import Asked, Request
from attnscope.seam.call import TOLERANCE, AttentionCall, CaptureReport
from attnscope.seam.differential import differences, strength
from attnscope.seam.engines import ENGINES, Engine
from attnscope.seam.inputs import given, given_of
from attnscope.seam.listen import listen
from attnscope.seam.projection import output_projections
from attnscope.stacks import (
    CSA,
    DECODER,
    DIFFERENCE,
    ENCODER,
    GLOBAL,
    OVER_PATCHES,
    POOLING,
    UNPOOLING,
    VISION,
)
from attnscope.text.summaries import of_patches, with_summaries
from attnscope.text.tokens import Chosen

if TYPE_CHECKING:
    from attnscope.model.geometry import Geometry
    from attnscope.model.loading import LoadedModel
    from attnscope.text.prompt import Prompt

Made = Callable[[str, Sequence[Asked]], Reading]  # the kind of a stack and its texts -> what reads it


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
        loaded.check_task("one text at a time", DECODER, ENCODER, patches=True)
    texts = list(zip(prompts, [None] * len(prompts) if sources is None else sources, strict=True))
    chosen = [request.chosen(*pair) for pair in texts] if chosen is None else chosen
    asked = [Asked(prompt, tokens, source) for (prompt, source), tokens in zip(texts, chosen, strict=True)]

    def one_pass(texts: Sequence[Asked]) -> list[Observation]:
        return _observed(loaded, texts, request, engine, facts or {}, advance)

    alone = any((one.source or one.prompt).inputs or one.prompt.unasked for one in asked)
    if POOLING in loaded.geometry.beside or alone:
        # whose numbers of parts differ
        return [one_pass([one])[0] for one in asked]
    lengths = {one.lengths for one in asked}
    if len(lengths) == 1 or padding.pads(loaded.model):
        try:
            return one_pass(asked)
        except PaddingError:
            padding.found(loaded.model, max(lengths)[0], exact=False)
    of_length = {length: iter(one_pass([one for one in asked if one.lengths == length])) for length in lengths}
    return [next(of_length[one.lengths]) for one in asked]


def _observed(
    loaded: LoadedModel,
    asked: Sequence[Asked],
    request: Request,
    engine: Engine,
    facts: Mapping[str, Any],
    advance: Callable[[int], object],
) -> list[Observation]:
    """One pass. Raises PaddingError where prompts of different length are not to be read side by side."""
    prompts = [one.prompt for one in asked]
    mixed = len({len(prompt) for prompt in prompts}) > 1
    check = mixed and padding.to_be_found(loaded.model)
    plain, stacks = loaded.geometry.kind, loaded.geometry.stacks
    made = _maker(loaded, asked, request, check, advance)
    readings, views = _readings(made, loaded.geometry, asked, request)
    factors: dict[str, float | None] = {}

    def on_call(call: AttentionCall) -> None:
        kind = next((kind for kind, one in views.items() if one.heard(call)), call.kind)
        if kind == POOLING and not readings.keys() & OVER_PATCHES and not _of_tokens_alone(request, asked):
            readings.update(_over_patches(made, asked[0].prompt, call, loaded.geometry.rates[POOLING]))
        if kind in readings:
            readings[kind].on_call(call)
        if DIFFERENCE in views and (difference := differences(call)):
            views[DIFFERENCE].on_call(difference)
            factors[str(call.layer)] = strength(call.module)

    reads, inputs = _fed(loaded, asked, readings)
    report = listen(
        loaded.model,
        reads,
        on_call,
        engine=engine,
        expected_layers=[(layer, kind) for kind, layers in stacks.items() for layer in layers if kind != VISION],
        windows=loaded.geometry.windows,
        patches=readings[VISION].prompts[0].windows if VISION in readings else (),
        calls_alone=not ((mixed and padding.to_be_tried(loaded.model, reads.shape[1])) or prompts[0].patches),
        **inputs,
    )
    for check_of in report.calls:
        check_of.kind = next((kind for kind, one in views.items() if one.heard(check_of)), check_of.kind)
    plain = _first_read(loaded, readings, (plain, *views))
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


def _maker(
    loaded: LoadedModel, asked: Sequence[Asked], request: Request, check: bool, advance: Callable[[int], object]
) -> Made:
    """What makes the reading of a stack over some texts."""
    out = None
    if request.view.weights == "value":
        beginning, more = given_of(loaded, asked[0].prompt, asked[0].source, most=4)
        out = output_projections(loaded, beginning, **more)

    def made(kind: str, texts: Sequence[Asked]) -> Reading:
        found = Reading(loaded, texts, request.of(kind, loaded.geometry.kind), check, advance, kind)
        found.out = out
        return found

    return made


def _readings(
    made: Made, geometry: Geometry, asked: Sequence[Asked], request: Request
) -> tuple[dict[str, Reading], dict[str, Reading]]:
    """What reads each stack, and those of it that read maps of a layer's own, by kind."""
    of_stacks = {kind: [text for one in asked for text in one.of(kind)] for kind in geometry.stacks}
    of_views = {kind: _view_of(kind, asked, request, geometry.rates.get(kind)) for kind in geometry.views}
    views = {kind: made(kind, texts) for kind, texts in of_views.items() if texts}
    return {kind: made(kind, texts) for kind, texts in of_stacks.items() if texts} | views, views


def _over_patches(made: Made, prompt: Prompt, call: AttentionCall, parts: int) -> dict[str, Reading]:
    """What reads the maps over patches, of which the first call over them says where they are."""
    seen_QK = call.visible.rows(0, call.P.queries)[0, 0]
    patches = [one.nonzero()[:, 0].tolist() for one in seen_QK[::parts]]
    whole, apart = of_patches(prompt, patches), of_patches(prompt, patches, parts)
    texts = {POOLING: (apart, prompt), GLOBAL: (whole, None), UNPOOLING: (prompt, apart)}
    return {kind: made(kind, [Asked(queries, Chosen(), keys=keys)]) for kind, (queries, keys) in texts.items()}


def _fed(
    loaded: LoadedModel, asked: Sequence[Asked], readings: Mapping[str, Reading]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the model's forward is given: its first argument, and the others by name."""
    prompts, plain = [one.prompt for one in asked], loaded.geometry.kind
    ids_BT = readings[plain].texts.ids_BT
    if prompts[0].patches:  # whose tokens are told apart there
        ids_BT = side_by_side([prompt.ids for prompt in prompts]).to(loaded.device)
    if plain == ENCODER or ENCODER not in readings:
        return given(loaded, prompts, ids_BT)
    reads, inputs = given(loaded, [one.source or one.prompt for one in asked], readings[ENCODER].texts.ids_BT)
    return reads, inputs | {"decoder_input_ids": ids_BT}


def _first_read(loaded: LoadedModel, readings: Mapping[str, Reading], kinds: Sequence[str]) -> str:
    """The first of some kinds of which a layer was read. Raises InputError where none was."""
    found = next((kind for kind in kinds if readings[kind].kv_of), None)
    if found is None:
        raise InputError(
            f"no layer of {loaded.geometry.model_type} attends to the tokens of this text themselves: from some length "
            f"on its keys stand for several tokens, and this text has {len(readings[kinds[0]].prompts[0])}",
            "take a shorter text",
        )
    return found


def _view_of(kind: str, asked: Sequence[Asked], request: Request, rate: int | None) -> list[Asked]:
    """What is read of layers with maps of their own; nothing where something is asked of tokens alone."""
    if _of_tokens_alone(request, asked):
        return []
    if rate is None:  # a difference has no logits and no values
        return list(asked) if request.view.weights == "softmax" else []
    return [one._replace(keys=with_summaries(one.prompt, rate, overlap=kind == CSA)) for one in asked]


def _of_tokens_alone(request: Request, asked: Sequence[Asked]) -> bool:
    """Whether something is asked that keys which are not tokens have no answer to."""
    of_tokens = (request.group, request.rollout, request.per_token, request.spans, request.operands)
    return any(of_tokens) or any(one.chosen != Chosen() for one in asked)


def _try_alone(loaded: LoadedModel, prompts: Sequence[Prompt], engine: Engine, report: CaptureReport) -> None:
    """Read the shortest prompt alone: its hidden states must be those that it has beside the longest."""
    row = min(range(len(prompts)), key=lambda place: len(prompts[place]))
    ids_BT = torch.tensor([prompts[row].ids], device=loaded.device)
    alone_TE = listen(loaded.model, ids_BT, lambda call: None, engine=engine).output[0][0].float()
    beside_TE = report.output[0][row, : len(alone_TE)].float()
    difference_T = (beside_TE - alone_TE).norm(dim=-1) / alone_TE.norm(dim=-1)
    _, allowed = TOLERANCE.get(loaded.model.dtype, TOLERANCE[torch.bfloat16])
    if (difference_T > allowed).any():
        raise PaddingError
    padding.found(loaded.model, report.tokens, exact=True)


def model_facts(loaded: LoadedModel, engine: Engine, report: CaptureReport) -> dict[str, Any]:
    """What a manifest says of the model and of who computed its attention."""
    layers = loaded.geometry.layers
    both = {str(layer.index): layer.beside for layer in layers if layer.attention and layer.beside}
    return {
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "type": loaded.geometry.model_type,
            "layers": len(layers),
            "layers_without_attention": {str(layer.index): layer.kind for layer in layers if not layer.attention},
            **({"beside_attention": both} if both else {}),
        },
        "device": loaded.device,
        "dtype": loaded.dtype,
        "attention": report.attention,
        "engine": engine.name,
        "output": engine.output,
    }
