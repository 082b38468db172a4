"""One side of a logit: the other side is a constant, so that it is linear in the residual that enters the layer.

Shapes: H head, G kv head, T token, K key, D width of q and k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscope.attention.spec import AttentionSpec


@dataclass(frozen=True)
class OneSided:
    """A mean of products q . k of one head, times their scale: one side's vectors with what the other side is.

    rows: the tokens of the side. towards_D: the other side, times the scale of the logits.
    """

    side: str
    head: int
    rows: tuple[int, ...]
    towards_D: Tensor

    def of(self, spec: AttentionSpec) -> Tensor:
        """The number itself, of a call."""
        return (self.vectors(spec) @ self.towards_D).mean()

    def size(self, spec: AttentionSpec) -> float:
        """The mean sum of |q_d k_d| that it is made of, which bounds what float32 does to it."""
        return float((self.vectors(spec).detach().abs() @ self.towards_D.abs()).mean())

    def units(self) -> Iterator[OneSided]:
        """The coordinates of the side's own mean vector, one by one."""
        for unit_D in torch.eye(len(self.towards_D), dtype=self.towards_D.dtype, device=self.towards_D.device):
            yield replace(self, towards_D=unit_D)

    def vectors(self, spec: AttentionSpec) -> Tensor:
        """(R, D): of its rows, before the scale of the logits."""
        one_TD = keys_of(spec, self.head) if self.side == "key" else spec.q_BHQD[0, self.head]
        return exact(one_TD[list(self.rows)])


def exact(x: Tensor) -> Tensor:
    """In float64, where the device has it.

    >>> exact(torch.ones(1)).dtype
    torch.float64
    """
    return x.to(widest(x.device))


def widest(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def keys_of(spec: AttentionSpec, head: int) -> Tensor:
    """(K, D): the keys of a query head."""
    return spec.k_BGKD[0, head // (spec.heads // spec.kv_heads)]


def one_sided(
    spec: AttentionSpec, side: str, head: int, query: int, key: int, others: Sequence[int]
) -> tuple[OneSided, OneSided]:
    """The logit of a key, and the mean of those that it is compared with, from one side."""
    q_D = exact(spec.q_BHQD[0, head, query].detach()) * spec.scale
    k_KD = exact(keys_of(spec, head).detach()) * spec.scale
    if side == "key":
        return OneSided(side, head, (key,), q_D), OneSided(side, head, tuple(others), q_D)
    return OneSided(side, head, (query,), k_KD[key]), OneSided(side, head, (query,), k_KD[list(others)].mean(0))


def visible_keys(spec: AttentionSpec, head: int, query: int) -> list[int]:
    """The keys that a query sees."""
    seen_K = spec.visible.rows(query, query + 1)[0].expand(spec.heads, -1, -1)[head, 0]
    found: list[int] = torch.nonzero(seen_K)[:, 0].tolist()
    return found


def position_term(spec: AttentionSpec, head: int, query: int) -> Tensor | None:
    """(K,) float64: what positions add to the logits of q and k, as ALiBi and relative bias do; None without."""
    mask = spec.visible.mask if spec.visible.additive else None
    rows = [_row(values, spec, head, query) for values in (spec.bias, mask) if values is not None]
    if not rows:
        return None
    added_K = torch.stack(rows).sum(0)
    return added_K if bool(added_K[visible_keys(spec, head, query)].any()) else None


def _row(values: Tensor, spec: AttentionSpec, head: int, query: int) -> Tensor:
    keys = spec.k_BGKD.shape[2]
    values_HQK = values[0, ..., :keys].expand(spec.heads, spec.q_BHQD.shape[2], keys)
    return values_HQK[head, query].detach().cpu().double()
