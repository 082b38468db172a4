"""`docs/families.md`, from the measurements of the family tests."""

import re
from collections.abc import Callable

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnscope.parity import ATOL
from helpers.families import WITHOUT_ATTENTION
from helpers.parity_cases import CASES
from helpers.parity_models import NOT_MADE, TOKENS, TYPES, Measured, measure

FIGURE = re.compile(r"\d\.\d+e-\d\d")
HEAD = """# Which families attnscope checks, and how far

Written by `scripts/families_doc.py` from the measurements of `tests/test_parity_families.py`; a test holds it to them.

{types} causal-LM types of transformers {transformers}: **{full}** reach level *full*, {scores} level *scores*, {none}
*none*, {without} have no softmax attention, {not_made} cannot be made here. transformers {transformers}, torch {torch},
CPU, float32, tiny models with every parameter drawn at random, {tokens} tokens, windows of 8.

*full*: the oracle gets the hidden states that enter the attention module, the positions, its raw weights and the
config, and gives its weights and its output. *scores*: it gets the captured q, k, v and extras. The columns are the
largest difference of a weight, and of a token's output relative to the typical output's norm, over all layers; both are
held to {atol:.0e}, for every type alike, or to what float32's rounding does to weights of logits so large that it is
more. A type's level is that of its weakest layer.
"""


def measure_case(case: str) -> Measured:
    """What a family can switch on, measured."""
    family, overrides = CASES[case]
    return measure(family, **overrides)


def document(of_type: Callable[[str], Measured] = measure, of_case: Callable[[str], Measured] = measure_case) -> str:
    """The whole document, from measurements made now or kept."""
    found = {family: of_type(family) for family in TYPES}
    levels = [one.level for one in found.values()]
    head = HEAD.format(
        types=len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        full=levels.count("full"),
        scores=levels.count("scores"),
        none=levels.count("none"),
        without=len(WITHOUT_ATTENTION),
        not_made=len(NOT_MADE),
        tokens=TOKENS,
        atol=ATOL,
    )
    absent = dict.fromkeys(WITHOUT_ATTENTION, "no softmax attention") | NOT_MADE
    rows = {family: _row(family, one) for family, one in found.items()}
    rows |= {family: f"| {family} | - | - | | | {why} |" for family, why in absent.items()}
    cases = [_row(case, of_case(case)) for case in CASES]
    return "\n".join(
        [
            head,
            _header("type"),
            *(rows[name] for name in sorted(rows)),
            "",
            "## Switched on",
            "",
            _header("case"),
            *cases,
        ]
    )


def rows_without_figures(text: str) -> list[str]:
    """The document's lines with every measured figure blanked: what must not change from machine to machine."""
    return [FIGURE.sub("", line).rstrip() for line in text.splitlines()]


def figures_of(text: str) -> list[float]:
    """The figures of rows that hold."""
    rows = [line for line in text.splitlines() if line.startswith("|") and "does not hold" not in line]
    return [float(figure) for line in rows for figure in FIGURE.findall(line)]


def _header(first: str) -> str:
    return f"| {first} | layout | level | weights | output | remarks |\n|---|---|---|---|---|---|"


def _row(name: str, one: Measured) -> str:
    figures = ("" if value is None else f"{value:.1e}" for value in (one.weights, one.output))
    why = one.why if one.holds or one.level == "none" else f"does not hold: {one.why}"
    return f"| {name} | {one.layout} | {one.level} | {' | '.join(figures)} | {why} |"
