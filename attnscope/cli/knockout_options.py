"""The options of `knockout` and `budgets`: rows and keys of which heads, what is lost, and where the table goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from attnscope.cli.figure_options import MOST_SEQUENCES, MOST_SETS, ManyTexts, Rehearsal, Sampled, StudyTable
from attnscope.cli.option_groups import FIRST, REST, check_one_given
from attnscope.cli.options import Generated, MayAsk, ModelText, Named, Question, Seed, Selected
from attnscope.cli.output import Top, check_file
from attnscope.errors import InputError, UsageError
from attnscope.interventions.spec import DRAWS
from attnscope.utils.folders import PICTURES, TABLES


class Answered(MayAsk, ModelText, ManyTexts, panel="What to ask"):
    """One text or many, and what follows each."""

    answer: Annotated[str | None, "Expected continuation of the text (default: the model's own next token).", FIRST] = (
        None
    )
    foil: Annotated[str | None, "Wrong continuation: the effect is the fall of logit(answer) - logit(foil)."] = None
    texts: Annotated[
        str | None, "Corpus instead of a text; its fields query, key, answer, foil override the options.", "FILE"
    ] = None
    chat: Annotated[bool, REST] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        from attnscope.inputs.answers import check_answer

        if self.foil is not None and not self.foil.strip():
            raise InputError("the foil is empty", "give one with at least one word, or leave out --foil")
        for given in (self.answer, self.foil):
            check_answer(None, given, self.truncate)
        check_one_given({"a text": self.has_text, "--texts": self.texts})
        if self.ids is not None and (self.answer is not None or self.foil is not None):
            raise UsageError("--answer needs a text, and --ids gives token ids", "leave out one of them")

    @property
    def shared(self) -> dict[str, Any]:
        """What is asked of every text whose record does not say it itself."""
        return {name: getattr(self, name) for name in ("answer", "foil", "chat", "truncate")}


class Portions(Selected, Named):
    """Which heads, and how many of them at a time."""

    over: Annotated[str, "Portions: none (all heads at once), heads, layers, kv (groups).", "WHAT", FIRST] = "none"


class Edges(Portions, Question):
    """Which edges are cut, and in what portions."""

    over: Annotated[str, "Portions: none (all edges at once), heads, layers, window:N (layers), keys, kv (groups)."] = (
        "none"
    )
    how: Annotated[Literal["mask", "zero"], "mask: the rest of a row gets the weight; zero: the weight is lost."] = (
        "mask"
    )

    def __post_init__(self) -> None:
        self.asks()


class CacheBudgets(Generated, panel="What to ask"):
    """Which keys a cache keeps."""

    keep: Annotated[
        str | None,
        "Budgets of a KV cache, by commas: stream:4+64, top:64, h2o:64, received:64, snap:64@16.",
        "BUDGETS",
        FIRST,
    ] = None
    at: Annotated[str | None, "Last token of the prompt in a longer text (default: the last token).", "TOKEN"] = None
    generate: Annotated[
        int | None, "Measure up to N tokens of the model's own output.", Option(rich_help_panel="What to ask")
    ] = None
    below: Annotated[float, "List the heads below this loss, for --select.", "NATS", Option(min=0, max=1e6)] = 0.01

    def budgets(self, answered: Answered, portions: Portions) -> str:
        """The budgets as they are written. Raises UsageError where there are none, or one has no meaning."""
        from attnscope.inputs.answers import check_answer
        from attnscope.interventions.spec import check_below, check_budgets

        if self.keep is None:
            raise UsageError("no budget was named", "name one: --keep stream:4+64")
        check_budgets(self.keep, portions.over)
        check_answer(self.generate, answered.answer, answered.truncate)
        check_below(self.below)
        portions.names(self.at)
        return self.keep


class OtherName(CacheBudgets):
    """`knockout --keep`, another name of `budgets --keep`."""

    hidden = True

    def check(self, edges: Edges) -> None:
        """Raise UsageError for what has no meaning with a budget, or without one."""
        from attnscope.interventions.spec import check_budgets, check_no_budget
        from attnscope.studies.knockout_records import check_over

        if self.keep is None:
            check_no_budget(self.at, self.generate)
            check_over(edges.over, "--over")
        else:
            check_budgets(self.keep, edges.over, query=edges.query, key=edges.key, how=edges.how)


class Texts(Rehearsal, Sampled, Top):
    """How many texts a number is of."""

    dry_run: Annotated[bool, REST] = False
    sequences: Annotated[int, "Texts at most; intervals need 32.", Option(min=1, max=MOST_SEQUENCES), REST] = 64


class Compared(Texts, Seed, panel="What to ask"):
    """What is compared with it."""

    random: Annotated[
        int,
        "Number of random control keys, matched by distance and by weight, and of other heads.",
        Option(min=0, max=MOST_SETS),
    ] = DRAWS
    seed: Annotated[int, "Seed of the draws."] = 0


class Table(StudyTable):
    """A table to stdout, table, facts, figures and a page to --out."""

    files = (*PICTURES, *TABLES)
    out: Annotated[
        Path | None,
        "Folder for table, facts, figures and knockout.html, or a file for one of them; a stopped run resumes.",
        "DIR|FILE",
    ] = None
    html: Annotated[Path | None, "File for the page alone."] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.html is not None:
            check_file(self.html, "knockout.html")
