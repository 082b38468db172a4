"""`attnscope why`: a logit before the softmax, taken apart by what wrote the residual of its key or query.

The options of `attnscope why`: which logit of which head, what it is compared with, and where the table goes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look, StudyTable
from attnscope.cli.option_groups import FIRST, command_line, fill
from attnscope.cli.options import OneHead, Question, TextsAsked
from attnscope.cli.output import Top, writing_to
from attnscope.cli.study import Printed, print_study
from attnscope.cli.study_tables import logit_sheet, why_notes
from attnscope.utils.folders import PICTURES, TABLES
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.api.why import Why, WhyOptions


class Logit(OneHead, Question):
    """Which logit is taken apart, and how."""

    query: Annotated[str, "Token that looks: 5, last, bank#2. Full syntax: `attnscope help tokens`."] = "last"
    key: Annotated[str | None, "Token that is looked at (default: the key with the most weight)."] = None
    against: Annotated[
        str, "Compare with the mean of the visible keys, or with another token.", "mean|TOKEN", FIRST
    ] = "mean"
    side: Annotated[
        Literal["key", "query", "both"], "Residual of the key, of the query, or of both in pairs.", FIRST
    ] = "key"
    by: Annotated[Literal["component", "tokens"], "A row per component, or per head and source token.", FIRST] = (
        "component"
    )
    verify: Annotated[bool, "Replace the ten largest one by one, and compute the logit again.", FIRST] = False

    def options(self, asked: TextsAsked) -> WhyOptions:
        """What the library is asked. Raises UsageError for what no text makes right."""
        groups = self.asks()["define"]

        from attnscope.api.why import WhyOptions

        options = fill(WhyOptions, asked, self, define=groups)
        options.check()
        return options


OUT = "Folder for table, facts and a figure, or a file for one of them."
WhyTable = writing_to(StudyTable, OUT, *PICTURES, *TABLES)
RIVER = '"the bank of the river, the bank of the" --head L3H0 --key river'
EXAMPLES = (
    f"attnscope why {RIVER}",
    f'attnscope why {RIVER} --against "bank#1" --by tokens',
    f"attnscope why {RIVER} --side both --format jsonl",
    f"attnscope why {RIVER} --verify --out runs/river",
)


@with_options(TextsAsked, Logit, Top, WhyTable, Look)
def why(asked: TextsAsked, logit: Logit, top: Top, table: StudyTable, look: Look) -> int:
    """Decompose an attention logit by the components that wrote it.

    The logit of --key in the row of --query is split by the parts of the key's residual: embedding, earlier heads,
    and the rest of each block. Norms keep their scale, so the contributions sum to the logit. Softmax ignores what
    all keys have in common, so each contribution is shown relative to its mean over visible keys, or to --against.
    --side query splits the query's residual, --side both the pairs of components.

    In an encoder-decoder, L3H0 is a head of the decoder; "cross L3H0" and "encoder L3H0" name others. In
    cross-attention the key's residual is the encoder's output.
    """
    head, options = logit.named, logit.options(asked)

    from attnscope.cli.one_text import read_given

    text = read_given(asked, table)

    from attnscope.api.why import ask_of
    from attnscope.cli.one_text import answer
    from attnscope.serve.questions import AttributeLogit

    result: Why = answer(asked, ask_of(text, options), AttributeLogit.of(head, options), table)

    style = partial(look.figure_style, command_line("why", asked, logit, look))
    if table.folder is not None:
        with unwinding(), output.progress("drawing", None, table.quiet):
            result.export(table.folder, style=style(), force=table.force)
    printed: Printed[Why] = Printed(
        logit_sheet, why_notes, lambda record, folder: [record.draw(folder, style())], hint="name a folder"
    )
    return print_study(result, top, table, printed)
