"""What keys write, v W_O: what its norms are computed from, and where it must point to raise a logit.

Shapes: B text, H head, G kv head, Q query, R query that is asked, K key, V width of v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnscope.attention.spec import AttentionSpec
from attnscope.errors import UsageError
from attnscope.seam.call import AttentionCall
from attnscope.seam.norms import Norm
from attnscope.seam.projection import gram_root


@dataclass(frozen=True)
class Directions:
    """Where the values of a text must point to raise the logit that is asked about, of every head in some rows.

    rows: the queries that are asked, ascending. of: (H, R, V) by attention module.
    """

    rows: Sequence[int]
    of: Mapping[nn.Module, Tensor]

    def written(self, attention: nn.Module, spec: AttentionSpec, start: int, stop: int) -> Tensor:
        """(B, H, stop - start, K): what a whole weight on a key adds to the logit; NaN in rows that are not asked."""
        v_BGKV, shares_BHQ1 = spec.v_BGKV, spec.output_shares(start, stop)
        towards_HRV = self.of[attention].to(v_BGKV.device)
        here = [place for place, row in enumerate(self.rows) if start <= row < stop]
        towards_GrV = towards_HRV[:, here].unflatten(0, (v_BGKV.shape[1], -1))
        found_BHrK = torch.einsum("gnrv,bgkv->bgnrk", towards_GrV, v_BGKV.float()).flatten(1, 2)
        every_BHQK = found_BHrK.new_full((*found_BHrK.shape[:2], stop - start, v_BGKV.shape[2]), torch.nan)
        every_BHQK[:, :, [self.rows[place] - start for place in here]] = found_BHrK
        return every_BHQK if shares_BHQ1 is None else every_BHQK * shares_BHQ1


@dataclass(frozen=True)
class Projections:
    """How heads' outputs are written: each attention module's output projection, and the norm behind it if any."""

    out: Mapping[nn.Module, nn.Module]
    behind: Mapping[nn.Module, Norm]

    def root(self, call: AttentionCall) -> Tensor:
        """What makes norms of a layer's values as they are written, but for the scale of a norm behind.

        Raises UsageError where they are not v W_O.
        """
        spec = shown_values(call)
        if spec.sinks_scale_output:
            raise _not_known("scales what its weights give before it is written")
        if call.module not in self.out:
            raise _not_known("has no output projection that is given the heads side by side, as they come")
        return gram_root(self.out[call.module], spec.heads, spec.v_BGKV, self.behind.get(call.module))

    def scale(self, call: AttentionCall) -> Tensor | None:
        """(B, Q, 1): what the norm behind multiplies each row by, with all that the heads write; None without one."""
        norm = self.behind.get(call.module)
        if norm is None:
            return None
        heads_BQHV = call.P.output() if call.output_BQHV is None else call.output_BQHV  # type: ignore[attr-defined]
        with torch.no_grad():
            projected_BQE = self.out[call.module](heads_BQHV.flatten(-2))
            return norm.scale(projected_BQE.float(), norm.module(projected_BQE).float())


def shown_values(call: AttentionCall) -> AttentionSpec:
    """The call's q, k and v. Raises UsageError where a head does not give its weights times its values."""
    if call.spec is None:
        raise _not_known("does not show the values of its attention")
    return call.spec


def _not_known(why: str) -> UsageError:
    return UsageError(f"this model family {why}, so that no key's share of it is known", "use {weights=softmax}")
