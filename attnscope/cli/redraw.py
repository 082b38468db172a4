"""`attnscope heatmap FOLDER`: the pictures of what was finished, drawn again from its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.config import refuse_others
from attnscope.cli.figure_options import DEPTH, FIGURES, Drawing, kinds_of_file, names, place_of_pictures
from attnscope.cli.groups import command_line, parameters
from attnscope.cli.options import Exporting
from attnscope.errors import UsageError
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    import typer

    from attnscope.export.redraw import Redrawn
    from attnscope.figures import Style

MAPS = ("overview", "layers", "heads")  # pictures of whole weights


def redraw(
    context: typer.Context,
    folder: Path,
    pictures: Exporting,
    looks: Drawing,
    select: str | None,
    sort: str | None,
    metrics: Sequence[str],
) -> list[Path]:
    """Draw the pictures of a folder into --out; the paths. Raises UsageError for options that have no part in it.

    sort, metrics: by which heads are sorted, and what else was named, for the figure of depth.
    """
    from attnscope.corpus.folder import is_dataset

    over_layers = {"sort", "metrics"} if is_dataset(folder) or DEPTH in (looks.figures or "") else set()
    drawing = {"given", "select", "set", *over_layers, *parameters(type(pictures), type(looks))}
    again = f"leave it out, or read the text again: attnscope heatmap --from {folder}"
    refuse_others(context, drawing, f"{folder} is drawn again from its tables", again)
    into = pictures.file or place_of_pictures(folder, pictures.out)
    style = looks.style(command_line("heatmap", pictures, looks))

    from attnscope.export.drawing import draw_alone
    from attnscope.export.redraw import STUDIES, Redrawn, redraw_study

    output.complain_through_talk(pictures.quiet)
    study = any((folder / name).exists() for name in STUDIES)
    if (looks.figures or select) and study:
        raise UsageError(f"{folder} holds no run of a text", "leave out --figures and --select")
    kinds = names(looks.figures, (*FIGURES, DEPTH), "--figures")
    if pictures.file is not None and not (study or is_dataset(folder)):
        kinds = kinds_of_file(kinds or None, select, pictures.file)
    notes: list[str] = []

    def draw(into: Path) -> list[Path]:
        if is_dataset(folder):
            from attnscope.cli.dataset import Ranked, draw_dataset

            asked = Ranked(sort=sort, select=select, metrics=metrics, atlas=None)
            found = Redrawn(draw_dataset(folder, asked, into, style, looks.figures or DEPTH, pictures.quiet))
        else:
            over = [one for one in (sort, *metrics) if one]
            found = redraw_study(folder, into, style) or _run(folder, into, style, kinds or FIGURES, select, over)
        notes.extend(found.notes)
        return found.paths

    with unwinding():
        paths = [draw_alone(pictures.file, draw, "name a folder")] if pictures.file else draw(into)
    for note in notes:
        output.talk(note, pictures.quiet)
    said = "wrote" if pictures.file else f"wrote {len(paths)} file{'s' * (len(paths) > 1)} to"
    output.talk(f"{said} {into}", pictures.quiet)
    return paths


def _run(
    folder: Path, into: Path, style: Style, kinds: Sequence[str], select: str | None, over: Sequence[str]
) -> Redrawn:
    """The pictures of a run of a text: its maps where a table lists every weight, and its metrics.

    over: the metrics that are drawn over the layers, without them what heads are sorted by.
    """
    from attnscope.export.drawing import drawings
    from attnscope.export.manifest import NAME
    from attnscope.export.redraw import AGAIN, Redrawn
    from attnscope.export.redraw import load_run as kept_run
    from attnscope.model.selection import pairs
    from attnscope.model.selection import select as selected

    if not (folder / NAME).exists():
        raise UsageError(
            f"{folder} is a folder without results of attnscope",
            f"name the folder of a run, scan, ablation or comparison; --text {folder} reads the name",
        )
    seen = kept_run(folder, sink_apart=style.sink == "mask")
    chosen: list[str] = []
    if select is not None:
        heads_by_layer = {key.layer: heads for key, (heads, _) in seen.kv_of.items()}
        wanted = set(pairs(selected(select, heads_by_layer, of="this run")))
        chosen = [head.name for head in seen.kept_heads() if (head.layer, head.head) in wanted]
    [drawing] = drawings(seen, chosen, depth=over).values()
    lacking = [kind for kind in MAPS if kind in kinds and seen.maps is None and (kind != "heads" or chosen)]
    lacking += ["metrics"] if "metrics" in kinds and not drawing.panels else []
    lacking += [DEPTH] if DEPTH in kinds and not drawing.depth[0] else []
    notes = [f"{', '.join(lacking)}: not in the tables; {AGAIN.format(folder)}"] * bool(lacking)
    if "metrics" in kinds and drawing.panels:
        notes.append(f"metrics.{style.image} does not mark what the text is too short to show: no table says it")
    if not drawing.pictures(kinds):
        raise UsageError(f"the tables of {folder} hold no picture that was asked for", AGAIN.format(folder))
    return Redrawn(drawing.draw(into, kinds, style), tuple(notes))
