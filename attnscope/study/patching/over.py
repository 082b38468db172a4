"""What may be patched, and in what portions, as it is written."""

from typing import Literal, get_args

Over = Literal["none", "heads", "kv", "layers", "positions", "layers,positions"]
OVER: tuple[Over, ...] = get_args(Over)
Method = Literal["measure", "gradient"]
