"""Rows and columns as a person reads them: on a terminal through rich, in a notebook as HTML.

    Sheet([{"set": "L1H4", "p": 0.012}], [Column("set", align="left"), Column("p", cells.p_value)])

rich is loaded when a sheet is measured or shown, and not before.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

Row = Mapping[str, Any]
GAP = 2  # characters after a column


def plain(value: Any) -> str:
    """A value as it is; None as nothing."""
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Column:
    """What a column shows of every row.

    title: its heading. format: a value as a cell; a text stays as it is, and a row without the name has an empty cell.
    name: of the value in a row, where that is not the title. fit: what happens on a narrow screen. whole: the column
    gives no room away while others can; cut: its cells end in `…`; wrap: they go on in the next line.
    """

    title: str
    format: Callable[[Any], str] = plain
    name: str = ""
    align: Literal["left", "right"] = "right"
    fit: Literal["whole", "cut", "wrap"] = "whole"

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
            table.add_column(_text(column.title, column), justify=column.align, no_wrap=column.fit == "whole")
        for place, row in enumerate(self.rows):
            if place == self.dim:
                table.add_section()
            style = "dim" if self.dim is not None and place >= self.dim else None
            table.add_row(*(_text(column.cell(row), column) for column in self.columns), style=style)
        return table

    def _repr_html_(self) -> str:
        """The table of a notebook."""
        head = "".join(f"<th>{html.escape(column.title)}</th>" for column in self.columns)
        rows = ("".join(f"<td>{html.escape(column.cell(row))}</td>" for column in self.columns) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def fitting(columns: Sequence[Column], rows: Sequence[Row], room: int, always: Container[str] = ()) -> list[Column]:
    """The columns that so many characters have room for, the first ones first; always: names of those that stay."""
    kept = []
    for column in sorted(columns, key=lambda column: column.key not in always):
        width = column.width(rows)
        if width <= room or column.key in always:
            kept.append(column)
            room -= width
    return [column for column in columns if column in kept]


def _text(text: str, column: Column) -> Text:
    """A cell, or a heading; what does not fit is cut, unless the column wraps."""
    from rich.text import Text

    return Text(text, no_wrap=column.fit != "wrap", overflow="ellipsis")
