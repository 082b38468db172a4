"""Options of pictures: their file format, how they look, and which are drawn. Then those of studies of many texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from attnscope.cli.option_groups import DRAWN, FIRST, HELD, SETTING, OptionGroup, changed, fill
from attnscope.cli.options import Question
from attnscope.cli.output import Config, Exporting, Format, wanted_format
from attnscope.errors import UsageError, nearest

if TYPE_CHECKING:
    from attnscope.figures import Style
    from attnscope.observe.request import MapFields

FIGURES = ("overview", "layers", "heads", "metrics")  # of every run with --out
DEPTH = "depth"  # of a text, and of a dataset


class Look(OptionGroup, panel="Output"):
    """What kind of file a figure is, and how every figure looks."""

    image: Annotated[Literal["png", "svg", "pdf"], "File format of figures.", HELD, DRAWN] = "png"
    title: Annotated[str | None, "Text before the title of each figure.", "TITLE", DRAWN, SETTING] = None
    caption: Annotated[
        bool | None,
        "Print captions (default: true, but false for column and page width).",
        Option("--caption/--no-caption"),
        DRAWN,
        SETTING,
    ] = None
    width: Annotated[
        str | None,
        "column (3.25 in) or page (6.75 in) for a paper, or the width in inches.",
        "WIDTH",
        DRAWN,
        SETTING,
    ] = None
    font_size: Annotated[
        float | None,
        "Size of all text in points (default: automatic, 7 to 8 in a paper).",
        "POINTS",
        Option(min=4, max=24),
        SETTING,
    ] = None
    dpi: Annotated[
        int | None, "Pixels per inch (default: 120, in a paper 300).", Option(min=10, max=1200), DRAWN, SETTING
    ] = None
    style: Annotated[
        Path | None, "A style file of matplotlib: its fonts, colours, lines and axes.", "FILE", SETTING
    ] = None
    cmap: Annotated[
        str | None,
        "Colour map of matplotlib, or colours by commas (default: viridis, for signed values RdBu_r).",
        "NAME",
        SETTING,
    ] = None

    def __post_init__(self) -> None:
        if changed(self):
            _ = self.figure_style()  # refused before a model is loaded
        if self.cmap:
            from attnscope.figures.colours import find_cmap

            find_cmap(self.cmap)

    def figure_style(self, command: str = "") -> Style:
        """How figures are drawn, those for a paper with its dots; command: what the files say made them."""
        from attnscope.figures import About, Style
        from attnscope.figures.style import PRINT_DPI

        style = fill(Style, self, about=About(command=command))
        return replace(style, dpi=PRINT_DPI) if style.in_print and self.dpi is None else style


class Scale(OptionGroup, panel="Output"):
    """How weights become colours."""

    scale: Annotated[
        Literal["auto", "linear", "sqrt", "log"],
        "Colour scale; auto: linear, but sqrt for an overview of 64 tokens or more, and for binned maps.",
        SETTING,
    ] = "auto"
    floor: Annotated[
        float | None,
        "Lower end of a log scale, e.g. 0.001 (default: the smallest weight).",
        "WEIGHT",
        Option(min=0, max=1),
        SETTING,
    ] = None
    sink: Annotated[
        Literal["keep", "mask"] | None,
        "Attention sink: keep it in the map, or mask it and draw it as a separate strip (default: keep).",
        SETTING,
    ] = None


class Map(Scale, Look):
    """How a heatmap is drawn."""

    annotate: Annotated[
        bool | None, "Numbers in the cells (default: up to 12 tokens).", Option("--annotate/--no-annotate"), SETTING
    ] = None


def names(text: str | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The parts of a comma-joined option, each known, in the order of `known`."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    for part in parts:
        if part not in known:
            near = nearest(part, known)
            hint = f"did you mean {near}?" if near else f"write {option} {known[0]}, several joined by commas"
            raise UsageError(f"{option}: expected some of {', '.join(known)}, got {part!r}", hint)
    return tuple(name for name in known if name in parts)


class Drawing(Map):
    """Which figures are drawn, and how many heatmaps."""

    figures: Annotated[
        str | None,
        "By commas: overview, layers, heads, metrics, mass (on --key), top (one sheet of the first "
        "heads), depth (metrics by layer), picture (over --picture).",
        "KINDS",
        FIRST,
    ] = None
    per_head_scale: Annotated[bool, "One colour scale per head, not per figure.", SETTING] = False
    bin: Annotated[Literal["sum", "max"], "Bins of texts over 200 tokens: sum or maximum.", SETTING] = "sum"

    def maps(self) -> MapFields:
        """The fields of `Request` that say how maps are kept."""
        return {"bin_rule": self.bin, "split_sink": self.sink == "mask"}

    def kinds(self, question: Question) -> tuple[str, ...] | None:
        """The kinds that were named, None where none were. Raises UsageError for one that cannot be drawn."""
        if self.figures is None:
            return None
        kinds = names(self.figures, (*FIGURES, "mass", "top", DEPTH, "picture"), "--figures")
        if not kinds:
            raise UsageError("--figures names no figure", "write --figures overview")
        if "mass" in kinds and question.key is None:
            raise UsageError("--figures mass shows the mass on named keys", "name them with --key")
        return kinds


def kinds_of_file(kinds: tuple[str, ...] | None, select: str | None, file: Path) -> tuple[str, ...]:
    """The one kind of figure that a file holds. Raises UsageError where several pictures are drawn."""
    from attnscope.model.selection import may_be_one_head

    heads = select is not None and may_be_one_head(select)
    if kinds is None and heads:
        return ("heads",)
    if kinds is None or len(kinds) > 1 or (kinds == ("heads",) and not heads):
        several = f"--select {select} names several heads" if select and not heads else "several are drawn"
        hint = "choose a head, --select L1H4, or a figure, --figures overview; or name a folder"
        raise UsageError(f"{file} is one picture, and {several}", hint)
    return kinds


def place_of_pictures(folder: Path, out: Path | None) -> Path:
    """The folder to draw into. Raises UsageError where that is none, or holds what was finished itself."""
    from attnscope.export.manifest import inner_folders
    from attnscope.utils.files import refuse_links
    from attnscope.utils.folders import kinds_in

    if out is None:
        raise UsageError("nowhere to draw", "name a folder with --out DIR")
    if kinds := list(kinds_in(out)):
        raise UsageError(f"{out} holds {kinds[0]}", f"name another folder for the pictures of {folder}")
    refuse_links(inner_folders(out))
    return out


FEW = 2  # sequences of a rehearsal: as many as a mean over others takes
MOST_SEQUENCES = 1_000_000
MOST_SETS = 100_000  # that are drawn to compare with


class ManyTexts(OptionGroup, panel="Input"):
    """A file of texts, for statistics over them."""

    texts: Annotated[str | None, "Texts, one per line or record.", "FILE", FIRST] = None


class Sampled(OptionGroup, panel="What to ask"):
    """How many sequences a number is of."""

    sequences: Annotated[int, "Sequences per probe; intervals need 32.", Option(min=2, max=MOST_SEQUENCES), FIRST] = 64


class Rehearsal(OptionGroup, panel="Output"):
    """Whether anything is done."""

    dry_run: Annotated[bool, "Print the plan and its cost, and stop.", FIRST] = False


class Sequences(Rehearsal, Sampled, ManyTexts):
    """Sequences that are drawn, or counted alone."""

    @property
    def drawn(self) -> int:
        """How many are drawn: a rehearsal counts all, and draws few."""
        return min(self.sequences, FEW) if self.dry_run else self.sequences


class StudyTable(Config, Format, Exporting):
    """A table to stdout, and files to --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted_format(self.format)  # what it refuses is refused before the work
