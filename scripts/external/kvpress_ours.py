"""What attnscope says of the keys, for the judge kvpress; the project's own Python writes it to a folder.

    python -m external.kvpress_ours FOLDER

Shapes: G kv head, K key.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from external.models import demo_folder, tiny

TOKENS, WINDOW = 60, 16
QUERIES = {"all": None, "window": f"{TOKENS - WINDOW}:{TOKENS}", "last": "last", "before": str(TOKENS - 2)}


def main(folder: Path) -> None:
    """Write models.json, {name: folder}, and NAME.npz with `ids` and, per layer and queries, what keys receive."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
