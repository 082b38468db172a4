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
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from attnscope.explain import Check, Explanation, Numbers, Step

FIRST = 4  # numbers shown of a long vector
IN_COLUMN = 3  # and in a column beside others
WHOLE = 4  # up to so many, a vector is shown whole
BAR = 12  # characters of a weight of 1
MOST_KEYS, KEPT_KEYS = 12, 10  # more keys than that: the strongest are kept
MOST_HEADS, KEPT_HEADS = 9, 3  # more heads than that: the first are kept, and the chosen one
LONGEST_LABEL = 16
HIDDEN = -30000.0  # a masked key's logit in the smallest of dtypes
SUMMED = ("exp(logit − largest)", "weight", "weight × v")


def rendered(explanation: Explanation, whole: bool = False) -> RenderableType:
    """All steps for a person; `whole` prints every matrix from corner to corner (for small ones)."""
    parts: list[RenderableType] = [_headline(explanation), Text()]
    for number, step in enumerate(explanation.steps, 1):
        parts.append(Text(f"{number:>2}  {step.name}", "bold"))
        parts += [Padding(Text(step.formula, "cyan"), (0, 0, 0, 4)), Padding(Text(step.why), (0, 0, 0, 4))]
        parts += [Padding(part, (0, 0, 0, 4)) for part in _tables(step, explanation, whole)]
        parts += [Padding(_verdict(check), (0, 0, 0, 4)) for check in step.checks]
        if not (step.checks or step.missing) and number > 1:
            parts.append(Padding(Text("checked by the steps that follow", "dim"), (0, 0, 0, 4)))
        if step.missing:
            parts.append(Padding(Text(f"not shown: {step.missing}", "yellow"), (0, 0, 0, 4)))
        parts.append(Text())
    return Group(*parts, _summary(explanation))


def _headline(explanation: Explanation) -> Text:
    """Which head, which text, which query."""
    words = Text(f"{explanation.head} of {explanation.source}, step by step, for query {explanation.query}: ")
    for place, label in enumerate(explanation.labels):
        chosen = place == explanation.query
        words.append(f"[{_short(label)}]" if chosen else _short(label), "bold reverse" if chosen else "")
        words.append(" ")
    return words


def _verdict(check: Check) -> Text:
    if check.holds:
        how = f"to {check.difference:.1e} (its numbers go up to {check.largest:.3g})" if check.difference else "exactly"
        return Text(f"✓ equals {check.against} {how}", "green")
    return Text(f"✗ differs from {check.against} by {check.difference:.1e} (allowed {check.allowed:.1e})", "bold red")


def _summary(explanation: Explanation) -> Text:
    checks = [check for step in explanation.steps for check in step.checks]
    weights_K, broken = explanation.weights_QK[explanation.query], len(explanation.failures)
    largest = [key for key in np.argsort(-weights_K, kind="stable")[:3] if weights_K[key] >= 0.01]
    found = ", ".join(f"{_short(explanation.labels[key])} ({weights_K[key]:.2f})" for key in largest)
    words = Text(f"In short: {_short(explanation.labels[explanation.query])} gives most weight to {found}.\n")
    if broken:
        return words.append(f"✗ {broken} of {len(checks)} checks do not hold", "bold red")
    worst = max((check.difference for check in checks), default=0.0)
    return words.append(f"✓ all {len(checks)} checks hold; the largest difference is {worst:.1e}", "bold green")


def _tables(step: Step, explanation: Explanation, whole: bool) -> Iterator[RenderableType]:
    """A step's tables: what each key gets, vectors of the query before and after it, heads side by side."""
    by_key = [one for one in step.numbers if "key" in one.axes]
    for one in step.numbers:
        if "head" in one.axes:
            yield _heads(one, explanation)
    if by_key and whole:
        last = [one for one in step.numbers if one.axes[0] == "query"][-1]
        yield Columns([_keys(by_key, step, explanation), _matrix(last, explanation)], padding=(0, 3))
    elif whole:
        yield Columns([_matrix(one, explanation) for one in step.numbers if "head" not in one.axes], padding=(0, 3))
    else:
        first = step.numbers.index(by_key[0]) if by_key else len(step.numbers)
        yield from _vectors(step.numbers[:first], explanation)
        if by_key:
            yield _keys(by_key, step, explanation)
            yield from _vectors(step.numbers[first:], explanation)
        yield from _pairs(step, explanation)


def _vectors(numbers: Sequence[Numbers], explanation: Explanation) -> Iterator[Table]:
    """The query's row of each array: first numbers, how many more, length."""
    vectors = [one for one in numbers if one.axes in (("token", "dim"), ("query", "dim"))]
    if not vectors:
        return
    shown = _table()
    shown.add_column("")
    shown.add_column("shape")
    shown.add_column(f"of token {explanation.query}, {_short(explanation.labels[explanation.query])}")
    shown.add_column("length", justify="right")
    for one in vectors:
        row_D = one.values[explanation.query]
        shape = " × ".join(map(str, one.values.shape))
        shown.add_row(Text(one.name), shape, Text(_vector(row_D)), _length(row_D))
    yield shown


def _pairs(step: Step, explanation: Explanation) -> Iterator[Table]:
    """How rotary positions turn the first pairs and the last of the query's q."""
    arrays = {one.name: one.values for one in step.numbers}
    if "angle t" not in arrays:
        return
    places, angles_M = arrays["places of a and b"], arrays["angle t"][explanation.query]
    names = [one.name for one in step.numbers if one.name.startswith("q ")]
    before_D, after_D = (arrays[name][explanation.query] for name in names[:2])
    shown = _table()
    for title in ("a and b", "t", "(a, b) of q", "turned by t"):
        shown.add_column(title)
    for pair in sorted({*range(min(3, len(places))), len(places) - 1}):
        a, b, a_out, b_out = places[pair]
        frequency = angles_M[pair] / explanation.query if explanation.query else float("nan")
        angle = f"{explanation.query} × {_number(frequency)} = " if explanation.query else ""
        shown.add_row(
            f"q[{a}], q[{b}]",
            f"{angle}{_number(angles_M[pair])}",
            f"({_number(before_D[a])}, {_number(before_D[b])})",
            f"({_number(after_D[a_out])}, {_number(after_D[b_out])})",
        )
    yield shown


def _heads(one: Numbers, explanation: Explanation) -> Table:
    """The query's vector of each head, the chosen head marked."""
    rows_HD = one.values[explanation.query]
    mine = int(explanation.head.partition("H")[2])
    shown = _table()
    for name in ("head", f"its output for token {explanation.query}"):
        shown.add_column(name)
    shown.add_column("length", justify="right")
    kept = range(len(rows_HD)) if len(rows_HD) <= MOST_HEADS else sorted({*range(KEPT_HEADS), mine})
    for head in kept:
        shown.add_row(
            f"{head}{' ←' if head == mine else ''}",
            _vector(rows_HD[head]),
            _length(rows_HD[head]),
            style="bold" if head == mine else "",
        )
    if len(kept) < len(rows_HD):
        shown.add_row("", f"… {len(rows_HD) - len(kept)} more heads", "", style="dim")
    return shown


def _keys(arrays: Sequence[Numbers], step: Step, explanation: Explanation) -> Table:
    """What the query makes of each key: a row a key, a column an array; more than 12 keys are shortened."""
    query, kept = explanation.query, _kept(explanation)
    columns = [(one, one.values[query] if one.axes[0] == "query" else one.values) for one in arrays]
    terms, bars = _terms(step, query), step.name == "softmax"
    shown = _table()
    shown.add_column("key", justify="right")
    shown.add_column("token")
    for one, values in columns:
        spelled = bool(terms) and one is arrays[-1]
        shown.add_column(Text(_title(one, values)), justify="left" if one.axes[-1] == "dim" or spelled else "right")
    for key in kept:
        cells = [_entry(values[key]) for _, values in columns]
        if terms:
            cells[-1] = f"{terms[key]} = {cells[-1]}"
        bar = ["█" * round(BAR * float(columns[-1][1][key]))] if bars else []
        style = "" if explanation.visible_QK[query, key] else "dim"
        shown.add_row(str(key), Text(_short(explanation.labels[key])), *map(Text, cells + bar), style=style)
    rest = np.setdiff1d(np.arange(len(explanation.labels)), kept)
    if len(rest):
        shown.add_row("", _rest(rest, explanation), *_sums(columns, rest), style="dim")
    sums = _sums(columns, np.arange(len(explanation.labels)))
    if any(sums):
        shown.add_section()
        shown.add_row("", "sum", *sums)
    return shown


def _title(one: Numbers, values: np.ndarray) -> str:
    """A column's name; of long vectors also how much of them is shown."""
    if one.axes[-1] != "dim" or values.shape[1] <= WHOLE:
        return one.name
    return (
        f"{one.name} (first {IN_COLUMN})" if "×" in one.name else f"{one.name} (first {IN_COLUMN} of {values.shape[1]})"
    )


def _entry(value: np.ndarray | np.generic) -> str:
    """A number, or a vector's first numbers: the column's title says how many there are."""
    if not np.ndim(value):
        return _cell(value)
    row_D = np.asarray(value)
    return _vector(row_D if len(row_D) <= WHOLE else row_D[:IN_COLUMN])


def _terms(step: Step, query: int) -> list[str]:
    """A score spelled out, `0·1 + 2·(−1)`, where the vectors are short enough to be shown whole."""
    arrays = {one.name: one.values for one in step.numbers}
    if not {"q", "k"} <= set(arrays) or arrays["q"].shape[1] > WHOLE:
        return []
    return [
        " + ".join(
            f"{_number(a)}·{f'({_number(b)})' if b < 0 else _number(b)}"
            for a, b in zip(arrays["q"][query], k_D, strict=True)
        )
        for k_D in arrays["k"]
    ]


def _sums(columns: Sequence[tuple[Numbers, np.ndarray]], keys: np.ndarray) -> list[str]:
    """The sum over these keys in the columns that add up to something."""
    return [_entry(values[keys].sum(0)) if one.name in SUMMED else "" for one, values in columns]


def _rest(keys: np.ndarray, explanation: Explanation) -> str:
    """How many keys are not shown, and how many of them the query cannot see."""
    hidden = int((~explanation.visible_QK[explanation.query, keys]).sum())
    return f"… {len(keys)} more" + (
        f", {hidden} of them hidden" if 0 < hidden < len(keys) else ", hidden" * bool(hidden)
    )


def _kept(explanation: Explanation) -> list[int]:
    """The keys that are shown, in order: all, or those with the largest weights and a hidden one."""
    weights_K, visible_K = explanation.weights_QK[explanation.query], explanation.visible_QK[explanation.query]
    if len(weights_K) <= MOST_KEYS:
        return list(range(len(weights_K)))
    strongest = [key for key in np.argsort(-weights_K, kind="stable").tolist() if visible_K[key]]
    return sorted([*strongest[:KEPT_KEYS], *np.flatnonzero(~visible_K)[:1].tolist()])


def _matrix(one: Numbers, explanation: Explanation) -> Table:
    """Every number of a small matrix, tokens at its sides, the query's row in bold."""
    shown = _table(one.name)
    rows, columns = one.axes
    if rows != "in":
        shown.add_column("")
    for column in range(one.values.shape[1]):
        shown.add_column(_short(explanation.labels[column]) if columns == "key" else f"{column}", justify="right")
    for row, values in enumerate(one.values):
        label = [Text(_short(explanation.labels[row]))] if rows != "in" else []
        mine = rows != "in" and row == explanation.query
        shown.add_row(*label, *(_cell(value) for value in values), style="bold" if mine else "")
    return shown


def _cell(value: np.ndarray | np.generic) -> str:
    if np.ndim(value):
        return _vector(np.asarray(value))
    return ("yes" if value else "no") if isinstance(value, np.bool_) else _number(float(value))


def _vector(row_D: np.ndarray) -> str:
    """`0.1234 -0.2000 1.3000 0.0100 … 28 more`; up to four numbers are shown whole."""
    shown = row_D[:FIRST]
    tiny = 0 < float(np.abs(shown).max()) < 1e-3  # else four decimals for all of them
    first = " ".join((_number(float(value)) if tiny else _decimals(float(value))).rjust(7) for value in shown)
    return first if len(row_D) <= WHOLE else f"{first} … {len(row_D) - FIRST} more"


def _decimals(value: float) -> str:
    """Four decimals, whole numbers without, however small."""
    rounded = round(value, 4) + 0.0
    return "0.0000" if rounded == 0 and value else _number(rounded)


def _number(value: float) -> str:
    """Whole numbers as they are, others with four decimals, hidden logits as −∞."""
    if value < HIDDEN:
        return "−∞"
    if value == int(value) and abs(value) < 1e4:
        return f"{int(value)}".replace("-", "−")
    small_or_large = not 1e-3 <= abs(value) < 1e4
    return (f"{value:.1e}" if small_or_large else f"{value:.4f}").replace("-", "−")


def _length(row_D: np.ndarray) -> str:
    return _number(float(np.linalg.norm(row_D)))


def _table(title: str = "") -> Table:
    return Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=Text(title) if title else None,
    )


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
