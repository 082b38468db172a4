"""What the records of all calls have in common: how they are shown, drawn and written."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attnscope.export.drawing import Picture
from attnscope.figures import Style
from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.utils.tables import TableRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.model.loaded import LoadedModel
    from attnscope.studies.parts import StudyRecord
    from attnscope.studies.study import Study

PASSED = "tokens x layers"


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


AnyStudy = TypeVar("AnyStudy", bound="Study[Any]")
Found = TypeVar("Found", bound="StudyRecord")


@dataclass(frozen=True, repr=False)
class StudyResult(Record, Generic[AnyStudy, Found]):
    """A study that was run, and what it found: with a line, a table, a figure and files."""

    study: AnyStudy
    found: Found

    @property
    def model(self) -> LoadedModel:
        """The model that was studied."""
        return self.study.model

    @property
    @abstractmethod
    def title(self) -> str:
        """Of the figure."""

    @abstractmethod
    def draw(self, folder: Path, style: Style = Style()) -> list[Path]:
        """Draw into a folder; the paths, that of `figure` first."""

    @property
    def line(self) -> str:
        return self.found.line

    def table(self) -> pa.Table:
        """The rows that the command prints in a pipe; see the table of `found`."""
        return self.found.table()

    def figure(self, style: Style = Style()) -> Picture:
        """The first of the pictures that a folder gets."""
        return picture_of(self.title, lambda folder: self.draw(folder, replace(style, image="png"))[0])

    def _picture(self) -> Picture | None:
        return self.figure()

    def save(self, folder: Path) -> None:
        """Write tables and facts into a folder that is this study's already."""
        self.found.save(folder)

    def export(self, folder: str | Path, *, force: bool = False, style: Style = Style()) -> list[Path]:
        """Write tables, facts and pictures; the paths.

        Raises UsageError for a folder that holds another study, unless force says to write over it.
        """
        into = Path(folder)
        self.study.claim(into, force)
        self.save(into)
        self.draw(into, style)
        return sorted(path for path in into.iterdir() if path.is_file() and not path.name.startswith("."))


def run_study(
    study: Study[Found],
    out: str | Path | None,
    force: bool,
    tell: Teller = SILENT,
    total: int | None = None,
    unit: str = PASSED,
) -> Found:
    """Run a study, with a folder there; total: what it takes, in the unit that its progress counts."""
    with tell.stage(study.stage, total, unit if total else "") as advance:
        return study.run(None if out is None else Path(out), force=force, advance=advance)
