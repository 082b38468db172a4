"""Inseq's command line attributes texts by attention; what it saves must be the weights that attnscope captures.

Shapes: T token, M token that is made, L layer, H head.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inseq import FeatureAttributionOutput
from torch import Tensor

import attnscope
from external.common import Check, Report, arguments
from external.models import demo_folder, tiny, words


@dataclass(frozen=True)
class Case:
    """A model's folder, the dtype that both load it in, a text and how it goes on."""

    name: str
    folder: Path
    dtype: str
    text: str
    more: str

    @property
    def saved(self) -> Path:
        return Path(f"{self.name}-{self.dtype}.json").resolve()


def main() -> None:
    """Attribute every text by Inseq's command line and write the result."""
    asked = arguments()
    report = Report(("inseq", "transformers", "torch"))
    text, more = "The small bird saw the old boat by the river bank.", " The small bird saw the boat lie still."
    cases = [Case("demo", demo_folder(), dtype, text, more) for dtype in ("float32", "float16")]
    for kind in ("llama", "gpt2", "gpt_neox"):
        start = words(range(3, 20))
        cases.append(Case(kind, tiny(kind, Path(kind).resolve()), "float32", start, f" {words(range(10, 40))}"))
    theirs = {case: attributed(case) for case in cases}
    ours = {case: captured(case) for case in cases}
    with report.check("the tokens") as check:
        for case in cases:
            found, expected = ours[case][0], theirs[case][0]
            check.hold(found == expected, f"{case.name}: {found}, expected {expected}")
    with report.check("every head's weights for every token that is made, bit for bit") as check:
        for case in cases:
            compare(check, case, ours[case][1], theirs[case][1])
    faults: dict[str, Callable[[Tensor], Tensor]] = {
        "the row of the token that is made, not of the query before it": lambda weights: weights.roll(-1, 2),
        "the heads of a layer in reverse order": lambda weights: weights.flip(1),
        "logits times 1.01": lambda weights: weights**1.01 / (weights**1.01).sum(-1, keepdim=True),
    }
    for what, fault in faults.items():
        with report.control(what) as control:
            for case in cases:
                compare(control, case, fault(ours[case][1]), theirs[case][1])
    report.write(asked.out)


def attributed(case: Case) -> tuple[list[int], Tensor]:
    """The ids of Inseq's tokens, and what its command line saves: (T, M, L, H)."""
    options = {
        "--model_name_or_path": str(case.folder),
        "--attribution_method": "attention",
        "--device": "cpu",
        "--model_kwargs": json.dumps({"dtype": case.dtype}),
        "--input_texts": case.text,
        "--generated_texts": case.text + case.more,
        "--save_path": str(case.saved),
    }
    command = [str(Path(sys.executable).parent / "inseq"), "attribute", "--hide_attributions"]
    subprocess.run([*command, *(part for option in options.items() for part in option)], check=True, stdout=sys.stderr)
    (found,) = FeatureAttributionOutput.load(case.saved).sequence_attributions
    return [token.id for token in found.target], found.target_attributions


def captured(case: Case) -> tuple[list[int], Tensor]:
    """The ids of attnscope's tokens, and every layer's weights: (L, H, Q, K)."""
    seen: Any = attnscope.capture(attnscope.load(str(case.folder), dtype=case.dtype), case.text + case.more)
    return list(seen.prompt.ids), torch.stack(list(seen.weights.values()))


def compare(check: Check, case: Case, weights_LHQK: Tensor, theirs_TMLH: Tensor) -> None:
    """Each token that is made: the row before it of every head, over the tokens before it."""
    tokens, made = theirs_TMLH.shape[:2]
    for place in range(made):
        position = tokens - made + place
        for layer, of_layer in enumerate(weights_LHQK):
            for head, weights_QK in enumerate(of_layer):
                found, expected = weights_QK[position - 1, :position], theirs_TMLH[:position, place, layer, head]
                check.hold(torch.equal(found, expected), f"{case.name} {case.dtype} L{layer}H{head} token {position}")


if __name__ == "__main__":
    main()
