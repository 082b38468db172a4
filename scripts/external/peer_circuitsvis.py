"""CircuitsVis' pictures by the rows of docs/coming-from.md: the numbers that a page is given are attnscope's."""

from __future__ import annotations

import json
from typing import Any

import circuitsvis as cv

from external.calls import Row, apart, notebook, run_rows
from external.common import Report, arguments

NAMED = {"head_names": [f"L1H{head}" for head in range(6)]}


def main() -> None:
    """Run every row on the demo and write the result."""
    asked = arguments()
    report = Report(("circuitsvis", "transformers", "torch"))
    names = notebook()
    attention = names["attentions"][1][0]
    run_rows(report, ROWS, {**names, **NAMED, "attention": attention, "values": attention[4, -1], "cv": cv})
    report.write(asked.out)


def props(page: Any) -> Any:
    """What the script of a page is given."""
    call = page.local_src.rindex("CircuitsVis.render(")
    return json.JSONDecoder().raw_decode(page.local_src, page.local_src.index("{", call))[0]


def of_heads(page: Any, seen: Any) -> float:
    return apart(props(page)["attention"], seen.weights[1])


ROWS = (
    Row(
        "cv.attention.attention_heads(attention=attention, tokens=tokens)",
        "attnscope view TEXT -o page.html",
        of_heads,
    ),
    Row(
        "cv.attention.attention_pattern(tokens=tokens, attention=attention[4])",
        "attnscope heatmap TEXT --select L1H4 --show",
        lambda page, seen: apart(props(page)["attention"], seen.weights[1][4]),
    ),
    Row(
        "cv.tokens.colored_tokens(tokens, values)",
        "attnscope text TEXT --query last --select L1H4",
        lambda page, records: apart(props(page)["values"], [one["weight"] for one in records]),
    ),
    Row(
        "cv.attention.attention_heads(attention=attention, tokens=tokens, attention_head_names=head_names)",
        "[head.name for head in seen.heads if head.layer == 1]",
        lambda page, names: float(props(page)["attentionHeadNames"] != sorted(names)),
    ),
)


if __name__ == "__main__":
    main()
