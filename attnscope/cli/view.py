"""`attnscope view`: a text's attention as one HTML file to hover over."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from attnscope.cli import output
from attnscope.cli.copied import copied
from attnscope.cli.groups import FIRST, command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.options import Config, OtherSide, Question, Selected, TextRun, Writing, check_folder
from attnscope.cli.takes import takes
from attnscope.errors import UsageError
from attnscope.signals import unwinding
from attnscope.stacks import SEQ2SEQ, VISION, is_vision

if TYPE_CHECKING:
    from attnscope.ask import Ask
    from attnscope.model.geometry import LayerGeometry
    from attnscope.model.loaded import LoadedModel
    from attnscope.observation import Observation
    from attnscope.run import Run
    from attnscope.study.why.records import KeyParts
    from attnscope.viewer.page import Page
    from attnscope.viewer.plan import Plan

EXAMPLES = (
    'attnscope view --text "the financial bank is located on river bank" --out bank.html',
    'attnscope view --text "Mary gave John a book" --compare-text "John gave Mary a book" --out swapped.html',
    'attnscope heads "the cat sat on the mat" --out runs/cat > cat.csv && attnscope view runs/cat --out cat.html',
)
STDOUT = Path("-")


@dataclass(frozen=True, kw_only=True)
class Pages(Config, OtherSide, Writing):
    """One page, and how much it may hold."""

    panel = "Page"
    out: Annotated[Path | None, Option(help="Write the page here; - is stdout.", metavar="FILE|-"), FIRST] = None
    from_tables: Annotated[bool, Option(help="Of a run: a page of what it kept, without the model.")] = False
    why: Annotated[
        str | None,
        Option(help="Take the logits of these heads apart, for the queries of --query or all.", metavar="HEADS"),
    ] = None
    precision: Annotated[int, Option(help="Bits per weight.", metavar="8|16")] = 8
    max_mb: Annotated[
        float, Option(help="Bin long maps over so many MB; heads of --select stay whole.", metavar="MB", min=0.1)
    ] = 20.0

    def __post_init__(self) -> None:
        if self.out is None:
            raise UsageError("nowhere to write the page", "name a file with --out FILE, or - for stdout")
        if self.out == STDOUT and sys.stdout.isatty():
            raise UsageError("a page cannot be printed on a terminal", "redirect it to a file: > page.html")
        if self.out != STDOUT and (self.out.is_dir() or not self.out.suffix):
            raise UsageError(f"{self.out} is not the name of a file", f"name one: {self.out / 'page.html'}")
        if self.precision not in (8, 16):
            raise UsageError(f"--precision: expected 8 or 16 bits, got {self.precision}", "leave it out, or write 16")
        if self.why is not None and self.from_tables:
            raise UsageError("a run's tables hold no logits to take apart", "leave out --from-tables")
        self.check_other_side()
        if self.out != STDOUT:
            check_folder(self.out.parent)


@takes(TextRun, Selected, Question, Pages, file=GROUPS)
def view(asked: TextRun, selected: Selected, question: Question, pages: Pages) -> int:
    """A text's attention as a page to hover over, in one HTML file.

    It needs no network. Every head as a map, as lines between tokens, as colours in the text, in a sortable table. The
    folder of a run in place of TEXT reads that run's tokens again, with the model that its manifest names. Of an
    encoder-decoder all stacks are on one page, or those of --select: the text, and after it the target. With --picture
    so are decoder and vision tower, and where a token looks in the picture.
    """
    command = command_line("view", asked, selected, question, pages)
    if pages.from_tables:
        return page_of_tables(asked, pages, command)

    from attnscope.cli.single import report_checks
    from attnscope.show.why_page import WhySide
    from attnscope.viewer.page import about, page_of
    from attnscope.viewer.side import Side
    from attnscope.viewer.stacks import StackedSide, first_asked, stacked

    ask, runs = runs_of(asked, selected, question, pages)
    plan = plan_of(pages, selected, runs[0])
    why = taken_apart(runs[0], pages, plan)
    seen = [observed(run, replace(plan, max_mb=plan.max_mb / len(runs)), asked, pages.quiet) for run in runs]
    sides = [StackedSide(one) if stacked(one) else Side(one) for one in seen]
    sides = [WhySide(seen[0], why), *sides[1:]] if why else sides
    asked_of = {stack: one.chosen for stack, one in runs[0].asked.items()}
    chosen = runs[0].chosen if runs[0].source is None else first_asked(asked_of, len(runs[0].source))
    named = {why[0].layer: (why[0].head,)} if why else plan.whole
    groups, first = groups_of(sides[0].seen, question), "why" if why else None
    said = about(replace(sides[0].seen, chosen=chosen), named, command, groups, first)
    said = replace(said, copied=copied(asked, pages, ask))
    write_page(page_of(sides, plan, said, pages.align), pages)
    return max(report_checks(one, pages.quiet) for one in seen)


def runs_of(asked: TextRun, selected: Selected, question: Question, pages: Pages) -> tuple[Ask, list[Run]]:
    """What is asked of the text; it, and what it is compared with, ready to be read."""
    from attnscope.cli.single import load_model, read_run
    from attnscope.keep.request import Request
    from attnscope.media.sound import Sound
    from attnscope.told import prepare_told

    def ready(loaded: LoadedModel, ask: Ask) -> Run:
        loaded.check_queries("a page")
        return prepare_told(loaded, ask, output.Talk(pages.quiet))

    if asked.picture and (pages.compare_text or pages.compare_model):
        raise UsageError("a page with a picture cannot show another text or model", "make a page of each")
    text, loaded = read_run(asked, pages), load_model(asked, pages)
    of_two = loaded.geometry.task == SEQ2SEQ
    if of_two and (pages.compare_text or pages.compare_model):
        raise UsageError("a page of an encoder-decoder cannot show another text or model", "make a page of each")
    ask = asked.ask(text, selected, Request(**question.asks()))
    if not (of_two or (asked.picture and not ask.keep.asks)):  # of several stacks those are shown that are named
        ask = replace(ask, select=None)
    runs = [ready(loaded, ask)]
    other_side = replace(ask, keep=Request(), select=None, atlas=None, target=None, picture=None)
    if pages.compare_text is not None:
        runs.append(ready(loaded, replace(other_side, text=pages.compare_text)))
    if pages.compare_model is not None:
        other = load_model(replace(asked, model=pages.compare_model, revision=None, base=None), pages)
        other.check_task("the other side of a page", "decoder", "encoder")
        written = isinstance(text, str)
        of_tokens = not (written or isinstance(text, Sound))  # of one model: the other reads what they say
        again = runs[0].prompt.text if of_tokens else text
        bare = other_side if written else replace(other_side, chat=False, answer=None, generate=None)
        runs.append(ready(other, replace(bare, text=again)))
    return ask, runs


def plan_of(pages: Pages, selected: Selected, run: Run) -> Plan:
    """What may go into the page."""
    from attnscope.selection import select
    from attnscope.viewer.plan import Plan

    heads = run.loaded.geometry.heads_by_layer
    whole = {} if selected.select is None or several(run) else select(selected.select, heads, run.named)
    return Plan(pages.max_mb, 16 if pages.precision == 16 else 8, whole)


def taken_apart(run: Run, pages: Pages, plan: Plan) -> Sequence[KeyParts]:
    """The logits of --why, of the page's first side."""
    from attnscope.calls.why import STACKS
    from attnscope.selection import select
    from attnscope.show.why_page import why_of

    if pages.why is None:
        return ()
    run.loaded.check_task(*STACKS)
    if several(run):
        raise UsageError("with a picture no logits are taken apart", "leave out --why")
    heads = select(pages.why, run.loaded.geometry.heads_by_layer, run.named)
    queries = range(len(run.prompt)) if run.chosen.query is None else run.chosen.query.positions
    return why_of(run.loaded, run.prompt.ids, heads, queries, plan)


def several(run: Run) -> bool:
    """Whether several stacks are on one page, over texts of their own."""
    return run.source is not None or VISION in run.loaded.geometry.stacks


def kept_layers(run: Run) -> list[LayerGeometry]:
    """The layers of all stacks with as many heads as the page is to have of each."""
    found = []
    for stack, layers in run.loaded.geometry.stacks.items():
        chosen = None if run.request.stacks is None else run.request.stacks.get(stack, {})
        for layer in layers.values():
            found.append(layer if chosen is None else replace(layer, heads=len(chosen.get(layer.index, ()))))
    return [layer for layer in found if layer.heads]


def kept_of(run: Run, plan: Plan) -> dict[str, Any]:
    """What to keep of a pass, over all texts of the page, as fields of `Request`."""
    beside = run.source or next(iter(run.prompt.medium.tower[-1:]), ())
    return plan.request(kept_layers(run), len(run.prompt) + len(beside) * several(run))


def without_tower(run: Run, plan: Plan, quiet: bool) -> Run:
    """The same; of a page that has no room for all maps of decoder and vision tower the decoder alone, and a line."""
    geometry = run.loaded.geometry
    if VISION not in geometry.stacks or run.request.stacks is not None or kept_of(run, plan)["weights"] is True:
        return run
    output.talk(
        "the page shows the decoder only, the vision tower does not fit; choose heads, as in --select vision.3.2,last",
        quiet,
    )
    others = {stack: layers for stack, layers in geometry.other_stacks.items() if not is_vision(stack)}
    loaded = replace(run.loaded, geometry=replace(geometry, other_stacks=others))
    medium = replace(run.prompt.medium, tower=())
    return replace(run, loaded=loaded, prompt=replace(run.prompt, medium=medium))


def observed(run: Run, plan: Plan, asked: TextRun, quiet: bool) -> Observation:
    """One side's forward pass, which keeps what the page has room for."""
    from attnscope.cli.single import say
    from attnscope.text.tokens import Chosen
    from attnscope.told import answer_lines, asked_lines, run_lines

    run = without_tower(run, plan, quiet)
    layers, kept = kept_layers(run), kept_of(run, plan)
    if several(run):  # stacks of different texts share no bins, and no steps
        kept |= {"operands": False, "maps": None, "weights": kept["weights"] is True}
    run = run.asking(replace(run.request, **kept))
    say((*run_lines(run), *answer_lines(run), *asked_lines(run)), quiet)
    whole = replace(run, chosen=Chosen())  # the page holds all tokens: those that were named say where it opens
    if asked.verify:
        with output.progress("oracle", None, quiet):
            whole = whole.verified()
    with output.progress(f"forward pass over {len(run.prompt):,} tokens", len(layers), quiet, "layers") as advance:
        return whole.observe(advance)


def groups_of(seen: Observation, question: Question) -> dict[str, Sequence[int]]:
    """The tokens of every name of --define."""
    from attnscope.text.tokens import find

    named = question.asks()["define"]
    return {name: find(seen.prompt, name, named).positions for name in named}


def page_of_tables(asked: TextRun, pages: Pages, command: str) -> int:
    """A page of a run's folder, as it lies there."""
    from attnscope.viewer.kept import KeptSide
    from attnscope.viewer.page import About, page_of
    from attnscope.viewer.plan import Plan

    if asked.from_ is None:
        raise UsageError("--from-tables is about a run", "name its folder: attnscope view runs/bank --from-tables")
    side = KeptSide(asked.from_.parent)
    write_page(page_of([side], Plan(pages.max_mb, 16), About(command, side.open)), pages)
    return 0


def write_page(page: Page, pages: Pages) -> None:
    """The page to --out, and what it does not hold to stderr."""
    if pages.out is None or pages.out == STDOUT:
        sys.stdout.buffer.write(page.html)
        sys.stdout.buffer.flush()
    else:
        with unwinding():
            page.save(pages.out)
        output.talk(f"wrote {pages.out}, {len(page.html) / 1e6:.1f} MB", pages.quiet)
    for sentence in page.left_out:
        output.talk(sentence, pages.quiet)
