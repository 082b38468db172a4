"""inspectus' charts by the rows of docs/coming-from.md: the numbers that a chart is given are attnscope's.

Shapes: L layer, H head, Q query, K key.
"""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inspectus
import IPython.display
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

import attnscope
from external.calls import Row, Source, apart, notebook, run_rows
from external.common import Report, arguments
from external.models import tiny, words

WORDS, OTHER, TARGET = words(range(3, 20)), words(range(30, 47)), words(range(20, 31))


def main() -> None:
    """Run every row and write the result."""
    asked = arguments()
    report = Report(("inspectus", "transformers", "torch"))
    theirs = {"inspectus": SimpleNamespace(attention=shown)}
    run_rows(report, ROWS, {**notebook(), **theirs})
    folder = tiny("bart", Path("bart").resolve())
    source = Source("a tiny bart", folder.name, WORDS, OTHER, {"TARGET": TARGET})
    run_rows(report, CROSS, {**two_texts(folder), **theirs}, source)
    report.write(asked.out)


def shown(*given: Any, **options: Any) -> Any:
    """What `inspectus.attention` shows in a notebook: the object that its script is given."""
    pages: list[str] = []
    IPython.display.display = lambda one: pages.append(one.data)
    inspectus.attention(*given, **options)
    text = pages[-1]
    return json.JSONDecoder().raw_decode(text, text.index("{"))[0]


def two_texts(folder: Path) -> dict[str, Any]:
    """An encoder-decoder that has read a text and what it is to write."""
    loaded = attnscope.load(str(folder))
    seen = attnscope.capture(loaded, WORDS, target=TARGET)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids = [list(seen.prompt.ids), list(seen.queries.ids)]
    result = model(torch.tensor(ids[:1]), decoder_input_ids=torch.tensor(ids[1:]), output_attentions=True)
    return {
        "cross_attentions": result.cross_attentions,
        "encoder_tokens": loaded.tokenizer.convert_ids_to_tokens(ids[0]),
        "decoder_tokens": loaded.tokenizer.convert_ids_to_tokens(ids[1]),
        "seen": lambda text: attnscope.capture(loaded, text, target=TARGET),
    }


def maps(data: Any) -> Tensor:
    """(L * H, Q, K): what a chart draws."""
    drawn = [(np.frombuffer(b64decode(one["values"]), np.float32), one["shape"]) for one in data["attention"]]
    return torch.stack([torch.tensor(values).reshape(shape) for values, shape in drawn])


def of_chart(data: Any, seen: Any) -> float:
    return apart(maps(data), torch.cat([*seen.weights.values()]))


VIEW = "attnscope view TEXT -o page.html"
ROWS = (
    Row("inspectus.attention(attentions, tokens)", VIEW, of_chart),
    Row('inspectus.attention(attentions, tokens, chart_types=["attention_matrix"])', VIEW, of_chart),
    Row(
        'inspectus.attention(attentions, tokens, chart_types=["query_token_heatmap", "key_token_heatmap"])',
        VIEW,
        of_chart,
    ),
    Row(
        'inspectus.attention(attentions, tokens, chart_types=["dimension_heatmap"])',
        'attnscope heatmap TEXT --query last --key "bank#1" --figures mass --out DIR',
        of_chart,
    ),
    Row('inspectus.attention(attentions, tokens, chart_types=["line_grid"])', VIEW, of_chart),
)
CROSS = (
    Row(
        "inspectus.attention(cross_attentions, decoder_tokens, encoder_tokens)",
        "attnscope view TEXT --target TARGET -o page.html",
        lambda data, seen: apart(maps(data), torch.cat([*seen.of("cross").weights.values()])),
    ),
)


if __name__ == "__main__":
    main()
