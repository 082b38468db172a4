"""attnread on tiny models of every type: weights recovered from what attention gives of values that it puts in.

It is taken from its source distribution, since its metadata ask for another torch than is at hand.

Shapes: H head, Q query, K key.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from external.common import Report, arguments, source_of
from external.model_types import ONE, Given, Known, attention_layers, run_types

VERSION = "0.1.2"
KNOWN = Known(
    apart={"qwen3_next": "what it reads is the weights times the output gate"},
    refused=dict.fromkeys(
        ("gpt_neox", "bert", "bloom", "mpt", "deepseek_v3", "deepseek_v32", "modernbert", "t5"), "ValueError"
    ),
)


def opened_report() -> Report:
    """An empty report, with attnread ready to be imported; one thread."""
    torch.set_num_threads(1)
    Path("source").mkdir(exist_ok=True)
    folder = source_of(f"attnread=={VERSION}", Path("source").resolve())
    sys.path[:0] = [str(folder), str(folder / "src")]
    report = Report(("nnsight", "transformers", "torch"))
    report.version = {"attnread": VERSION, **report.version}
    return report


def main() -> None:
    asked, report = arguments(), opened_report()
    run_types(report, read, KNOWN)
    report.write(asked.out)


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    from attnread import extract_attention

    model = given.model()
    result: dict[int, list[Tensor]] = {}
    for (_, place, _), weights_BQK in extract_attention(model, given.inputs).items():
        result.setdefault(place, []).append(weights_BQK[0])
    maps = [torch.stack(heads) for _, heads in sorted(result.items())]
    if given.target is None:
        return {ONE: dict(zip(attention_layers(model.config), maps, strict=True))}
    count = model.config.num_hidden_layers  # of the encoder, which comes first
    return {"encoder": dict(enumerate(maps[:count])), "decoder": dict(enumerate(maps[count:]))}


if __name__ == "__main__":
    main()
