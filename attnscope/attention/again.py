"""Some rows of a call's attention computed again from its q, k and v, with some of their weights cut.

The closed form, (o - sum p v) / (1 - sum p), loses the digits where most of a row is cut: rows are computed again.

    rows = RowsAgain(spec, heads=(0, 1))
    for block in rows.blocks(query_NR):
        output_NrPV = block.output(cut_NPrK, "mask")

Shapes: B text, N text or row of a pass, H head, G kv head, P asked head, Q query, R asked row, r row of a block, K key,
D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnscope.attention.spec import AttentionSpec
from attnscope.attention.visibility import Visibility, row_blocks

# mask: logits of minus infinity, the rest of the row takes the mass; zero: weights after the softmax, the rest stays.
CutHow = Literal["mask", "zero"]


@dataclass(frozen=True)
class RowsAgain:
    """The rows of some heads of a call, to be computed again in blocks. heads: ascending, of all heads of the call."""

    spec: AttentionSpec
    heads: tuple[int, ...]

    def blocks(self, query_NR: Tensor) -> Iterator[RowBlock]:
        """Blocks of at most BLOCK_BYTES; query_NR: the positions that are asked of each text, -1 where it has fewer."""
        # All heads of the kv heads that the asked ones share: a group is multiplied as one matrix.
        spec, device, per_group = self.spec, self.spec.device, self.spec.heads // self.spec.kv_heads
        groups = sorted({head // per_group for head in self.heads})
        members = [group * per_group + member for group in groups for member in range(per_group)]
        shared_by, group_G = torch.tensor(members, device=device), torch.tensor(groups, device=device)
        place_P = torch.searchsorted(shared_by, torch.tensor(self.heads, device=device))

        # In float32 once, not once per block.
        k, v = spec.k_BGKD, spec.v_BGKV
        if len(groups) < spec.kv_heads:
            k, v = k[:, group_G], v[:, group_G]
        whole = replace(spec, q_BHQD=spec.q_BHQD[:, shared_by], k_BGKD=k.float(), v_BGKV=v.float())
        numbers = spec.batch * whole.heads * spec.visible.keys
        for start, stop in row_blocks(query_NR.shape[1], numbers, device):
            query_Nr = query_NR[:, start:stop]
            yield RowBlock(self._rows(whole, shared_by, query_Nr.clamp_min(0)), place_P, query_Nr, start)

    def _rows(self, whole: AttentionSpec, shared_by: Tensor, query_Nr: Tensor) -> AttentionSpec:
        """The call with some rows of each text alone; whole: with the heads `shared_by`."""
        text_N11 = torch.arange(len(query_Nr), device=query_Nr.device)[:, None, None]
        head_1P1 = torch.arange(whole.heads, device=query_Nr.device)[None, :, None]
        query_N1r = query_Nr[:, None, :]

        # A mask, bias or sink logit may be one for all texts, heads or queries: it is then taken once, not copied.
        def of_rows(value_BHQX: Tensor) -> Tensor:
            """What a call has per text or once, per head or once, per query or once, of these rows."""
            texts, heads, queries = value_BHQX.shape[:3]
            own = value_BHQX[:, shared_by] if heads == self.spec.heads > 1 else value_BHQX
            return own[
                text_N11 if texts > 1 else text_N11 * 0,
                head_1P1 if own.shape[1] > 1 else head_1P1[:, :1] * 0,
                query_N1r if queries > 1 else query_N1r * 0,
            ]

        # Rows that are no longer in the text's order need a mask, also where the call has none.
        visible, mask = whole.visible, whole.visible.as_mask
        if mask is None:
            seen = visible.seen_from(visible.position_Q[query_Nr])[:, None]
        else:
            seen = of_rows(mask[..., : visible.keys])
        sinks = None if whole.sinks is None else of_rows(whole.sinks[..., None])[..., 0]
        return replace(
            whole,
            q_BHQD=whole.q_BHQD[text_N11, head_1P1, query_N1r],
            visible=Visibility(query_Nr.shape[1], visible.keys, seen, device=whole.device),
            bias=None if whole.bias is None else of_rows(whole.bias),
            sinks=sinks,
        )


@dataclass(frozen=True)
class RowBlock:
    """Some rows of every text. query_Nr: their positions, -1 for none; start: the place of the first among all."""

    spec: AttentionSpec
    places_P: Tensor
    query_Nr: Tensor
    start: int

    @cached_property
    def seen_NPrK(self) -> Tensor:
        """Which keys the rows see, (N or 1, P or 1, r, K)."""
        seen = self.spec.visible.rows(0, self.spec.visible.queries)
        return seen[:, self.places_P] if seen.shape[1] > 1 else seen

    @cached_property
    def logits_NPrK(self) -> Tensor:
        """The logits of the asked heads, minus infinity on what a row does not see."""
        logits = self.spec.logits(0, self.spec.visible.queries)[:, self.places_P]
        return logits.masked_fill_(~self.seen_NPrK, -torch.inf)

    @cached_property
    def weights_NPrK(self) -> Tensor:
        """The weights of the asked heads as they are; 0 in a row that sees nothing."""
        return self._softmax(self.logits_NPrK)

    @property
    def row_sinks_NPr1(self) -> Tensor | None:
        """The asked heads' sink logits that take a share of the rows, (N or 1, P, r, 1); None without."""
        sinks, rows = self._asked.row_sinks, self.query_Nr.shape[1]
        return None if sinks is None else sinks.float().expand(-1, -1, rows)[..., None]

    def output(self, cut_NPrK: Tensor | None, how: CutHow) -> Tensor:
        """The output, (N, r, P, V) in float32, without what is cut; 0 in a row without keys."""
        if cut_NPrK is None or how == "zero":
            weights = self.weights_NPrK if cut_NPrK is None else self.weights_NPrK.masked_fill(cut_NPrK, 0.0)
            return self.weighted(weights, self.logits_NPrK)
        logits = self.logits_NPrK.masked_fill(cut_NPrK, -torch.inf)
        return self.weighted(self._softmax(logits), logits)

    def moved(self, from_NPK: Tensor) -> RowBlock:
        """The block with its logits on other keys; from_NPK: the key whose logit each key has."""
        block = replace(self)
        from_NPrK = from_NPK[:, :, None].expand(-1, -1, self.query_Nr.shape[1], -1)
        vars(block)["logits_NPrK"] = self.logits_NPrK.expand(from_NPrK.shape).gather(-1, from_NPrK)
        return block

    def blind(self, cut_NPrK: Tensor | None = None) -> Tensor:
        """Boolean (N, r, P): a row that sees no key, or none but what is cut."""
        uncut_NPrK = self.seen_NPrK if cut_NPrK is None else self.seen_NPrK & ~cut_NPrK
        shape = len(self.query_Nr), self.query_Nr.shape[1], len(self.places_P)
        return (~uncut_NPrK.any(-1)).transpose(1, 2).expand(shape)

    @cached_property
    def _asked(self) -> AttentionSpec:
        """The asked heads' sink logits; q, k and v are not theirs."""
        sinks = self.spec.sinks
        return replace(
            self.spec, sinks=sinks if sinks is None else sinks.expand(-1, self.spec.heads, -1)[:, self.places_P]
        )

    def _softmax(self, logits_NPrK: Tensor) -> Tensor:
        return self._asked.normalised(logits_NPrK, 0, logits_NPrK.shape[2])

    def weighted(self, weights_NPrK: Tensor, logits_NPrK: Tensor) -> Tensor:
        """P V, (N, r, P, V), every head with its own kv head; less what a sink logit takes of the output alone."""
        v_NGKV, per_group = self.spec.v_BGKV, self.spec.heads // self.spec.kv_heads
        N, P, r, K = weights_NPrK.shape
        if per_group * v_NGKV.shape[1] == P:
            output = (weights_NPrK.reshape(N, -1, per_group * r, K) @ v_NGKV).view(N, P, r, -1)
        else:
            output = weights_NPrK @ v_NGKV[:, self.places_P // per_group]
        if self.spec.sinks_scale_output and self._asked.sinks is not None:
            output = output * torch.sigmoid(logits_NPrK.logsumexp(-1) - self._asked.sinks.float())[..., None]
        return output.transpose(1, 2)


def padded(queries: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Positions of every text as one tensor (N, R), -1 after those of a text that has fewer.

    >>> padded([[3], [1, 4]], torch.device("cpu"))
    tensor([[ 3, -1],
            [ 1,  4]])
    """
    longest = max(map(len, queries), default=0)
    rows = [[*positions, *[-1] * (longest - len(positions))] for positions in queries]
    return torch.tensor(rows, device=device).view(-1, longest)
