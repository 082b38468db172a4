"""How many rows a command prints: `--top`."""

from __future__ import annotations

import re
from typing import Annotated

from typer import Option

from attnscope.cli.groups import option_group


def count_or_all(text: str | int) -> str:
    """What was given to an option `N|all`. Raises ValueError for what is neither."""
    if text != "all" and not re.fullmatch(r"0*[1-9][0-9]{0,8}", str(text)):
        raise ValueError(f"expected a number from 1, or all, got {str(text)[:20]!r}")
    return str(text)


def count_of(text: str) -> int | None:
    """The number that `count_or_all` has checked, None for all."""
    return None if text == "all" else int(text)


@option_group
class Top:
    """How much of a table is printed."""

    FEW = 40  # rows of a terminal's table by default

    top: Annotated[
        str | None,
        Option(
            help="Rows printed, the first ones: a number, or all (default: 40 on a terminal, all in a pipe). Files in "
            "--out have all.",
            metavar="N|all",
            parser=count_or_all,
        ),
    ] = None

    @property
    def shown(self) -> int | None:
        """How many a person sees, None for all: as many as were asked for, else FEW."""
        return self.FEW if self.top is None else count_of(self.top)

    def limit(self, format: str) -> int | None:
        """How many are printed in a format, None for all: a terminal's table has FEW by default."""
        return None if self.top is None and format != "table" else self.shown

    def rest(self, count: int, of: int, what: str = "rows") -> list[str]:
        """A line of how many are printed, where that is not all of them."""
        more = "; --top N shows more, a pipe gets all" if self.top is None else "; --top all shows all"
        return [f"{count:,} of {of:,} {what}{more}"] * (count < of)
