"""Files written whole or not at all, and the same bytes every time."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from attnscope import files
from attnscope.figures.fonts import Fonts, register

DPI = 120
PNG_ZLIB_LEVEL = 3  # flat colours: level 6 takes twice the time for a few percent

# no dates, no random ids: two runs write the same bytes
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": "attnscope"},
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


def save_figure(figure: Figure, path: Path, image: str) -> Path:
    """A whole figure as png, svg or pdf."""
    extra: dict[str, Any] = {"pil_kwargs": {"compress_level": PNG_ZLIB_LEVEL}} if image == "png" else {}
    return write_whole(
        path, lambda temp: figure.savefig(temp, format=image, dpi=DPI, metadata=_METADATA[image], **extra)
    )
