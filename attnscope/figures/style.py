"""How figures are to look, and the matrices they show; nothing heavy is imported here.

H head, L layer, Q query, K key.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from attnscope.errors import BLANKS, UsageError, visible
from attnscope.figures.style_sheet import FONT_SIZES, StyleSheet, read_style_sheet
from attnscope.utils.display import head_name, model_name, printed

if TYPE_CHECKING:
    import numpy as np

Quantity = Literal["weight", "logit", "norm", "share", "difference", "signed", "channel", "size"]
OPEN: tuple[Quantity, ...] = ("logit", "norm", "difference", "signed", "channel", "size")  # which may lie beyond 0 to 1
SIGNED: tuple[Quantity, ...] = ("logit", "difference", "signed", "channel")  # scales reach equally far from 0
OWN_SCALE: tuple[Quantity, ...] = ("logit", "signed", "channel", "size")  # of which heads have no common measure
ImageFormat = Literal["png", "svg", "pdf"]
Scale = Literal["auto", "linear", "sqrt", "log"]
MOST_ANNOTATED = 12  # tokens; numbers in more cells than that are too small to read
LONG = 64  # tokens from which an overview on a linear scale is nearly all dark
DPI, PRINT_DPI = 120, 300
HIGHEST_DPI = 1200
TAKEN = math.inf  # stands where a query sees a key that the style took out
# After Okabe and Ito: kept apart by colour-blind readers, on white and beside viridis.
ROLE_COLOURS = {  # of both vocabularies: what a text shows, and what a scan names
    "induction": "#0072b2",
    "prefix-matching": "#1b24a9",
    "previous-token": "#e69f00",
    "self": "#56b4e9",
    "offset-2": "#382e04",
    "offset-3": "#7a5e2c",
    "offset-4": "#b6c16a",
    "duplicate-token": "#009e73",
    "sink": "#cc79a7",
    "long-range-copying": "#671c5e",
    "local": "#d55e00",
}
WIDTHS = {"column": 3.25, "page": 6.75}  # inches: a column, and both, of the two-column styles of most venues
PRINT_SIZES = 7.0, 8.0  # points of every text in a paper's figure
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # of lines, which hue alone does not tell apart
LEAST_WIDTH, MOST_WIDTH = 1.0, 60.0


@dataclass(frozen=True)
class About:
    """What a figure is of, for its foot and for the file's metadata; empty if not given.

    line: `demo, “the financial bank …”, 9 tokens`. The text is in the metadata by its hash alone. What steers a reader
    or has no place in XML is written out, as in `Style.title`.
    """

    line: str = ""
    model: str = ""
    text_sha256: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            object.__setattr__(self, name, visible(text, BLANKS))


class StyleFields(TypedDict, total=False):
    """The fields of `Style` that a picture in a notebook takes, as keywords."""

    scale: Scale
    sink: Literal["keep", "mask"]
    per_head_scale: bool
    cmap: str | None
    annotate: bool | None
    floor: float | None
    title: str
    caption: bool | None
    width: float | str | None
    font_size: float | None
    style: StyleSheet | str | Path | None
    dpi: int


@dataclass(frozen=True)
class Style:
    """How a figure is to look, and what it says of itself.

    `sink="mask"` takes a head's sink (`Maps.sinks`, else key 0) out of its map, draws it as its own grey strip at the
    side and prints its mean.
    Without `per_head_scale` one colour scale holds across a call's figures of weights. `scale="sqrt"` lies between
    linear and log; `auto` is sqrt for an overview of at least 64 tokens and where cells hold several tokens, else
    linear; `floor` is where a log scale begins. `cmap`: default viridis, for what has a sign a map that diverges around
    0, light there; it may be colours, by commas. `annotate=None` writes numbers into the cells when there are at
    most 12 tokens. `title` is put before each figure's own. `width`: inches, or `column` or `page` of a paper; there
    text has 7 to 8 points, and title and caption are drawn only where they are asked for. `font_size`: points of every
    text, but the numbers in cells that are too small for it. `style`: a style file of matplotlib, whose fonts, colours,
    lines and axes are read. `caption`: the lines below title and panels; `dpi`: pixels per inch.

    Raises UsageError for a choice that does not exist.

        >>> Style(scale="log", sink="mask")
        >>> Style(image="pdf", width="column", title="Induction")
    """

    scale: Scale = "auto"
    sink: Literal["keep", "mask"] = "keep"
    per_head_scale: bool = False
    image: ImageFormat = "png"
    cmap: str | None = None
    annotate: bool | None = None
    floor: float | None = None
    title: str = ""
    caption: bool | None = None
    width: float | str | None = None
    font_size: float | None = None
    style: StyleSheet | str | Path | None = None
    dpi: int = DPI
    about: About = About()

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Style).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                *others, last = get_args(hint)
                expected = f"{', '.join(others)} or {last}"
                raise UsageError(f"{name}: expected {expected}, got {getattr(self, name)!r}")
        if self.floor is not None and not (self.scale == "log" and 0 < self.floor < 1):
            raise UsageError(
                f"floor: expected a weight between 0 and 1 where the log scale begins, got {self.floor} on a "
                f"{'linear' if self.scale == 'auto' else self.scale} scale",
                "write scale log and floor 0.001",
            )
        if isinstance(self.style, str | Path):
            object.__setattr__(self, "style", read_style_sheet(self.style))
        size = self.sheet.get("font.size") if self.sheet else None
        if size and self.font_size is None:
            object.__setattr__(self, "font_size", float(size))
        if self.font_size is not None and not FONT_SIZES[0] <= self.font_size <= FONT_SIZES[1]:
            expected = f"points from {FONT_SIZES[0]:g} to {FONT_SIZES[1]:g}"
            raise UsageError(f"font_size: expected {expected}, got {self.font_size}")
        if not 10 <= self.dpi <= HIGHEST_DPI:
            raise UsageError(f"dpi: expected pixels per inch from 10 to {HIGHEST_DPI}, got {self.dpi}")
        _ = self.inches
        object.__setattr__(self, "title", visible(self.title, BLANKS))

    @property
    def sheet(self) -> StyleSheet | None:
        """The style file that was read."""
        return self.style if isinstance(self.style, StyleSheet) else None

    def of(self, about: About) -> Style:
        """The same of another figure."""
        return replace(self, about=about)

    def of_model(self, name: str) -> Style:
        """The same of a figure that is of a model alone, made by the same command."""
        return self.of(About(line=model_name(name), model=name, command=self.about.command))

    @property
    def inches(self) -> float | None:
        """The width that was asked for; None where the figure takes what it needs."""
        if self.width is None:
            return None
        try:
            inches = WIDTHS.get(str(self.width)) or float(self.width)
        except ValueError:
            inches = math.nan
        if not LEAST_WIDTH <= inches <= MOST_WIDTH:
            expected = f"{' or '.join(WIDTHS)}, or inches from {LEAST_WIDTH:g} to {MOST_WIDTH:g}"
            raise UsageError(f"width: expected {expected}, got {self.width!r}")
        return inches

    @property
    def in_print(self) -> bool:
        """Whether the figure is for a paper, which has its own title and caption."""
        return str(self.width) in WIDTHS

    @property
    def points(self) -> tuple[float, float] | None:
        """The smallest and the largest size of a text, where the figure is for a paper or a size was asked for."""
        if self.font_size is not None:
            return self.font_size, self.font_size
        return PRINT_SIZES if self.in_print else None

    def size_of(self, setting: str) -> float | None:
        """Points of a kind of text, as `axes.labelsize`: of the style file, else those of every text.

        A font size that was asked for wins over all sizes of the file.
        """
        of_file = self.sheet.points("font.size") if self.sheet else None
        own = self.sheet.points(setting) if self.sheet and self.font_size == of_file else None
        return self.font_size if own is None else own

    @property
    def titled(self) -> bool:
        """Whether a figure's title is drawn."""
        return bool(self.title) or not self.in_print

    @property
    def captioned(self) -> bool:
        """Whether the lines below title and panels are drawn."""
        return self.caption if self.caption is not None else not self.in_print

    def of_quantity(self, quantity: Quantity) -> Style:
        """The same with a linear scale for what has a sign; logits keep it, as another scale of them is refused."""
        level = quantity in SIGNED and quantity != "logit"
        return replace(self, scale="linear", floor=None) if level else self

    def for_maps(self, maps: Maps, *, overview: bool = False) -> Style:
        """The same with the scale that `auto` means for maps: most cells of many tokens are dark on a linear one."""
        if (style := self.of_quantity(maps.quantity)) is not self:
            return style
        many = maps.tokens >= LONG if overview else max(maps.bin_size, maps.bin_queries) > 1
        lifted = many and maps.quantity not in SIGNED and not self.per_head_scale
        return replace(self, scale="sqrt") if lifted and self.scale == "auto" else self

    def annotates(self, tokens: int) -> bool:
        """Whether numbers are written into the cells of a map of so many tokens."""
        return tokens <= MOST_ANNOTATED if self.annotate is None else self.annotate

    def headed(self, name: str) -> str:
        """A figure's own title after the one that was asked for."""
        return f"{self.title}: {name}" if self.title else name


UNSURE = "hatched: the interval holds 0"
SMALL = 0.01  # of the largest effect: an effect to the other side that no colour could show


def effect_scale(low: float, high: float) -> tuple[Quantity, float, float]:
    """The scale of effects from `low` to `high`, 0 among them: from 0 on, or centred on 0 where they have both signs.

    >>> effect_scale(-0.5, 1.0)
    ('logit', -1.0, 1.0)
    """
    end = max(-low, high) or 1.0
    return ("logit", -end, end) if -low > SMALL * high else ("weight", min(low, 0.0), end)


@dataclass(frozen=True)
class Part:
    """Some of a text's tokens: those of a map's rows and columns, and in words."""

    words: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Maps:
    """One layer's matrices as they will be drawn.

    values_HQK is float32, NaN where a query cannot see a key (drawn blank), already binned when `bin_size` > 1;
    `bin_rule` says how ("sum over keys, mean over queries"). Labels are one per row and one per column; `starts_Q` and
    `starts_K` the position of the first token in each, printed where not every token is labelled. `axes` name the two.
    `kv_heads` names each head's kv head in its title; `by_kv` says that `heads` counts kv heads. `quantity` says what
    the values are: attention weights, logits (before the softmax), norms of what keys write, shares of a token (a
    rollout's), or differences of weights. `turns`: the rows at which a turn of a chat begins. `key0`: each head's mean
    mass on key 0, where its column is binned and does not tell. `sinks`: the key that is each head's sink and its mean
    mass over all queries, where it is not key 0 for all; the columns then stay, so that all heads have the same.
    `part`: which tokens rows and columns hold, where they are some of the text's. `roles`: each head's, where known;
    `role_scores`: what each scores in the metric of its role, NaN for none; `roles_by`: whose word the roles are, as
    `a scan of the model`. `titles`, `name`: of each head and of the picture, where
    they are not of one layer; a layer without attention has no heads, and what it is as its name. `stack`: what is
    written before a layer's number, as `cross `, where a number alone means one of another stack. `numbered`: see Axis,
    of rows and columns. `window`: which keys a query sees, as `window 16` or `chunk 8`, where not all; its edge is
    drawn, also on the right where queries look `ahead`. `parallel`: what the layer computes next to its attention, as
    `ssm`. `begins`: what begins at the `turns`, in words.

    Raises ValueError when shape and labels disagree, or for a quantity that does not exist.

        Maps(27, (3,), np.ones((1, 2, 2), np.float32), ("a", "b"), ("a", "b"))
        Maps(0, (0,), binned_1QK, labels, labels, bin_size=5, bin_rule="sum over keys, mean over queries")
    """

    layer: int
    heads: tuple[int, ...]
    values_HQK: np.ndarray
    labels_Q: tuple[str, ...]
    labels_K: tuple[str, ...]
    bin_size: int = 1
    bin_rule: str = ""
    kv_heads: tuple[int, ...] = ()
    by_kv: bool = False
    quantity: Quantity = "weight"
    starts_Q: tuple[int, ...] = ()
    starts_K: tuple[int, ...] = ()
    axes: tuple[str, str] = ("query", "key")
    turns: tuple[int, ...] = ()
    key0: tuple[float, ...] = ()
    sinks: tuple[tuple[int, float], ...] = ()
    part: Part | None = None
    roles: tuple[str, ...] = ()
    role_scores: tuple[float, ...] = ()
    roles_by: str = ""
    titles: tuple[str, ...] = ()
    name: str = ""
    stack: str = ""
    numbered: tuple[bool, bool] = (True, True)
    window: str = ""
    ahead: bool = False
    parallel: str = ""
    begins: str = "a turn"

    def __post_init__(self) -> None:
        expected = (len(self.heads), len(self.labels_Q), len(self.labels_K))
        if self.values_HQK.shape != expected:
            raise ValueError(f"expected heads x queries x keys of {expected}, got {self.values_HQK.shape}")
        if self.kv_heads and len(self.kv_heads) != len(self.heads):
            raise ValueError(f"expected {len(self.heads)} kv heads, one per head, got {len(self.kv_heads)}")
        if self.quantity not in get_args(Quantity):
            raise ValueError(f"quantity: expected {' or '.join(get_args(Quantity))}, got {self.quantity!r}")

    def sink(self, index: int) -> tuple[int, float]:
        """The key that is a head's sink, and its mean mass, NaN where the column tells."""
        key, mass = self.sinks[index] if self.sinks else (0, math.nan)
        if key == 0:
            mass = self.key0[index] if self.key0 else math.nan
        return key, math.nan if self.quantity in OPEN else mass

    def column(self, key: int) -> int | None:
        """The column that holds a key, None where it is not drawn."""
        if self.part and key not in self.part.keys:
            return None
        return bisect_right(self.starts_K, key) - 1 if self.starts_K else key // self.bin_size

    @property
    def tokens(self) -> int:
        """The longer side of a map, in tokens; a binned one's last cell counts in full."""
        return max(len(self.labels_Q) * self.bin_queries, len(self.labels_K) * self.bin_size)

    @property
    def bin_queries(self) -> int:
        """How many queries a row has."""
        if self.part is None:
            two_texts = self.stack and len(self.starts_Q) > 1
            return self.starts_Q[1] - self.starts_Q[0] if two_texts else self.bin_size
        queries, (_, *later) = self.part.queries, self.starts_Q
        return queries.index(later[0]) if later else len(queries)

    @property
    def axis_Q(self) -> Axis:
        """What is written along the rows."""
        part = self.part.queries if self.part else ()
        return Axis(self.axes[0], self.labels_Q, self.starts_Q, self.bin_queries, part, self.numbered[0])

    @property
    def axis_K(self) -> Axis:
        """What is written below the columns."""
        part = self.part.keys if self.part else ()
        return Axis(self.axes[1], self.labels_K, self.starts_K, self.bin_size, part, self.numbered[1])


@dataclass(frozen=True)
class Axis:
    """One side of a map: its name, a label per cell, and the position of each cell's first token, if known.

    size: tokens per cell. part: the tokens that the cells hold, where they are some of the text's. numbered:
    whether positions are printed; labels that say a time need none.
    """

    name: str
    labels: tuple[str, ...]
    starts: tuple[int, ...] = ()
    size: int = 1
    part: tuple[int, ...] = ()
    numbered: bool = True

    @property
    def binned(self) -> bool:
        """Whether a cell holds several tokens."""
        return self.size > 1

    def named(self, step: int) -> str:
        """`key`, or `key (every 10th token labelled)` where every fifth cell of two tokens is."""
        every = step * self.size
        what = " token" * self.binned
        return self.name if every == 1 else f"{self.name} (every {ordinal(every)}{what} labelled)"

    @property
    def gaps(self) -> list[int]:
        """The cells before which tokens are left out."""
        before = {later: earlier for earlier, later in pairwise(self.part)}
        cells = [cell for cell, start in enumerate(self.starts) if before.get(start, start - 1) != start - 1]
        return [cell for cell in cells if cell]

    def marks(self, step: int) -> tuple[list[int], list[str]]:
        """The cells that are labelled, every `step`th, and their labels: `·the`, or `35 ·the` among unlabelled.

        Counted from position 0, also where the axis begins at 1, so that both axes of a map name the same tokens.
        """
        skipped = self.starts[0] if self.starts else 0  # key 0, where it is drawn beside the map
        first = step * bool(skipped) if self.binned else -skipped % step
        if self.binned and self.starts[:2] == (0, 1):  # key 0 in a column of its own, before the rest of its bin
            first = step + 1
        cells = list(range(0 if self.part else first, len(self.labels), step)) or [0]
        if not (self.starts and self.numbered) or (step == 1 and not self.binned and not self.part):
            return cells, [self.labels[cell] for cell in cells]
        return cells, [f"{self.starts[cell]} {self.labels[cell]}" for cell in cells]


@dataclass(frozen=True)
class Panel:
    """One metric of all heads as it is drawn: values_LH, NaN for none, on a scale from `low` to `high`.

    name and unit are above it. uniform: what uniform attention would score, one number per kind of layer. few_L: the
    layers in which a text has fewer rows than a role needs; support: why, in words. quantity: what a colour
    map is chosen by. first: row and column of the heads that are framed. hatched_LH: the heads that are hatched over
    their colours, whose interval holds 0. always: the panel is drawn even if heads are alike.
    without_L: of each layer without attention what it is, "" for the others; its row is grey.
    """

    name: str
    values_LH: np.ndarray
    low: float
    high: float
    unit: str = ""
    uniform: tuple[float, ...] = ()
    few_L: tuple[bool, ...] = ()
    support: str = ""
    quantity: Quantity = "weight"
    first: tuple[tuple[int, int], ...] = ()
    hatched_LH: np.ndarray | None = None
    always: bool = False
    without_L: tuple[str, ...] = ()


@dataclass(frozen=True)
class Depth:
    """One metric over the layers: layer_N, value_N of each head, NaN for none; null_N of uniform attention.

    name and unit are above it. interval: layers, and the ends of an interval of each layer's mean; empty without one.
    """

    name: str
    unit: str
    layer_N: np.ndarray
    value_N: np.ndarray
    null_N: np.ndarray
    interval: tuple[np.ndarray, ...] = ()


def head_title(maps: Maps, index: int) -> str:
    """`L27H3 (kv 1)  induction 0.72`, or `L27 kv 1` when kv heads were averaged; the role and its score where known."""
    kv = f" (kv {maps.kv_heads[index]})" if maps.kv_heads else ""
    name = f"L{maps.layer} kv {maps.heads[index]}" if maps.by_kv else head_name(maps.layer, maps.heads[index]) + kv
    return "  ".join(filter(None, (f"{maps.stack}{name}", role_title(maps, index))))


def role_title(maps: Maps, index: int) -> str:
    """`induction 0.72`, a head's role and its score on the text; nothing of a head without a role."""
    role = maps.roles[index] if maps.roles else ""
    score = maps.role_scores[index] if role and maps.role_scores else math.nan
    return role + f" {printed(score)}" * (not math.isnan(score))


def parallel_note(maps: Maps) -> str:
    """`parallel to the attention: ssm`, where the layer computes more than it."""
    return f"parallel to the attention: {maps.parallel}" * bool(maps.parallel)


def layer_name(layer: int, parallel: str = "") -> str:
    """`3`, or `3 + ssm` of a layer that computes that next to its attention."""
    return " + ".join(filter(None, (str(layer), parallel)))


def ordinal(number: int) -> str:
    """`2nd`, `11th`, `21st`."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def bin_note(maps: Maps) -> str:
    """Which tokens are drawn, and what one cell holds, or nothing when it is one query and one key of all."""
    rule = f": {maps.bin_rule}" if maps.bin_rule else ""
    binned = f"{maps.bin_queries} x {maps.bin_size} tokens a cell{rule}" if maps.bin_queries * maps.bin_size > 1 else ""
    return "; ".join(filter(None, (maps.part.words if maps.part else "", binned)))


def edge_boxes(values_QK: np.ndarray, window: tuple[str, bool], line: tuple[float, float] = (1, 1)) -> np.ndarray:
    """The edge of a window in a map, (n x 4: left, top, right, bottom, in cells), on the side of what is not seen.

    values_QK: NaN where a query sees no key. window: `Maps.window` and `Maps.ahead`. line: how thick, as a share of a
    cell's width and of its height. Nothing without a window, and where it holds the whole text.
    """
    import numpy as np

    name, ahead = window
    if not name:
        return np.empty((0, 4))
    seen_QK = ~np.isnan(values_QK)
    boxes = _left_edge(seen_QK, *line)
    if ahead:  # the same from the other corner
        keys, queries = seen_QK.shape[::-1]
        turned = _left_edge(seen_QK[::-1, ::-1], *line)
        boxes += [(keys - right, queries - bottom, keys - left, queries - top) for left, top, right, bottom in turned]
    return np.array(boxes, float).reshape(-1, 4)


def _left_edge(seen_QK: np.ndarray, wide: float, high: float) -> list[tuple[float, float, float, float]]:
    """Left of the first key that each query sees, and below what only the query before it sees."""
    first: dict[int, int] = {row: int(seen_K.argmax()) for row, seen_K in enumerate(seen_QK) if seen_K.any()}
    boxes: list[tuple[float, float, float, float]] = []
    boxes += [(key - wide, row, key, row + 1) for row, key in first.items() if key]
    for row, key in first.items():
        before = first.get(row - 1, key)
        if before < key:
            boxes.append((max(0, before - wide), row, key, row + high))
    return boxes


def split_sink(maps: Maps, style: Style) -> tuple[Maps, np.ndarray | None]:
    """The maps to draw, and the column (heads x queries) of each head's sink where the style takes it out of them.

    Where key 0 is the sink of all its column is gone; else each head's is TAKEN wherever it has a value. NaN where a
    head's is not drawn; nothing is taken out of a part without key 0 where that is the sink of all.
    """
    if style.sink == "keep" or len(maps.labels_K) < 2 or (not maps.sinks and maps.column(0) is None):
        return maps, None
    if maps.sinks:
        values_HQK, sink_HQ = maps.values_HQK.copy(), maps.values_HQK[:, :, 0] * math.nan
        for head, (key, _) in enumerate(maps.sinks):
            if (column := maps.column(key)) is not None:
                sink_HQ[head] = maps.values_HQK[head, :, column]
                values_HQK[head, :, column] = abs(sink_HQ[head]) + TAKEN  # NaN stays NaN
        return replace(maps, values_HQK=values_HQK), sink_HQ
    rest = replace(maps, values_HQK=maps.values_HQK[:, :, 1:], labels_K=maps.labels_K[1:], starts_K=maps.starts_K[1:])
    return rest, maps.values_HQK[:, :, 0]


def alone(layers: Iterable[Maps], style: Style) -> int | None:
    """How many of the first rows see one key whatever a head does, and set no scale; None: those drawn with one key.

    In a part a row may see more than is drawn of it; without its column key 0 is drawn nowhere.
    """
    layers = list(layers)
    if layers and layers[0].part:
        return int(layers[0].part.queries[0] == 0)
    return 0 if style.sink == "mask" and not any(maps.sinks for maps in layers) else None


@dataclass(frozen=True)
class Patches:
    """One head's weights on the patches of a picture, (N,), NaN for a hidden one; its title and a line below that."""

    weight_N: np.ndarray
    title: str
    note: str = ""


@dataclass(frozen=True)
class PatchSheet:
    """A picture of Pillow, its patches, and some heads' weights on these.

    box_N4: left, top, right and bottom edge of each patch, as shares of the picture's sides; where patches of several
    sizes lie over one another, their weights are added up.
    """

    image: Any
    box_N4: np.ndarray
    heads: tuple[Patches, ...]
    title: str = ""
    note: str = ""
