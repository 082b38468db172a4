"""BertViz shows attnscope's weights and transformers' own: the data in its pages must be equal.

Shapes: L layer, H head, Q query, K key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bertviz import head_view, model_view
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import attnscope
from external.common import Check, Report, arguments
from external.models import demo_folder, tiny, words

SECOND = 9  # where the second sentence begins
TEXTS = {
    "demo": "The financial bank is located on the river bank. The old boat lies by the bank.",
    "llama": words(range(3, 40)),
    "gpt2": words([*range(3, 30), *range(3, 30)]),
    "bert": words(range(3, 25)),
    "bart": words(range(3, 25)),
}
TARGET = words(range(30, 45))
Weights = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Seen:
    """One text as attnscope and as transformers show it: per stack the layers' weights, each (1, H, Q, K)."""

    ours: Weights
    theirs: Weights
    tokens: Mapping[str, list[str]]


def main() -> None:
    """Make every view of every model from both and write the result."""
    asked = arguments()
    report = Report(("bertviz", "transformers", "torch"))
    folders = {kind: demo_folder() if kind == "demo" else tiny(kind, Path(kind).resolve()) for kind in TEXTS}
    seen = {kind: read(kind, folder) for kind, folder in folders.items()}
    for view in (head_view, model_view):
        with report.check(f"`{view.__name__}`: every head of every part, number for number") as check:
            for kind, one in seen.items():
                compare(check, view, kind, one.ours, one)
    with report.control("attnscope's heads in reverse order") as control:
        for kind, one in seen.items():
            compare(control, head_view, kind, changed(one.ours, lambda weights: weights.flip(1)), one)
    with report.control("one weight of each head larger by the smallest step of float32") as control:
        for kind, one in seen.items():
            compare(control, head_view, kind, changed(one.ours, one_step), one)
    with report.control("a mask that is off by one: each row moved down") as control:
        for kind, one in seen.items():
            compare(control, head_view, kind, changed(one.ours, lambda weights: weights.roll(1, 2)), one)
    report.write(asked.out)


def changed(weights: Weights, fault: Callable[[Tensor], Tensor]) -> Weights:
    return {stack: [fault(layer) for layer in layers] for stack, layers in weights.items()}


def one_step(weights: Tensor) -> Tensor:
    """The weight of the last query on key 0, one step up."""
    found = weights.clone()
    found[:, :, -1, 0] = torch.nextafter(found[:, :, -1, 0], torch.tensor(math.inf))
    return found


def read(kind: str, folder: Path) -> Seen:
    """A model's text read by both, each with an instance of its own."""
    two = {"target": TARGET} if kind == "bart" else {}
    model = attnscope.load(str(folder))
    seen = attnscope.capture(model, TEXTS[kind], **two)
    ours = {stack: [weights[None] for weights in one.weights.values()] for stack, one in seen.stacks.items()}
    inputs = {"input_ids": torch.tensor([seen.prompt.ids])}
    if two:
        inputs["decoder_input_ids"] = torch.tensor([seen.queries.ids])
    found = their_model(kind, folder)(**inputs, output_attentions=True, use_cache=False)
    if two:
        given = {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions}
        theirs = {**given, "cross": found.cross_attentions}
    else:
        theirs = dict.fromkeys(ours, found.attentions)
    names = {name: model.tokenizer.convert_ids_to_tokens(ids[0]) for name, ids in inputs.items()}
    return Seen(ours, {stack: [one.detach() for one in layers] for stack, layers in theirs.items()}, names)


def their_model(kind: str, folder: Path) -> Any:
    maker = {"bert": AutoModelForMaskedLM, "bart": AutoModelForSeq2SeqLM}.get(kind, AutoModelForCausalLM)
    return maker.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def compare(check: Check, view: Callable[..., Any], kind: str, ours: Weights, seen: Seen) -> None:
    """Each head of each part of a view; the tokens and all else that the page is given must be equal too."""
    found, expected = page_data(view, kind, ours, seen), page_data(view, kind, seen.theirs, seen)
    check.hold(without_weights(found) == without_weights(expected), f"{kind}: names, tokens and layers")
    for one, other in zip(found["attention"], expected["attention"], strict=True):
        for layer, (heads, others) in enumerate(zip(one["attn"], other["attn"], strict=True)):
            for head, pair in enumerate(zip(heads, others, strict=True)):
                check.hold(pair[0] == pair[1], f"{kind} {one['name'] or ''} L{layer}H{head}")


def without_weights(data: Mapping[str, Any]) -> Any:
    parts = [{name: value for name, value in one.items() if name != "attn"} for one in data["attention"]]
    return {**data, "attention": parts, "root_div_id": None}  # an id drawn anew for each page


def page_data(view: Callable[..., Any], kind: str, weights: Weights, seen: Seen) -> Any:
    """What the script of BertViz's page is given."""
    if kind == "bart":
        given: dict[str, Any] = {f"{stack}_attention": weights[stack] for stack in ("encoder", "decoder", "cross")}
        given["encoder_tokens"], given["decoder_tokens"] = (
            list(seen.tokens[one]) for one in ("input_ids", "decoder_input_ids")
        )
    else:
        (layers,) = weights.values()
        given = {"attention": layers, "tokens": list(seen.tokens["input_ids"])}
        given |= {"sentence_b_start": SECOND} if kind == "bert" else {}
    page = view(**given, html_action="return").data
    return json.JSONDecoder().raw_decode(page, page.index("const params = ") + len("const params = "))[0]


if __name__ == "__main__":
    main()
