"""Values as the text of a cell, and tables of such cells, as a person reads them.

Values are numbers, p values, bytes, names of heads, long texts cut short. Tables on a terminal, pictures and messages
print a value in one way. A value that is missing, None or NaN, is a dash, and no number is printed as -0.00.

A `Sheet` has rows and columns, for a terminal through rich, for a notebook as HTML. rich is loaded when a sheet is
measured or shown, and not before.

    Sheet([{"set": "L1H4", "p": 0.012}], [Column("set", align="left"), Column("p", display.p_value)])
"""

from __future__ import annotations

import html
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

MISSING = "-"
DASH, MINUS = "–", "−"  # a missing value and a sign, as pictures print them


def _is_missing(value: float | None) -> bool:
    """Whether a value is None or NaN."""
    return value is None or value != value


def number(value: float | None, decimals: int = 2) -> str:
    """`0.25`."""
    return MISSING if _is_missing(value) else f"{value:z.{decimals}f}"


def signed(value: float | None, decimals: int = 2) -> str:
    """`+0.25`."""
    return MISSING if _is_missing(value) else f"{value:+z.{decimals}f}"


def number_of(count: int, unit: str) -> str:
    """A number with its unit.

    >>> number_of(1, "text"), number_of(2, "text")
    ('1 text', '2 texts')
    """
    return f"{count} {unit}{'s' * (count != 1)}"


def model_name(name: str) -> str:
    """A model's name as a picture prints it: of a path the folder's name alone.

    >>> model_name("/home/me/models/stories260K-llama"), model_name("Qwen/Qwen3-0.6B")
    ('stories260K-llama', 'Qwen/Qwen3-0.6B')
    """
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    is_path = name[:1] in ("/", ".", "~") or "\\" in name or len(parts) > 2
    return parts[-1] if is_path and parts and parts[-1].strip(".") else name


def effect(value: float | None) -> str:
    """`+0.250`; 0.000 has no sign, since an effect that is too small to be printed has no direction."""
    return "0.000" if value is not None and abs(value) < 0.0005 else signed(value, 3)


def interval(low: float | None, high: float | None, of: Callable[[Any], str] = effect) -> str:
    """`[0.200, 0.300]`, an open end a dash; of: how the number is printed whose interval it is."""
    return f"[{of(low).lstrip('+')}, {of(high).lstrip('+')}]"


def score(value: float | None) -> str:
    """`0.25`, `120`: no decimals from 100."""
    return number(value, 0 if value is not None and abs(value) >= 100 else 2)


def share(value: float | None) -> str:
    """`0.250`; `<0.001` and `>-0.001` of what is too small for three decimals, and not 0."""
    if value is None or value == 0 or not abs(value) < 0.0005:
        return number(value, 3)
    return "<0.001" if value > 0 else ">-0.001"


def divergence(value: float) -> str:
    """`0.0123`, `1.2e-05`; `0` of what is equal, not merely alike."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if value < 1e-3 else number(value, 4)


def p_value(value: float | None) -> str:
    """`.012`, `<.001`."""
    if value is not None and value < 0.001:
        return "<.001"
    return number(value, 3).lstrip("0")


def percentage(share: float | None) -> str:
    """`82 %`, of 0.82."""
    return MISSING if share is None or _is_missing(share) else f"{number(100 * share, 0)} %"


def exact(value: float) -> str:
    """A number to calculate with: whole ones as they are, others with three decimals, or with two digits: `1.2e−05`."""
    if value == int(value) and abs(value) < 1e4:
        return typeset(f"{int(value)}")
    return typeset(f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}")


def power(value: float) -> str:
    """`3e-4` rather than `3e-04`."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def printed(value: float | None, decimals: int = 2) -> str:
    """`−0.25`, as pictures print a number."""
    return DASH if _is_missing(value) else typeset(number(value, decimals))


def decimals_of(largest: float) -> int:
    """Decimals of the numbers of one table: 2, one more where all are so small that 2 show a single digit."""
    return 3 if largest < 0.1 else 2


def typeset(text: str) -> str:
    """A number with a minus sign for its hyphen."""
    return text.replace("-", MINUS)


def decimal_bytes(count: float) -> str:
    """Bytes by powers of 1000: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def layer_name(layer: int) -> str:
    """`L3`, and `linear L3` of a layer that says its stack."""
    return f"{getattr(layer, 'prefix', '')}L{layer:d}"


def head_name(layer: int, head: int, by_kv: bool = False) -> str:
    """`L3H1`; by_kv: `L3KV1`, the heads of a kv head together; of a layer that says its stack `linear L3H1`."""
    return f"{layer_name(layer)}{'KV' if by_kv else 'H'}{head}"


def head_names(heads: Iterable[tuple[int, int]]) -> str:
    """`L3H1 L3H2`."""
    return " ".join(head_name(layer, head) for layer, head in heads)


def number_list(numbers: Sequence[int]) -> str:
    """Numbers of layers or heads, in order: `0 to 3`, `only 0`, `1, 3`."""
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"only {numbers[0]}"
    return ", ".join(map(str, numbers))


def shortened(text: str, most: int) -> str:
    """The beginning of a text that is longer than so many characters, with an ellipsis."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


Row = Mapping[str, Any]
Fit = Literal["whole", "cut", "wrap"]
GAP = 2  # characters after a column


def plain(value: Any) -> str:
    """A value as it is; None as nothing."""
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Column:
    """What a column shows of every row.

    title: its heading. format: a value as a cell; a text stays as it is, and a row without the name has an empty cell.
    name: of the value in a row, where that is not the title. fit: what happens on a narrow screen. whole: the column
    gives no room away while others can; cut: its cells end in `…`; wrap: they continue in the next line. min_width: the
    characters that it takes at least.
    """

    title: str
    format: Callable[[Any], str] = plain
    name: str = ""
    align: Literal["left", "right"] = "right"
    fit: Fit = "whole"
    min_width: int | None = None

    @property
    def key(self) -> str:
        """The name of its value in a row."""
        return self.name or self.title

    def cell(self, row: Row) -> str:
        """What it shows of a row."""
        value = row.get(self.key, "")
        return value if isinstance(value, str) else self.format(value)

    def width(self, rows: Sequence[Row]) -> int:
        """The characters that it takes, with the gap after it."""
        from rich.cells import cell_len

        lines = "\n".join([self.title, *map(self.cell, rows)]).split("\n")
        return max(map(cell_len, lines)) + GAP


@dataclass(frozen=True)
class Sheet:
    """A table as it is shown. dim: the rows from there on are dim, below a line."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    dim: int | None = None

    def __rich__(self) -> RichTable:
        """The table of a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in self.columns:
            title, whole = _text(column.title, column), column.fit == "whole"
            table.add_column(title, justify=column.align, no_wrap=whole, min_width=column.min_width)
        for place, row in enumerate(self.rows):
            if place == self.dim:
                table.add_section()
            style = "dim" if self.dim is not None and place >= self.dim else None
            table.add_row(*(_text(column.cell(row), column) for column in self.columns), style=style)
        return table

    def _repr_html_(self) -> str:
        """The table of a notebook."""
        rows = ([column.cell(row) for column in self.columns] for row in self.rows)
        return html_table([column.title for column in self.columns], rows)


def html_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of HTML with a row of titles; cells are text, and no HTML in them takes effect."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def fitting(columns: Sequence[Column], rows: Sequence[Row], room: int, always: Container[str] = ()) -> list[Column]:
    """The columns that so many characters have room for, the first ones first; always: names of those that stay."""
    chosen = []
    for column in sorted(columns, key=lambda column: column.key not in always):
        width = column.width(rows)
        if width <= room or column.key in always:
            chosen.append(column)
            room -= width
    return [column for column in columns if column in chosen]


def _text(text: str, column: Column) -> Text:
    """A cell, or a heading; what does not fit is cut, unless the column wraps."""
    from rich.text import Text

    return Text(text, no_wrap=column.fit != "wrap", overflow="ellipsis")
