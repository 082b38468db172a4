"""`attnscope why`: a logit before the softmax, taken apart by what wrote the residual of its key or query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.study import Printed, print_study
from attnscope.cli.takes import takes
from attnscope.cli.top import Top
from attnscope.cli.why_options import Logit, LogitText, WhyTable
from attnscope.cli.why_table import logit_sheet, to_know
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from pathlib import Path

    from attnscope.api.why_record import Why

RIVER = '"the bank of the river, the bank of the" --head L3H0 --key river'
EXAMPLES = (
    f"attnscope why {RIVER}",
    f'attnscope why {RIVER} --against "bank#1" --by tokens',
    f"attnscope why {RIVER} --side both --format jsonl",
    f"attnscope why {RIVER} --verify --out runs/river",
)


@takes(LogitText, Logit, Top, WhyTable, Look, file=GROUPS)
def why(asked: LogitText, logit: Logit, top: Top, table: WhyTable, look: Look) -> int:
    """Why a head looks where it looks: its logit, by what wrote it.

    The logit of --key in the row of --query is taken apart by what wrote the key's residual: embedding, earlier heads,
    and the rest of each block. Norms keep the scale that they have, so that the contributions sum to the logit. The
    softmax does not see what all keys share: the contrast is the contribution less its mean over the visible keys, or
    less that of --against. --side query takes the query's residual, both each pair of a component of the key and one
    of the query. In an encoder-decoder L3H0 is a head of its decoder, "cross L3H0" and "encoder L3H0" are others; in
    cross-attention the key is taken apart by what wrote the encoder's output.
    """
    output.wanted_format(table.format)  # what it refuses is refused before the work
    head, options = logit.named, logit.options(asked)

    from attnscope.cli.single import read_given

    text = read_given(asked, table)

    from attnscope.api.why_record import ask_of
    from attnscope.cli.single import answer
    from attnscope.serve.questions import AttributeLogit as TakeApart

    found: Why = answer(asked, ask_of(text, options), TakeApart.of(head, options), table)

    def draw(record: Why, folder: Path) -> list[Path]:
        return [record.draw(folder, look.style(command_line("why", asked, logit, look)))]

    if table.folder is not None:
        style = look.style(command_line("why", asked, logit, look))
        with unwinding(), output.progress("drawing", None, table.quiet):
            found.export(table.folder, style=style, force=table.force)
    return print_study(found, top, table, Printed(logit_sheet, to_know, draw, hint="name a folder"))
