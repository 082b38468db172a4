"""What keys write, v W_O: what its norms are computed from, and where it must point to raise a logit.

Shapes: B text, H head, G kv head, Q query, R query that is asked, K key, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from attnscope.attention.rows import topk
from attnscope.errors import UsageError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.projections import Norm, ProjectionInputs, gram_root

SEARCHED = 8  # times as many keys as are wanted: a search among fewer does not pay
MANY_PAIRS = 3  # a pair alone takes as long as so many of all
PAIRS = 2**15  # at once
BOUND_SLACK = 1e-3


@dataclass(frozen=True)
class Directions:
    """Where the values of a text must point to raise the logit that is asked about, of every head in some rows.

    rows: the queries that are asked, ascending. of: (H, R, V) by attention module.
    """

    rows: Sequence[int]
    of: Mapping[nn.Module, Tensor]

    def written(self, call: AttentionCall, start: int, stop: int) -> Tensor:
        """(B, H, stop - start, K): what a whole weight on a key adds to the logit; NaN in rows that are not asked.

        Raises UsageError where a head does not give its weights times its values.
        """
        v_BGKV, shares_BHQ1 = shown_values(call), call.output_shares(start, stop)
        towards_HRV = self.of[call.module].to(v_BGKV.device)
        here = [place for place, row in enumerate(self.rows) if start <= row < stop]
        towards_GrV = towards_HRV[:, here].unflatten(0, (v_BGKV.shape[1], -1))
        found_BHrK = torch.einsum("gnrv,bgkv->bgnrk", towards_GrV, v_BGKV.float()).flatten(1, 2)
        every_BHQK = found_BHrK.new_full((*found_BHrK.shape[:2], stop - start, v_BGKV.shape[2]), torch.nan)
        every_BHQK[:, :, [self.rows[place] - start for place in here]] = found_BHrK
        return every_BHQK if shares_BHQ1 is None else every_BHQK * shares_BHQ1


@dataclass(frozen=True)
class Projections:
    """How heads' outputs are written: each attention module's output projection, and the norm behind it if any.

    gated: those projections before which something multiplies the heads' outputs, and what they are given.
    """

    out: Mapping[nn.Module, nn.Module]
    behind: Mapping[nn.Module, Norm]
    gated: ProjectionInputs

    def when_known(self, call: AttentionCall, then: Callable[[ValueNorms], None]) -> None:
        """Call `then` with the norms of a call's values: now, or with a gate once the projection is given its part."""
        if call.module in self.gated.out:
            self.gated.on_next(call.module, lambda given: then(ValueNorms(self, call, given)))
        else:
            then(ValueNorms(self, call))


@dataclass(eq=False)
class ValueNorms:
    """The norms of what keys write, of one call: |v W_O|, or |(g v) W_O| behind a gate g of a query.

    given: what the output projection was given, where that is the heads' outputs times a gate. The gate is read off
    both, and frozen; it counts as closed where a head gives 0. A norm behind W_O is frozen with its scale in the row.
    No tensor is as wide as the model for every key.
    """

    of: Projections
    call: AttentionCall
    given: Tensor | None = None

    def __call__(self, start: int, stop: int, weights_BHRK: Tensor | None = None, most: int | None = None) -> Tensor:
        """The norm of what a whole weight on a key writes in some rows, fp32 (B, H, stop - start or 1, K).

        weights_BHRK, most: of the rows' weights times their norms only so many largest are wanted in each row; behind a
        gate other keys may have the norm 0. Raises UsageError where the heads do not write their weights times v W_O.
        """
        if self.given is None:
            norm_BHRK = self._plain_BH1K
        elif weights_BHRK is None or most is None or SEARCHED * most >= weights_BHRK.shape[-1]:
            norm_BHRK = self._gated(start, stop)
        else:
            norm_BHRK = self._largest(start, stop, weights_BHRK, most)
        shares_BHR1, scale_BQ1 = self.call.output_shares(start, stop), self._scale_BQ1
        norm_BHRK = norm_BHRK if shares_BHR1 is None else norm_BHRK * shares_BHR1
        return norm_BHRK if scale_BQ1 is None else norm_BHRK * scale_BQ1[:, None, start:stop].abs()

    @cached_property
    def _plain_BH1K(self) -> Tensor:
        v_BGKV = self._v_BGKV.float()
        root_GRVV = self._root_HVV.unflatten(0, (v_BGKV.shape[1], -1))
        return (v_BGKV[:, :, None] @ root_GRVV).norm(dim=-1).flatten(1, 2)[:, :, None]

    def _gated(self, start: int, stop: int) -> Tensor:
        return gated_norms(self._gate_BQHV[:, start:stop].transpose(1, 2), self._v_BGKV.float(), self._root_HVV)

    def _largest(self, start: int, stop: int, weights_BHRK: Tensor, most: int) -> Tensor:
        """The norms of keys that may be among the largest, from an upper bound: |(g v) R| <= |g v| |R|."""
        v_BGKV, gate_BHRV = self._v_BGKV.float(), self._gate_BQHV[:, start:stop].transpose(1, 2).contiguous()
        B, G, _, V = v_BGKV.shape
        bound_BHRK = (gate_BHRV.square().reshape(B, G, -1, V) @ v_BGKV.square().mT).sqrt_().view(weights_BHRK.shape)
        bound_BHRK.mul_(self._size_H[:, None, None]).mul_(weights_BHRK)

        # The least of any so many products is no more than the least of the largest: what is bound to be less is out.
        norm_BHRK = torch.zeros_like(bound_BHRK)
        _, first_BHRk = topk(bound_BHRK, most)
        wanted_BHRK = torch.zeros_like(bound_BHRK, dtype=torch.bool).scatter_(-1, first_BHRk, True)
        self._fill(norm_BHRK, wanted_BHRK, gate_BHRV, v_BGKV)
        least_BHR1 = (weights_BHRK * norm_BHRK).gather(-1, first_BHRk).amin(-1, keepdim=True)
        further_BHRK = ~(bound_BHRK < least_BHR1) & (weights_BHRK != 0) & ~wanted_BHRK  # with NaN all of a row
        self._fill(norm_BHRK, further_BHRK, gate_BHRV, v_BGKV)
        return norm_BHRK

    def _fill(self, norm_BHRK: Tensor, wanted_BHRK: Tensor, gate_BHRV: Tensor, v_BGKV: Tensor) -> None:
        """Write the norms that are wanted: pair by pair of a query and a key, or of all pairs where these are many."""
        per_group = gate_BHRV.shape[1] // v_BGKV.shape[1]
        for text, wanted_HRK in enumerate(wanted_BHRK):
            for head, wanted_RK in enumerate(wanted_HRK):
                gate_RV, v_KV = gate_BHRV[text, head], v_BGKV[text, head // per_group]
                root_VV, norm_RK = self._root_HVV[head], norm_BHRK[text, head]
                row_N, key_N = wanted_RK.nonzero(as_tuple=True)
                if MANY_PAIRS * len(row_N) > wanted_RK.numel():
                    norm_RK.copy_(gated_norms(gate_RV[None, None], v_KV[None, None], root_VV[None])[0, 0])
                    continue
                for row_n, key_n in zip(row_N.split(PAIRS), key_N.split(PAIRS), strict=True):
                    norm_RK[row_n, key_n] = ((gate_RV[row_n] * v_KV[key_n]) @ root_VV).norm(dim=-1)

    @cached_property
    def _size_H(self) -> Tensor:
        """The largest singular value of each head's root, and what rounding may take from a bound."""
        root_HVV = self._root_HVV.cpu()  # LAPACK's: not every device has one
        sizes_H = torch.linalg.eigvalsh(root_HVV @ root_HVV.mT)[:, -1].sqrt()
        return (sizes_H * (1 + BOUND_SLACK)).to(self._root_HVV.device)

    @cached_property
    def _v_BGKV(self) -> Tensor:
        return shown_values(self.call)

    @cached_property
    def _root_HVV(self) -> Tensor:
        v_BGKV, out = self._v_BGKV, self.of.out.get(self.call.module)
        if out is None:
            raise _not_known("has no output projection that is given the heads side by side, as they come or gated")
        return gram_root(out, self.call.P.heads, v_BGKV, self.of.behind.get(self.call.module))

    @cached_property
    def _heads_BQHV(self) -> Tensor:
        output_BQHV = self.call.output_BQHV
        return self.call.P.output() if output_BQHV is None else output_BQHV  # type: ignore[attr-defined]

    @cached_property
    def _gate_BQHV(self) -> Tensor:
        assert self.given is not None
        heads_BQHV = self._heads_BQHV.float()
        gate_BQHV = self.given.reshape(heads_BQHV.shape).float() / heads_BQHV
        return gate_BQHV.masked_fill(heads_BQHV == 0, 0)

    @cached_property
    def _scale_BQ1(self) -> Tensor | None:
        """What the norm behind multiplies each row by, with all that the heads write; None without one."""
        norm = self.of.behind.get(self.call.module)
        if norm is None:
            return None
        with torch.no_grad():
            given = self._heads_BQHV.flatten(-2) if self.given is None else self.given
            projected_BQE = self.of.out[self.call.module](given)
            return norm.scale(projected_BQE.float(), norm.module(projected_BQE).float())


def gated_norms(gate_BHRV: Tensor, v_BGKV: Tensor, root_HVV: Tensor) -> Tensor:
    """|(g v) R| of every query and key, (B, H, R, K), column by column of a triangular R.

    Each query has a vector of its own for each key. In the loop R are the rows of all heads that share a kv head.
    """
    B, G, K, _ = v_BGKV.shape
    square_BGRK = v_BGKV.new_zeros(B, G, gate_BHRV[0, ..., 0].numel() // G, K)
    for number, column_HV in enumerate(root_HVV.unbind(-1)):
        through_BHRV = (gate_BHRV * column_HV[:, None])[..., number:]
        part_BGRK = through_BHRV.reshape(B, G, -1, through_BHRV.shape[-1]) @ v_BGKV[..., number:].mT
        square_BGRK.addcmul_(part_BGRK, part_BGRK)
    return square_BGRK.sqrt().view(*gate_BHRV.shape[:3], K)


def shown_values(call: AttentionCall) -> Tensor:
    """The call's values, (B, G, K, V). Raises UsageError where a head does not give its weights times its values."""
    if call.v_BGKV is None:
        raise _not_known("does not show the values of its attention")
    return call.v_BGKV


def _not_known(why: str) -> UsageError:
    return UsageError(f"this model family {why}, so that no key's share of it is known", "use {weights=softmax}")
