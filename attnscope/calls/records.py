"""What the records of all calls have in common: how they are shown, and how they are drawn."""

from __future__ import annotations

import html
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.drawing import Picture

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN_ROWS = 12  # of a table in a notebook
LETTERS = 60  # of a cell there


class Record(ABC):
    """What a call found: a line, a table, in most cases a figure.

    >>> attnscope.parity(attnscope.load("demo")).table().to_pandas()
    """

    @property
    @abstractmethod
    def line(self) -> str:
        """What was found, in a line."""

    @abstractmethod
    def table(self) -> pa.Table:
        """The rows that the command of this name prints in a pipe."""

    def _picture(self) -> Picture | None:
        """What a notebook shows below the table."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.line}"

    def _repr_html_(self) -> str:
        """The first rows of the table, and the figure where there is one."""
        table, picture = self.table(), self._picture()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.column_names)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(value))}</td>' for value in row.values())}</tr>"
            for row in table.slice(0, SHOWN_ROWS).to_pylist()
        )
        left = len(table) - SHOWN_ROWS
        more = f"<p>{left} more rows in table()</p>" if left > 0 else ""
        drawn = picture._repr_html_() if picture else ""
        return f"<div><pre>{html.escape(repr(self))}</pre><table><tr>{head}</tr>{rows}</table>{more}{drawn}</div>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    said = "" if value is None else str(value)
    return said if len(said) <= LETTERS else said[: LETTERS - 1] + "…"


def picture_of(title: str, draw: Callable[[Path], Path]) -> Picture:
    """A picture in memory, of what writes a PNG into a folder and returns its path."""
    with tempfile.TemporaryDirectory(prefix="attnscope-") as folder:
        return Picture(draw(Path(folder)).read_bytes(), title)
