"""Inseq on tiny models of every type: its method `attention`, which gives the row before each token that is made.

Shapes: H head, Q query, K key, T token, M token that is made, L layer.
"""

from __future__ import annotations

from typing import Any

import inseq
import torch
from torch import Tensor

from external.common import Report, arguments
from external.model_types import ONE, Given, Known, attention_layers, run_types

PROMPT = 3  # tokens that are given; the others are made
KNOWN = Known(
    apart={"bert": "a row is that of the text before the token that is made, and BERT looks at what comes after, too"},
    refused={"modernbert": "ValueError"},
)


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    report = Report(("inseq", "transformers", "torch"))
    run_types(report, read, KNOWN)
    report.write(asked.out)


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    model = inseq.load_model(str(given.folder), "attention", device="cpu", model_kwargs={"dtype": torch.float32})
    if given.target is None:
        text = given.text.split()
        result = attributed(model, " ".join(text[:PROMPT]), given.text)
        layers = attention_layers(model.model.config)
        return {ONE: dict(zip(layers, rows(result.target_attributions), strict=True))}
    result = attributed(model, given.text, given.target)
    rows_LHQK = result.source_attributions.permute(2, 3, 1, 0)  # every target token but the last is a query
    cross_LHQK = torch.nn.functional.pad(rows_LHQK, (0, 0, 0, 1), value=torch.nan)
    return {"cross": dict(enumerate(cross_LHQK)), "decoder": dict(enumerate(rows(result.target_attributions)))}


def attributed(model: Any, text: str, made: str) -> Any:
    out = model.attribute(text, made, attribute_target=True, show_progress=False, pretty_progress=False)
    return out.sequence_attributions[0]


def rows(shown_TMLH: Tensor) -> Tensor:
    """(L, H, Q, K), NaN where nothing is shown: the row before a token over the tokens before it."""
    tokens, made, layers, heads = shown_TMLH.shape
    result_LHQK = torch.full((layers, heads, tokens, tokens), torch.nan)
    for place in range(made):
        position = tokens - made + place
        result_LHQK[:, :, position - 1, :position] = shown_TMLH[:position, place].permute(1, 2, 0)
    return result_LHQK


if __name__ == "__main__":
    main()
