"""`attnscope heatmap FOLDER`: the pictures of what was finished, drawn again from its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.config import flagged
from attnscope.cli.figure_options import FIGURES, Drawing, names
from attnscope.cli.groups import command_line, parameters
from attnscope.cli.options import Exporting
from attnscope.errors import UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    import typer

    from attnscope.figures import Style
    from attnscope.show.again import Redrawn

MAPS = ("overview", "layers", "heads")  # pictures of whole weights


def redraw(context: typer.Context, folder: Path, pictures: Exporting, looks: Drawing, select: str | None) -> list[Path]:
    """Draw the pictures of a folder into --out; the paths. Raises UsageError for options that have no part in it."""
    _check(context, folder, type(pictures), type(looks))
    into = _place(folder, pictures.out)
    style = looks.style(command_line("heatmap", pictures, looks))

    from attnscope.show.again import STUDIES, redraw_study

    output.complain_through_talk(pictures.quiet)
    if (looks.figures or select) and any((folder / name).exists() for name in STUDIES):
        raise UsageError(f"{folder} is no run of a text", "leave out --figures and --select")
    with unwinding():
        found = redraw_study(folder, into, style) or _run(folder, into, style, looks, select)
    for note in found.notes:
        output.talk(note, pictures.quiet)
    output.talk(f"wrote {len(found.paths)} file{'s' * (len(found.paths) > 1)} to {into}", pictures.quiet)
    return found.paths


def _check(context: typer.Context, folder: Path, *groups: type) -> None:
    """Raise UsageError for an option that draws nothing."""
    drawing = {"given", "select", "set", *parameters(*groups)}
    for one in context.command.params:
        if one.name not in drawing and flagged(context, str(one.name)):
            raise UsageError(
                f"{max(one.opts, key=len)} has no part in drawing {folder} again",
                f"leave it out, or read the text again: attnscope heatmap --from {folder}",
            )


def _place(folder: Path, out: Path | None) -> Path:
    """The folder to draw into. Raises UsageError where that is none, or holds what was finished itself."""
    from attnscope.files import refuse_links
    from attnscope.folder.manifest import NAME, inner_folders
    from attnscope.show.again import STUDIES

    if out is None:
        raise UsageError("nowhere to draw", "name a folder with --out DIR")
    if any((out / name).exists() for name in (NAME, *STUDIES)):
        raise UsageError(f"{out} holds a finished run", f"name another folder for the pictures of {folder}")
    refuse_links(inner_folders(out))
    return out


def _run(folder: Path, into: Path, style: Style, looks: Drawing, select: str | None) -> Redrawn:
    """The pictures of a run of a text: its maps where a table lists every weight, and its metrics."""
    from attnscope.drawing import drawings
    from attnscope.folder.manifest import NAME
    from attnscope.redraw import AGAIN, kept_run
    from attnscope.selection import pairs
    from attnscope.selection import select as selected
    from attnscope.show.again import Redrawn

    if not (folder / NAME).exists():
        raise UsageError(
            f"TEXT is the name of a folder, {folder}, in which no run lies, and no scan, ablation or comparison",
            f"name the folder of one, or --text {folder} reads the name",
        )
    kinds = names(looks.figures, FIGURES, "--figures") or FIGURES
    seen = kept_run(folder, sink_apart=style.sink == "mask")
    chosen: list[str] = []
    if select is not None:
        heads_by_layer = {key.layer: heads for key, (heads, _) in seen.kv_of.items()}
        wanted = set(pairs(selected(select, heads_by_layer)))
        chosen = [head.name for head in seen.kept_heads() if (head.layer, head.head) in wanted]
    [drawing] = drawings(seen, chosen).values()
    lacking = [kind for kind in MAPS if kind in kinds and seen.maps is None and (kind != "heads" or chosen)]
    lacking += ["metrics"] if "metrics" in kinds and not drawing.panels else []
    notes = [f"{', '.join(lacking)}: not in the tables; {AGAIN.format(folder)}"] * bool(lacking)
    if "metrics" in kinds and drawing.panels:
        notes.append(f"metrics.{style.image} does not mark what the text is too short to show: no table says it")
    if not drawing.pictures(kinds):
        raise UsageError(f"the tables of {folder} hold no picture that was asked for", AGAIN.format(folder))
    return Redrawn(drawing.draw(into, kinds, style), tuple(notes))
