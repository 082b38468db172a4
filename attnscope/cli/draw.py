"""`attnscope draw`: pictures of the attention, of a text, or again of a finished folder by its tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from attnscope.cli import output
from attnscope.cli.config import refuse_others, with_options
from attnscope.cli.figure_options import DEPTH, FIGURES, Drawing, kinds_of_file, names, place_of_pictures
from attnscope.cli.heads import MeasuredEntries, Ranking, over_picture
from attnscope.cli.one_text import FEW, Show, draw_in_terminal, export_text, observe_text, report_checks, stream
from attnscope.cli.option_groups import SETTING, UNRECORDED, build, command_line, of_run, parameters
from attnscope.cli.options import Question, TextRun
from attnscope.cli.output import Config, Exporting
from attnscope.errors import UsageError, visible
from attnscope.utils.folders import PICTURES
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.export.redraw import Redrawn
    from attnscope.figures import Style

EXAMPLES = (
    'attnscope draw --text "the cat sat on the mat" --select last --out runs/cat',
    'attnscope draw --text "the cat sat on the mat" --scale log --sink mask --image svg --out runs/cat',
    'attnscope draw --text "the cat sat on the mat" --select 3.0,3.1 --weights value --show',
    'attnscope draw --text "Mary saw John, and John gave Mary a book" --query last --key Mary '
    "--figures overview,mass,top --out runs/mary",
    "attnscope scan demo --sequences 32 --out runs/atlas && "
    "attnscope draw runs/atlas --cmap magma --dpi 200 --out pictures",
)


class Pictures(Config, Exporting):
    """Figures to --out, their paths to stdout."""

    files = PICTURES
    out: Annotated[Path | None, "Folder for the pictures, or a file for one picture.", "DIR|FILE"] = None


class Drawn(MeasuredEntries):
    """What is drawn of the heads."""

    metrics: Annotated[str | None, SETTING] = None


class Best(Ranking):
    """The order of the heads of --figures top, and how many."""

    top: Annotated[str | None, "Heads on the picture of --figures top: a number, or all (default: 20)."] = None


class Drawable(TextRun):
    """One text through one model, or what is drawn again."""

    given: Annotated[str | None, "The text, in quotes, or a result folder to redraw; - reads stdin.", Argument()] = None
    from_: Annotated[Path | None, "Read the tokens of this run again, with the model.", UNRECORDED] = None


GROUPS = (Drawable, Drawn, Question, Best, Pictures, Drawing, Show)


def redraw(context: Context, folder: Path, given: dict[str, Any]) -> int:
    """Draw the pictures of a finished run, scan, ablation, comparison or dataset from its tables, without a model.

    given: the options, by field. Raises UsageError for those that have no part in it.
    """
    from attnscope.corpus.folder import is_dataset

    pictures, looks, entries = build(Pictures, given), build(Drawing, given), build(Drawn, given)
    # Heads are sorted by one metric; others that were named are drawn beside it.
    select, sort, metrics = entries.select, given["sort"], entries.named
    # An option that cannot change a picture here is refused, and not passed over.
    of_metrics = is_dataset(folder) or {DEPTH, "metrics"} & {kind.strip() for kind in (looks.figures or "").split(",")}
    named = {"sort", "metrics"} if of_metrics else set()
    drawing = {"given", "select", "set", *named, *parameters(type(pictures), type(looks))}
    again = f"leave it out, or read the text again: attnscope draw --from {folder}"
    refuse_others(context, drawing, f"{folder} is drawn again from its tables", again)
    into = pictures.file or place_of_pictures(folder, pictures.out)
    style = looks.figure_style(command_line("draw", pictures, looks))

    from attnscope.export.drawing import draw_alone
    from attnscope.export.redraw import STUDIES, Redrawn, redraw_study
    from attnscope.metrics.metrics import order_of

    # A study has its own pictures; of a run of a text kinds and heads can be chosen.
    study = any((folder / name).exists() for name in STUDIES)
    if (looks.figures or select) and study:
        raise UsageError(f"{folder} holds no run of a text", "leave out --figures and --select")
    kinds = names(looks.figures, (*FIGURES, DEPTH), "--figures")
    if pictures.file is not None and not (study or is_dataset(folder)):
        kinds = kinds_of_file(kinds or None, select, pictures.file)
    notes: list[str] = []

    def draw_again(into: Path) -> list[Path]:
        if is_dataset(folder):
            from attnscope.cli.dataset import Chosen, DatasetAsk

            chosen = Chosen.read(folder, DatasetAsk(sort, select=select, metrics=metrics), pictures.quiet)
            redrawn = Redrawn(chosen.draw(into, style, looks.figures or DEPTH))
        else:
            over = [*([order_of(sort)[0]] if sort else []), *metrics]
            redrawn = redraw_study(folder, into, style) or _run(folder, into, style, kinds or FIGURES, select, over)
        notes.extend(redrawn.notes)
        return redrawn.paths

    # A stop between two files leaves no half of one.
    with unwinding():
        paths = [draw_alone(pictures.file, draw_again, "name a folder")] if pictures.file else draw_again(into)
    output.log_lines(notes, pictures.quiet)
    count = "" if pictures.file else f" {len(paths)} file{'s' * (len(paths) > 1)} to"
    output.log(f"wrote{count} {into}", pictures.quiet)
    _print(paths)
    return 0


@with_options(*GROUPS, of_folder=redraw)
def draw(
    asked: Drawable,
    entries: Drawn,
    question: Question,
    ranking: Best,
    pictures: Pictures,
    drawing: Drawing,
    showing: Show,
) -> int:
    """Draw the attention of a text: overview, layers, heads.

    stdout gets the path of every picture. --select draws heads one by one. With --query and --key the pictures show
    those tokens alone, with --picture the weights over it. --show draws heads in the terminal, without --out too;
    next to --out in a pipe, on stderr.

    Give a result folder instead of TEXT to redraw its figures in another style, without loading the model. --from
    FOLDER reads the tokens of a run again, with the model.
    """
    if pictures.out is None and not showing.show:
        raise UsageError("nowhere to draw", "name a folder with --out DIR, or draw in the terminal with --show")
    entries.check(scale=drawing.scale)
    ranking.check(asked, entries, question)
    over = over_picture(asked, entries, question, drawing)
    # A file is one picture; a folder has by default all kinds that the text can show.
    kinds = drawing.kinds(question)
    if pictures.file is not None:
        kinds = kinds_of_file(kinds, entries.select, pictures.file)
    kinds = kinds or (*FIGURES[:-1], *["picture"] * over)

    from attnscope.observe.request import MapFields, Request

    groups = (asked, entries, question, ranking, pictures, drawing)
    drawn = pictures.out is not None
    options = of_run("draw", *groups)
    style, to = drawing.figure_style(command_line("draw", *groups)), stream(only=not drawn)
    # Metrics cost time, and are measured for the pictures that show them or roles, or order heads by them.
    measured = not drawn or bool({"overview", "heads", "metrics", "top", DEPTH} & set(kinds))
    maps: MapFields = {"maps": "all"} if drawn else showing.maps(lambda: style, to)
    maps = {**drawing.maps(), **maps}
    metrics = entries.ids(ranking.sort) if measured else ()
    keep = Request(view=entries.view(), metrics=metrics, per_token=over, **question.asks(), **maps)
    seen = observe_text(asked, entries, pictures, options, keep)
    order = ranking.order(seen)
    if drawn:
        names = [head.name for head in seen.kept_heads()] if entries.select else []
        written = export_text(
            seen,
            pictures,
            options=options,
            heads=names,
            sort=order if measured else None,
            top=ranking.shown,
            depth=entries.over_layers(order),
            metrics=entries.of_panels(ranking.sort),
            figures=kinds,
            style=style,
            tables=False,
        )
        _print(written if pictures.file else written[:-1])  # without the manifest
        named = entries.select is not None or pictures.file is not None or "heads" not in kinds
        output.log("heads are drawn one by one with --select", pictures.quiet or named)
    if showing.show:
        shown = seen.kept_heads(None if entries.select else seen.ranked_by)[:FEW]
        draw_in_terminal(seen, seen.kept_heads() if entries.select else shown, style, to)
    return report_checks(seen, pictures.quiet)


def _print(paths: Sequence[Path]) -> None:
    """The paths, one per line: to a program as they are, to a person as can be read."""
    lines = (visible(str(path)).encode() if sys.stdout.isatty() else os.fsencode(path) for path in paths)
    sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))


MAPS = ("overview", "layers", "heads")  # pictures of whole weights


def _run(
    folder: Path, into: Path, style: Style, kinds: Sequence[str], select: str | None, over: Sequence[str]
) -> Redrawn:
    """The pictures of a run of a text: its maps where a table lists every weight, and its metrics.

    over: the metrics that are drawn, without them all, and over the layers what heads are sorted by.
    """
    from attnscope.export.drawing import DrawingOptions, drawings
    from attnscope.export.manifest import NAME
    from attnscope.export.redraw import AGAIN, Redrawn, load_run
    from attnscope.model.selection import select_stacks

    if not (folder / NAME).exists():
        raise UsageError(
            f"{folder} is a folder without results of attnscope",
            f"name the folder of a run, scan, ablation or comparison; --text {folder} reads the name",
        )
    # Heads by --select, in the words of the run's own layers: there is no model to ask.
    seen = load_run(folder, sink_apart=style.sink == "mask")
    chosen: list[str] = []
    if select is not None:
        heads = {
            stack: {key.layer: count for key, (count, _) in obs.kv_of.items()} for stack, obs in seen.stacks.items()
        }
        wanted = select_stacks(select, heads, seen.stack, of="this run")
        kept = seen.kept_heads()
        chosen = [head.name for head in kept if head.head in wanted.get(head.stack, {}).get(head.layer, ())]
    drawn = drawings(seen, DrawingOptions(chosen, depth=over, metrics=over))
    panels = any(drawing.panels for drawing in drawn.values())
    # Tables hold less than a run did: what they lack is named, with how to draw it all the same.
    lacking = [kind for kind in MAPS if kind in kinds and seen.maps is None and (kind != "heads" or chosen)]
    lacking += ["metrics"] if "metrics" in kinds and not panels else []
    lacking += [DEPTH] if DEPTH in kinds and not any(drawing.depth[0] for drawing in drawn.values()) else []
    notes = [f"{', '.join(lacking)}: not in the tables; {AGAIN.format(folder)}"] * bool(lacking)
    if "metrics" in kinds and panels:
        notes.append(f"metrics.{style.image} does not mark what the text is too short to show: no table says it")
    if not any(drawing.pictures(kinds) for drawing in drawn.values()):
        raise UsageError(f"the tables of {folder} hold no picture that was asked for", AGAIN.format(folder))
    paths = chain.from_iterable(drawing.draw(into / stack, kinds, style) for stack, drawing in drawn.items())
    return Redrawn(list(paths), tuple(notes))
