"""Keys hidden from queries in the heads of a set: an intervention that the package does not have."""

from dataclasses import dataclass

import torch

from attnscope.interventions.base import Intervention


@dataclass(frozen=True)
class Hidden(Intervention):
    """Some keys get nothing from some queries, and the row's other keys their mass; the same in every text."""

    queries: tuple[int, ...] | range
    keys: tuple[int, ...] | range
    name = "hidden"

    @property
    def facts(self):
        return {"queries": list(self.queries), "keys": list(self.keys)}

    def change(self, sets, lengths, texts):
        def change(call, output_NQHV):
            weights = call.P.rows(0, call.P.queries).double()
            weights[:, :, torch.tensor(self.queries)[:, None], torch.tensor(self.keys)] = 0
            v = call.spec.v_BGKV.double().repeat_interleave(call.P.heads // call.spec.kv_heads, 1)
            hidden_NQHV = ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).to(output_NQHV.dtype)
            changed = output_NQHV.clone()
            for number, heads in enumerate(sets, start=1):
                rows = range(number * len(lengths), (number + 1) * len(lengths))
                for head in [head for layer, head in heads.heads if layer == call.layer]:
                    changed[rows, :, head] = hidden_NQHV[rows, :, head]
            return changed

        return change
