"""nnterp on tiny models of every type: its `attention_probabilities`, read by nnsight.

Shapes: H head, Q query, K key.
"""

from __future__ import annotations

import torch
from nnterp import StandardizedTransformer
from torch import Tensor

from external.common import Report, arguments
from external.model_types import ONE, Given, Known, attention_layers, run_types

KNOWN = Known(
    refused={
        **dict.fromkeys(("gpt2", "gpt_oss", "mpt"), "NNsightException"),
        **dict.fromkeys(("bart", "qwen3_next", "lfm2"), "RenamingError"),
        **dict.fromkeys(("modernbert", "t5"), "ValueError"),
        "bert": "AttributeError",
    }
)


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    report = Report(("nnterp", "nnsight", "transformers", "torch"))
    run_types(report, read, KNOWN)
    report.write(asked.out)


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    model = StandardizedTransformer(
        str(given.folder), enable_attention_probs=True, dtype=torch.float32, device_map="cpu"
    )
    layers = attention_layers(model.config)
    result = {}
    for layer in layers:
        with model.trace(given.inputs["input_ids"]):
            weights_BHQK = model.attention_probabilities[layer].save()
        result[layer] = weights_BHQK[0]
    return {ONE: result}


if __name__ == "__main__":
    main()
