"""What the records of all calls have in common: how they are shown, drawn and written.

What `attnscope.explain` returns: the steps of a head as a line, a table, a figure and files; without torch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attnscope.errors import visible
from attnscope.export.drawing import Picture, picture_of
from attnscope.figures import Style
from attnscope.steps.records import divisor, json_lines
from attnscope.utils.display import model_name
from attnscope.utils.files import write_whole
from attnscope.utils.folders import refuse_file_name
from attnscope.utils.stages import NO_PROGRESS, Progress
from attnscope.utils.tables import TableRecord, as_table, words

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.model.loaded import LoadedModel
    from attnscope.steps.records import Explanation
    from attnscope.studies.study import Study
    from attnscope.studies.study_folder import StudyRecord


class DrawnRecord(TableRecord):
    """What a call found: a line, a table and a figure, which a notebook shows below the table."""

    @abstractmethod
    def figure(self) -> Picture | None:
        """The figure; None of what has none."""

    def _below(self) -> str:
        picture = self.figure()
        return picture._repr_html_() if picture else ""


AnyStudy = TypeVar("AnyStudy", bound="Study[Any]")
Found = TypeVar("Found", bound="StudyRecord")


@dataclass(frozen=True, repr=False)
class StudyResult(DrawnRecord, Generic[AnyStudy, Found]):
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
        return picture_of(self.title, style, lambda folder, style: self.draw(folder, style)[0])

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
    tell: Progress = NO_PROGRESS,
    total: int | None = None,
    unit: str | None = None,
) -> Found:
    """Run a study, with a folder there; total: what it takes, in the unit that its progress counts."""
    from attnscope.studies.study import PASSED

    with tell.stage(study.stage, total, (unit or PASSED) if total else "") as advance:
        return study.run(None if out is None else Path(out), force=force, advance=advance)


def draw_scaling(explanation: Explanation, place: Path, style: Style = Style()) -> Path:
    """The four panels of what scaling does; the path ends as the style has its kind of file."""
    from attnscope.figures.explain import EffectSheet, save_scaling_effect, scaling_effect

    effect = scaling_effect(explanation.raw_QK, explanation.visible_QK, explanation.scale)
    extra = sorted({"soft-cap", "position bias"} & {step.name for step in explanation.steps})
    note = f"Without this model's {' and '.join(extra)}, to show the scaling alone." if extra else ""
    head = visible(f"{explanation.head} of {model_name(explanation.source)}")  # an SVG holds no control characters
    by = divisor(explanation.scale, explanation.head_dim)
    return save_scaling_effect(place, EffectSheet(effect, explanation.labels, head, by, note), style)


@dataclass(frozen=True, repr=False)
class Explained(DrawnRecord):
    """The steps from hidden states to the output projection, of one head and token; see `Explanation`."""

    explanation: Explanation

    @property
    def failures(self) -> list[str]:
        """The steps that differ from the model's own value, in words."""
        return list(self.explanation.failures)

    @property
    def line(self) -> str:
        one = self.explanation
        held = "each checked step is the model's own" if not self.failures else f"check failed: {self.failures[0]}"
        return f"{one.head} of {one.source}, query {one.query}, {len(one.steps)} steps; {held}"

    def table(self) -> pa.Table:
        """A row per step: step, name, formula, why, holds (null where nothing is checked)."""
        steps = self.explanation.steps
        holds = [all(check.holds for check in step.checks) if step.checks else None for step in steps]
        return as_table(
            {
                "step": list(range(1, len(steps) + 1)),
                **{name: words([getattr(step, name) for step in steps]) for name in ("name", "formula", "why")},
                "holds": holds,
            }
        )

    def lines(self) -> list[str]:
        """Every number of every step, as JSON lines."""
        return list(json_lines(self.explanation))

    def figure(self, style: Style = Style()) -> Picture:
        """What the division by the square root of d_k does to this head's scores and weights."""
        explanation = self.explanation
        title = f"scaling of {explanation.head}"
        return picture_of(title, style, lambda into, style: draw_scaling(explanation, into / "scaling.png", style))

    def export(self, folder: str | Path, *, style: Style = Style()) -> list[Path]:
        """Write the steps as explain-L2H3.jsonl and their figure as explain-L2H3.png; the paths."""
        into, name = Path(folder), f"explain-{self.explanation.head}"
        refuse_file_name(into)
        into.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in self.lines())
        written = write_whole(into / f"{name}.jsonl", lambda temp: temp.write_text(text, encoding="utf-8"))
        return [written, draw_scaling(self.explanation, into / f"{name}.{style.image}", style)]
