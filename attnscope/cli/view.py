"""`attnscope view`: a text's attention as one HTML file to hover over."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.one_text import answer, load_model, nothing, own_module, read_run, report_checks
from attnscope.cli.option_groups import FIRST, SETTING, command_line, fill
from attnscope.cli.options import OtherSide, Question, Selected, TextRun
from attnscope.cli.output import Config, Writing, check_file
from attnscope.cli.reproduce import reproduce
from attnscope.errors import UsageError
from attnscope.serve.questions import ShowPage
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.observe.request import CaptureSpec
    from attnscope.serve.questions import PageSide
    from attnscope.viewer.page import Page

EXAMPLES = (
    'attnscope view --text "the financial bank is located on river bank" --out bank.html',
    'attnscope view --text "Mary gave John a book" --compare-text "John gave Mary a book" --out swapped.html',
    'attnscope heads "the cat sat on the mat" --out runs/cat > cat.csv && attnscope view runs/cat --out cat.html',
)
STDOUT = Path("-")


class Pages(Config, OtherSide, Writing, panel="Output"):
    """One page, and how much it may hold."""

    out: Annotated[Path | None, "Write the page here; - is stdout.", "FILE|-", FIRST] = None
    from_tables: Annotated[bool, "Make the page from the tables of a run, without the model."] = False
    why: Annotated[str | None, "Decompose the logits of these heads, for --query or all queries.", "HEADS"] = None
    precision: Annotated[int, "Bits per weight.", "8|16", Option(min=8, max=16)] = 8
    max_mb: Annotated[
        float,
        "Bin long maps to keep the page below this size; heads of --select stay whole.",
        "MB",
        Option(min=0.1, max=1e6),
    ] = 20.0
    steps: Annotated[bool, "Keep q, k and v of a short text, for its steps.", SETTING] = True

    def __post_init__(self) -> None:
        if self.out is None:
            raise UsageError("nowhere to write the page", "name a file with --out FILE, or - for stdout")
        if self.out == STDOUT and sys.stdout.isatty():
            raise UsageError("a page cannot be printed on a terminal", "redirect it to a file: > page.html")
        if self.out != STDOUT:
            check_file(self.out, "page.html")
        if self.precision not in (8, 16):
            raise UsageError(f"--precision: expected 8 or 16 bits, got {self.precision}", "leave it out, or write 16")
        if self.why is not None and self.from_tables:
            raise UsageError("a run's tables hold no logits to take apart", "leave out --from-tables")
        self.check_other_side()


@with_options(TextRun, Selected, Question, Pages)
def view(asked: TextRun, selected: Selected, question: Question, pages: Pages) -> int:
    """Write one HTML page of a text's attention, to hover over.

    The page needs no network. It shows every head as a map, as lines between tokens, as colours in the text and in
    a sortable table. In place of TEXT, the folder of a run reads its tokens again, with the model of its manifest.
    An encoder-decoder has all stacks on one page, or those of --select. With --picture the page shows decoder and
    vision tower.
    """
    command = command_line("view", asked, selected, question, pages)
    if pages.from_tables:
        return page_of_tables(asked, pages, command)

    from attnscope.inputs.tokens import find
    from attnscope.viewer.page import Plan, about, page_of
    from attnscope.viewer.page_data import Side, StackedSide, stacked
    from attnscope.viewer.study_pages import WhySide

    purpose = fill(ShowPage, pages, bits=pages.precision, whole=selected.select)
    ask, shown = shown_sides(asked, selected, question, pages, purpose)
    seen, why, whole = [side.seen for side in shown], shown[0].why, shown[0].whole
    sides = [StackedSide(side) if stacked(side) else Side(side) for side in seen]
    sides = [WhySide(seen[0], why), *sides[1:]] if why else sides
    opened = {why[0].layer: (why[0].head,)} if why else whole
    # The tokens of every name of --define.
    named = question.asks()["define"]
    groups = {name: find(sides[0].seen.prompt, name, named).positions for name in named}
    first = "why" if why else None
    facts = about(replace(sides[0].seen, chosen=shown[0].chosen), opened, command, groups, first)
    facts = replace(facts, copied=reproduce(asked, pages, ask))
    plan = Plan(pages.max_mb, 16 if pages.precision == 16 else 8, whole)
    write_page(page_of(sides, plan, facts, pages.align, shown[0].divergences), pages)
    return max(report_checks(observation, pages.quiet) for observation in seen)


def shown_sides(
    asked: TextRun, selected: Selected, question: Question, pages: Pages, purpose: ShowPage
) -> tuple[CaptureSpec, list[PageSide]]:
    """What is asked of the text; what the page shows of it, and of what it is compared with."""
    from attnscope.inputs.tensors import GivenTensors
    from attnscope.observe.request import Request

    if asked.picture and pages.of_two:
        raise UsageError("a page with a picture cannot show another text or model", "make a page of each")
    ask = asked.ask(read_run(asked, pages), selected, Request(**question.asks()))
    if isinstance(ask.text, GivenTensors):
        if pages.compare_model is not None:
            raise UsageError("another model needs a text, and these are tensors alone", "leave out {compare_model}")
        return ask, [purpose.of_tensors(ask.text, ask, output.TerminalProgress(pages.quiet))]
    if asked.module is not None:
        return ask, [module_side(asked, ask, pages, purpose)]
    side = model_beside(asked, ask, pages, purpose) if pages.compare_model else answer(asked, ask, purpose, pages)
    return ask, [side, *([side.other] if side.other else [])]


def module_side(asked: TextRun, ask: CaptureSpec, pages: Pages, purpose: ShowPage) -> PageSide:
    """What the page shows of a module of the user's."""
    from attnscope.model.loaded import LoadedModule

    if pages.compare_model is not None:
        raise UsageError("another model needs a first one, and --module gives a module", "leave out {compare_model}")
    loaded, tell = own_module(asked, pages), output.TerminalProgress(pages.quiet)
    if isinstance(loaded, LoadedModule):
        return purpose.of_module(loaded, ask, tell)
    side: PageSide = purpose.answer(loaded, ask, tell, nothing)
    return side


def model_beside(asked: TextRun, ask: CaptureSpec, pages: Pages, purpose: ShowPage) -> PageSide:
    """What the page shows of the text by the model, and next to it by another."""
    from attnscope.inputs.sound import Sound
    from attnscope.serve.questions import other_side

    assert pages.compare_model is not None
    loaded, tell = load_model(asked, pages), output.TerminalProgress(pages.quiet)
    [run] = purpose.runs(loaded, ask, tell, of_two=True)
    other = load_model(replace(asked, model=pages.compare_model, revision=None, base=None), pages)
    other.check_task("the other side of a page", "decoder", "encoder")
    written = isinstance(ask.text, str)
    of_tokens = not (written or isinstance(ask.text, Sound))  # of one model: the other reads what they say
    bare = other_side(ask) if written else replace(other_side(ask), chat=False, answer=None, generate=None)
    again = replace(bare, text=run.prompt.text if of_tokens else ask.text)
    return purpose.collect([run, purpose.prepare(other, again, tell)], ask.verify, tell)


def page_of_tables(asked: TextRun, pages: Pages, command: str) -> int:
    """A page of a run's folder, as it lies there."""
    from attnscope.export.redraw import run_of_folder
    from attnscope.viewer.page import Plan, about, page_of
    from attnscope.viewer.page_data import Side, StackedSide, kept_columns, stacked

    if asked.from_ is None:
        raise UsageError(
            "--from-tables needs the folder of a run", "name its folder: attnscope view runs/bank --from-tables"
        )
    folder = asked.from_.parent
    seen = run_of_folder(folder)
    side = StackedSide(seen) if stacked(seen) else Side(replace(seen, text_columns=kept_columns(seen.columns)))
    if not (side.said["metrics"] or side.seen.kept_keys):
        raise UsageError(f"{folder} has neither metrics nor weights of tokens", "leave out {from_tables}")
    facts = about(side.seen, {}, command, first="metrics" if side.said["metrics"] else "head")
    write_page(page_of([side], Plan(pages.max_mb, 16, listed=True), facts), pages)
    return 0


def write_page(page: Page, pages: Pages) -> None:
    """The page to --out, and what it does not hold to stderr."""
    if pages.out is None or pages.out == STDOUT:
        sys.stdout.buffer.write(page.html)
        sys.stdout.buffer.flush()
    else:
        with unwinding():
            page.save(pages.out)
        less = "; --set steps=false leaves the steps out" if page.arrays.get("steps", 0) > len(page.html) / 4 else ""
        output.log(f"wrote {pages.out} ({page.size}){less}", pages.quiet)
    output.log_lines(page.left_out, pages.quiet)
