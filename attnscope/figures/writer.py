"""Files written whole or not at all, and the same bytes every time; what they say of themselves."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import Normal
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from attnscope.figures.fonts import Fonts, caption, isolated, register
from attnscope.figures.raster import Boxes, encode_png, press_images
from attnscope.figures.style import DPI, About, Style
from attnscope.utils import files

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
def drawing(fonts: Fonts) -> Iterator[None]:
    """Matplotlib as shipped, whatever the user's own settings are, and no text read as a formula."""
    with mpl.rc_context(), warnings.catch_warnings():
        configure(fonts)
        yield


def configure(fonts: Fonts) -> None:
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
            "xtick.major.size": 3,
            "ytick.major.size": 3,
            "xtick.major.pad": 3,
            "ytick.major.pad": 3,
        }
    )
    # fonts_for has said it already, once and with what to do
    warnings.filterwarnings("ignore", message=r"Glyph .* missing from")


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Write beside `path` and move into place; a failure leaves nothing. UsageError where the folder cannot be written.

    >>> write_whole(Path("a.txt"), lambda temp: temp.write_text("whole"))
    """
    return files.write_whole(path, write)


def save_figure(figure: Figure, path: Path, style: Style) -> Path:
    """A whole figure as png, svg or pdf; its images are painted by cells where those are whole pixels."""
    spell(figure, style)
    if style.image == "png":
        figure.set_dpi(style.dpi)
        return save_pixels(_painted(figure), path, style)
    facts = {**_METADATA[style.image], **facts_of(style.about, style.image)}
    return write_whole(path, lambda temp: figure.savefig(temp, format=style.image, dpi=style.dpi, metadata=facts))


def spell(figure: Figure, style: Style) -> None:
    """The words of a figure as `caption` and `isolated` have them; ticks are written as they stand.

    In a PDF words with format characters, such as those that isolate a direction, are outlines: matplotlib 3.11 moves
    what follows such a character to the left there, by the width of a space.
    """
    for text in figure.findobj(Text):
        if not (said := text.get_text()).isascii():
            text.set_text(isolated(caption(said)))
            if style.image == "pdf" and any(unicodedata.category(char) == "Cf" for char in text.get_text()):
                text.set_path_effects([Normal()])


def save_pixels(pixels: np.ndarray, path: Path, style: Style) -> Path:
    """A picture (height x width x 3, uint8) as png."""
    data = encode_png(pixels, style.dpi, {"Software": "attnscope", **facts_of(style.about, "png")})
    return write_whole(path, lambda temp: temp.write_bytes(data))


def save_behind(pictures: Iterable[tuple[Path, np.ndarray]], style: Style) -> Iterator[Path]:
    """`save_pixels` for many, one path at a time; each is compressed, which holds no lock, while the next is drawn."""
    with ThreadPoolExecutor(1) as thread:
        last: Future[Path] | None = None
        for path, pixels in pictures:
            if last is not None:
                yield last.result()
            last = thread.submit(save_pixels, pixels, path, style)
        if last is not None:
            yield last.result()


def facts_of(about: About, image: str) -> dict[str, str]:
    """What a file says of itself, by the keys that its format has."""
    known = {"Model": about.model, "Text-SHA256": about.text_sha256, "Command": about.command}
    said = {name: value for name, value in known.items() if value}
    title = {"Title": about.line} if about.line else {}
    if image == "png":
        return {**title, **said}
    key = "Description" if image == "svg" else "Subject"
    return {**title, **({key: "; ".join(f"{name}: {value}" for name, value in said.items())} if said else {})}


def drawn_pixels(figure: Figure) -> np.ndarray:
    """What the canvas holds now, height x width x 3 of uint8."""
    canvas = cast(FigureCanvasAgg, figure.canvas)
    # Pillow drops the fourth channel five times faster than numpy
    return np.array(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))


class Reused:
    """A figure drawn again and again: all but the `live` artists once, those anew each time."""

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
        self.blank()
        self.draw()
        return drawn_pixels(self.figure)

    def blank(self) -> None:
        """Put back on the canvas what is drawn once."""
        self.buffer[:] = self.background

    def draw(self) -> None:
        """Draw the live artists over what the canvas holds."""
        for artist in self.live:
            self.figure.draw_artist(artist)

    @cached_property
    def plain(self) -> np.ndarray:
        """What is drawn once, height x width x 3 of uint8."""
        return np.ascontiguousarray(self.background[..., :3])

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


def _painted(figure: Figure) -> np.ndarray:
    """The figure drawn. Matplotlib colours every pixel of a large image; we colour its cells, and repeat them."""
    panels = [ax for ax in figure.axes if not ax.patches]  # patches lie over images
    images = [image for ax in panels for image in ax.images]
    boxes = [one for ax in panels for one in ax.collections if isinstance(one, Boxes)]
    for artist in (*images, *boxes):
        artist.set_visible(False)
    figure.canvas.draw()
    pixels = drawn_pixels(figure)
    by_hand = [press_images(pixels, images), *(one.press(pixels) for one in boxes)]
    for artist in (*images, *boxes):
        artist.set_visible(True)
    if all(by_hand):
        return pixels
    figure.canvas.draw()
    return drawn_pixels(figure)
