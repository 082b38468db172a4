"""A tiny random model of every encoder and encoder-decoder of text in transformers, and what is measured of each.

    measure("bart").weights      # the largest difference to the family's own attentions

Shapes: B text, H head, Q query, K key, N block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import AbsoluteDistance, Entropy, MaxWeight, Received, RowSum, SumOfSquares, TopK
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.listen import calls_interface, listen
from attnscope.hooks.report import CaptureReport
from attnscope.model.families import FAMILIES, family
from attnscope.model.geometry import geometry_of
from attnscope.model.selection import CROSS, DECODER, ENCODER
from attnscope.model.tasks import model_class, reading_part, task_of
from helpers.families import FAMILIES as DECODERS
from helpers.families import tiny_config
from helpers.parity_models import rouse

SOURCE, TARGET = 16, 11
REACH = 3  # of tiny local attention: a window of 7, a block of 4
Key = tuple[str, int]  # stack and layer

# Encoders of text that transformers loads as AutoModel alone, and causal types that are encoders unless configured.
ALONE = (
    *("canine", "clip_text_model", "dpr", "embedding_gemma2_text", "layoutlmv3", "lilt", "markuplm", "splinter"),
    *("openai_privacy_filter", "tipsv2_text_model", "visual_bert", "bert-generation", "xlnet"),
    *("bros", "lxmert", "tvp", "udop", "vilt"),
)
NOT_OF_TEXT = {
    **dict.fromkeys(
        (
            *("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize"),
            *("musicflamingo", "nemo_speechlm", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral"),
            "voxtral_realtime",
        ),
        "a causal decoder that is given audio, and no encoder-decoder",
    ),
}
NOT_MADE = {"layoutlmv2": "its model needs the detectron2 package"}
UNREAD = {name: known.unread for name, known in FAMILIES.items() if known.unread}
UNREAD |= {"reformer": "hashes its keys into buckets"}
_KNOWN = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *ALONE, *NOT_MADE}
TYPES = sorted(_KNOWN - NOT_OF_TEXT.keys() - NOT_MADE.keys() - UNREAD.keys())

SEQ2SEQ = sorted({*TYPES} & MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys())
WITHOUT_NORM = ("mobilebert",)  # its states grow from layer to layer, and the logits with them
CROSSED = {"is_decoder": True, "add_cross_attention": True}
OVERRIDES: dict[str, dict[str, Any]] = {
    name: {"is_decoder": False} for name, said in DECODERS.items() if said.get("is_decoder") and name not in UNREAD
} | {
    "albert": {"num_hidden_groups": 2},
    "bert-generation": {"is_decoder": False},
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "encoder-decoder": {"decoder": CROSSED},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [2, 1], "block_repeats": [1, 2]},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "visual_embed": False},
    "led": {"attention_window": 2 * REACH},
    "lilt": {"hidden_size": 96, "num_attention_heads": 4},
    "longformer": {"attention_window": 2 * REACH},
    "longt5": {"local_radius": REACH},
    "luke": {"entity_vocab_size": 8},
    "modernbert": {"local_attention": 8},
    "xlm": {"causal": False},
}


def tiny(model_type: str, attention: str = "eager", **overrides: Any) -> Any:
    """A tiny model of this type as `load` would make it of a config, every parameter drawn at random."""
    changes = dict(family(model_type).config_changes)
    config = tiny_config(model_type, **{**OVERRIDES.get(model_type, {}), **changes, **overrides})
    made = model_class(config, task_of(config), model_type)
    torch.manual_seed(0)
    build = made.from_config if hasattr(made, "from_config") else made._from_config
    model = reading_part(build(config, attn_implementation=attention).eval().requires_grad_(False))
    rouse(model)
    if model_type in WITHOUT_NORM:
        for parameter in model.parameters():
            parameter.data *= 0.5
    return model


def ids(tokens: int, seed: int = 0, texts: int = 2) -> Tensor:
    return torch.randint(6, 100, (texts, tokens), generator=torch.Generator().manual_seed(seed))


def inputs_of(model: Any, target: int = TARGET) -> dict[str, Tensor]:
    """What the model reads beside the ids."""
    return {"decoder_input_ids": ids(target, 1)} if task_of(model.config) == "seq2seq" else {}


def heard(model: Any, ids_BT: Tensor, **how: Any) -> tuple[dict[Key, Tensor], CaptureReport]:
    """The weights of every call, in order, and the report."""
    found: dict[Key, Tensor] = {}

    def on_call(call: AttentionCall) -> None:
        assert (call.stack, call.layer) not in found, "a layer called twice"
        found[call.stack, call.layer] = call.P.rows(0, call.P.queries).clone()

    return found, listen(model, ids_BT, on_call, **how)


def own(model: Any, ids_BT: Tensor, **inputs: Tensor) -> dict[Key, Tensor]:
    """The weights that the family itself returns, brought to (B, H, Q, K) by its layout's rule, spelled here again."""
    cache = {"use_cache": False} if inputs.get("decoder_input_ids") is not None else {}
    with torch.no_grad():
        output = model(ids_BT, **inputs, **cache, output_attentions=True)
    names = {ENCODER: "attentions"}
    if task_of(model.config) == "seq2seq":
        names = {ENCODER: "encoder_attentions", DECODER: "decoder_attentions", CROSS: "cross_attentions"}
    bring = BROUGHT.get(model.config.model_type, lambda kind, given, tokens: given)
    return {
        (kind, layer): bring(kind, given, ids_BT.shape[1])
        for kind, name in names.items()
        for layer, given in enumerate(getattr(output, name, None) or ())
        if isinstance(given, Tensor)  # pegasus_x returns two of other kinds by name
    }


def _band(kind: str, given: Tensor, tokens: int) -> Tensor:
    """Longformer's column c of a query i is the key i - reach + c."""
    if kind != ENCODER:
        return given
    whole = torch.zeros(*given.shape[:2], tokens, tokens)
    for query in range(tokens):
        for column in range(given.shape[-1]):
            key = query - REACH + column
            if 0 <= key < tokens:
                whole[:, :, query, key] = given[:, :, query, column]
    return whole


def _blocks(kind: str, given: Tensor, tokens: int) -> Tensor:
    """LongT5's column c of a query in block n is the key (n - 1) block + c."""
    if kind != ENCODER:
        return given
    B, _, H, block, _ = given.shape
    whole = torch.zeros(B, H, tokens, tokens)
    for query in range(tokens):
        n, row = divmod(query, block)
        for column in range(3 * block):
            key = (n - 1) * block + column
            if 0 <= key < tokens:
                whole[:, :, query, key] = given[:, n, :, row, column]
    return whole


def _logits(kind: str, given: Tensor, tokens: int) -> Tensor:
    """ProphetNet and SqueezeBERT give the logits, where they have no name of their own for it: see their tests."""
    return given if kind == DECODER else given.softmax(-1)


BROUGHT: Mapping[str, Callable[[str, Tensor, int], Tensor]] = {
    **dict.fromkeys(("led", "longformer"), _band),
    "longt5": _blocks,
    **dict.fromkeys(("prophetnet", "squeezebert"), _logits),
}


@dataclass(frozen=True)
class Measured:
    """One type: its stacks, how its calls are heard, and the largest differences; None where nothing is compared.

    weights: to the family's own. output: of P V to the layer's own output. fused: of what the tiles and the compiled
    kernel say of every row, to the same read off the model's own weights. unlike: what the geometry says otherwise
    than the calls show.
    """

    stacks: Mapping[str, int]
    route: str
    weights: float
    row_sums: float
    output: float | None
    fused: float | None
    unlike: tuple[str, ...]
    failures: tuple[str, ...]


def measure(model_type: str, **overrides: Any) -> Measured:
    model = tiny(model_type, **overrides)
    inputs, source = inputs_of(model), ids(SOURCE)
    found, report = heard(model, source, **inputs)
    expected = own(model, source, **inputs)
    assert found.keys() == expected.keys(), (list(found), list(expected))
    output = [check.value_error for check in report.calls if check.value_error is not None]
    layers = geometry_of(model.config, count=False).stacks
    return Measured(
        stacks={kind: len(there) for kind, there in layers.items()},
        route=" and ".join(sorted({check.route for check in report.calls})),
        weights=max(float((found[key] - expected[key]).abs().max()) for key in found),
        row_sums=max((check.row_sum_error or 0.0 for check in report.calls), default=0.0),
        output=max(output, default=None),
        fused=_fused(model, source, inputs) if calls_interface(model) else None,
        unlike=_unlike(model, source, inputs),
        failures=tuple(line for check in report.calls for line in check.failures(torch.float32)),
    )


def _unlike(model: Any, source: Tensor, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What the geometry says otherwise than the calls show: stacks, layers, heads, kv heads, width."""
    shown: dict[Key, tuple[int, ...]] = {}

    def on_call(call: AttentionCall) -> None:
        q = call.spec.q_BHQD.shape[-1] if call.spec else 0
        shown[call.stack, call.layer] = (call.P.heads, call.spec.kv_heads if call.spec else 0, q)

    listen(model, source, on_call, **inputs)
    said = {
        (kind, index): (one.heads, one.kv_heads, one.head_dim)
        for kind, layers in geometry_of(model.config, count=False).stacks.items()
        for index, one in layers.items()
    }
    wrong = {
        key: (said.get(key), shown.get(key))
        for key in said.keys() | shown.keys()
        if key not in said
        or key not in shown
        or any(there not in (0, one) for one, there in zip(said[key], shown[key], strict=True))
    }
    return tuple(f"{kind} {layer}: said {a}, shown {b}" for (kind, layer), (a, b) in sorted(wrong.items()))


def _fused(model: Any, source: Tensor, inputs: Mapping[str, Tensor]) -> float:
    eager = _answers(model, source, inputs, None)
    engines = ENGINES["tiles"], ENGINES["numba"]
    return max(_largest(eager, _answers(model, source, inputs, engine)) for engine in engines)


def _answers(model: Any, source: Tensor, inputs: Mapping[str, Tensor], engine: Engine | None) -> list[Tensor]:
    found: list[Tensor] = []
    report = listen(model, source, lambda call: found.extend(_asked(call.P)), engine=engine, **inputs)
    states = report.output[0]
    return [*found, states / states.abs().max()]


def _asked(P: AttentionOperator) -> list[Tensor]:
    """What is asked of a layer: something of every row, of every key, and the strongest keys."""
    plain = [RowSum(), Entropy(), SumOfSquares(), MaxWeight(), AbsoluteDistance()]
    received, top = Received(torch.full((1, P.queries), 1 / P.queries)), TopK(2)
    found = P.together([*plain, received, top])
    return [*(found[question] for question in (*plain, received)), found[top][0].nan_to_num()]


def _largest(one: list[Tensor], other: list[Tensor]) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def peak_bytes(model: Any, tokens: int) -> int:
    """The most that one eager pass over a text has allocated at a time, beside the model and its inputs."""
    source, inputs = ids(tokens, texts=1), {name: value[:1] for name, value in inputs_of(model).items()}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        listen(model, source, lambda call: None, **inputs)
    steps = (event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(steps))
