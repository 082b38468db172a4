"""What may be cut one at a time, as it is written."""

import re

from attnscope.errors import UsageError, nearest

OVER = "none, heads, layers, window:N, keys or kv"
WINDOW = re.compile(r"window:([1-9][0-9]{0,3})")


def check_over(over: str, option: str = "over") -> None:
    """Raise UsageError for what nothing can be cut over; option: as it is called where it was given."""
    if over not in ("none", "heads", "layers", "keys", "kv") and not WINDOW.fullmatch(over):
        near = nearest(over, ("none", "heads", "layers", "window:5", "keys")) or "heads"
        raise UsageError(f"{option}: expected {OVER}, got {over[:20]!r}", f"use {{over={near}}}")


def window_of(over: str) -> int:
    """How many layers are cut at a time, of `layers` or `window:N`.

    >>> window_of("window:5")
    5
    """
    found = WINDOW.fullmatch(over)
    return int(found[1]) if found else 1
