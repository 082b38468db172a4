"""`attnscope heatmap`: pictures of the attention, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from attnscope.cli import output
from attnscope.cli.groups import recorded, spelled
from attnscope.cli.heads import GROUPS, Ranking
from attnscope.cli.options import FIGURES, Config, Drawing, Entries, Exporting, Question, TextRun
from attnscope.cli.takes import takes
from attnscope.errors import UsageError
from attnscope.shown import visible

EXAMPLES = (
    'attnscope heatmap --text "the cat sat on the mat" --select last --out runs/cat',
    'attnscope heatmap --text "the cat sat on the mat" --scale log --sink mask --image svg --out runs/cat',
    'attnscope heatmap --text "Mary saw John, and John gave Mary a book" --query last --key Mary '
    "--figures overview,mass,top --out runs/mary",
)


@dataclass(frozen=True, kw_only=True)
class Pictures(Config, Exporting):
    """Figures to --out, their paths to stdout."""

    out: Annotated[Path | None, Option(help="Draw into this folder.")] = None

    def __post_init__(self) -> None:
        if self.out is None:
            raise UsageError("nowhere to draw", "name a folder with --out DIR")
        super().__post_init__()


@takes(TextRun, Entries, Question, Ranking, Pictures, Drawing, file=GROUPS)
def heatmap(
    asked: TextRun, entries: Entries, question: Question, ranking: Ranking, pictures: Pictures, drawing: Drawing
) -> int:
    """The attention of a text, drawn: overview, layers, heads.

    The path of every picture is printed on stdout, one per line. Heads are drawn one by one with --select. With --query
    and --key the pictures are of those tokens.
    """
    entries.check(scale=drawing.scale)
    order, kinds = ranking.order(question), drawing.kinds(question) or FIGURES[:-1]

    from attnscope.cli.single import export_text, observe_text, report_checks

    groups = (asked, entries, question, ranking.told(question), pictures, drawing)
    options = recorded(*groups) | {"sort": ranking.by(question)}
    measured = {} if {"overview", "metrics", "top"} & set(kinds) else {"metrics": ()}
    seen = observe_text(asked, entries, pictures, options, maps="all", **measured, **question.asks(), **drawing.maps())
    names = [head.name for head in seen.kept_heads()] if entries.select else []
    how = {"figures": kinds, "sort": order if measured == {} else None, "top": ranking.top, "tables": False}
    written = export_text(seen, pictures, options, heads=names, style=drawing.style(spelled("heatmap", *groups)), **how)
    _print(written[:-1])  # without the manifest
    output.talk(
        "heads are drawn one by one with --select", pictures.quiet or entries.select is not None or "heads" not in kinds
    )
    return report_checks(seen, pictures.quiet)


def _print(paths: Sequence[Path]) -> None:
    """The paths, one per line: to a program as they are, to a person as can be read."""
    lines = (visible(str(path)).encode() if sys.stdout.isatty() else os.fsencode(path) for path in paths)
    sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))
