"""`attnscope explain`: one head, one sentence, every step with its numbers, each compared with the model's own."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look
from attnscope.cli.one_text import answer, read_text
from attnscope.cli.option_groups import FIRST, check_one_given, command_line
from attnscope.cli.options import MayAsk, OneHead, PairedText, Query, Seed, Selected
from attnscope.cli.output import Config, Format, Writing
from attnscope.errors import UsageError
from attnscope.utils.folders import PICTURES
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table as RichTable

    from attnscope.steps.records import Explanation
    from attnscope.steps.toy import Spread

EXAMPLES = (
    'attnscope explain --text "the cat sat on the mat" --head L2H3 --query last --out runs/cat.png',
    "attnscope explain --toy",
    "attnscope explain --scaling --out runs/scaling.png",
)


class StepsText(MayAsk, PairedText):
    """The text of one query."""


class Steps(OneHead, Query, Seed):
    """What is explained."""

    query: Annotated[str, "Query token: 5, last, bank#2. Full syntax: `attnscope help tokens`."] = "last"
    toy: Annotated[bool, '"I saw a saw" with tiny numbers, without a model.', FIRST] = False
    scaling: Annotated[bool, "Standard deviation of q·k against d_k on random data, without a model.", FIRST] = False
    seed: Annotated[int, "Seed of --scaling's random data."] = 0

    def check(self, asked: StepsText) -> None:
        """Raise UsageError for what cannot be asked together."""
        check_one_given({"--toy": self.toy, "--scaling": self.scaling})
        if (self.toy or self.scaling) and asked.has_text:
            raise UsageError(f"--{'toy' if self.toy else 'scaling'} takes no text", "leave out the text")


class Telling(Look, Config, Format, Writing):
    """The steps to stdout, a figure to --out, which may also name the file itself."""

    files = PICTURES
    out: Annotated[Path | None, "Folder or file for the figure.", "DIR|FILE"] = None
    format: Annotated[
        Literal["table", "jsonl"] | None, "Format on stdout (default: tables on a terminal, JSON lines in a pipe)."
    ] = None

    def __post_init__(self) -> None:
        Writing.__post_init__(self)
        Look.__post_init__(self)

    @property
    def on_stdout(self) -> str:
        """The format: as asked, else tables on a terminal and JSON lines in a pipe."""
        return output.wanted_format(self.format, "jsonl")

    def place(self, name: str) -> Path | None:
        """Where a figure of this name goes, if anywhere."""
        return self.file or (self.out and self.out / f"{name}.{self.image}")


@with_options(StepsText, Steps, Telling)
def explain(asked: StepsText, steps: Steps, telling: Telling) -> int:
    """Show one head's arithmetic on a sentence, step by step.

    A query token is followed from the hidden states to the output projection. Each step is compared with the
    model's own value; the exit code is 1 if one differs. --out draws the effect of the scaling.
    """
    steps.check(asked)
    if steps.scaling:
        return run_scaling(telling, steps.seed)
    if steps.toy:
        return run_toy(telling, steps)
    head = steps.named

    from attnscope.inputs.tokens import check_expression
    from attnscope.observe.request import Request
    from attnscope.serve.questions import ExplainHead

    check_expression(steps.query)
    ask = asked.ask(read_text(asked, telling), Selected(), Request(query=steps.query))
    return finish(telling, answer(asked, replace(ask, engine="eager"), ExplainHead(head), telling))


def run_toy(telling: Telling, steps: Steps) -> int:
    """Explain the toy, every number of it."""
    from attnscope.model.selection import DECODER, one_head
    from attnscope.steps.toy import HEADS, explain_toy

    *_, number = one_head(steps.head or "L0H0", {DECODER: {0: HEADS}}, DECODER)
    return finish(telling, explain_toy(number, read_query(steps.query)), whole=True)


def run_scaling(telling: Telling, seed: int) -> int:
    """Measure std(q . k) against d_k."""
    from attnscope.steps.toy import FORMULA, SAMPLES, measure_scaling

    spreads = measure_scaling(seed=seed)
    if place := telling.place("scaling"):
        import numpy as np

        from attnscope.figures.explain import Curve, save_scaling_curves

        curves = [
            Curve(
                label,
                *(np.array([getattr(spread, name) for spread in group]) for name in ("width", "measured", "predicted")),
            )
            for label, group in _by_case(spreads).items()
        ]
        note = f"points: measured on {SAMPLES} random pairs, seed {seed}; lines: √Var, {FORMULA}"
        with unwinding():
            style = telling.figure_style(command_line("explain", telling))
            save_scaling_curves(place, curves, note=note, style=style)
        output.log(f"wrote {place}", telling.quiet)
    output.emit(spread_table(spreads), telling.on_stdout, lambda: spread_picture(spreads))
    if telling.on_stdout == "table":
        output.log(f"{SAMPLES} random pairs of q and k for each number, seed {seed}; {FORMULA}", telling.quiet)
    return 0


def finish(telling: Telling, explanation: Explanation, whole: bool = False) -> int:
    """Draw the figure, print the steps, say which checks do not hold; returns the exit code."""
    if place := telling.place(f"{'toy' if whole else 'explain'}-{explanation.head}"):
        from attnscope.api.records import draw_scaling

        with unwinding():
            written = draw_scaling(explanation, place, telling.figure_style(command_line("explain", telling)))
        output.log(f"wrote {written}", telling.quiet)
    if telling.on_stdout == "table":
        from attnscope.cli.explain_tables import steps_sheet

        output.show(steps_sheet(explanation, whole))
    else:
        from attnscope.steps.records import json_lines

        stream = output.data_stream("jsonl")
        for line in json_lines(explanation):
            stream.write(f"{line}\n".encode(errors="backslashreplace"))
        stream.flush()
    output.log_lines((f"check failed: {line}" for line in explanation.failures), quiet=False)
    return 1 if explanation.failures else 0


def read_query(text: str) -> int:
    """Of the toy: `last` is -1; UsageError for what is neither that nor a number."""
    if text == "last":
        return -1
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise UsageError(
            f"--query: expected a position from 0, or last, got {text!r}", "write --query 5, or --query last"
        )
    return int(text)


def spread_table(spreads: list[Spread]) -> pa.Table:
    """One row a measurement."""
    from attnscope.utils.tables import as_table

    names = ("mean_q", "std_q", "mean_k", "std_k")
    return as_table(
        {
            **{name: [getattr(spread.entries, name) for spread in spreads] for name in names},
            "d_k": [spread.width for spread in spreads],
            "std": [spread.measured for spread in spreads],
            "std_formula": [spread.predicted for spread in spreads],
            "std_scaled": [spread.scaled for spread in spreads],
        }
    )


def spread_picture(spreads: list[Spread]) -> RichTable:
    """A row a width, a column a case: std(q . k), and what is left after the division by sqrt(d_k)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    groups = _by_case(spreads)
    shown = RichTable(
        "d_k", "√d_k", *groups, box=SIMPLE_HEAD, padding=(0, 2, 0, 0), title="std(q·k) → after the division by √d_k"
    )
    for rows in zip(*groups.values(), strict=True):
        cells = [f"{spread.measured:.2f} → {spread.scaled:.2f}" for spread in rows]
        shown.add_row(str(rows[0].width), f"{rows[0].width ** 0.5:.2f}", *cells)
    shown.add_section()
    by_formula = [f"{group[0].predicted / group[0].width ** 0.5:.2f}" for group in groups.values()]
    shown.add_row("", "formula", *(f"{value}·√d_k → {value}" for value in by_formula))
    return shown


def _by_case(spreads: list[Spread]) -> dict[str, list[Spread]]:
    return {label: list(case) for label, case in groupby(spreads, lambda spread: spread.entries.label)}
