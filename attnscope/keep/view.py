"""How the entries of an attention matrix are read, and of which heads.

Shapes: B text, H head (or kv head, where they are averaged), Q query, K key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.keep.layers import Layer

ENTRIES = {"softmax": "weight", "scores": "score", "value": "norm", "logit": "logit"}  # the column of what a view reads


@dataclass(frozen=True)
class View:
    """How entries are read wherever they are tabled or drawn.

    weights: "softmax"; "scores", the logits after scale, cap, bias and mask; "value", the norm of what a key writes
    into the residual stream, A[i,j] |v_j W_O| (Kobayashi et al. 2020, arXiv 2004.10102), norms and gates as they were
    in the query's row; or "logit", what it adds to the logit of the answer's token, signed, in the rows that make the
    answer: over the mean of all tokens, or with a foil over the foil's first token. by_kv: average the query heads that
    share a kv head. heads: {layer: heads to keep}, None for all.

        >>> attnscope.Request(view=attnscope.View(by_kv=True, heads={0: [1, 2]}), relations=True)
    """

    weights: Literal["softmax", "scores", "value", "logit"] = "softmax"
    by_kv: bool = False
    heads: Mapping[int, Sequence[int]] | None = None
    foil: str | None = None

    def __post_init__(self) -> None:
        if self.foil is not None and self.weights != "logit":
            raise UsageError("a foil needs effects on a logit", "add {weights=logit}, or leave out {foil}")

    @property
    def by_size(self) -> bool:
        """Whether the strongest entries are the largest of either sign."""
        return self.weights == "logit"

    @property
    def of_heads(self) -> bool:
        """Whether entries are the weights of the heads themselves."""
        return self.weights == "softmax" and not self.by_kv

    def kept(self, layer: Layer) -> list[int]:
        """The heads (kv heads, when averaged) of a layer that this view keeps."""
        if self.heads is None:
            return list(range(layer.kv_heads if self.by_kv else layer.P.heads))
        starts = range(0, layer.P.heads, layer.P.heads // len(layer.keys))
        of_layers = [self.heads.get(key.layer, ()) for key in layer.keys]
        chosen = [start + head for start, heads in zip(starts, of_layers, strict=True) for head in heads]
        return sorted({layer.kv_head(head) for head in chosen}) if self.by_kv else chosen

    def rows(self, layer: Layer, heads: Sequence[int], start: int, stop: int) -> Tensor:
        """Entries of a block of queries, fp32 (B, len(heads), stop - start, K)."""
        entries = layer.P.scores(start, stop) if self.weights == "scores" else layer.P.rows(start, stop)
        if self.weights == "value":
            assert layer.value_norms is not None
            entries = entries * layer.value_norms(start, stop)
        if self.weights == "logit":
            assert layer.written is not None
            entries = entries * layer.written(start, stop)
        entries = layer.per_kv_head(entries) if self.by_kv else entries
        return entries if list(heads) == list(range(entries.shape[1])) else entries[:, list(heads)]

    def seen(self, layer: Layer, heads: Sequence[int], seen_BHQK: Tensor) -> Tensor:
        """Which entries of these heads there are, from what the query heads see, (B or 1, H or 1, Q, K) boolean.

        A kv head has a mean weight where any of its heads sees the key, and a mean logit where all of them do.
        """
        if seen_BHQK.shape[1] == 1:  # one mask for all heads
            return seen_BHQK
        if self.by_kv:
            grouped = seen_BHQK.unflatten(1, (layer.kv_heads, -1))
            seen_BHQK = grouped.all(2) if self.weights == "scores" else grouped.any(2)
        return seen_BHQK[:, list(heads)]
