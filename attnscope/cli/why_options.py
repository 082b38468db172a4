"""The options of `attnscope why`: which logit of which head, what it is compared with, and where the table goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from attnscope.cli.groups import FIRST, fill, option_group
from attnscope.cli.options import Generated, MayAsk, ModelTexts, OneHead, Question
from attnscope.cli.study_options import StudyTable
from attnscope.utils.folders import PICTURES, TABLES

if TYPE_CHECKING:
    from attnscope.api.why_record import WhyOptions


@option_group
class LogitText(Generated, MayAsk, ModelTexts):
    """The text of one query and one key."""

    panel = "Text"
    chat: Annotated[bool, Option(rich_help_panel=panel)] = False


@option_group
class Logit(OneHead, Question):
    """Which logit is taken apart, and how."""

    panel = "Question"
    query: Annotated[str, Option(help="The token that looks: 5, last, bank#2 (`attnscope tokens -h`).")] = "last"
    key: Annotated[str | None, Option(help="The token that it looks at (default: the one that gets most weight).")] = (
        None
    )
    against: Annotated[
        str,
        Option(help="Compared with the mean of the visible keys, or with another token.", metavar="mean|TOKEN"),
        FIRST,
    ] = "mean"
    side: Annotated[
        Literal["key", "query", "both"],
        Option(help="The residual of the key or of the query; both: in pairs."),
        FIRST,
    ] = "key"
    by: Annotated[
        Literal["component", "tokens"],
        Option(help="A row per component, or per head and token that it read."),
        FIRST,
    ] = "component"
    verify: Annotated[bool, Option(help="Replace the ten largest one by one, and make the logit again."), FIRST] = False

    def options(self, asked: LogitText) -> WhyOptions:
        """What the library is asked. Raises UsageError for what no text makes right."""
        groups = self.asks()["define"]

        from attnscope.api.why_record import WhyOptions

        text = {name: getattr(asked, name) for name in ("chat", "truncate", "target", "generate", "pair")}
        options = fill(WhyOptions, self, define=groups, picture=asked.picture or None, **text)
        options.check()
        return options


@option_group
class WhyTable(StudyTable):
    """A table to stdout, table, facts and a figure to --out."""

    files = (*PICTURES, *TABLES)
    out: Annotated[
        Path | None,
        Option(help="Write table, facts and a figure here; or table or figure to this file.", metavar="DIR|FILE"),
    ] = None
