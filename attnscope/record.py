"""What a call or a study found, as Python and notebooks show it: a line, and the first rows of its table."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN_ROWS = 12  # of a table in a notebook
LETTERS = 60  # of a cell there


class TableRecord(ABC):
    """What was found, with a table.

    >>> attnscope.parity(attnscope.load("demo")).table().to_pandas()
    """

    @property
    @abstractmethod
    def line(self) -> str:
        """What was found, in a line."""

    @abstractmethod
    def table(self) -> pa.Table:
        """The rows that the command of this name prints in a pipe."""

    def _below(self) -> str:
        """What a notebook shows below the table, as HTML."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.line}"

    def _repr_html_(self) -> str:
        """The first rows of the table, and what is below it."""
        table = self.table()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.column_names)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(value))}</td>' for value in row.values())}</tr>"
            for row in table.slice(0, SHOWN_ROWS).to_pylist()
        )
        left = len(table) - SHOWN_ROWS
        more = f"<p>{left} more rows in table()</p>" if left > 0 else ""
        shown = f"<table><tr>{head}</tr>{rows}</table>{more}{self._below()}"
        return f"<div><pre>{html.escape(repr(self))}</pre>{shown}</div>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    said = "" if value is None else str(value)
    return said if len(said) <= LETTERS else said[: LETTERS - 1] + "…"
