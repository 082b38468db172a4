"""A file -> a picture, as it is shown and as it is hashed.

picture = open_picture("cat.png")
picture.image.size, picture.sha256
"""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
MOST_PICTURES, MOST_BYTES = 16, 2**28
PictureSource = Any  # a file's name or path, or a picture of Pillow


@dataclass(frozen=True)
class Picture:
    """A picture in RGB, upright, and the SHA-256 of its file, or of its pixels where it is from none."""

    image: Image
    sha256: str


def all_opened(sources: PictureSource | Sequence[PictureSource]) -> tuple[Picture, ...]:
    """One or several pictures. Raises InputError for what is none, and for too many."""
    listed = list(sources) if isinstance(sources, list | tuple) else [sources]
    if not 1 <= len(listed) <= MOST_PICTURES:
        raise InputError(f"expected 1 to {MOST_PICTURES} pictures, got {len(listed)}", "give fewer with {picture}")
    return tuple(open_picture(source) for source in listed)


def open_picture(source: PictureSource) -> Picture:
    """A picture in RGB: the first of an animation, turned as its camera says, on white where it is transparent.

    Raises InputError for a file that cannot be read, is no picture, or is larger than Pillow opens.
    """
    if hasattr(source, "convert"):
        image: Image = _shown(source, "the picture")
        return Picture(image, hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest())
    data = _bytes(Path(source))
    return Picture(_decoded(data, str(source)), hashlib.sha256(data).hexdigest())


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {problem}", "name the file of a picture with {picture=FILE}")
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has more than {MOST_BYTES // 2**20} MiB", "make the picture smaller")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {why}", "check the path") from None


def _decoded(data: bytes, name: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                return _shown(image, name)
    except UnidentifiedImageError:
        raise InputError(f"{name} is not a picture that Pillow reads", "give a PNG or JPEG file") from None
    except bombs:
        most = f"{(Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} million"
        raise InputError(f"{name} has more than {most} pixels", "make the picture smaller") from None
    except Exception as error:  # any of Pillow's decoders, over any bytes
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        raise InputError(f"{name} is damaged: {why}", "give a PNG or JPEG file") from error


def _shown(image: Image, name: str) -> Image:
    from PIL import Image, ImageOps

    if getattr(image, "n_frames", 1) > 1:
        logger.warning("%s has %d frames: the first is read", name, image.n_frames)  # type: ignore[attr-defined]
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):  # whose brightest is 65535, and which Pillow would cut at 255
        upright = upright.point(lambda value: value / 257).convert("L")
    if upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info:
        over = upright.convert("RGBA")
        if over.getchannel("A").getextrema() != (255, 255):
            logger.warning("%s is transparent: it is read on white", name)
        upright = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return upright.convert("RGB")
