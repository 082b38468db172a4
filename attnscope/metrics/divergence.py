"""How far one layer's attention is on one side from that on another: over the tokens that two texts share.

Rows and columns are units (`inputs/spans.py`): a token, or the tokens that are the same text where tokenizers cut
differently. Mass is summed over a unit's keys and averaged over its queries.

Last which keys have mass on one side alone, of two sides that read the same tokens.

Shapes: H head, T token, U unit, r units of a block, q queries, Q, K cell of a map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import Visibility, row_blocks
from attnscope.attention.tiling import TiledAttention
from attnscope.metrics.texts import Cells

TINY = torch.finfo(torch.float64).tiny
COPIES = 16  # fp32 entries that a block's arithmetic takes per entry of its rows


class DivergenceSide(NamedTuple):
    """A layer's attention for one text, and the unit of each token as a query and as a key, (T,), -1 for none."""

    P: AttentionOperator
    query_T: Tensor
    key_T: Tensor

    @classmethod
    def of(cls, P: AttentionOperator, queries: Sequence[int], keys: Sequence[int]) -> DivergenceSide:
        """The same of units as they come from `inputs/spans.py`."""
        return cls(P, torch.tensor(queries, device=P.device), torch.tensor(keys, device=P.device))

    def mass(self, read: Callable[[int, int], Tensor], start: int, stop: int, units: int) -> Tensor:
        """Units [start, stop) as queries on all units, and last on tokens of none: fp64 (H, r, U + 1).

        read: the rows of a range of queries, (1, H, q, T). units: of keys.
        """
        query_q = ((self.query_T >= start) & (self.query_T < stop)).nonzero().flatten()
        first, last = int(query_q[0]), int(query_q[-1])
        rows_HqT = read(first, last + 1)[0][:, query_q - first].double()
        column_T, row_q = self.key_T.where(self.key_T >= 0, units), self.query_T[query_q] - start
        mass_HqU = rows_HqT.new_zeros(*rows_HqT.shape[:2], units + 1).index_add_(-1, column_T, rows_HqT)
        sums_HrU = mass_HqU.new_zeros(len(mass_HqU), stop - start, units + 1).index_add_(1, row_q, mass_HqU)
        return sums_HrU / row_q.bincount(minlength=stop - start)[:, None]


class Divergence(NamedTuple):
    """Two sides of a layer, (H,) float64 each.

    js: the Jensen-Shannon divergence in bits of the mass on shared units, renormalised, as a mean over the shared rows
    that have some on both sides; NaN without. rows: how many those are. lost, other_lost: the mean mass that either
    side gives to tokens that the other lacks. map: the other side's mass minus the first's of some heads, (h, Q, K)
    float32, NaN where a query does not see the key on both sides.
    """

    js: np.ndarray
    rows: np.ndarray
    lost: np.ndarray
    other_lost: np.ndarray
    map: np.ndarray | None = None


def own_matrix(P: AttentionOperator) -> Tensor | None:
    """The matrix that an operator has, in the dtype in which it was computed; None where it follows from q and k."""
    matrix: Tensor | None = getattr(P, "weights_BHQK", None)
    return matrix


def readable(P: AttentionOperator, whole: bool = False) -> AttentionOperator:
    """The weights as they follow from q and k, which can be kept of every layer; its matrix where none are shown.

    whole: its matrix in any case, such as that of a kernel whose work q and k do not tell.
    """
    matrix = own_matrix(P) if whole or P.spec is None else None
    if matrix is not None:
        return DenseAttention(matrix, P.visible, P.spec)
    return TiledAttention(P.spec) if P.spec is not None else P


def diverge(
    first: DivergenceSide, second: DivergenceSide, cells: tuple[Cells, Cells], heads: Sequence[int] = ()
) -> Divergence:
    """Compare two sides block by block of their rows; cells: of the units as queries and as keys, heads: to be mapped.

    >>> diverge(DivergenceSide(P, unit_T, unit_T), DivergenceSide(P, unit_T, unit_T), (cells, cells)).js    # all 0
    """
    count, device, (rows, columns) = first.P.heads, first.P.device, (len(axis.tokens) for axis in cells)
    js_H, rows_H, lost_H, other_H = (torch.zeros(count, dtype=torch.float64, device=device) for _ in range(4))
    drawn = _Map(cells, heads, device) if heads and rows and columns else None

    # Block by block: the whole matrices of two long texts would not fit.
    for start, stop in row_blocks(rows, COPIES * count * max(first.P.keys, second.P.keys), first.P.device):
        p_HrU, q_HrU = (side.mass(side.P.rows, start, stop, columns).to(device) for side in (first, second))
        of_row_Hr = js_bits(p_HrU[..., :-1], q_HrU[..., :-1])
        js_H += of_row_Hr.nansum(-1)
        rows_H += of_row_Hr.isfinite().sum(-1)
        lost_H += p_HrU[..., -1].sum(-1)
        other_H += q_HrU[..., -1].sum(-1)
        if drawn is not None:
            both = [side.mass(side.P.visible.rows, start, stop, columns).to(device) > 0 for side in (first, second)]
            drawn.add((q_HrU - p_HrU)[..., :-1], (both[0] & both[1])[..., :-1], start)
    numbers = (js_H / rows_H, rows_H, lost_H / rows, other_H / rows)
    js, counted, lost, other = (value_H.cpu().numpy() for value_H in numbers)
    return Divergence(js, counted, lost, other, None if drawn is None else drawn.values())


def js_bits(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of rows in bits, 0 to 1, each divided by its sum; NaN where one of them is empty.

    Lin 1991, doi 10.1109/18.61115. Equal rows give exactly 0.
    """
    p, q = (rows / rows.sum(-1, keepdim=True) for rows in (p, q))
    mean = ((p + q) / 2).clamp_min(TINY)
    parts = [torch.special.xlogy(rows, rows / mean) for rows in (p, q)]
    bits = ((parts[0] + parts[1]).sum(-1) / (2 * np.log(2))).clamp(0.0, 1.0)
    return bits if p.shape[-1] else bits.fill_(torch.nan)


class _Map:
    """The difference of some heads, put together into cells as the blocks come."""

    def __init__(self, cells: tuple[Cells, Cells], heads: Sequence[int], device: torch.device) -> None:
        self.heads, sides = list(heads), [len(axis.sizes) for axis in cells]
        self.row_U, self.column_U = (axis.groups(len(axis.tokens)).to(device) for axis in cells)
        self.size_Q = torch.tensor(cells[0].sizes, device=device)
        self.sum_hQK = torch.zeros(len(self.heads), *sides, dtype=torch.float64, device=device)
        self.seen_hQK = torch.zeros_like(self.sum_hQK)

    def add(self, difference_HrU: Tensor, seen_HrU: Tensor, start: int) -> None:
        seen_hrU = seen_HrU if len(seen_HrU) == 1 else seen_HrU[self.heads]  # one mask for all heads
        difference_hrU = difference_HrU[self.heads].masked_fill(~seen_hrU, 0.0)
        row_r = self.row_U[start : start + difference_hrU.shape[1]]
        for into, values in ((self.sum_hQK, difference_hrU), (self.seen_hQK, seen_hrU.double())):
            columns = values.new_zeros(*values.shape[:2], into.shape[-1]).index_add_(-1, self.column_U, values)
            into.index_add_(1, row_r, columns.expand(len(into), -1, -1))

    def values(self) -> np.ndarray:
        mean_hQK = self.sum_hQK / self.size_Q[:, None]
        return mean_hQK.masked_fill(self.seen_hQK == 0, torch.nan).float().cpu().numpy()


UNDERFLOW = 2**10  # a mass that is so many times the least number of its dtype is no 0 in another run of it


class KeyChanges(NamedTuple):
    """Which keys have mass on one side alone, head by head, as pairs of a query and a key: (H,) int64 each.

    gained, gone: pairs with mass on the other side alone, and on the first alone. hidden: pairs that the mask of one
    side alone hides; -1 where a mask is not known. query, key: the first such pair, -1 without one. weight: the largest
    difference of one weight, float64.
    """

    gained: np.ndarray
    gone: np.ndarray
    hidden: np.ndarray
    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray


def key_changes(first: AttentionOperator, other: AttentionOperator) -> KeyChanges:
    """Compare the sets of keys that have mass, block by block of rows: of two sides with the same tokens.

    A pair counts where its weight is exactly 0 on one side, and at least `least_mass` on the other: what is less there
    may have been rounded to 0 here.

    >>> key_changes(P, P).gained    # all 0
    """
    count, device = max(first.heads, other.heads), first.device
    least, known = max(least_mass(first), least_mass(other)), first.visible.known and other.visible.known
    gained_H, gone_H, hidden_H = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3))
    place_H, weight_H = torch.full_like(gained_H, -1), torch.zeros(count, dtype=torch.float64, device=device)
    for start, stop in row_blocks(first.queries, COPIES * count * first.keys, device):
        p_HqK, q_HqK = (P.rows(start, stop)[0].to(device) for P in (first, other))
        more_HqK, fewer_HqK = (p_HqK == 0) & (q_HqK >= least), (q_HqK == 0) & (p_HqK >= least)
        changed_HqK = more_HqK | fewer_HqK
        if known:
            seen, seen_by_other = (P.visible.rows(start, stop)[0].to(device) for P in (first, other))
            hidden_HqK = (seen ^ seen_by_other).expand_as(changed_HqK)
            changed_HqK = changed_HqK | hidden_HqK
            hidden_H += hidden_HqK.sum((1, 2))
        gained_H += more_HqK.sum((1, 2))
        gone_H += fewer_HqK.sum((1, 2))
        weight_H = torch.maximum(weight_H, (q_HqK - p_HqK).abs().amax((1, 2)))
        new_H = (place_H < 0) & changed_HqK.any(2).any(1)
        place_H = torch.where(new_H, start * first.keys + changed_HqK.flatten(1).byte().argmax(1), place_H)
    hidden_H = hidden_H if known else torch.full_like(hidden_H, -1)
    query_H = torch.where(place_H < 0, -1, place_H // first.keys)
    key_H = torch.where(place_H < 0, -1, place_H % first.keys)
    return KeyChanges(*(part.cpu().numpy() for part in (gained_H, gone_H, hidden_H, query_H, key_H, weight_H)))


def least_mass(P: AttentionOperator) -> float:
    """From which mass on a key has some in every run: below, the dtype that it is stored in may round it to 0.

    A softmax is computed in float32 at the least, whose numbers below its smallest normal one may be taken for 0; it is
    stored in the dtype of the weights, which keeps numbers that are smaller than its normal ones.
    """
    matrix = own_matrix(P)
    stored = torch.finfo(torch.float32 if matrix is None else matrix.dtype)
    return UNDERFLOW * max(torch.finfo(torch.float32).smallest_normal, stored.smallest_normal * stored.eps)


def own_pairs(P: AttentionOperator) -> np.ndarray:
    """The pairs of a query and a key by which a layer's own matrix differs from its q, k and mask, (H,) int64.

    0 of what has no matrix of its own, or shows no q and k: there is nothing to hold it against.
    """
    if P.spec is None or own_matrix(P) is None:
        return np.zeros(P.heads, np.int64)
    changes = key_changes(TiledAttention(P.spec), P)
    return changes.gained + changes.gone


MASK_NAME = 16  # letters of a mask's name


def mask_names(visible: Visibility) -> list[str]:
    """A name for which keys each query may see, of each head or of all heads alike: equal masks have equal names.

    Empty where it is not known. A mask and an order of positions that hide the same keys have one name.

    >>> mask_names(Visibility(3, 3)) == mask_names(Visibility(3, 3, torch.ones(1, 1, 3, 3).tril().bool()))
    True
    """
    if not visible.known:
        return [""]

    def make() -> list[str]:
        digests: list[Any] = []
        for start, stop in row_blocks(visible.queries, visible.keys, visible.device):
            rows_HqK = visible.rows(start, stop)[0].cpu().numpy()
            digests = digests or [hashlib.sha256(repr(visible.queries).encode()) for _ in rows_HqK]
            for digest, row_qK in zip(digests, rows_HqK, strict=True):
                digest.update(np.packbits(row_qK, axis=1).tobytes())
        return [digest.hexdigest()[:MASK_NAME] for digest in digests]

    return visible.once("mask names", make)
