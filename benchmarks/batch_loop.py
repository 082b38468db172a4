"""The loop that `attnscope batch` is held against: what a person who knows torch and Arrow writes for a corpus.

Texts are sorted by length in windows and run in padded batches with `output_attentions=True`, on the model without its
vocabulary; all heads of a layer are measured at once, and the columns go to Arrow without a Python object per row.

Shapes: B text, H head, Q query, K key, N tokens of the batch, M metric, k kept keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from attnscope.model.loaded import LoadedModel

WINDOW = 512  # texts
BUDGET = 1024  # tokens of a padded batch: where this loop takes the least processor time
TOP = 5
Measured = tuple[np.ndarray, np.ndarray, np.ndarray]  # of a layer: metrics (H, M), weights and keys (H, Q, k)


@torch.inference_mode()
def loop(loaded: LoadedModel, path: Path, folder: Path, budget: int = BUDGET) -> None:
    """Measure every text of a file of JSON lines into heads.parquet and relations.parquet."""
    loaded.model.set_attn_implementation("eager")
    ids = loaded.tokenizer([json.loads(line)["text"] for line in path.read_text().splitlines()])["input_ids"]
    folder.mkdir()
    writers: dict[str, pq.ParquetWriter] = {}
    for start in range(0, len(ids), WINDOW):
        window = range(start, min(start + WINDOW, len(ids)))
        found: dict[int, list[Measured]] = {text: [] for text in window}
        for batch in batches(window, ids, budget):
            for layer in measured(loaded.model, [ids[text] for text in batch]):
                for text, one in zip(batch, layer, strict=True):
                    found[text].append(one)
        for name, table in (("heads", heads(found)), ("relations", relations(found, ids, loaded.tokenizer))):
            if name not in writers:
                writers[name] = pq.ParquetWriter(folder / f"{name}.parquet", table.schema, compression="zstd")
            writers[name].write_table(table)
    for writer in writers.values():
        writer.close()


def batches(window: Sequence[int], ids: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Texts of like length, padded to no more tokens than the budget."""
    batch: list[int] = []
    for text in sorted(window, key=lambda text: len(ids[text])):
        if batch and (len(batch) + 1) * len(ids[text]) > budget:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def measured(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[list[Measured]]:
    """Of each layer, each text's metrics and strongest keys."""
    lengths = [len(ids) for ids in texts]
    N, device = max(lengths), model.device
    ids_BN = torch.tensor([[*ids, *[0] * (N - len(ids))] for ids in texts], device=device)
    real_BN = torch.arange(N, device=device) < torch.tensor(lengths, device=device)[:, None]
    same_BQK = (ids_BN[:, :, None] == ids_BN[:, None]).tril(-1) & real_BN[:, None]
    after_BQK = torch.nn.functional.pad(same_BQK, (1, -1)).tril(-2)
    found = model.base_model(ids_BN, attention_mask=real_BN.long(), output_attentions=True, use_cache=False)
    for weights_BHQK in found.attentions:
        A_BHQK = weights_BHQK.tril() * real_BN[:, None, :, None]
        scores_BHM = metrics(A_BHQK, same_BQK, after_BQK, real_BN).cpu().numpy()
        best = A_BHQK.topk(min(TOP, N), -1)
        weight, key = best.values.cpu().numpy(), best.indices.int().cpu().numpy()
        yield [(scores_BHM[row], weight[row, :, :count], key[row, :, :count]) for row, count in enumerate(lengths)]


METRICS = (
    *("previous_token", "self", "sink", "off_token_mass", "duplicate_token", "induction", "entropy"),
    *("entropy_normalised", "effective_keys", "confidence", "distance", "local_mass_32", "focus"),
)


def metrics(A: Tensor, same_BQK: Tensor, after_BQK: Tensor, real_BN: Tensor) -> Tensor:
    """(B, H, M): the metrics from their formulas, A (B, H, Q, K) zero outside; NaN where no row can show one."""
    place = torch.arange(A.shape[-1], device=A.device)
    seen = place + 1.0
    two, three = real_BN & (place >= 1), real_BN & (place >= 2)
    entropy = torch.special.entr(A).sum(-1)
    rest = A[..., 1:]
    mass = rest.sum(-1).clamp_min(1e-30)
    sharp = 1 - (torch.special.entr(rest).sum(-1) / mass + mass.log()).clamp_min(0) / (seen - 1).clamp_min(2).log()
    back = (place[:, None] - place).clamp_min(0).float()
    values = (
        (torch.nn.functional.pad(A.diagonal(-1, 2, 3), (1, 0)), two),
        (A.diagonal(0, 2, 3), two),
        (A[..., 0], real_BN),
        (1 - A.sum(-1), two),
        (torch.einsum("bhqk,bqk->bhq", A, same_BQK.float()), real_BN & same_BQK.any(-1)),
        (torch.einsum("bhqk,bqk->bhq", A, after_BQK.float()), real_BN & after_BQK.any(-1)),
        (entropy, two),
        (entropy / seen.clamp_min(2).log(), two),
        (1 / (A * A).sum(-1).clamp_min(1e-30), two),
        (A.amax(-1), two),
        ((A * back).sum(-1), two),
        ((A * (back < 32)).sum(-1), two),
        ((1 - A[..., 0]) * sharp, three),
    )
    return torch.stack([(value * rows[:, None]).sum(-1) / rows.sum(-1)[:, None] for value, rows in values], -1)


def heads(found: dict[int, list[Measured]]) -> pa.Table:
    """A row per text, layer and head."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("item", "layer", "head", *METRICS)}
    for text, layers in found.items():
        for layer, (scores_HM, _, _) in enumerate(layers):
            head = np.arange(len(scores_HM), dtype=np.int32)
            about = {"item": np.full_like(head, text), "layer": np.full_like(head, layer), "head": head}
            for name, column in (about | dict(zip(METRICS, scores_HM.T, strict=True))).items():
                columns[name].append(column)
    return pa.table({name: np.concatenate(parts) for name, parts in columns.items()})


def relations(found: dict[int, list[Measured]], ids: Sequence[Sequence[int]], tokenizer: Any) -> pa.Table:
    """A row per text, layer, head, query and kept key."""
    names = ("item", "layer", "head", "query", "query_token", "key", "key_token", "weight")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for text, layers in found.items():
        words = np.array(tokenizer.convert_ids_to_tokens(ids[text]), dtype=object)
        for layer, (_, weight_HQk, key_HQk) in enumerate(layers):
            head, query, _ = np.indices(weight_HQk.shape, dtype=np.int32)
            keep = key_HQk <= query
            query, key = query[keep], key_HQk[keep]
            about = np.full_like(query, text), np.full_like(query, layer), head[keep]
            parts = (*about, query, words[query], key, words[key], weight_HQk[keep])
            for name, part in zip(names, parts, strict=True):
                columns[name].append(part)
    return pa.table({name: np.concatenate(parts) for name, parts in columns.items()})
