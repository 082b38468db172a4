"""Peers and model types: tiny random models of every type, read by a peer, and held against transformers' own weights.

A judge whose toml names a `column` is one of these peers. A peer is right, apart by so much, or refuses a type in its
own words. The table in docs/external.md is made of the results.

Shapes: H head, Q query, K key.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from external.common import Check, Report
from external.models import MAKERS, TINY, tiny, words

ALLOWED = 5e-6
TEXT, TARGET = words(range(3, 22)), words(range(30, 45))
TWO = ("bart", "t5")  # that read a text and write another
START = 1  # their decoders' first token
ONE = "all"  # the stack of a model that has one
Weights = Mapping[str, Mapping[int, Tensor]]  # {stack: {layer: (H, Q, K)}}


@dataclass(frozen=True)
class Given:
    """What a peer reads: a model in a folder and a text; of an encoder-decoder what it writes too."""

    kind: str
    folder: Path
    text: str = TEXT
    target: str | None = None

    def model(self, **options: Any) -> Any:
        """The model as transformers loads it, in float32."""
        maker = getattr(transformers, MAKERS.get(self.kind, "AutoModelForCausalLM"))
        return maker.from_pretrained(self.folder, dtype=torch.float32, **options).eval()

    @property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """(1, T) ids; an encoder-decoder's `decoder_input_ids` begin with its start token."""
        made = {"input_ids": self.ids(self.text)}
        if self.target is not None:
            made["decoder_input_ids"] = torch.cat([torch.tensor([[START]]), self.ids(self.target)], 1)
        return made

    def ids(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class Known:
    """What is known to differ. apart: {type: why}. refused: {type: the name of the error that a peer raises}."""

    apart: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def run_types(report: Report, read: Callable[[Given], Weights], known: Known) -> None:
    """Read every type by a peer. What is not known to differ must be transformers' own weights.

    read: raises whatever the peer raises for a type that it does not read. A type that this transformers does not have
    is left out.
    """
    results: dict[str, tuple[Weights, Weights]] = {}
    with report.check(f"the weights of every type are transformers' own, to {ALLOWED:g}") as check:
        for kind in (kind for kind in TINY if kind in transformers.CONFIG_MAPPING):
            given = Given(kind, tiny(kind, Path(kind).resolve()), target=TARGET if kind in TWO else None)
            try:
                result = read(given)
            except Exception as error:  # whatever it is: so the peer refuses
                refusal = first_line(error, given)
                report.model_types[kind] = {"refused": refusal}
                as_known(check, f"{kind}: refused: `{refusal}`", known.refused.get(kind) == type(error).__name__)
                continue
            results[kind] = result, transformers_own(given)
            apart = distance(*results[kind])
            report.model_types[kind] = {"apart": apart, "stacks": sorted(result)}
            if apart <= ALLOWED:
                check.hold(kind not in (*known.apart, *known.refused), f"{kind}: right, which is not what is known")
            else:
                as_known(check, f"{kind}: apart by {apart:.2g}: {known.apart.get(kind)}", kind in known.apart)
    with report.control("the heads of a layer in reverse order") as control:
        for kind, (result, expected) in results.items():
            control.hold(distance(flipped(result), expected) <= ALLOWED, kind)


def first_line(error: Exception, given: Given) -> str:
    """`ValueError: no such layout`: of a message that holds a traceback its last line. Without the folder's path."""
    lines = [one for one in str(error).splitlines() if one.strip()] or [""]
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    shown = line.replace(str(given.folder), given.kind).replace("`", "'")
    return textwrap.shorten(f"{type(error).__name__}: {shown}", 120, placeholder=" ...")


def as_known(check: Check, case: str, known: bool) -> None:
    """Count a case that differs: as expected where it is known."""
    if known:
        check.expect(case, 1)
    else:
        check.hold(False, case)


def transformers_own(given: Given) -> Weights:
    """What transformers returns, computed by its `eager` attention."""
    model = given.model(attn_implementation="eager")
    with torch.no_grad():
        result = model(**given.inputs, output_attentions=True, use_cache=False)
    if given.target is not None:
        return {stack: by_layer(result[f"{stack}_attentions"]) for stack in ("encoder", "decoder", "cross")}
    attentions = [one[0] for one in result.attentions if one is not None]
    return {ONE: dict(zip(attention_layers(model.config), attentions, strict=True))}


def attention_layers(config: Any) -> list[int]:
    """The layers of a hybrid that have attention, or every layer of another model that reads one text."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind not in ("conv", "linear_attention")]


def by_layer(attentions: Sequence[Tensor]) -> dict[int, Tensor]:
    """{layer: (H, Q, K)} of tensors that are (1, H, Q, K)."""
    return {layer: one[0].detach() for layer, one in enumerate(attentions)}


def distance(result: Weights, expected: Weights) -> float:
    """The largest difference of a weight that is shown; others are NaN. Every layer of a stack must be there."""
    apart = 0.0
    for stack, layers in result.items():
        if layers.keys() != expected[stack].keys():
            raise ValueError(f"expected layers {sorted(expected[stack])}, got {sorted(layers)}")
        for layer, weights_HQK in layers.items():
            apart_HQK = (weights_HQK.detach().float() - expected[stack][layer]).abs()
            apart = max(apart, float(apart_HQK[~apart_HQK.isnan()].max()))
    return apart


def flipped(weights: Weights) -> Weights:
    return {stack: {layer: one.flip(0) for layer, one in layers.items()} for stack, layers in weights.items()}
