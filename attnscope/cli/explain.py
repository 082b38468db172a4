"""`attnscope explain`: one head, one sentence, every step with its numbers, each compared with the model's own.

Last the steps as rich tables: one query followed from start to end, or in a toy every number.

Shapes: Q query, K key, T token, D dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look
from attnscope.cli.heads import GROUPS
from attnscope.cli.one_text import answer, read_text
from attnscope.cli.option_groups import FIRST, check_one_given, command_line, option_group
from attnscope.cli.options import MayAsk, OneHead, PairedText, Query, Seed, Selected
from attnscope.cli.output import Config, Format, Writing
from attnscope.errors import UsageError
from attnscope.steps.records import HIDDEN, SUMMED
from attnscope.utils import display as cells
from attnscope.utils.folders import PICTURES
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.steps.records import Explanation, Numbers, Step
    from attnscope.steps.toy import Spread

EXAMPLES = (
    'attnscope explain --text "the cat sat on the mat" --head L2H3 --query last --out runs/cat.png',
    "attnscope explain --toy",
    "attnscope explain --scaling --out runs/scaling.png",
)
SHOWN = 4  # numbers shown of a vector
IN_COLUMN = 3  # and of a longer one in a column beside others
BAR = 12  # characters of a weight of 1
MOST_KEYS, KEPT_KEYS = 12, 10  # more keys than that: the strongest are kept
MOST_HEADS, KEPT_HEADS = 9, 3  # more heads than that: the first are kept, and the chosen one
LONGEST_LABEL = 16


@option_group
class StepsText(MayAsk, PairedText):
    """The text of one query."""


@option_group
class Steps(OneHead, Query, Seed):
    """What is explained."""

    panel = "What to ask"
    query: Annotated[str, "Query token: 5, last, bank#2. Full syntax: `attnscope help tokens`."] = "last"
    toy: Annotated[bool, '"I saw a saw" with tiny numbers, without a model.', FIRST] = False
    scaling: Annotated[bool, "Standard deviation of q·k against d_k on random data, without a model.", FIRST] = False
    seed: Annotated[int, "Seed of --scaling's random data."] = 0

    def check(self, asked: StepsText) -> None:
        """Raise UsageError for what cannot be asked together."""
        check_one_given({"--toy": self.toy, "--scaling": self.scaling})
        if (self.toy or self.scaling) and asked.has_text:
            raise UsageError(f"--{'toy' if self.toy else 'scaling'} takes no text", "leave out the text")


@option_group
class Telling(Look, Config, Format, Writing):
    """The steps to stdout, a figure to --out, which may also name the file itself."""

    files = PICTURES
    out: Annotated[Path | None, "Folder or file for the figure.", "DIR|FILE"] = None
    format: Annotated[
        Literal["table", "jsonl"] | None, "Format on stdout (default: tables on a terminal, JSON lines in a pipe)."
    ] = None

    def __post_init__(self) -> None:
        Writing.__post_init__(self)
        Look.__post_init__(self)

    @property
    def on_stdout(self) -> str:
        """The format: as asked, else tables on a terminal and JSON lines in a pipe."""
        return output.wanted_format(self.format, "jsonl")

    def place(self, name: str) -> Path | None:
        """Where a figure of this name goes, if anywhere."""
        return self.file or (self.out and self.out / f"{name}.{self.image}")


@with_options(StepsText, Steps, Telling, file=GROUPS)
def explain(asked: StepsText, steps: Steps, telling: Telling) -> int:
    """Show one head's arithmetic on a sentence, step by step.

    A query token is followed from the hidden states to the output projection. Each step is compared with the
    model's own value; the exit code is 1 if one differs. --out draws the effect of the scaling.
    """
    steps.check(asked)
    if steps.scaling:
        return run_scaling(telling, steps.seed)
    if steps.toy:
        return run_toy(telling, steps)
    head = steps.named

    from attnscope.inputs.tokens import check_expression
    from attnscope.observe.request import Request
    from attnscope.serve.questions import ExplainHead

    check_expression(steps.query)
    ask = asked.ask(read_text(asked, telling), Selected(), Request(query=steps.query))
    return finish(telling, answer(asked, replace(ask, engine="eager"), ExplainHead(head), telling))


def run_toy(telling: Telling, steps: Steps) -> int:
    """Explain the toy, every number of it."""
    from attnscope.api.explain import one_head
    from attnscope.steps.toy import HEADS, explain_toy

    _, number = one_head(steps.head or "L0H0", {0: HEADS})
    return finish(telling, explain_toy(number, read_query(steps.query)), whole=True)


def run_scaling(telling: Telling, seed: int) -> int:
    """Measure std(q . k) against d_k."""
    from attnscope.steps.toy import FORMULA, SAMPLES, measure_scaling

    spreads = measure_scaling(seed=seed)
    if place := telling.place("scaling"):
        from attnscope.figures.explain import Curve, save_scaling_curves

        curves = [
            Curve(
                label,
                *(np.array([getattr(spread, name) for spread in group]) for name in ("width", "measured", "predicted")),
            )
            for label, group in _by_case(spreads).items()
        ]
        note = f"points: measured on {SAMPLES} random pairs, seed {seed}; lines: √Var, {FORMULA}"
        with unwinding():
            style = telling.figure_style(command_line("explain", telling))
            save_scaling_curves(place, curves, note=note, style=style)
        output.log(f"wrote {place}", telling.quiet)
    output.emit(spread_table(spreads), telling.on_stdout, lambda: spread_picture(spreads))
    if telling.on_stdout == "table":
        output.log(f"{SAMPLES} random pairs of q and k for each number, seed {seed}; {FORMULA}", telling.quiet)
    return 0


def finish(telling: Telling, explanation: Explanation, whole: bool = False) -> int:
    """Draw the figure, print the steps, say which checks do not hold; returns the exit code."""
    if place := telling.place(f"{'toy' if whole else 'explain'}-{explanation.head}"):
        from attnscope.api.records import draw_scaling

        with unwinding():
            written = draw_scaling(explanation, place, telling.figure_style(command_line("explain", telling)))
        output.log(f"wrote {written}", telling.quiet)
    if telling.on_stdout == "table":
        output.show(steps_sheet(explanation, whole))
    else:
        from attnscope.steps.records import json_lines

        stream = output.data_stream("jsonl")
        for line in json_lines(explanation):
            stream.write(f"{line}\n".encode(errors="backslashreplace"))
        stream.flush()
    output.log_lines((f"check failed: {line}" for line in explanation.failures), quiet=False)
    return 1 if explanation.failures else 0


def read_query(text: str) -> int:
    """Of the toy: `last` is -1; UsageError for what is neither that nor a number."""
    if text == "last":
        return -1
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise UsageError(
            f"--query: expected a position from 0, or last, got {text!r}", "write --query 5, or --query last"
        )
    return int(text)


def spread_table(spreads: list[Spread]) -> pa.Table:
    """One row a measurement."""
    from attnscope.utils.tables import as_table

    names = ("mean_q", "std_q", "mean_k", "std_k")
    return as_table(
        {
            **{name: [getattr(spread.entries, name) for spread in spreads] for name in names},
            "d_k": [spread.width for spread in spreads],
            "std": [spread.measured for spread in spreads],
            "std_formula": [spread.predicted for spread in spreads],
            "std_scaled": [spread.scaled for spread in spreads],
        }
    )


def spread_picture(spreads: list[Spread]) -> Table:
    """A row a width, a column a case: std(q . k), and what is left after the division by sqrt(d_k)."""
    groups = _by_case(spreads)
    shown = Table(
        "d_k", "√d_k", *groups, box=SIMPLE_HEAD, padding=(0, 2, 0, 0), title="std(q·k) → after the division by √d_k"
    )
    for rows in zip(*groups.values(), strict=True):
        row = [f"{spread.measured:.2f} → {spread.scaled:.2f}" for spread in rows]
        shown.add_row(str(rows[0].width), f"{rows[0].width ** 0.5:.2f}", *row)
    shown.add_section()
    by_formula = [f"{group[0].predicted / group[0].width ** 0.5:.2f}" for group in groups.values()]
    shown.add_row("", "formula", *(f"{value}·√d_k → {value}" for value in by_formula))
    return shown


def _by_case(spreads: list[Spread]) -> dict[str, list[Spread]]:
    return {label: list(case) for label, case in groupby(spreads, lambda spread: spread.entries.label)}


def steps_sheet(explanation: Explanation, whole: bool = False) -> RenderableType:
    """All steps for a person; `whole` prints every matrix from corner to corner (for small ones)."""
    headline = Text(f"{explanation.head} of {explanation.source}, step by step, for query {explanation.query}: ")
    for place, label in enumerate(explanation.labels):
        chosen = place == explanation.query
        headline.append(f"[{_short(label)}]" if chosen else _short(label), "bold reverse" if chosen else "")
        headline.append(" ")
    parts: list[RenderableType] = [headline, Text()]
    for number, step in enumerate(explanation.steps, 1):
        body = [Text(step.formula, "cyan"), Text(step.why), *_tables(step, explanation, whole)]
        for check in step.checks:
            how = f"to {check.difference:.1e} (its numbers go up to {check.largest:.3g})"
            holds = f"✓ equals {check.against} {how if check.difference else 'exactly'}"
            differs = f"✗ differs from {check.against} by {check.difference:.1e} (allowed {check.allowed:.1e})"
            body.append(Text(holds, "green") if check.holds else Text(differs, "bold red"))
        if step.missing:
            body.append(Text(f"not shown: {step.missing}", "yellow"))
        elif not step.checks and number > 1:
            body.append(Text("checked by the steps that follow", "dim"))
        parts += [Text(f"{number:>2}  {step.name}", "bold"), *(Padding(part, (0, 0, 0, 4)) for part in body), Text()]
    return Group(*parts, _summary(explanation))


def _summary(explanation: Explanation) -> Text:
    checks = [check for step in explanation.steps for check in step.checks]
    weights_K, broken = explanation.weights_QK[explanation.query], len(explanation.failures)
    largest = [key for key in np.argsort(-weights_K, kind="stable")[:3] if weights_K[key] >= 0.01]
    most = ", ".join(f"{_short(explanation.labels[key])} ({weights_K[key]:.2f})" for key in largest)
    words = Text(f"In short: {_short(explanation.labels[explanation.query])} gives most weight to {most}.\n")
    if broken:
        return words.append(f"✗ {broken} of {len(checks)} checks do not hold", "bold red")
    worst = max((check.difference for check in checks), default=0.0)
    return words.append(f"✓ all {len(checks)} checks hold; the largest difference is {worst:.1e}", "bold green")


def _tables(step: Step, explanation: Explanation, whole: bool) -> Iterator[RenderableType]:
    """A step's tables: what each key gets, vectors of the query before and after it, heads side by side."""
    by_key = [array for array in step.numbers if "key" in array.axes]
    yield from (_heads(array, explanation) for array in step.numbers if "head" in array.axes)
    if whole:
        shown = [array for array in step.numbers if array.axes[0] == "query"][-1:] if by_key else step.numbers
        tables = [_matrix(array, explanation) for array in shown if "head" not in array.axes]
        yield Columns([_keys(by_key, step, explanation), *tables] if by_key else tables, padding=(0, 3))
        return
    first = step.numbers.index(by_key[0]) if by_key else len(step.numbers)
    yield from _vectors(step.numbers[:first], explanation)
    if by_key:
        yield _keys(by_key, step, explanation)
        yield from _vectors(step.numbers[first:], explanation)
    yield from _pairs(step, explanation)


def _vectors(numbers: Sequence[Numbers], explanation: Explanation) -> Iterator[Table]:
    """The query's row of each array: first numbers, how many more, length."""
    query = explanation.query
    shown = _table("", "shape", f"of token {query}, {_short(explanation.labels[query])}", _right("length"))
    for array in numbers:
        if array.axes in (("token", "dim"), ("query", "dim")):
            row_D, shape = array.values[query], " × ".join(map(str, array.values.shape))
            shown.add_row(Text(array.name), shape, Text(_vector(row_D)), _length(row_D))
    if shown.row_count:
        yield shown


def _pairs(step: Step, explanation: Explanation) -> Iterator[Table]:
    """How rotary positions turn the first pairs and the last of the query's q."""
    arrays, query = {array.name: array.values for array in step.numbers}, explanation.query
    if "angle t" not in arrays:
        return
    places, angles_M = arrays["places of a and b"], arrays["angle t"][query]
    before_D, after_D = arrays["q before"][query], arrays["q after"][query]
    shown = _table("a and b", "t", "(a, b) of q", "turned by t")
    for pair in sorted({*range(min(3, len(places))), len(places) - 1}):
        a, b, a_out, b_out = places[pair]
        angle = f"{query} × {_number(angles_M[pair] / query)} = " if query else ""
        shown.add_row(
            f"q[{a}], q[{b}]",
            f"{angle}{_number(angles_M[pair])}",
            f"({_number(before_D[a])}, {_number(before_D[b])})",
            f"({_number(after_D[a_out])}, {_number(after_D[b_out])})",
        )
    yield shown


def _heads(array: Numbers, explanation: Explanation) -> Table:
    """The query's vector of each head, the chosen head marked."""
    rows_HD = array.values[explanation.query]
    mine = int(explanation.head.partition("H")[2])
    shown = _table("head", f"its output for token {explanation.query}", _right("length"))
    kept = range(len(rows_HD)) if len(rows_HD) <= MOST_HEADS else sorted({*range(KEPT_HEADS), mine})
    for head in kept:
        mark, style = (" ←", "bold") if head == mine else ("", "")
        shown.add_row(f"{head}{mark}", _vector(rows_HD[head]), _length(rows_HD[head]), style=style)
    if len(kept) < len(rows_HD):
        shown.add_row("", f"… {len(rows_HD) - len(kept)} more heads", "", style="dim")
    return shown


def _keys(arrays: Sequence[Numbers], step: Step, explanation: Explanation) -> Table:
    """What the query makes of each key: one row per key, one column per array; more than 12 keys are shortened."""
    query, labels, kept = explanation.query, explanation.labels, _kept(explanation)
    columns = [(array, array.values[query] if array.axes[0] == "query" else array.values) for array in arrays]
    # A score is spelled out, `0·1 + 2·(−1)`, where the vectors are short enough to be shown whole.
    numbers, terms = {array.name: array.values for array in step.numbers}, list[str]()
    if {"q", "k"} <= set(numbers) and numbers["q"].shape[1] <= SHOWN:
        pairs = (zip(numbers["q"][query], k_D, strict=True) for k_D in numbers["k"])
        terms = [
            " + ".join(f"{_number(a)}·{f'({_number(b)})' if b < 0 else _number(b)}" for a, b in pair) for pair in pairs
        ]
    shown = _table(_right("key"), "token", *(_key_column(*column) for column in columns))
    if terms:
        shown.columns[-1].justify = "left"
    for key in kept:
        row = [_entry(values[key]) for _, values in columns]
        if terms:
            row[-1] = f"{terms[key]} = {row[-1]}"
        if step.name == "softmax":
            row.append("█" * round(BAR * float(columns[-1][1][key])))
        style = "" if explanation.visible_QK[query, key] else "dim"
        shown.add_row(str(key), Text(_short(labels[key])), *map(Text, row), style=style)
    rest = np.setdiff1d(np.arange(len(labels)), kept)
    if len(rest):
        hidden = int((~explanation.visible_QK[query, rest]).sum())  # which the query cannot see
        some = f", {hidden} of them hidden" if hidden < len(rest) else ", hidden"
        more = f"… {len(rest)} more{some * bool(hidden)}"
        shown.add_row("", more, *_sums(columns, rest), style="dim")
    sums = _sums(columns, np.arange(len(labels)))
    if any(sums):
        shown.add_section()
        shown.add_row("", "sum", *sums)
    return shown


def _key_column(array: Numbers, values: np.ndarray) -> Column:
    """Headed by the array's name; of long vectors also by how much of them is shown."""
    if array.axes[-1] != "dim":
        return _right(array.name)
    if values.shape[1] <= SHOWN:
        return Column(Text(array.name))
    of = "" if "×" in array.name else f" of {values.shape[1]}"
    return Column(Text(f"{array.name} (first {IN_COLUMN}{of})"))


def _entry(value: np.ndarray | np.generic) -> str:
    """A number, or a vector's first numbers: the column's title says how many there are."""
    shortened = np.ndim(value) and len(np.asarray(value)) > SHOWN
    return _cell(np.asarray(value)[:IN_COLUMN] if shortened else value)


def _sums(columns: Sequence[tuple[Numbers, np.ndarray]], keys: np.ndarray) -> list[str]:
    """The sum over these keys in the columns that add up to something."""
    return [_entry(values[keys].sum(0)) if array.name in SUMMED else "" for array, values in columns]


def _kept(explanation: Explanation) -> list[int]:
    """The keys that are shown, in order: all, or those with the largest weights and a hidden one."""
    weights_K, visible_K = explanation.weights_QK[explanation.query], explanation.visible_QK[explanation.query]
    if len(weights_K) <= MOST_KEYS:
        return list(range(len(weights_K)))
    strongest = [key for key in np.argsort(-weights_K, kind="stable").tolist() if visible_K[key]]
    return sorted([*strongest[:KEPT_KEYS], *np.flatnonzero(~visible_K)[:1].tolist()])


def _matrix(array: Numbers, explanation: Explanation) -> Table:
    """Every number of a small matrix, tokens at its sides, the query's row in bold."""
    rows, columns = array.axes
    of_tokens, labels = rows != "in", [_short(label) for label in explanation.labels]
    names = labels if columns == "key" else map(str, range(array.values.shape[1]))
    of_all = " of every query" if rows == "query" and columns == "key" else ""
    shown = _table("", *map(_right, names), title=array.name + of_all)
    for row, values in enumerate(array.values):
        label = Text(labels[row]) if of_tokens else Text(f"in {row}", "dim")
        mine = of_tokens and row == explanation.query
        shown.add_row(label, *(_cell(value) for value in values), style="bold" if mine else "")
    return shown


def _cell(value: np.ndarray | np.generic) -> str:
    if np.ndim(value):
        return _vector(np.asarray(value))
    return ("yes" if value else "no") if isinstance(value, np.bool_) else _number(float(value))


def _vector(row_D: np.ndarray) -> str:
    """`0.123 -0.200 1.300 0.010 … 28 more`; up to four numbers are shown whole."""
    shown = row_D[:SHOWN]
    tiny = 0 < float(np.abs(shown).max()) < 1e-3  # else three decimals for all of them
    # Three decimals, whole numbers without: 0.000 is what is not 0, and too small for them.
    rounded = [float(value) if tiny else round(float(value), 3) + 0.0 for value in shown]
    numbers = ["0.000" if near == 0 and value else _number(near) for near, value in zip(rounded, shown, strict=True)]
    first = " ".join(number.rjust(6) for number in numbers)
    return first if len(row_D) <= SHOWN else f"{first} … {len(row_D) - SHOWN} more"


def _number(value: float) -> str:
    """Whole numbers as they are, others with three decimals, hidden logits as −∞."""
    return "−∞" if value < HIDDEN else cells.exact(value)


def _length(row_D: np.ndarray) -> str:
    return _number(float(np.linalg.norm(row_D)))


def _table(*columns: Column | str, title: str = "") -> Table:
    shown = Text(title) if title else None
    return Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, title=shown)


def _right(header: str) -> Column:
    return Column(Text(header), justify="right")


def _short(label: str) -> str:
    return cells.shortened(label, LONGEST_LABEL)
