"""Activation patching: heads of one text are given what they have in another text of the same pass.

Interchange interventions (Geiger et al. 2021, arXiv 2106.02997), as used on indirect objects (Wang et al. 2022, arXiv
2211.00593); Heimersheim and Nanda 2024 (arXiv 2404.15255) say how to read them. The texts of a task are pairs: 2n, the
clean one, and 2n + 1, the corrupted one. Each is patched from the other, so that one pass shows what the patch costs
the clean text and what it gives back to the corrupted one.

    engine = Patching("output").over(UNCHECKED, [Patch("one", ((3, 0),), ((4, 5), (4, 5)))], lengths, texts=(0, 1))

Shapes: B text of a pass, N row of a pass (text, or patch and text), H head, G kv head, Q query, P head that is computed
again, r row of a block, K key, V width of v.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.rows import RowBlock, RowsAgain, padded
from attnscope.attention.spec import AttentionSpec
from attnscope.errors import InputError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import Change, Engine
from attnscope.intervene.again import recompute, spec_of
from attnscope.intervene.intervention import Intervention
from attnscope.intervene.sets import HeadSet
from attnscope.intervene.task import Task
from attnscope.intervene.what import What
from attnscope.model.selection import DECODER


@dataclass(frozen=True)
class Patch(HeadSet):
    """Heads, and the positions of each text of the task at which they are patched: of a pair those that belong together
    in the same places."""

    at: tuple[tuple[int, ...], ...] = ()

    @property
    def identity(self) -> Hashable:
        return self.heads, self.at


@dataclass(frozen=True)
class Move:
    """Into a row of the pass, at some positions of some heads, from another row at others."""

    row: int
    source: int
    heads: tuple[int, ...]
    at: tuple[int, ...]
    source_at: tuple[int, ...]


@dataclass(frozen=True)
class Patching(Intervention):
    """Heads are given what they have in the other text of a pair. The sets of its passes are Patches.

    what: a head's output before the output projection, its pattern (the weights of its rows), or its keys or values,
    which all heads of a kv group share. Where rows are computed again for it, those of the intact texts are, too.
    stack: whose layers the heads are of.
    """

    what: What
    stack: str = DECODER
    name: str = "patch"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"patch": self.what}

    @property
    def least(self) -> int:
        """A pair."""
        return 2

    def check(self, task: Task) -> None:
        if task.together != 2 or len(task) % 2:
            raise InputError("patching needs pairs of texts", "give each text its corrupted one")

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        return replace(engine, change=self.patching([chosen for chosen in sets if isinstance(chosen, Patch)], texts))

    def patching(self, patches: Sequence[Patch], texts: Sequence[int]) -> Change:
        """An engine's `change` for a pass of some texts and, after them, the same texts once per patch."""

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            moved = list(moves(patches, texts, call.layer)) if call.stack == self.stack else []
            return self.changed(call, output_NQHV, moved, moved_heads(moved)) if moved else output_NQHV

        return change

    def changed(
        self, call: AttentionCall, output_NQHV: Tensor, moved: Sequence[Move], heads: tuple[int, ...]
    ) -> Tensor:
        """A call's output with some moves made, each from the intact call; heads: those that are computed again."""
        if self.what == "output":
            changed, device = output_NQHV.clone(), output_NQHV.device
            for move in moved:
                heads_P, at_Q, source_Q = (_index(places, device) for places in (move.heads, move.at, move.source_at))
                changed[move.row, at_Q[:, None], heads_P] = output_NQHV[move.source, source_Q[:, None], heads_P]
            return changed

        # A pattern changes the rows that it is put into; a key or value may change every row.
        spec = spec_of(call, output_NQHV)
        if self.what == "pattern":
            rows = sorted({position for move in moved for position in move.at})
            query_NR = padded([rows] * spec.batch, spec.device)
        else:
            query_NR = torch.arange(spec.visible.queries, device=spec.device).expand(spec.batch, -1)
            spec = _with_moved(spec, self.what, moved)

        def output(block: RowBlock) -> Tensor:
            return _of_patterns(block, heads, moved) if self.what == "pattern" else block.output(None, "mask")

        changed_E = _index([move.row for move in moved], spec.device)
        return recompute(call, output_NQHV, RowsAgain(spec, heads), query_NR, output, changed_E)


def moved_heads(moved: Sequence[Move]) -> tuple[int, ...]:
    """All heads that any of the moves has, ascending."""
    return tuple(sorted({head for move in moved for head in move.heads}))


def moves(patches: Sequence[Patch], texts: Sequence[int], layer: int) -> Iterator[Move]:
    """What patches move in a layer, in a pass of some texts and, after them, the same texts once per patch."""
    for number, patch in enumerate(patches, start=1):
        heads = tuple(head for patched_layer, head in patch.heads if patched_layer == layer)
        for place, text in enumerate(texts if heads else ()):
            if patch.at[text]:
                row, other = number * len(texts) + place, text ^ 1
                yield Move(row, texts.index(other), heads, patch.at[text], patch.at[other])


def _with_moved(spec: AttentionSpec, what: What, moved: Sequence[Move]) -> AttentionSpec:
    """The call with some keys or values of its rows taken from others."""
    own_NGKX = spec.k_BGKD if what == "key" else spec.v_BGKV
    changed, per_group = own_NGKX.clone(), spec.heads // spec.kv_heads
    for move in moved:
        groups = _index(sorted({head // per_group for head in move.heads}), spec.device)[:, None]
        at, source_at = _index(move.at, spec.device), _index(move.source_at, spec.device)
        changed[move.row, groups, at] = own_NGKX[move.source, groups, source_at]
    return replace(spec, k_BGKD=changed) if what == "key" else replace(spec, v_BGKV=changed)


def _of_patterns(block: RowBlock, heads: Sequence[int], moved: Sequence[Move]) -> Tensor:
    """The output of a block, some of whose rows have the weights of others; positions are the same in both."""
    weights = block.weights_NPrK.clone()
    for move in moved:
        places_P1 = _index([heads.index(head) for head in move.heads], weights.device)[:, None]
        here = torch.isin(block.query_Nr[move.row], _index(move.at, weights.device)).nonzero()[:, 0]
        weights[move.row, places_P1, here] = block.weights_NPrK[move.source, places_P1, here]
    return block.weighted(weights, block.logits_NPrK)


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.long, device=device)
