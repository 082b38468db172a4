"""What a notebook writes with transformers, seaborn and torch alone, by the rows of docs/coming-from.md.

attnscope reads every model type here, too: its column of the table of types.

Shapes: L layer, H head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import seaborn as sns
import torch
from matplotlib import pyplot as plt
from torch import Tensor

import attnscope
from external.calls import TEXT, Row, apart, column, notebook, printed, run_rows
from external.common import Report, arguments
from external.model_types import ONE, Given, Known, run_types

matplotlib.use("Agg")
CORPUS = [TEXT, "the river bank"]


def main() -> None:
    """Run every row on the demo and write the result."""
    asked = arguments()
    report = Report(("transformers", "torch", "seaborn"))
    run_rows(report, ROWS, names())
    run_types(report, read, Known())
    report.write(asked.out)


def names() -> dict[str, Any]:
    """What a notebook has by then."""
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    return {**notebook(), "corpus": CORPUS, "sns": sns, "plt": plt}


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    """attnscope's own weights of a model type."""
    two = {} if given.target is None else {"target": given.target}
    seen = attnscope.capture(attnscope.load(str(given.folder)), given.text, **two)
    weights = {stack: {key.layer: one for key, one in seen.of(stack).weights.items()} for stack in seen.stacks}
    return weights if two else {ONE: next(iter(weights.values()))}


def of_subplots(theirs: Any, seen: Any) -> float:
    """How many heads are drawn."""
    return abs(theirs[1].size - len(seen.heads))


def of_top(theirs: Any, records: Sequence[Any]) -> float:
    """Weights and keys, in order."""
    return apart(torch.stack([*theirs]), [[one[name] for one in records] for name in ("weight", "key")])


def of_corpus(theirs: Sequence[Any], records: Sequence[Any]) -> float:
    """The mean over the texts of every head's mean entropy over rows that see two keys or more, nats."""
    entropy_LH = sum(
        torch.special.entr(torch.stack(attentions)[:, 0]).sum(-1)[..., 1:].mean(-1) for attentions in theirs
    ) / len(theirs)
    return apart(entropy_LH.flatten(), column(records, "entropy"))


ROWS = (
    Row(
        "model(**inputs, output_attentions=True).attentions[1][0, 4]",
        "attnscope.capture(attnscope.wrap(model, tokenizer), text).weights[1][4]",
        apart,
    ),
    Row(
        "sns.heatmap(attentions[1][0, 4], xticklabels=tokens)",
        "attnscope heatmap TEXT --select L1H4 --out DIR",
        lambda theirs, seen: apart(theirs.collections[0].get_array().data, seen.weights[1][4]),
    ),
    Row(
        "plt.subplots(len(attentions), attentions[0].shape[1])",
        "attnscope heatmap TEXT --out DIR",
        of_subplots,
    ),
    Row(
        "attentions[1][0, 4:6].mean(0)",
        "attnscope relations TEXT --select L1H4-5 --by kv --query last --all-keys",
        printed,
    ),
    Row(
        "attentions[1][0, 4, -1].topk(5)",
        "attnscope relations TEXT --select L1H4 --query last --all-keys --top 5",
        of_top,
    ),
    Row(
        "torch.stack(attentions)[:, 0, :, -1, 3]",
        "attnscope heads TEXT --query last --key 3",
        lambda theirs, records: apart(theirs.flatten(), column(records, "mass")),
    ),
    Row(
        "tokenizer.convert_ids_to_tokens(ids)",
        "attnscope tokens TEXT",
        lambda theirs, records: float([one.replace("Ġ", " ") for one in theirs] != [one["token"] for one in records]),
    ),
    Row(
        "torch.linalg.multi_dot([(a[0].mean(0) + torch.eye(a.shape[-1])) / 2 for a in attentions[::-1]])",
        "attnscope rollout TEXT",
        printed,
    ),
    Row(
        '[model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions for text in corpus]',
        "attnscope batch corpus.jsonl --out DIR && attnscope heads DIR",
        of_corpus,
    ),
)


if __name__ == "__main__":
    main()
