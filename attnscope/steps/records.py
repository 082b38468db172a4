"""What an explanation is made of: steps, their words and numbers, and whether they are the model's.

The words from the scores to the weighted values are written here, once: `steps.attention` adds the numbers of a query,
and the page those of the query that its reader chooses. An explanation is also JSON lines, every number of it.

Plain data: who prints, draws or sends it never sees a tensor, nor torch.

Shapes: Q query, K key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Logits below this are masked keys, in whatever dtype the mask was built: half of the most that float16 can hide by.
HIDDEN = float(np.finfo(np.float16).min) / 2


@dataclass(frozen=True)
class Numbers:
    """One array of a step, whole: its name, what each axis counts (token, query, key, head, dim, ...), its values."""

    name: str
    axes: tuple[str, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Check:
    """Ours against another's: the largest difference, the largest number of theirs, and what is allowed."""

    against: str
    difference: float
    largest: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Step:
    """One step: what it is called, its formula, one sentence of why, its numbers, its checks.

    missing: what cannot be shown here and why, for layers of which not everything can be read.
    """

    name: str
    formula: str
    why: str
    numbers: tuple[Numbers, ...] = ()
    checks: tuple[Check, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Explanation:
    """One head of one text from start to end, a chosen query among its tokens.

    tokens: their exact text; labels: as they are shown. raw_QK: q . k; scale: what they are multiplied with; head_dim:
    d_k; visible_QK: which keys a query may see; weights_QK: after the softmax.
    """

    head: str
    source: str
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    query: int
    steps: tuple[Step, ...]
    raw_QK: np.ndarray
    scale: float
    head_dim: int
    visible_QK: np.ndarray
    weights_QK: np.ndarray

    @property
    def failures(self) -> list[str]:
        """The checks that do not hold, in words."""
        return [
            f"step {number}, {step.name}: differs from {check.against} by {check.difference:.2g} "
            f"(allowed {check.allowed:.2g})"
            for number, step in enumerate(self.steps, 1)
            for check in step.checks
            if not check.holds
        ]


def divisor(scale: float, width: int) -> str:
    """How a scale is written: `/ √32` where it is 1 / sqrt(32), else `× 0.25`.

    >>> divisor(0.125, 64)
    '/ √64'
    """
    return f"/ √{width}" if math.isclose(scale, width**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"


@dataclass(frozen=True)
class StepWords:
    """A step without its numbers: its words, and which arrays it shows.

    formula: may hold {keys} and {sight}, which depend on the query. arrays: of each its key, by which its numbers are
    found, its name and its axes.
    """

    name: str
    formula: str
    why: str
    arrays: tuple[tuple[str, str, str], ...]

    def step(self, numbers: Mapping[str, np.ndarray], checks: tuple[Check, ...] = (), **query: object) -> Step:
        """The step with its numbers; query: the values of the formula's placeholders."""
        arrays = tuple(Numbers(name, tuple(axes.split()), numbers[key]) for key, name, axes in self.arrays)
        return Step(self.name, self.formula.format(**query), self.why, arrays, checks)


SUMMED = ("exp(logit − largest)", "weight", "weight × v")  # arrays that add up to something over the keys
SEES_ALL, SEES_SOME = "sees all of them", "sees {seen}, {hidden} hidden"
PAIRS = "query key"


def sight(seen: int, keys: int) -> str:
    """How many of the keys a query sees, in words.

    >>> sight(3, 9)
    'sees 3, 6 hidden'
    """
    return SEES_ALL if seen == keys else SEES_SOME.format(seen=seen, hidden=keys - seen)


def attention_words(
    width: int,
    scale: float,
    *,
    softcap: float | None = None,
    bias: bool = False,
    sink: float | None = None,
    ahead: bool = False,
    windowed: bool = False,
) -> list[StepWords]:
    """The words of the steps from the scores to the weighted values.

    width: of q and k. ahead: whether some query sees keys after it. windowed: whether some query does not see a key
    before it. The formula of the mask has placeholders, see `StepWords`.

    >>> [words.name for words in attention_words(64, 0.125)]
    ['scores', 'scaling', 'mask', 'softmax', 'weighted values']
    """
    # what depends on the layer: the usual scale has a reason, another one is a fact of its family
    scaled = f"s {divisor(scale, width)}"
    why_scaled = (
        f"A sum of {width} products spreads about √{width} = {math.sqrt(width):.4g} times as far as one product; "
        "dividing by √d_k undoes that, so that the softmax is not decided by the width alone."
        if scaled.startswith("s /")
        else f"This family multiplies by {scale:.4g} and not by 1 / √d_k = {width**-0.5:.4g}."
    )
    looks = "In an encoder a token may look both ways"
    looks = looks if ahead else "A token may look at itself and at earlier tokens, never ahead"
    part = "; this layer hides some of that too (a window, a chunk, a choice)" if windowed else ""
    largest = "; the largest logit is subtracted first, which changes nothing but keeps exp small"
    largest = largest if sink is None else f"; a sink logit of {sink:.4g} takes its share and gives nothing"
    # arrays that several steps show, so that each begins with the numbers at which the one before it ended
    raw, logit, weight = ("raw", "q · k", PAIRS), ("masked", "logit", PAIRS), ("weights", "weight", PAIRS)
    steps = [
        StepWords(
            "scores",
            f"s = q · k   a sum of {width} products for each key",
            "How well the query and a key match: large where both point the same way, negative where they oppose.",
            (("q", "q", "query dim"), ("k", "k", "key dim"), raw),
        ),
        StepWords("scaling", f"{scaled}   d_k = {width}", why_scaled, (raw, ("scaled", scaled, PAIRS))),
    ]
    # few families have these two: a step that does nothing would only lengthen the explanation of the others
    if softcap is not None:
        why = f"Keeps every score between −{softcap:g} and {softcap:g}, so that no key can win by any margin."
        capped = (("capped", "capped", PAIRS),)
        steps.append(StepWords("soft-cap", f"{softcap:g} · tanh(s / {softcap:g})", why, capped))
    if bias:
        why = "This family tells positions apart by adding a number that depends on the distance of query and key."
        biased = (("bias", "bias", PAIRS), ("biased", "s + bias", PAIRS))
        steps.append(StepWords("position bias", "s + bias", why, biased))
    # the mask's words alone depend on the query, which the reader of a page may change
    return [
        *steps,
        StepWords(
            "mask",
            "hidden keys become −∞   {keys} keys, this query {sight}",
            f"{looks}{part}.",
            (("visible", "visible", PAIRS), logit),
        ),
        StepWords(
            "softmax",
            "weight = exp(logit) / sum of exp(logit)",
            f"Turns the logits of a query into weights between 0 and 1 that sum to 1{largest}.",
            (logit, ("exp", "exp(logit − largest)", PAIRS), weight),
        ),
        StepWords(
            "weighted values",
            "output of the head = sum of weight × v",
            "Each key hands over its value, as much of it as its weight says; the sum is what this head found.",
            (weight, ("v", "v", "key dim"), ("weighted", "weight × v", "key dim"), ("output", "output", "query dim")),
        ),
    ]


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
