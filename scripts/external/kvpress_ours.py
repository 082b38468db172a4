"""What attnscope says of the keys, for the judge kvpress; the project's own Python writes it to a folder.

    python -m external.kvpress_ours FOLDER

Shapes: P head, G kv head, K key.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.interventions.kv_cache import Once, policy_of
from external.models import demo_folder, tiny

TOKENS, WINDOW, PROMPT = 60, 16, 40
BUDGETS = ("received:30", "received:6", f"snap:30@{WINDOW}", f"snap:18@{WINDOW}")  # of a text that is the prompt
AFTER = ("received:20", f"snap:20@{WINDOW}")  # whose loss is measured after the first PROMPT tokens
QUERIES = {"all": None, "window": f"{TOKENS - WINDOW}:{TOKENS}", "last": "last", "before": str(TOKENS - 2)}


def main(folder: Path) -> None:
    """Write models.json, {name: folder}, and NAME.npz with `ids` and what `received`, `kept` and `losses` give."""
    folders = {kind: tiny(kind, (folder / kind).resolve()) for kind in ("llama", "qwen3")} | {"demo": demo_folder()}
    for name, place in folders.items():
        loaded = attnscope.load(str(place))
        drawn = torch.Generator().manual_seed(3)
        ids = torch.randint(3, min(loaded.geometry.vocab_size, 1000), (TOKENS,), generator=drawn).tolist()
        found = {
            f"{layer} {what}": received(loaded, ids, layer, query)
            for layer in loaded.geometry.heads_by_layer
            for what, query in QUERIES.items()
        }
        found |= kept(loaded, ids) | losses(loaded, ids)
        np.savez(folder / f"{name}.npz", ids=ids, **found)
    (folder / "models.json").write_text(json.dumps({name: str(place) for name, place in folders.items()}))


def received(loaded: Any, ids: list[int], layer: int, query: str | None) -> np.ndarray:
    """(G, K): the column `received` of `attnscope keys`, for the heads of each kv head of a layer."""
    heads, groups = loaded.model.config.num_attention_heads, loaded.model.config.num_key_value_heads
    share = heads // groups
    found = []
    for group in range(groups):
        select = f"{layer}.{group * share}-{(group + 1) * share - 1}"
        table = attnscope.capture(loaded, ids, select=select, query=query).key_table()
        found.append(table["received"].to_numpy())
    return np.stack(found)


def kept(loaded: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """{"2 kept received:30": (G, K) boolean}: the keys that budgets choose where the whole text is the prompt."""
    found: dict[str, np.ndarray] = {}

    def choose(call: Any) -> None:
        share = call.spec.heads // call.spec.kv_heads
        for written in BUDGETS:
            policy = policy_of(written)
            assert isinstance(policy, Once)
            kept_BPK = policy.chosen(call.spec, tuple(range(call.spec.heads)), (len(ids),))
            found[f"{call.layer} kept {written}"] = kept_BPK[0, ::share].numpy()

    attnscope.listen(loaded.model, torch.tensor([ids]), choose)
    return found


def losses(loaded: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """{"loss received:20": nats per token after the prompt}, and "loss" without a budget."""
    found: dict[str, np.ndarray] = {}
    for written in AFTER:
        costs = attnscope.knockout(loaded, ids, keep=written, at=PROMPT - 1)
        found["loss"] = costs.intact_S[0]
        found[f"loss {written}"] = costs.intact_S[0] + costs.effect_SN[0, 0]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
