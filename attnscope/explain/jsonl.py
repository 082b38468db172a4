"""An explanation as JSON lines, every number of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from attnscope.explain.records import Explanation


def json_lines(explanation: Explanation) -> Iterator[str]:
    """A line for the text (step 0), then one line per step; hidden logits are the string "-inf".

    >>> [json.loads(line)["name"] for line in json_lines(explain_toy())][:2]
    ['text', 'token vectors']
    """
    head = {"head": explanation.head, "source": explanation.source, "query": explanation.query}
    yield _line({**head, "step": 0, "name": "text", "tokens": list(explanation.tokens)})
    for place, step in enumerate(explanation.steps, 1):
        numbers = [
            {
                "name": array.name,
                "axes": list(array.axes),
                "shape": list(array.values.shape),
                "values": array.values.tolist(),
            }
            for array in step.numbers
        ]
        checks = [{**vars(check), "holds": check.holds} for check in step.checks]
        words = {"name": step.name, "formula": step.formula, "why": step.why, "missing": step.missing or None}
        yield _line({**head, "step": place, **words, "numbers": numbers, "checks": checks})


def _line(value: dict[str, Any]) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """JSON has no word for infinity."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
