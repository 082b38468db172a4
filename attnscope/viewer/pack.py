"""Weights as the page carries them: one or two bytes each with a scale per head, deflated, in base64.

A weight is stored as 0 only when it is below half a step, the head's largest weight / 255 (or 65535).

The pictures of a text as the page has them: small, encoded again, as data URIs; and which tokens are of what part.

No bytes of a file go in: the pixels that Pillow decoded are encoded again, and nothing else.

Shapes: H head, Q query, K key, R row of a map, C column, E entry, k kept key.
"""

from __future__ import annotations

import io
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

    from attnscope.inputs.prompt import Prompt

Bits = Literal[8, 16]
TINY = 1e-30  # a step whose inverse float32 does not hold
ALIGNED = 4  # bytes: where an array may begin, as the browser's typed arrays ask


class BlobPlace(TypedDict):
    """Where an array lies: the number of its blob, and the byte of the unpacked blob."""

    blob: int
    offset: int


@dataclass
class Blobs:
    """The page's arrays, several to a blob that the browser unpacks when one of them is wanted."""

    texts: list[bytes] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that the blobs take in the page."""
        return sum(map(len, self.texts))

    def add(self, *arrays: np.ndarray) -> list[BlobPlace]:
        """One blob of these arrays, one after the other; where each lies."""
        places, parts, end = list[BlobPlace](), list[bytes](), 0
        for array in arrays:
            data = array.tobytes()
            places.append({"blob": len(self.texts), "offset": end})
            parts += [data, bytes(-len(data) % ALIGNED)]
            end += len(data) + len(parts[-1])
        self.texts.append(b64encode(deflated(b"".join(parts))))
        return places


def deflated(data: bytes) -> bytes:
    """Raw deflate, which the browser's DecompressionStream reads."""
    # Weights repeat in runs of zeros alone: looking for runs takes a tenth of the time of level 6, and packs as well.
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def quantised(weights_HE: np.ndarray, bits: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers (H, E) and the scale of each head (H,): a weight is its number times the scale.

    With a sign where some weight has one.
    """
    signed = bool((weights_HE < 0).any())
    most = (1 << bits - signed) - 1
    scale_H = (np.abs(weights_HE) if signed else weights_HE).max(1, initial=0.0).astype(np.float64) / most
    scale_H[scale_H < TINY] = 0.0
    per_weight_H = np.divide(1, scale_H, where=scale_H > 0, out=np.zeros_like(scale_H))
    steps_HE = weights_HE * per_weight_H[:, None].astype(np.float32)
    # a half is a whole, so that 0 says below half a step
    steps_HE += np.copysign(np.float32(0.5), steps_HE) if signed else 0.5
    return steps_HE.astype(("i1" if bits == 8 else "<i2") if signed else (np.uint8 if bits == 8 else "<u2")), scale_H


def triangle(weights_HRC: np.ndarray) -> np.ndarray | None:
    """The entries on and below the diagonal, row after row, (H, E); None where there is weight above it."""
    heads, rows, columns = weights_HRC.shape
    below_RC = np.tri(rows, columns, dtype=bool)
    if weights_HRC.sum(0)[~below_RC].any():
        return None
    return weights_HRC.reshape(heads, -1)[:, np.flatnonzero(below_RC)]


def aligned(numbers_HE: np.ndarray) -> np.ndarray:
    """The numbers with zeros behind each head's, so that the next begins where an array may."""
    short = -numbers_HE.shape[1] % (ALIGNED // numbers_HE.itemsize)
    return np.pad(numbers_HE, ((0, 0), (0, short))) if short else numbers_HE


def binned(weights_HQK: np.ndarray, size: int) -> np.ndarray:
    """(H, R, C): cells of size x size tokens, the sum over keys and the mean over queries."""
    count = weights_HQK.shape[1]
    starts_R = np.arange(0, count, size)
    summed_HQC = np.add.reduceat(weights_HQK, starts_R, 2)
    tokens_R = np.minimum(size, count - starts_R).astype(np.float32)
    return np.add.reduceat(summed_HQC, starts_R, 1) / tokens_R[:, None]


def strongest(weight_HQk: np.ndarray, key_HQk: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Keys (uint32, the largest number for none), weights in steps (16 bits), and the step, one for all heads."""
    numbers, scale = quantised(np.nan_to_num(weight_HQk).reshape(1, -1), 16)
    keys = np.where(np.abs(weight_HQk) > 0, key_HQk, np.uint32(0xFFFFFFFF)).astype("<u4")
    return keys, numbers.reshape(weight_HQk.shape), float(scale[0])


def packed_maps(blobs: Blobs, weights_HRC: np.ndarray, bits: Bits) -> list[dict[str, object]]:
    """What the page says of the maps of a layer's heads; their numbers are added to the blobs, as one blob."""
    lower_HE = triangle(weights_HRC)
    numbers_HE, scale_H = quantised(weights_HRC.reshape(len(weights_HRC), -1) if lower_HE is None else lower_HE, bits)
    padded_HE = aligned(numbers_HE)
    [place] = blobs.add(padded_HE)
    record = {
        "rows": weights_HRC.shape[1],
        "columns": weights_HRC.shape[2],
        "bits": bits,
        "triangle": lower_HE is not None,
        **({"signed": True} if padded_HE.dtype.kind == "i" else {}),
    }
    size = padded_HE.shape[1] * padded_HE.itemsize
    return [
        {**record, "scale": float(scale), "blob": place["blob"], "offset": place["offset"] + number * size}
        for number, scale in enumerate(scale_H)
    ]


def joined_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays as one row of float32."""
    return np.concatenate([array.ravel() for array in arrays]).astype("<f4")


LONGEST = 640  # pixels of a side
DIGITS = 6  # of a place in a picture


def pictures_of(prompt: Prompt) -> dict[str, Any]:
    """What the page's JSON says of pictures, (token, picture, left, top, right, bottom) of every patch; {} without."""
    patches = [
        (token, patch.picture, *(round(edge, DIGITS) for edge in patch.box))
        for token, patch in prompt.medium.patches.items()
        if patch.box is not None
    ]
    return {"pictures": [{"src": uri(image)} for image in prompt.medium.images], "patches": patches} if patches else {}


def uri(image: Image) -> str:
    """A picture as a data URI: JPEG of its pixels, at most LONGEST on a side, without the metadata of its file."""
    from PIL import Image

    plain = image.convert("RGB")
    plain = Image.frombytes("RGB", plain.size, plain.tobytes())  # a copy would keep comments and profiles
    plain.thumbnail((LONGEST, LONGEST))
    written = io.BytesIO()
    plain.save(written, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{b64encode(written.getvalue()).decode()}"
