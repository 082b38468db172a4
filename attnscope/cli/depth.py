"""`attnscope depth`: each block's share of the residual of later layers.

The options of `attnscope depth`: which tokens get rows of their own, and where the table goes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look, StudyTable
from attnscope.cli.option_groups import FIRST, command_line, fill
from attnscope.cli.options import Queries, TextsAsked
from attnscope.cli.output import Top, writing_to
from attnscope.cli.reproduce import study_command
from attnscope.cli.study import Printed, print_study
from attnscope.cli.study_tables import depth_sheet
from attnscope.utils.folders import PICTURES, TABLES
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.api.depth import Depth


class ListedTokens(Queries):
    """The tokens with rows of their own."""

    query: Annotated[
        str | None,
        "Tokens to list one by one (default: the mean over all). Full syntax: `attnscope help tokens`.",
        "TOKENS",
        FIRST,
    ] = None


OUT = "Folder for table, facts, a figure and depth.html, or a file for one of them."
DepthTable = writing_to(StudyTable, OUT, *PICTURES, *TABLES)
EXAMPLES = (
    'attnscope depth "the bank of the river, the bank of the"',
    'attnscope depth "the bank of the river, the bank of the" --query last --format jsonl',
    'attnscope depth "the bank of the river, the bank of the" --out runs/depth',
)


@with_options(TextsAsked, ListedTokens, Top, DepthTable, Look)
def depth(asked: TextsAsked, question: ListedTokens, top: Top, table: StudyTable, look: Look) -> int:
    """List each block's share of the residual of later layers.

    The residual of a layer is a sum: the embedding, and the outputs of earlier attention and MLPs. A block's share
    is the projection of its output on the residual, over the squared norm of the residual. The shares sum to 1; a
    negative share is cancelled by other blocks. Numbers are means over the tokens; --query lists tokens one by one.

    Some models mix earlier blocks by a softmax. Their table has the weights instead: of attention, or of q, k and v
    apart, of the MLP, and of the final state.
    """
    meant = question.asks()

    from attnscope.api.depth import DepthOptions, ask_of

    options = fill(DepthOptions, asked, query=meant["query"], define=meant["define"])
    options.check()

    from attnscope.cli.one_text import answer, read_given
    from attnscope.serve.questions import ReadDepth

    text = read_given(asked, table)
    result: Depth = answer(asked, ask_of(text, options), ReadDepth(), table)

    style = partial(look.figure_style, command_line("depth", asked, question, look))
    if table.folder is not None:
        from attnscope.viewer.study_pages import Again

        with unwinding(), output.progress("drawing", None, table.quiet):
            again = Again(command=study_command("depth", text, asked, question))
            result.export(table.folder, style=style(), force=table.force, again=again)
    printed: Printed[Depth] = Printed(
        depth_sheet,
        lambda record: (*record.notes, record.line),
        lambda record, folder: [record.draw(folder, style())],
        hint="name a folder",
        sizes=lambda record: map(len, record.readers()),  # a reader counts as one row, and has a row per block in data
    )
    return print_study(result, top, table, printed)
