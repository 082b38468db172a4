"""The pictures of a text as the page has them: small, encoded again, as data URIs; and which tokens are of what part.

No bytes of a file go in: the pixels that Pillow decoded are encoded again, and nothing else.
"""

from __future__ import annotations

import io
from base64 import b64encode
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from attnscope.inputs.prompt import Prompt

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
