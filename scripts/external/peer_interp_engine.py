"""interp-engine's eager backend on tiny models of every type: its point `attn_probs`.

Shapes: H head, Q query, K key.
"""

from __future__ import annotations

import torch
from interp_engine import Address, capture, load_model
from torch import Tensor

from external.common import Report, arguments
from external.model_types import ONE, Given, Known, attention_layers, run_types

KNOWN = Known(
    apart={"bart": "it loads the decoder alone, whose embeddings find no weights in the files and are random"},
    refused=dict.fromkeys(("bert", "modernbert", "t5"), "ValueError"),
)


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    report = Report(("interp-engine", "transformers", "torch"))
    run_types(report, read, KNOWN)
    report.write(asked.out)


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    model = load_model(str(given.folder), backend="eager", dtype="float32", device="cpu")
    ids = given.inputs["input_ids" if given.target is None else "decoder_input_ids"]
    layers = attention_layers(model.hf_model.config)
    points = [Address("attn_probs", layer) for layer in layers]
    result = capture(model, ids, points)
    maps = {layer: result[point][0] for layer, point in zip(layers, points, strict=True)}
    return {ONE if given.target is None else "decoder": maps}


if __name__ == "__main__":
    main()
