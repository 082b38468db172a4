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
from helpers.stack_families import NOT_MADE as STACKS_NOT_MADE
from helpers.stack_families import NOT_OF_TEXT, UNREAD
from helpers.stack_families import TYPES as STACK_TYPES
from helpers.stack_families import Measured as Stacked
from helpers.stack_families import measure as measure_stacks
from helpers.study_families import STUDIES, Studied, study

SAID = re.compile(  # in every reason
    r"^(what a key writes to the logits is not known: )?(layer \d+: )?|^this model family |^an? [a-z ]+ is (?=for a )"
    "|, so that no key's share of it is known$"
)
FIGURE = re.compile(r"\d\.\d+e-\d\d")
HEAD = """# Which families attnscope checks, and how far

Written by `scripts/families_doc.py` from the measurements of `tests/test_parity_families.py`; a test holds it to them.

{types} causal-LM types of transformers {transformers}: **{full}** reach level *full*, {scores} level *scores*, {none}
*none*, {without} have no softmax attention, {not_made} cannot be made here. transformers {transformers}, torch {torch},
CPU, float32, tiny models with every parameter drawn at random, {tokens} tokens, windows of 8.

*full*: the oracle gets the hidden states that enter the attention module, the positions, its raw weights and the
config, and gives its weights and its output. *scores*: it gets the captured q, k, v and extras. The columns are the
largest difference of a weight, and of a token's output relative to the typical output's norm, over all layers. Both
must be within {atol:.0e}, for every type alike, or within float32's rounding of weights, where logits are so large that
it is more. A type's level is that of its weakest layer.
"""


STACKS = "## Encoders and encoder-decoders"
STACKS_HEAD = (
    STACKS
    + """

From the measurements of `tests/test_stacks_families.py`: {types} types of text, every one whose masked or
sequence-to-sequence language model transformers has, and encoders that it loads as AutoModel alone. Of each a tiny
model with every parameter drawn at random reads two texts of 16 tokens, its decoder 11. What is heard must equal the
family's own `attentions`, `encoder_attentions`, `decoder_attentions`, `cross_attentions` to 1e-6, every row must sum to
1, and the geometry must have the layers and heads that call.

*interface*: the family asks transformers' attention interface; q, k, v and P V are checked, and every engine reads it.
*hook*: it does not; its weights are read from what its attention modules return, under eager alone. Logits and
values are what the softmax and the product in these modules were given, but for Longformer's windows. {unread} types
are refused with a reason, {others} are causal decoders with an encoder of sound, {not_made} cannot be made here.
"""
)


def stacks_table(of_type: Callable[[str], Stacked] = measure_stacks) -> str:
    """The second part of the document."""
    head = STACKS_HEAD.format(
        types=len(STACK_TYPES), unread=len(UNREAD), others=len(NOT_OF_TEXT), not_made=len(STACKS_NOT_MADE)
    )
    rows = {name: stack_row(name, of_type(name)) for name in STACK_TYPES}
    absent = {name: f"refused: it {why}" for name, why in UNREAD.items()} | NOT_OF_TEXT | STACKS_NOT_MADE
    rows |= {name: f"| {name} | - | - | - | {why} |" for name, why in absent.items()}
    columns = "| type | layers | read by | engines | remarks |\n|---|---|---|---|---|"
    return "\n".join([head, columns, *(rows[name] for name in sorted(rows))])


STUDIED = "## Studies of what heads write"
STUDIED_HEAD = (
    STUDIED
    + """

From the measurements of `tests/test_study_families.py`, of the same tiny models: which study says something of which
type. *frozen*: what the heads' outputs pass as well as the output projection, and stays as it was in the intact pass.
*direct* is a column of [`ablate`](ablate.md#what-a-head-writes-itself), *relations --weights
logit* the same by key, *copying* a probe of [`scan`](atlas.md), *--weights value* the norm of what keys write; where a
norm is after it, of what that makes with the scale that it had. [*why*](why.md): how far the contributions to a logit
of the last layer are from it, as a share of the sum of their sizes; the larger of both sides, the key's and the
query's. Of {types} types {counts}.
"""
)


def studies_table(of_type: Callable[[str], Studied] = study) -> str:
    """The third part of the document."""
    found = {name: of_type(name) for name in TYPES}
    yes = [f"{sum(one.answers(name) for one in found.values())} have *{name}*" for name in STUDIES]
    yes.append(f"{sum(FIGURE.fullmatch(one.why) is not None for one in found.values())} *why*")
    columns = f"| type | frozen | {' | '.join(STUDIES)} | why | remarks |\n|---|---|{'---|' * len(STUDIES)}---|---|"
    rows = [study_row(name, one) for name, one in found.items()]
    return "\n".join([STUDIED_HEAD.format(types=len(TYPES), counts=", ".join(yes)), columns, *rows])


def study_row(name: str, one: Studied) -> str:
    """A row of the third part: which studies say something of a type, how exact `why` is, and why others do not."""
    cells = [said if one.answers(study) else "-" for study, said in one.studies.items()]
    known = FIGURE.fullmatch(one.why) is not None
    reasons = [said for study, said in one.studies.items() if not one.answers(study)] + [one.why] * (not known)
    said = "; ".join(dict.fromkeys(SAID.sub("", reason) for reason in reasons))
    return f"| {name} | {one.frozen} | {' | '.join(cells)} | {one.why if known else '-'} | {said} |"


REMARKS = {
    **dict.fromkeys(
        ("big_bird", "bigbird_pegasus"), "read with full attention; a run says where its own would be block-sparse"
    ),
    **dict.fromkeys(
        ("led", "longformer"),
        "windows of the encoder brought to true key positions; global tokens as its class chooses, or as named",
    ),
    "funnel": "layers in the order of their calls; keys are pooled after the first block",
    "longt5": "local blocks brought to true key positions; a transient-global encoder's layers are not read",
    **dict.fromkeys(("modernvbert", "ultravbert"), "the part that reads its texts"),
    "pegasus_x": "its encoder's keys are blocks and learned summaries: not read",
    "prophetnet": "as squeezebert; cross has the rows of several predicted tokens below each other: not shown",
    "squeezebert": "returns logits; their softmax, which gives its output, is read",
    "t5gemma2": "one softmax over target and source: the rows of decoder and cross sum to 1 together",
}


def stack_row(name: str, one: Stacked) -> str:
    """A row of the second part: what can be read of a type, and how."""
    layers = ", ".join(f"{kind} {count}" for kind, count in one.stacks.items())
    engines = "eager" if one.fused is None else "all"
    return f"| {name} | {layers} | {one.route} | {engines} | {REMARKS.get(name, '')} |"


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
