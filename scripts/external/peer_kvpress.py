"""SnapKV of KVPress on tiny models of every type: the weights by which it scores the keys of a cache.

The last queries are its window, and all earlier keys what it scores. Where the model's attention is `sdpa`, it computes
these weights itself; under `eager` it takes the model's own.

Shapes: H head, Q query, K key.
"""

from __future__ import annotations

from typing import Any

import torch
from kvpress import SnapKVPress
from torch import Tensor
from transformers import DynamicCache

from external.common import Report, arguments
from external.model_types import ONE, Given, Known, run_types

WINDOW = 8
NO_LAYERS = ("gpt2", "gpt_neox", "gptj", "bert", "bart", "bloom", "mpt", "t5")  # where it looks for them
NO_HEADS = ("qwen3_next", "lfm2", "deepseek_v3", "modernbert")  # whose attention is as it expects
WITHOUT = "under `sdpa` its window is computed without the model's {}"
KNOWN = Known(
    apart={
        "gemma2": WITHOUT.format("sliding window and soft-cap"),
        "gemma3_text": WITHOUT.format("sliding window"),
        "mistral": WITHOUT.format("sliding window"),
        "olmo2": WITHOUT.format("norm of queries over all heads"),
    },
    refused=dict.fromkeys((*NO_LAYERS, *NO_HEADS), "AttributeError"),
)


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    report = Report(("kvpress", "transformers", "torch"))
    run_types(report, read, KNOWN)
    report.write(asked.out)


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    model, ids = given.model(), given.inputs["input_ids"]
    tokens = ids.shape[1]
    result: dict[int, Tensor] = {}

    class Listened(SnapKVPress):
        """It keeps the weights of each layer's window."""

        def score(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, own: Any, kwargs: Any) -> Tensor:
            self.layer = module.layer_idx
            if own is not None:
                self.keep(own[..., -WINDOW:, :-WINDOW])
            return super().score(module, hidden, keys, values, own, kwargs)

        def compute_window_attention(self, *given: Any) -> Tensor:
            weights_BHQK = SnapKVPress.compute_window_attention(*given)
            self.keep(weights_BHQK)
            return weights_BHQK

        def keep(self, weights_BHQK: Tensor) -> None:
            result[self.layer] = torch.full((weights_BHQK.shape[1], tokens, tokens), torch.nan)
            result[self.layer][:, -WINDOW:, :-WINDOW] = weights_BHQK[0]

    with torch.no_grad(), Listened(0.5, WINDOW)(model):
        model(ids, past_key_values=DynamicCache(), use_cache=True)
    return {ONE: result}


if __name__ == "__main__":
    main()
