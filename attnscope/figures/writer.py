"""Files written whole or not at all, and the same bytes every time; what they say of themselves.

What makes a PNG per head fast: numbers copied into the cells, and an encoder for flat colours.

Drawing 45 texts costs several times the rest of a head's picture, and the same few strings recur: matplotlib draws
each string once. Cells are whole pixels, so that a string lies the same way in each of them.
"""

from __future__ import annotations

import struct
import unicodedata
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, NamedTuple, cast

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import Normal
from matplotlib.rcsetup import cycler
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from attnscope.figures.fonts import Fonts, caption, isolated, register
from attnscope.figures.style import DPI, About, Style
from attnscope.figures.style_sheet import StyleSheet, parameters
from attnscope.utils.files import write_whole

PNG_ZLIB_LEVEL = 3  # flat colours: level 6 takes twice the time for a few percent
SHARED_ZLIB_LEVEL, LEAST_STRETCH = 4, 10  # of rows that are compressed once; fewer are not worth a block of their own
ZLIB_HEAD, LAST_BLOCK, ADLER = b"\x78\x01", b"\x03\x00", 65521
MOST_KEPT = 4096  # strings; scores have many more than weights
NOTHING = np.array([255, 255, 255, 0], np.uint8).view(np.uint32)  # what a canvas holds on which nothing is drawn
# Kept apart by colour-blind readers: seaborn's `colorblind`.
COLOURS = (
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"),
)
UP = 2  # the filter that stores a row as its difference to the row above: nearly all zeros in a heatmap
INCH_PER_METRE = 39.3701
NO_COMPRESSION_NO_LANGUAGE = bytes(5)  # ends the keyword; flag and method 0; two empty strings


class Stamps:
    """The numbers of one heatmap: `numbers` are its n texts, `cells` (n x 2) their rows and columns."""

    def __init__(self, canvas: FigureCanvasAgg, ax: Axes, numbers: Sequence[Text], cells: np.ndarray) -> None:
        self.canvas, self.numbers, self.model = canvas, numbers, numbers[0]
        box, height = ax.get_window_extent(), np.asarray(canvas.buffer_rgba()).shape[0]
        self.side = np.array([box.height / abs(np.diff(ax.get_ylim())[0]), box.width / np.diff(ax.get_xlim())[0]])
        self.corners = np.rint(np.array([height - box.y1, box.x0]) + cells * self.side).astype(int)
        self.kept: dict[str, tuple[int, int, np.ndarray]] = {}

    def press(self, pixels: np.ndarray) -> None:
        """Put every number, in its colour, into the picture (height x width x 3, uint8)."""
        for text, (top, left) in zip(self.numbers, self.corners, strict=True):
            string = text.get_text()
            if not string:
                continue
            if string not in self.kept:
                if len(self.kept) >= MOST_KEPT:
                    self.kept.clear()
                self.kept[string] = self._drawn(string)
            down, right, cover = self.kept[string]
            high, wide, _ = cover.shape
            spot = pixels[top + down : top + down + high, left + right : left + right + wide]
            ink = np.rint(np.array(to_rgb(text.get_color())) * 255)
            spot += ((ink - spot) * cover).astype(np.int16).astype(np.uint8)

    def _drawn(self, string: str) -> tuple[int, int, np.ndarray]:
        """Where in a cell the string begins (pixels down, right), and its cover (height x width x 1, 0 to 1)."""
        now, (top, left) = self.model.get_text(), self.corners[0]
        self.model.set_text(string)
        box = self.model.get_window_extent()
        reach = np.ceil([box.height, box.width])  # beyond the cell, so that little of a large picture is looked at
        above, before = np.maximum(0, self.corners[0] - reach).astype(int)
        below, behind = (self.corners[0] + self.side + reach).astype(int)
        spot = np.asarray(self.canvas.buffer_rgba())[above:below, before:behind]
        spot.view(np.uint32)[:] = NOTHING  # a pixel at a time: four times as fast as its four bytes
        self.model.draw(self.canvas.get_renderer())
        self.model.set_text(now)
        cover = spot[..., 3]
        rows, columns = np.flatnonzero(cover.any(1)), np.flatnonzero(cover.any(0))
        tight = cover[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1, None] / 255
        return int(above + rows[0] - top), int(before + columns[0] - left), tight


def press_images(pixels: np.ndarray, images: Sequence[AxesImage]) -> bool:
    """Paint images that fill their axes, each over those before it, into the picture (height x width x 3).

    Transparent cells are left as they are. False, and nothing painted, where cells are not whole pixels, or half
    transparent.
    """
    by_panel: dict[tuple[Axes, tuple[int, ...]], list[np.ndarray]] = {}
    for image in images:
        cells = image.get_array()
        assert cells is not None
        by_panel.setdefault((image.axes, cells.shape[:2]), []).append(image.to_rgba(cells, bytes=True))
    places = [_place(axes, shape, len(pixels)) for axes, shape in by_panel]
    every = (cells for layers in by_panel.values() for cells in layers)
    if None in places or not all(np.isin(cells[..., 3], (0, 255)).all() for cells in every):
        return False
    for place, layers in zip(places, by_panel.values(), strict=True):
        top, left, high, wide = cast(tuple[int, int, int, int], place)
        colours, there = layers[0][..., :3].copy(), layers[0][..., 3] > 0
        for layer in layers[1:]:
            np.copyto(colours, layer[..., :3], where=layer[..., 3:] > 0)
            there = there | (layer[..., 3] > 0)
        # A block of cells that have a colour at a time; rows that are alike are taken together.
        starts = [0, *(np.flatnonzero((there[1:] != there[:-1]).any(1)) + 1).tolist(), len(there)]
        for rows in starmap(slice, pairwise(starts)):
            for columns in runs(there[rows.start]):
                block = colours[rows, columns].repeat(wide, 1)
                spot = pixels[top + rows.start * high : top + rows.stop * high, left + columns.start * wide :]
                spot[:, : block.shape[1]].reshape(-1, high, *block.shape[1:])[:] = block[:, None]
    return True


def _place(ax: Axes, cells: tuple[int, ...], height: int) -> tuple[int, int, int, int] | None:
    """Top and left of axes, height and width of one of so many cells; None where these are not whole pixels."""
    box = ax.get_window_extent()
    place = np.array([height - box.y1, box.x0, box.height / cells[0], box.width / cells[1]])
    whole = np.rint(place)
    return tuple(whole.astype(int).tolist()) if np.allclose(place, whole, atol=1e-6) else None


def runs(there: Sequence[bool] | np.ndarray) -> Iterator[slice]:
    """The stretches of what is there.

    >>> list(runs([True, True, False, True]))
    [slice(0, 2, None), slice(3, 4, None)]
    """
    ends = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(bool)))
    return starmap(slice, ends.reshape(-1, 2).tolist())


class Boxes(PolyCollection):
    """Rectangles over the cells of an image (n x 4: left, top, right, bottom, in cells), a colour each."""

    def __init__(self, ax: Axes, boxes: np.ndarray, colours: Sequence[str]) -> None:
        self.boxes, self.colours = boxes, np.rint([[255 * part for part in to_rgb(colour)] for colour in colours])
        self.panel = ax
        corners = boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]]
        super().__init__(list(corners), facecolors=list(colours), linewidths=0, antialiaseds=False, zorder=1)
        self.set_clip_on(False)  # a frame may stand outside
        ax.add_collection(self, autolim=False)

    def press(self, pixels: np.ndarray) -> bool:
        """Paint them into the picture; False, and nothing painted, where their sides are not whole pixels."""
        corners = self.panel.transData.transform(self.boxes.reshape(-1, 2))
        corners[:, 1] = len(pixels) - corners[:, 1]
        whole = np.rint(corners).astype(int).reshape(-1, 4)
        if not np.allclose(corners.reshape(-1, 4), whole, atol=1e-6):
            return False
        for (left, top, right, bottom), colour in zip(whole.tolist(), self.colours, strict=True):
            pixels[top:bottom, left:right] = colour
        return True


def encode_png(pixels: np.ndarray, dpi: int, facts: Mapping[str, str] = {}, shared: SharedRows | None = None) -> bytes:
    """Height x width x 3 of uint8 -> the file's bytes (PNG specification, third edition: IHDR, pHYs, iTXt, IDAT, IEND).

    In under half of Pillow's time where colours are flat. facts: what the file says of itself, by keyword. shared: the
    rows that it has in common with other pictures of its figure.

    Path("a.png").write_bytes(encode_png(np.zeros((2, 2, 3), np.uint8), dpi=120, facts={"Software": "attnscope"}))
    """
    height, width, _ = pixels.shape
    per_metre, lines = round(dpi * INCH_PER_METRE), filtered(pixels)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"pHYs", struct.pack(">IIB", per_metre, per_metre, 1)),
        *(
            (b"iTXt", name.encode("latin-1") + NO_COMPRESSION_NO_LANGUAGE + text.encode())
            for name, text in facts.items()
        ),
        (b"IDAT", zlib.compress(lines.data, PNG_ZLIB_LEVEL) if shared is None else shared.compressed(lines)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        data += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return data


def filtered(pixels: np.ndarray) -> np.ndarray:
    """The rows of a picture as its PNG has them: a filter, and the differences to the row above."""
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, width * 3)
    lines = np.empty((height, 1 + width * 3), np.uint8)
    lines[:, 0] = UP
    lines[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])
    return lines


class SharedRows:
    """The rows that pictures of one figure have in common with its background: a stretch of them is compressed once.

    A row within a cell differs from the row above as it does in the background, whatever the cell's colour. The bytes
    of a picture do not depend on those before it.
    """

    def __init__(self, background: np.ndarray) -> None:
        """background: the figure without what changes, height x width x 3 of uint8."""
        self.background, self._lines = background, filtered(background)
        self._kept: dict[tuple[int, int], Stretch] = {}

    def compressed(self, lines: np.ndarray) -> bytes:
        """Rows as one stream of zlib (RFC 1950), in stretches that do not refer to each other."""
        alike = [run for run in runs((lines == self._lines).all(1)) if run.stop - run.start >= LEAST_STRETCH]
        parts, end = [], 0
        for run in [*alike, slice(len(lines), len(lines))]:
            parts.append(Stretch.of(lines[end : run.start], PNG_ZLIB_LEVEL))
            place, end = (run.start, run.stop), run.stop
            if place not in self._kept:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.clear()
                self._kept[place] = Stretch.of(self._lines[run], SHARED_ZLIB_LEVEL)
            parts.append(self._kept[place])
        low, high = 1, 0  # the two sums of Adler-32, each stretch's own begun at 1 and 0
        for part in parts:
            high = (high + (part.checksum >> 16) + part.size * (low - 1)) % ADLER
            low = (low + (part.checksum & 0xFFFF) - 1) % ADLER
        return ZLIB_HEAD + b"".join(part.data for part in parts) + LAST_BLOCK + struct.pack(">HH", high, low)


class Stretch(NamedTuple):
    """Some bytes compressed by themselves: blocks of deflate (RFC 1951), none the last; their Adler-32 and how many."""

    data: bytes
    checksum: int
    size: int

    @classmethod
    def of(cls, lines: np.ndarray, level: int) -> Stretch:
        """The rows of a part of a picture."""
        packer = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
        blocks = packer.compress(lines.data) + packer.flush(zlib.Z_SYNC_FLUSH) if len(lines) else b""
        return cls(blocks, zlib.adler32(lines.data), lines.size)


BEYOND = 16  # pixels around artists: tick marks, and ink outside a letter's own box
# no dates, no random ids: two runs write the same bytes
_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": "attnscope"},
    "pdf": {"CreationDate": None, "Creator": "attnscope", "Producer": "attnscope"},
}


def px(pixels: float) -> float:
    """Pixels -> points."""
    return pixels * 72 / DPI


@contextmanager
def drawing(fonts: Fonts, sheet: StyleSheet | None = None) -> Iterator[None]:
    """Matplotlib as shipped, whatever the user's own settings are, but for those of a sheet; no text is a formula."""
    with mpl.rc_context(), warnings.catch_warnings():
        configure(fonts, sheet)
        yield


def configure(fonts: Fonts, sheet: StyleSheet | None = None) -> None:
    """The settings of `drawing`, for good: for a process that does nothing else."""
    register(fonts)
    mpl.rcdefaults()
    mpl.rcParams.update(
        {
            "font.family": list(fonts.families),
            "text.parse_math": False,
            "figure.dpi": DPI,
            "savefig.dpi": DPI,
            "svg.hashsalt": "attnscope",
            "svg.fonttype": "none",  # text that can be searched and edited
            "pdf.fonttype": 42,  # TrueType: some venues refuse Type 3
            "axes.unicode_minus": True,
            "axes.edgecolor": "#262626",
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "grid.color": "#e6e6e6",
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.5,
            "lines.markersize": 4,
            "xtick.major.size": 3,
            "ytick.major.size": 3,
            "xtick.major.pad": 3,
            "ytick.major.pad": 3,
        }
    )
    if sheet is not None:
        mpl.rcParams.update(parameters(sheet, fonts.families))
    # fonts_for has said it already, once and with what to do
    warnings.filterwarnings("ignore", message=r"Glyph .* missing from")


def save_figure(figure: Figure, path: Path, style: Style) -> Path:
    """A whole figure as png, svg or pdf; its images are painted by cells where those are whole pixels."""
    spell(figure, style)
    if style.image == "png":
        figure.set_dpi(style.dpi)
        panels = [ax for ax in figure.axes if not ax.patches]  # patches lie over images
        images = [image for ax in panels for image in ax.images]
        boxes = [artist for ax in panels for artist in ax.collections if isinstance(artist, Boxes)]
        # Matplotlib colours every pixel of a large image; we colour its cells, and repeat them.
        for artist in (*images, *boxes):
            artist.set_visible(False)
        figure.canvas.draw()
        pixels = drawn_pixels(figure)
        by_hand = [press_images(pixels, images), *(artist.press(pixels) for artist in boxes)]
        for artist in (*images, *boxes):
            artist.set_visible(True)
        if not all(by_hand):
            figure.canvas.draw()
            pixels = drawn_pixels(figure)
        return save_pixels(pixels, path, style)
    facts = {**_METADATA[style.image], **facts_of(style.about, style.image)}
    return write_whole(path, lambda temp: figure.savefig(temp, format=style.image, dpi=style.dpi, metadata=facts))


def spell(figure: Figure, style: Style) -> None:
    """The words of a figure as `caption` and `isolated` have them; ticks are written as they are.

    In a PDF words with format characters, such as those that isolate a direction, are outlines: matplotlib 3.11 moves
    what follows such a character to the left there, by the width of a space.
    """
    for text in figure.findobj(Text):
        if not text.get_text().isascii():
            text.set_text(isolated(caption(text.get_text())))
            if style.image == "pdf" and any(unicodedata.category(char) == "Cf" for char in text.get_text()):
                text.set_path_effects([Normal()])


def save_pixels(pixels: np.ndarray, path: Path, style: Style, shared: SharedRows | None = None) -> Path:
    """A picture (height x width x 3, uint8) as png; shared: see `encode_png`."""
    data = encode_png(pixels, style.dpi, {"Software": "attnscope", **facts_of(style.about, "png")}, shared)
    return write_whole(path, lambda temp: temp.write_bytes(data))


def save_behind(pictures: Iterable[tuple[Path, np.ndarray, SharedRows]], style: Style) -> Iterator[Path]:
    """`save_pixels` for many, one path at a time; each is compressed, which holds no lock, while the next is drawn."""
    with ThreadPoolExecutor(1) as thread:
        last: Future[Path] | None = None
        for path, pixels, shared in pictures:
            if last is not None:
                yield last.result()
            last = thread.submit(save_pixels, pixels, path, style, shared)
        if last is not None:
            yield last.result()


def facts_of(about: About, image: str) -> dict[str, str]:
    """What a file says of itself, by the keys that its format has."""
    known = {"Model": about.model, "Text-SHA256": about.text_sha256, "Command": about.command}
    facts = {name: value for name, value in known.items() if value}
    title = {"Title": about.line} if about.line else {}
    if image == "png":
        return {**title, **facts}
    key = "Description" if image == "svg" else "Subject"
    return {**title, **({key: "; ".join(f"{name}: {value}" for name, value in facts.items())} if facts else {})}


def drawn_pixels(figure: Figure) -> np.ndarray:
    """What the canvas holds now, height x width x 3 of uint8."""
    canvas = cast(FigureCanvasAgg, figure.canvas)
    # Pillow drops the fourth channel five times faster than numpy
    return np.array(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))


class Reused:
    """A figure drawn again and again: all but the `live` artists once, those each time."""

    def __init__(self, figure: Figure, live: Sequence[Artist], absent: Sequence[Artist] = ()) -> None:
        """absent: artists that somebody else puts into the pixels."""
        self.figure, self.live, self.canvas = figure, live, cast(FigureCanvasAgg, figure.canvas)
        for artist in (*live, *absent):
            artist.set_animated(True)
        images = [artist for artist in (*live, *absent) if isinstance(artist, AxesImage)]
        for image in images:  # matplotlib 3.10 draws them although they are animated
            image.set_visible(False)
        self.canvas.draw()
        for image in images:
            image.set_visible(True)
        self.background = np.array(self.canvas.buffer_rgba())

    @property
    def buffer(self) -> np.ndarray:
        """What the canvas holds, height x width x 4 of uint8, to be written into."""
        return np.asarray(self.canvas.buffer_rgba())

    def pixels(self) -> np.ndarray:
        """The figure as it is now, height x width x 3 of uint8."""
        self.buffer[:] = self.background
        self.draw()
        return drawn_pixels(self.figure)

    def draw(self) -> None:
        """Draw the live artists over what the canvas holds."""
        for artist in self.live:
            self.figure.draw_artist(artist)

    @cached_property
    def plain(self) -> np.ndarray:
        """What is drawn once, height x width x 3 of uint8."""
        return np.ascontiguousarray(self.background[..., :3])

    @cached_property
    def shared(self) -> SharedRows:
        """The rows of that, which pictures of the figure share."""
        return SharedRows(self.plain)

    def changed(self, *artists: Artist) -> Changed:
        """What artists change of that, as they are now; the canvas is left with what is drawn once."""
        box = self._around(artists)
        now, before = self.buffer[box], self.background[box]
        now[:] = before
        for artist in artists:
            self.figure.draw_artist(artist)
        down, right = np.nonzero((now != before).any(-1))
        colours = now[down, right, :3]
        now[:] = before
        return Changed(down + box[0].start, right + box[1].start, colours)

    def _around(self, artists: Sequence[Artist]) -> tuple[slice, slice]:
        """Rows and columns of the canvas that hold artists, and what of them reaches beyond the room they claim."""
        high, wide, _ = self.background.shape
        claimed = [box for artist in artists if (box := artist.get_tightbbox()) is not None]
        boxes = [box for box in claimed if np.isfinite(box.get_points()).all()]  # a text without letters has none
        if not boxes:
            return slice(0, 0), slice(0, 0)
        (x0, y0), (x1, y1) = Bbox.union(boxes).padded(BEYOND).get_points().round().astype(int).tolist()
        return slice(max(0, high - y1), max(0, high - y0)), slice(max(0, x0), max(0, min(x1, wide)))


@dataclass(frozen=True)
class Changed:
    """Some pixels of a picture: their rows and columns, and their colours (n x 3)."""

    rows: np.ndarray
    columns: np.ndarray
    colours: np.ndarray

    def press(self, pixels: np.ndarray, down: int = 0, right: int = 0) -> None:
        """Paint them into the picture (height x width x 3 or 4), so many pixels from where they were."""
        pixels[self.rows + down, self.columns + right, :3] = self.colours
