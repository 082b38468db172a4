"""The steps of an explanation as rich tables: one query followed from start to end, or in a toy every number.

Q query, K key, T token, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from attnscope.steps.records import HIDDEN, SUMMED
from attnscope.utils import display as cells

if TYPE_CHECKING:
    from attnscope.steps.records import Explanation, Numbers, Step

FIRST = 4  # numbers shown of a vector
IN_COLUMN = 3  # and of a longer one in a column beside others
BAR = 12  # characters of a weight of 1
MOST_KEYS, KEPT_KEYS = 12, 10  # more keys than that: the strongest are kept
MOST_HEADS, KEPT_HEADS = 9, 3  # more heads than that: the first are kept, and the chosen one
LONGEST_LABEL = 16


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
    if {"q", "k"} <= set(numbers) and numbers["q"].shape[1] <= FIRST:
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
    if values.shape[1] <= FIRST:
        return Column(Text(array.name))
    of = "" if "×" in array.name else f" of {values.shape[1]}"
    return Column(Text(f"{array.name} (first {IN_COLUMN}{of})"))


def _entry(value: np.ndarray | np.generic) -> str:
    """A number, or a vector's first numbers: the column's title says how many there are."""
    shortened = np.ndim(value) and len(np.asarray(value)) > FIRST
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
    shown = row_D[:FIRST]
    tiny = 0 < float(np.abs(shown).max()) < 1e-3  # else three decimals for all of them
    # Three decimals, whole numbers without: 0.000 is what is not 0, and too small for them.
    rounded = [float(value) if tiny else round(float(value), 3) + 0.0 for value in shown]
    numbers = ["0.000" if near == 0 and value else _number(near) for near, value in zip(rounded, shown, strict=True)]
    first = " ".join(number.rjust(6) for number in numbers)
    return first if len(row_D) <= FIRST else f"{first} … {len(row_D) - FIRST} more"


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
