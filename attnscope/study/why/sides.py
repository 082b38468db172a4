"""One side of a logit: the other side is a constant, so that it is linear in the residual that enters the layer.

Shapes: H head, G kv head, T token, D width of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.attention.spec import AttentionSpec

SIDES = ("key", "query")


@dataclass(frozen=True)
class OneSided:
    """A mean of logits: of keys with one query, or of one query with one direction; before soft-cap and bias.

    towards_D: the other side, times the scale of the logits.
    """

    side: str
    head: int
    rows: tuple[int, ...]
    towards_D: Tensor

    def of(self, spec: AttentionSpec) -> Tensor:
        """The number itself, of a call."""
        x_HTD = spec.k_BGKD[0] if self.side == "key" else spec.q_BHQD[0]
        x_TD = x_HTD[self.head // (spec.heads // spec.kv_heads) if self.side == "key" else self.head]
        return (x_TD[list(self.rows)].double() @ self.towards_D).mean()


def readings(
    spec: AttentionSpec, side: str, head: int, query: int, key: int, against: list[int]
) -> tuple[OneSided, OneSided]:
    """The logit of a key, and the mean of those that it is compared with, from one side."""
    q_D = spec.q_BHQD[0, head, query].detach().double() * spec.scale
    k_KD = spec.k_BGKD[0, head // (spec.heads // spec.kv_heads)].detach().double() * spec.scale
    if side == "key":
        return OneSided(side, head, (key,), q_D), OneSided(side, head, tuple(against), q_D)
    return OneSided(side, head, (query,), k_KD[key]), OneSided(side, head, (query,), k_KD[against].mean(0))


def visible_keys(spec: AttentionSpec, head: int, query: int) -> list[int]:
    """The keys that a query sees."""
    seen_K = spec.visible.rows(query, query + 1)[0].expand(spec.heads, -1, -1)[head, 0]
    return torch.nonzero(seen_K)[:, 0].tolist()


def position_term(spec: AttentionSpec, head: int, query: int) -> Tensor | None:
    """(K,) float64: what positions add to the logits beside q and k, as ALiBi and relative bias do; None without."""
    added = []
    if spec.bias is not None:
        added.append(_row(spec.bias, spec, head, query))
    if spec.visible.additive and spec.visible.mask is not None:
        added.append(_row(spec.visible.mask, spec, head, query))
    found = sum(added, torch.zeros(spec.k_BGKD.shape[2], dtype=torch.float64))
    seen = visible_keys(spec, head, query)
    return found if added and bool((found[seen] != 0).any()) else None


def _row(values: Tensor, spec: AttentionSpec, head: int, query: int) -> Tensor:
    rows = values[:1].expand(1, spec.heads, spec.q_BHQD.shape[2], -1)[..., : spec.k_BGKD.shape[2]]
    return rows[0, head, query].double().cpu()
