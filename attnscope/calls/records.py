"""What the records of all calls have in common: how they are shown, and how they are drawn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from attnscope.drawing import Picture
from attnscope.tables import TableRecord


class Record(TableRecord):
    """What a call found: a line, a table, in most cases a figure."""

    def _picture(self) -> Picture | None:
        """What a notebook shows below the table."""
        return None

    def _below(self) -> str:
        picture = self._picture()
        return picture._repr_html_() if picture else ""


def picture_of(title: str, draw: Callable[[Path], Path]) -> Picture:
    """A picture in memory, of what writes a PNG into a folder and returns its path."""
    with tempfile.TemporaryDirectory(prefix="attnscope-") as folder:
        return Picture(draw(Path(folder)).read_bytes(), title)
