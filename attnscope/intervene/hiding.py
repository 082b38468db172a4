"""Keys hidden from queries, in the heads of a set: attention knockout as an intervention.

Shapes: N row of a pass, B text, H head, Q query, K key, P head of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.spec import AttentionSpec
from attnscope.intervene.intervention import Intervention
from attnscope.intervene.sets import HeadSet
from attnscope.seam.call import CallPlace
from attnscope.seam.engines import Engine


@dataclass(frozen=True)
class Hiding(Intervention):
    """Some keys are hidden from some queries before the softmax: the other keys of the row take their mass.

    queries, keys: positions, the same in every text.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    name: str = "hidden"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"queries": list(self.queries), "keys": list(self.keys)}

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        batch = len(lengths)

        def hide(place: CallPlace, spec: AttentionSpec) -> Tensor | None:
            gone = [(1 + at, head) for at, one in enumerate(sets) for layer, head in one.heads if layer == place.layer]
            if not gone:
                return None
            size = spec.visible.queries, spec.visible.keys
            hidden_QK = torch.zeros(size, dtype=torch.bool, device=spec.q_BHQD.device)
            hidden_QK[torch.tensor(self.queries)[:, None], torch.tensor(self.keys)] = True
            hidden_NHQK = hidden_QK.new_zeros(spec.batch // batch, batch, spec.heads, *size)
            row_P, head_P = torch.tensor(gone).T
            hidden_NHQK[row_P, :, head_P] = hidden_QK
            return hidden_NHQK.flatten(0, 1)

        return replace(engine, hide=hide)
