"""`attnscope.explain`, and what the command of that name runs: one head, one token, every step with its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from attnscope.ask import Ask
from attnscope.calls.records import Record, picture_of
from attnscope.cells import model_name
from attnscope.errors import UsageError
from attnscope.explain import explain_head
from attnscope.explain.jsonl import json_lines
from attnscope.explain.steps import divisor
from attnscope.figures import Style
from attnscope.figures.explain import save_scaling_effect, scaling_effect
from attnscope.files import write_whole
from attnscope.keep.request import Request
from attnscope.run import prepare
from attnscope.selection import pairs, select
from attnscope.shown import visible
from attnscope.tables import as_table, words
from attnscope.text.tokens import described
from attnscope.typed import check_names

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.ask import Text
    from attnscope.drawing import Picture
    from attnscope.explain import Explanation
    from attnscope.model.loaded import LoadedModel
    from attnscope.run import Run
    from attnscope.text.prompt import Side

STACKS = ("an explanation", "decoder", "encoder")  # what needs which models


class ExplainFields(TypedDict, total=False):
    """The fields of `ExplainOptions`, as keywords."""

    query: str | int
    chat: bool
    truncate: Side | None
    answer: str | list[int] | None
    generate: int | None


@dataclass(frozen=True)
class ExplainOptions:
    """Which token is followed, and how the text is read; the other fields are those of `attnscope.ask.Ask`.

    query: the one token, as `5`, `last` or `bank#2`.
    """

    query: str | int = "last"
    chat: bool = False
    truncate: Side | None = None
    answer: str | list[int] | None = None
    generate: int | None = None


def explain(model: LoadedModel, text: Text, head: str, **options: Unpack[ExplainFields]) -> Explained:
    """One head, one sentence, every step with its numbers, each compared with the model's own.

    head: as `L2H3` or `2.3`. options: the fields of `ExplainOptions`: query, chat, truncate, answer, generate. Raises
    UsageError for what is not one head or one token, and for an option that does not exist; InputError for a text that
    does not fit the model; ModelError for an encoder-decoder.

        >>> attnscope.explain(attnscope.load("demo"), "the cat sat on the mat", head="L2H3").table().to_pandas()
    """
    check_names("explain", options, ExplainOptions)
    asked = ExplainOptions(**options)
    how = {"chat": asked.chat, "truncate": asked.truncate, "answer": asked.answer, "generate": asked.generate}
    run = prepare(model, Ask(text, Request(query=str(asked.query)), engine="eager", **how))  # type: ignore[arg-type]
    run.loaded.check_task(*STACKS)
    return followed(run, head)


def followed(run: Run, head: str) -> Explained:
    """The steps of one head for the token that the run asks about. Raises UsageError unless each is exactly one."""
    position = one_token(run)
    layer, number = one_head(head, run.loaded.geometry.heads_by_layer)
    return Explained(explain_head(run.loaded, run.prompt, layer, number, position))


def one_head(text: str, heads: dict[int, int]) -> tuple[int, int]:
    """The layer and head that `L2H3` or `2.3` names; UsageError unless it is exactly one."""
    if "@" in text:
        raise UsageError(f"head {text} names a role, expected one head", "write it as L2H3 or 2.3")
    found = pairs(select(text, heads))
    if len(found) != 1:
        raise UsageError(f"head {text} names {len(found)} heads, expected one", "write it as L2H3 or 2.3")
    return found[0]


def one_token(run: Run) -> int:
    """The token that the query means; UsageError unless it is exactly one."""
    found = run.chosen.query
    assert found is not None
    if len(found.positions) != 1:
        said = f"query {found.expression} means {described(run.prompt, found)}, expected one token"
        raise UsageError(said, "write its position, or bank#2")
    return found.positions[0]


def draw_scaling(explanation: Explanation, place: Path, style: Style = Style()) -> Path:
    """The four panels of what scaling does; the path ends as the style has its kind of file."""
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
        into.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in self.lines())
        written = write_whole(into / f"{name}.jsonl", lambda temp: temp.write_text(text, encoding="utf-8"))
        return [written, draw_scaling(self.explanation, into / f"{name}.{style.image}", style)]
