"""How figures are to look, and the matrices they show; nothing heavy is imported here.

H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from attnscope.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Quantity = Literal["weight", "logit", "share"]
MOST_ANNOTATED = 12  # tokens; numbers in more cells than that are too small to read


@dataclass(frozen=True)
class Style:
    """How a figure is to look.

    `sink="mask"` takes key 0 out of the map, draws it as its own grey strip at the side and prints its mean.
    Without `per_head_scale` one colour scale holds across a call's figures. `annotate=None` writes numbers
    into the cells when there are at most 12 tokens.

    Raises UsageError for a choice that does not exist.

        >>> Style(scale="log", sink="mask")
        >>> Style(image="svg", per_head_scale=True)
    """

    scale: Literal["linear", "log"] = "linear"
    sink: Literal["keep", "mask"] = "keep"
    per_head_scale: bool = False
    image: Literal["png", "svg", "pdf"] = "png"
    cmap: str = "viridis"
    annotate: bool | None = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Style).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise UsageError(f"{name}: expected {' or '.join(get_args(hint))}, got {getattr(self, name)!r}")

    def annotates(self, tokens: int) -> bool:
        """Whether numbers are written into the cells of a map of so many tokens."""
        return tokens <= MOST_ANNOTATED if self.annotate is None else self.annotate


@dataclass(frozen=True)
class Maps:
    """One layer's matrices as they will be drawn.

    values_HQK is float32, NaN where a query cannot see a key (drawn blank), already binned when `bin_size` > 1;
    `bin_rule` says how ("sum over keys, mean over queries"). Labels are one per row and one per column.
    `kv_heads` names each head's kv head in its title; `by_kv` says that `heads` counts kv heads. `quantity` says what
    the values are: attention weights, logits (before the softmax), or shares of a token (a rollout's). `key0` is each
    head's mean mass on key 0, where its column is binned and does not tell.

    Raises ValueError when shape and labels disagree, or for a quantity that does not exist.

        Maps(27, (3,), np.ones((1, 2, 2), np.float32), ("a", "b"), ("a", "b"))
        Maps(0, (0,), binned_1QK, labels, labels, bin_size=5, bin_rule="sum over keys, mean over queries")
    """

    layer: int
    heads: tuple[int, ...]
    values_HQK: np.ndarray
    labels_Q: tuple[str, ...]
    labels_K: tuple[str, ...]
    bin_size: int = 1
    bin_rule: str = ""
    kv_heads: tuple[int, ...] = ()
    by_kv: bool = False
    quantity: Quantity = "weight"
    key0: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        expected = (len(self.heads), len(self.labels_Q), len(self.labels_K))
        if self.values_HQK.shape != expected:
            raise ValueError(f"expected heads x queries x keys of {expected}, got {self.values_HQK.shape}")
        if self.kv_heads and len(self.kv_heads) != len(self.heads):
            raise ValueError(f"expected {len(self.heads)} kv heads, one per head, got {len(self.kv_heads)}")
        if self.quantity not in get_args(Quantity):
            raise ValueError(f"quantity: expected {' or '.join(get_args(Quantity))}, got {self.quantity!r}")

    @property
    def tokens(self) -> int:
        """The longer side of a map, in cells."""
        return max(len(self.labels_Q), len(self.labels_K))


def head_title(maps: Maps, index: int) -> str:
    """`L27H3 (kv 1)`, or `L27 kv 1` when kv heads were averaged."""
    if maps.by_kv:
        return f"L{maps.layer} kv {maps.heads[index]}"
    return f"L{maps.layer}H{maps.heads[index]}" + (f" (kv {maps.kv_heads[index]})" if maps.kv_heads else "")


def bin_note(maps: Maps) -> str:
    """What one cell stands for, or nothing when it is one query and one key."""
    rule = f": {maps.bin_rule}" if maps.bin_rule else ""
    return f"{maps.bin_size} x {maps.bin_size} tokens a cell{rule}" if maps.bin_size > 1 else ""


def split_sink(maps: Maps, style: Style) -> tuple[Maps, np.ndarray | None]:
    """The maps to draw, and key 0's column (heads x queries) where the style takes it out of them."""
    if style.sink == "keep" or len(maps.labels_K) < 2:
        return maps, None
    rest = replace(maps, values_HQK=maps.values_HQK[:, :, 1:], labels_K=maps.labels_K[1:])
    return rest, maps.values_HQK[:, :, 0]
