"""In what portions is patched, and how that is measured, as it is written."""

from typing import Literal, get_args

Over = Literal["none", "heads", "kv", "layers", "positions", "layers,positions"]
OVER: tuple[Over, ...] = get_args(Over)
Method = Literal["measure", "gradient"]
METHODS: tuple[Method, ...] = get_args(Method)
