"""What `attnscope.explain` returns: the steps of a head as a line, a table, a figure and files; without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.calls.records import Record, picture_of
from attnscope.errors import visible
from attnscope.explain.jsonl import json_lines
from attnscope.explain.records import divisor
from attnscope.figures import Style
from attnscope.utils.display import model_name
from attnscope.utils.files import write_whole
from attnscope.utils.folders import refuse_file_name
from attnscope.utils.tables import as_table, words

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.explain import Explanation
    from attnscope.export.drawing import Picture


def draw_scaling(explanation: Explanation, place: Path, style: Style = Style()) -> Path:
    """The four panels of what scaling does; the path ends as the style has its kind of file."""
    from attnscope.figures.explain import save_scaling_effect, scaling_effect

    effect = scaling_effect(explanation.raw_QK, explanation.visible_QK, explanation.scale)
    extra = sorted({"soft-cap", "position bias"} & {step.name for step in explanation.steps})
    note = f"Without this model's {' and '.join(extra)}, to show the scaling alone." if extra else ""
    return save_scaling_effect(
        place,
        effect,
        explanation.labels,
        head=visible(f"{explanation.head} of {model_name(explanation.source)}"),  # an SVG holds no control characters
        divisor=divisor(explanation.scale, explanation.head_dim),
        note=note,
        style=style,
    )


@dataclass(frozen=True, repr=False)
class Explained(Record):
    """The steps from hidden states to the output projection, of one head and token; see `Explanation`."""

    explanation: Explanation

    @property
    def failures(self) -> list[str]:
        """The steps that differ from the model's own value, in words."""
        return list(self.explanation.failures)

    @property
    def line(self) -> str:
        one = self.explanation
        held = "each checked step is the model's own" if not self.failures else f"does not hold: {self.failures[0]}"
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
        title = f"scaling of {self.explanation.head}"
        style = replace(style, image="png")
        return picture_of(title, lambda folder: draw_scaling(self.explanation, folder / "scaling.png", style))

    def _picture(self) -> Picture:
        return self.figure()

    def export(self, folder: str | Path, *, style: Style = Style()) -> list[Path]:
        """Write the steps as explain-L2H3.jsonl and their figure as explain-L2H3.png; the paths."""
        into, name = Path(folder), f"explain-{self.explanation.head}"
        refuse_file_name(into)
        into.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in self.lines())
        written = write_whole(into / f"{name}.jsonl", lambda temp: temp.write_text(text, encoding="utf-8"))
        return [written, draw_scaling(self.explanation, into / f"{name}.{style.image}", style)]
