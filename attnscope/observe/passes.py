"""Prompts in, observations out: one forward pass, the path that single texts and corpora share.

    >>> loaded = load(LoadOptions())
    >>> prompt = from_text(loaded.tokenizer, "the financial bank is located on river bank")
    >>> [seen] = observe(loaded, [prompt], Request())
    >>> seen.heads[0].score["entropy"]

Shapes: B text, N heads of all layers, H heads of a layer, Q query, T token, k kept keys, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.forward import given, given_of
from attnscope.hooks.generation import watched_states
from attnscope.hooks.listen import listen
from attnscope.hooks.report import CaptureReport, tolerance
from attnscope.inputs.tokens import TokenSelection as Chosen
from attnscope.keep.request import Asked, Request
from attnscope.keep.values import Directions
from attnscope.model import loaded as padding
from attnscope.model.selection import CAUSAL_LM, ENCODER, ENCODER_ONLY, OF_TWO_TEXTS, VISION, VISION_ONLY, is_vision
from attnscope.observation import Observation
from attnscope.observe.reading import PaddingError, Reading
from attnscope.observe.stacks import projections_of, stacks_of
from attnscope.observe.texts import side_by_side

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel


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
    asked = [Asked(prompt, tokens, source) for (prompt, source), tokens in zip(texts, chosen, strict=True)]

    def one_pass(texts: Sequence[Asked]) -> list[Observation]:
        return _observed(loaded, texts, request, engine, facts or {}, advance, directions, states)

    alone = any((one.source or one.prompt).medium.inputs or one.prompt.medium.unasked for one in asked)
    if loaded.geometry.over_patches or alone:
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
    directions: Directions | None,
    states: Callable[[torch.Tensor], object] | None,
) -> list[Observation]:
    """One pass. Raises PaddingError where prompts of different length are not to be read side by side."""
    prompts = [one.prompt for one in asked]
    mixed = len({len(prompt) for prompt in prompts}) > 1
    check = mixed and padding.to_be_found(loaded.model)
    out = projections_of(loaded, asked[0]) if request.view.weights == "value" else None
    stacks = stacks_of(loaded, asked, request, check, advance, out, directions)
    reads, inputs = _fed(loaded, asked, stacks.readings)
    of_tower = stacks.readings.get(VISION)
    gated = out.gated if out and out.gated.out else None
    whole = bool(gated) or bool(states) or (mixed and padding.to_be_tried(loaded.model, reads.shape[1]))
    with (
        gated.watched() if gated else nullcontext(),
        watched_states(loaded.model, states) if states else nullcontext(),
    ):
        report = listen(
            loaded.model,
            reads,
            stacks.on_call,
            engine=engine,
            expected_layers=[
                (layer, stack) for stack, layers in loaded.geometry.in_every_pass.items() for layer in layers
            ],
            windows=loaded.geometry.windows,
            patches=of_tower.prompts[0].medium.windows if of_tower else (),
            calls_alone=not (whole or prompts[0].medium.patches),
            computed=request.view.weights != "softmax",
            **inputs,
        )
    for check_of in report.calls:
        check_of.stack = stacks.stack_of(check_of)
    readings, plain = stacks.readings, stacks.first_read(report)
    if mixed and padding.to_be_tried(loaded.model, report.tokens):
        _try_alone(loaded, prompts, engine, report)
    report = replace(report, output=None)  # hidden states that nobody asked for
    facts = {**model_facts(loaded, engine, report), **stacks.facts, **facts}

    def seen(stack: str, row: int) -> Observation:
        row = len(readings[stack].prompts) - 1 if is_vision(stack) else row  # the whole picture follows its parts
        own = report if len(readings) == 1 and not prompts[0].medium.patches else report.of(stack)
        return readings[stack].observation(row, replace(own, tokens=readings[stack].key_count), facts)

    others = [stack for stack in readings if stack != plain and readings[stack].kv_of]
    unread = [f"{stack}: its layers attend over something else than tokens" for stack in _heard_alone(report, readings)]
    if prompts[0].medium.tower and VISION not in others and not request.asks:
        unread.append("the vision tower: it attends in windows, or its config does not say its layers")
    if unread:
        facts |= {"unread": unread}
    return [
        replace(seen(plain, row), other_stacks={stack: seen(stack, row) for stack in others})
        if others
        else seen(plain, row)
        for row in range(len(prompts))
    ]


def _heard_alone(report: CaptureReport, readings: Mapping[str, Reading]) -> list[str]:
    """The stacks of two texts whose layers called, and of which nothing could be kept."""
    called = {call.stack for call in report.calls}
    return [stack for stack in OF_TWO_TEXTS if stack in called & readings.keys() and not readings[stack].kv_of]


def _fed(
    loaded: LoadedModel, asked: Sequence[Asked], readings: Mapping[str, Reading]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the model's forward is given: its first argument, and the others by name."""
    prompts, plain = [one.prompt for one in asked], loaded.geometry.stack
    ids_BT = readings[plain].texts.ids_BT
    if prompts[0].medium.patches:  # whose tokens are told apart there
        ids_BT = side_by_side([prompt.ids for prompt in prompts]).to(loaded.device)
    if plain == ENCODER or ENCODER not in readings:
        return given(loaded, prompts, ids_BT)
    reads, inputs = given(loaded, [one.source or one.prompt for one in asked], readings[ENCODER].texts.ids_BT)
    return reads, inputs | {"decoder_input_ids": ids_BT}


def _try_alone(loaded: LoadedModel, prompts: Sequence[Prompt], engine: Engine, report: CaptureReport) -> None:
    """Read the shortest prompt alone: its hidden states must be those that it has beside the longest."""
    row = min(range(len(prompts)), key=lambda place: len(prompts[place]))
    ids_BT, inputs = given_of(loaded, prompts[row])
    report_alone = listen(loaded.model, ids_BT, lambda call: None, engine=engine, computed=False, **inputs)
    alone_TE = report_alone.output[0][0].float()
    beside_TE = report.output[0][row, : len(alone_TE)].float()
    difference_T = (beside_TE - alone_TE).norm(dim=-1) / alone_TE.norm(dim=-1)
    _, allowed = tolerance(loaded.model.dtype, "bfloat16")
    if (difference_T > allowed).any():
        raise PaddingError
    padding.found(loaded.model, report.tokens, exact=True)


def model_facts(loaded: LoadedModel, engine: Engine, report: CaptureReport) -> dict[str, Any]:
    """What a manifest says of the model and of who computed its attention."""
    layers, heard = loaded.geometry.layers, report.of(loaded.geometry.stack).layers
    without = {str(one.index): one.type for one in layers if not (one.attention or one.index in heard)}
    unknown = {
        str(one.index): one.type for one in layers if one.of_unknown_type or (one.index in heard and not one.attention)
    }
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
