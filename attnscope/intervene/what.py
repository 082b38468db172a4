"""What of a head may be patched, as it is written."""

from typing import Literal, get_args

What = Literal["output", "pattern", "key", "value"]
WHAT: tuple[What, ...] = get_args(What)
SHARED: tuple[What, ...] = ("key", "value")  # what the heads of a kv group have in common
