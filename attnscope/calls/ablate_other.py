"""What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.calls.records import StudyResult
from attnscope.errors import UsageError
from attnscope.figures import Style
from attnscope.studies.ablation_search import HeadRecord, HeadStudy, PairsStudy, PruneStudy, Pruning, ScreenStudy
from attnscope.utils.display import head_name, model_name

if TYPE_CHECKING:
    from attnscope.export.drawing import Picture

QUESTIONS: Mapping[str, type[HeadStudy[Any]]] = {study.kind: study for study in (PairsStudy, PruneStudy, ScreenStudy)}


@dataclass(frozen=True, repr=False)
class Answered(StudyResult[HeadStudy[Any], HeadRecord]):
    """The answer to another question than what sets cost: a row per pair, per head that is removed, or per head of the
    screen."""

    @property
    def title(self) -> str:
        return self.study.kind

    def figure(self, style: Style = Style()) -> Picture | None:  # type: ignore[override]
        """The loss after each head that a pruning removes; None of the other questions."""
        return super().figure(style) if isinstance(self.found, Pruning) else None

    def draw(self, folder: Path, style: Style = Style()) -> list[Path]:
        """Draw the curve of a pruning into a folder; the path, none of the other questions."""
        if not isinstance(self.found, Pruning):
            return []
        from attnscope.figures.curves import save_pruning

        found, (model, task) = self.found, (self.model.name, self.study.task)
        line = f"{model_name(model)}, {task.name}, {len(task)} sequences"
        style = replace(style, about=replace(style.of_model(model).about, line=line))
        names = [head_name(one.layer, one.head) for one in found.steps]
        values = [found.intact, *(one.value for one in found.steps)]
        return [save_pruning(folder / f"prune.{style.image}", names, values, [("uniform guess", found.guess)], style)]


def question_of(wishes: Mapping[str, bool]) -> type[HeadStudy[Any]] | None:
    """The one question that is wished for, None without one. Raises UsageError for two."""
    wanted = [name for name, asked in wishes.items() if asked]
    if len(wanted) > 1:
        raise UsageError(f"{wanted[0]} and {wanted[1]} were both asked for", "ask one question at a time")
    return QUESTIONS[wanted[0]] if wanted else None
