"""`docs/families.md` and the tables of `docs/families/`, from the measurements of the family tests.

A table is a CSV file. The page counts what they hold, so that it is made of them and of nothing else.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attnscope.attention.channels import ChannelMap
from attnscope.certificate.check import ATOL
from helpers.families import WITHOUT_ATTENTION
from helpers.mixed import ONE_OF_EACH, OTHERS, MixedLayer, mixed_layers
from helpers.mixed import TOKENS as MIXED_TOKENS
from helpers.parity_cases import CASES
from helpers.parity_models import NOT_MADE, TOKENS, TYPES, Measured, measure
from helpers.stack_families import NOT_MADE as STACKS_NOT_MADE
from helpers.stack_families import NOT_OF_TEXT, UNREAD
from helpers.stack_families import TYPES as STACK_TYPES
from helpers.stack_families import Measured as Stacked
from helpers.stack_families import measure as measure_stacks
from helpers.study_families import STUDIED, STUDIES, Studied, study

SAID = re.compile(  # in every reason
    r"^(what a key writes to the logits is not known: )?(layer \d+: )?|^this model family |^an? [a-z ]+ is (?=for a )"
    "|, so that no key's share of it is known$"
)
FIGURE = re.compile(r"\d\.\d+e-\d\d")
DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "families"
MEASURED = ("layout", "level", "weights", "output", "remarks")
COLUMNS: Mapping[str, Sequence[str]] = {  # of each table that is measured
    "causal": ("type", *MEASURED),
    "switched_on": ("case", *MEASURED),
    "studies": ("type", "frozen", *STUDIES, "why", "depth", "remarks"),
    "stacks": ("type", "layers", "read by", "engines", "remarks"),
    "linear": ("type", "rule", "maps", "layers", "M v - y", "after the query", "M - reference", "remarks"),
}
Row = tuple[str, ...]
PAGE = """# Which families attnscope checks, and how far

Written by `scripts/families_doc.py` from what `tests/test_parity_families.py` and its kin measure; tests hold page and
tables to them. transformers {transformers}, torch {torch}, CPU, float32, tiny models with all parameters random.

| table | of | has |
|---|---|---|
| [causal.csv](families/causal.csv) | {types} causal-LM types | layout, level, distance from the oracle |
| [switched_on.csv](families/switched_on.csv) | {cases} cases that a config switches on | the same |
| [studies.csv](families/studies.csv) | {studied} causal-LM types | which study says something of each |
| [stacks.csv](families/stacks.csv) | {stacks} encoders, encoder-decoders | layers, how they are read, engines |
| [linear.csv](families/linear.csv) | {mixing} types with layers without softmax | rule, how far from its output |
| [types.csv](families/types.csv) | {all_types} types, {models} models | read or refused, and why; new since {since} |
| [libraries.csv](families/libraries.csv) | {otherwise} facts of libraries | what they do otherwise than expected |

## Causal language models

**{full}** of {types} types reach level *full*, {scores} level *scores*, {none} *none*; {without} have no softmax,
{not_made} cannot be made here. Those without a softmax are read [by their rules](#layers-without-a-softmax), but for
{unread_rules}.

*full*: the oracle gets the hidden states that enter the attention module, the positions, its raw weights and the
config, and gives its weights and its output. *scores*: it gets the captured q, k, v and extras. The columns are the
largest difference of a weight, and of a token's output relative to the typical output's norm, over all layers, of
{tokens} tokens with windows of 8. Both must be within {atol:.0e}, for every type alike, or within float32's rounding of
weights, where logits are so large that it is more. A type's level is that of its weakest layer.

## Studies of what heads write

*frozen*: what the heads' outputs pass as well as the output projection, and stays as it was in the intact pass.
*direct* is a column of [`ablate`](ablate.md#what-a-head-writes-itself), *relations --weights
logit* the same by key, *copying* a probe of [`scan`](atlas.md). *--weights value* is the norm of what keys write. Where
a norm is after it, it is the norm of what that makes with the scale that it had. [*why*](why.md): how far the
contributions to a logit of the last layer are from it, as a share of the sum of their sizes. It is the larger of both
sides, the key's and the query's. [*depth*](depth.md): how far the outputs of all blocks are from each residual, as a
share of it, or weights times states from a mixture of blocks. Of {studied} types {answered}.

## Encoders and encoder-decoders

Every type whose masked or sequence-to-sequence language model transformers has, and encoders that it loads as AutoModel
alone. Of each a model reads two texts of 16 tokens, its decoder 11. The captured weights must equal the
family's own `attentions`, `encoder_attentions`, `decoder_attentions` and `cross_attentions` to 1e-6. Every row must sum
to 1. The geometry must have the layers and heads of the calls. {unread} types are refused with a
reason, {sounds} are causal decoders with an encoder of sound, {stacks_not_made} cannot be made here.

*interface*: the family asks transformers' attention interface; q, k, v and P V are checked, and every engine reads it.
*hook*: it does not; its weights are read from what its attention modules return, under eager alone. Logits and
values are what the softmax and the product in these modules were given, but for Longformer's windows.

## Layers without a softmax

Every type of transformers with layers that mix tokens by a rule, each read as a tiny random model of {mixed_tokens}
tokens. *maps*: one for each head, or for each channel, shown as the mean of |w| over channels. *M v - y*: the largest
difference between the map times the values and what the model's own code made, over the largest of that; at most 1e-6.
*after the query*: the largest weight on a later token. *M - reference*: the largest difference from the map of the
same layer by the paper's recurrence, one token after another in float64, over its largest weight.

A layer that is a multilayer perceptron or experts alone mixes no tokens, and reformer's hashing is not read.

## What the libraries do otherwise

Seen in transformers 5.23.0, peft 0.21.2, tokenizers 0.23.3 and those named in [libraries.csv](families/libraries.csv)
while these models were read. Sources are files of those packages (`models/` of transformers is left out). A script of
`findings/` in the repository shows it without attnscope.
"""


def causal(of_type: Callable[[str], Measured] = measure) -> list[Row]:
    """The first table: every causal-LM type, those without a measurement with why."""
    rows = {family: measured_row(family, of_type(family)) for family in TYPES}
    absent = dict.fromkeys(WITHOUT_ATTENTION, "no softmax attention") | NOT_MADE
    rows |= {family: (family, "-", "-", "", "", why) for family, why in absent.items()}
    return [rows[name] for name in sorted(rows)]


def switched_on(of_case: Callable[[str], Measured] | None = None) -> list[Row]:
    """What a config can switch on, case by case."""
    return [measured_row(case, (of_case or measure_case)(case)) for case in CASES]


def measure_case(case: str) -> Measured:
    """What a family can switch on, measured."""
    family, overrides = CASES[case]
    return measure(family, **overrides)


def measured_row(name: str, result: Measured) -> Row:
    """How far a type or a case is from the oracle."""
    figures = ("" if value is None else f"{value:.1e}" for value in (result.weights, result.output))
    why = result.why if result.holds or result.level == "none" else f"does not hold: {result.why}"
    return (name, result.layout, result.level, *figures, why)


def studies(of_type: Callable[[str], Studied] = study) -> list[Row]:
    return [study_row(name, of_type(name)) for name in STUDIED]


def study_row(name: str, result: Studied) -> Row:
    """Which studies say something of a type, how exact `why` and `depth` are, and why others do not."""
    cells = [answer if result.answers(study) else "-" for study, answer in result.studies.items()]
    errors = [result.why, result.depth]
    known = [FIGURE.fullmatch(error) is not None for error in errors]
    reasons = [answer for study, answer in result.studies.items() if not result.answers(study)]
    reasons += [error for error, figure in zip(errors, known, strict=True) if not figure]
    remarks = "; ".join(dict.fromkeys(SAID.sub("", reason) for reason in reasons))
    cells += [error if figure else "-" for error, figure in zip(errors, known, strict=True)]
    return (name, result.frozen, *cells, remarks)


def stacks(of_type: Callable[[str], Stacked] = measure_stacks) -> list[Row]:
    """Every encoder and encoder-decoder, those that are not read with why."""
    rows = {name: stack_row(name, of_type(name)) for name in STACK_TYPES}
    absent = {name: f"refused: it {why}" for name, why in UNREAD.items()} | NOT_OF_TEXT | STACKS_NOT_MADE
    rows |= {name: (name, "-", "-", "-", why) for name, why in absent.items()}
    return [rows[name] for name in sorted(rows)]


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


def stack_row(name: str, result: Stacked) -> Row:
    """What can be read of a type, and how."""
    layers = ", ".join(f"{kind} {count}" for kind, count in result.stacks.items())
    engines = "eager" if result.fused is None else "all"
    return (name, layers, result.route, engines, REMARKS.get(name, ""))


def mixing() -> list[Row]:
    """Every type with layers without a softmax: how far their maps are from output and reference."""
    return [mixing_row(name, mixed_layers(name)) for name in sorted((*ONE_OF_EACH, *OTHERS))]


def mixing_row(name: str, layers: Sequence[MixedLayer]) -> Row:
    """One type: the largest differences over its layers."""
    checks, counts = [layer.check for layer in layers], Counter(layer.check.kernel for layer in layers)
    rules = ", ".join(counts)
    of_channels = any(isinstance(layer.P, ChannelMap) for layer in layers)
    error, distance = (
        f"{max(numbers):.1e}"
        for numbers in ([check.value_error or 0.0 for check in checks], [m.distance for m in layers])
    )
    future = max(check.masked_weight or 0.0 for check in checks)
    coarse = "its own code adds logarithms of decays up in float32" if float(distance) > 1e-6 else ""
    maps = "channels" if of_channels else "heads"
    return (name, rules, maps, ",".join(str(check.layer) for check in checks), error, f"{future:.1f}", distance, coarse)


def page(tables: Mapping[str, Sequence[Row]], versions: Mapping[str, str], since: str) -> str:
    """The page, but for what the sweep adds. versions: of transformers and torch."""
    levels = Counter(level for _, _, level, *_ in tables["causal"])
    answers = {name: sum(row[2 + place] == "yes" for row in tables["studies"]) for place, name in enumerate(STUDIES)}
    answered = [f"{count} have *{name}*" for name, count in answers.items()]
    answered += [
        f"{sum(row[at] != '-' for row in tables['studies'])} *{name}*" for at, name in ((-3, "why"), (-2, "depth"))
    ]
    types = tables["types"]
    return PAGE.format(
        **versions,
        types=len(tables["causal"]),
        cases=len(tables["switched_on"]),
        studied=len(tables["studies"]),
        mixing=len(tables["linear"]),
        mixed_tokens=MIXED_TOKENS,
        stacks=sum(row[1] != "-" for row in tables["stacks"]),
        all_types=len({row[0] for row in types if row[0]}),
        models=sum(bool(row[0]) for row in types),
        since=since,
        otherwise=len(tables["libraries"]),
        full=levels["full"],
        scores=levels["scores"],
        none=levels["none"],
        without=len(WITHOUT_ATTENTION),
        unread_rules=", ".join(name for name in WITHOUT_ATTENTION if name not in {row[0] for row in tables["linear"]}),
        not_made=len(NOT_MADE),
        tokens=TOKENS,
        atol=ATOL,
        answered=", ".join(answered),
        unread=len(UNREAD),
        sounds=len(NOT_OF_TEXT),
        stacks_not_made=len(STACKS_NOT_MADE),
    )


def as_csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def read(name: str) -> list[Row]:
    """The rows of a table of `docs/families/`, without its head."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def without_figures(rows: Iterable[Row]) -> list[Row]:
    """The rows with every measured figure blanked: what must not change from machine to machine."""
    return [tuple(FIGURE.sub("", cell) for cell in row) for row in rows]


def figures_of(rows: Iterable[Row]) -> list[float]:
    """The figures of rows that hold."""
    held = [row for row in rows if not any("does not hold" in cell for cell in row)]
    return [float(figure) for row in held for cell in row for figure in FIGURE.findall(cell)]
