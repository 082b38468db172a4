"""`--show`: heads drawn in the terminal, beside what a command gives otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

from typer import Option

from attnscope.cli import output
from attnscope.cli.groups import Mark, option_group

if TYPE_CHECKING:
    from attnscope.figures import Style
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head
    from attnscope.observe.request import MapFields

FEW = 4  # heads that are drawn where nobody names them


@option_group
class Show:
    """Whether heads are drawn in the terminal."""

    panel = "Figures"
    show: Annotated[
        bool, Option(help=f"Draw the heads of --select, else the first {FEW}, in the terminal."), Mark.UNRECORDED
    ] = False

    def maps(self, style: Style, to: TextIO) -> MapFields:
        """The fields of `Request` that keep maps as fine as the stream has room for; none where nobody asked."""
        return {"maps": "kept", "map_side": _side(style, to)} if self.show else {}


def draw(seen: Observation, heads: Sequence[Head], style: Style, to: TextIO) -> None:
    """Draw heads on a stream, as large as it has room for."""
    from attnscope.export.drawing import terminal_maps

    output.show(terminal_maps(seen, [head.name for head in heads], style, _side(style, to)), to)


def first_heads(seen: Observation) -> list[Head]:
    """The first of all heads, by focus where it was measured."""
    return seen.kept_heads("focus" if "focus" in seen.columns.scores else None)[:FEW]


def stream(only: bool) -> TextIO:
    """Where maps go: to stdout, if nothing else does or a person looks there, else to stderr."""
    return sys.stdout if only or sys.stdout.isatty() else sys.stderr


def _side(style: Style, to: TextIO) -> int:
    from attnscope.figures.terminal import COLOURFUL, side

    console = output.console(to)
    return side(console.width, console.color_system in COLOURFUL, style)
