"""Relative positions by a learned table: a bias for every bucket of distances and head (Raffel et al. 2020, "T5").

    logits_HQK = scale * q k^T + table[bucket(key - query), head]

Near distances have a bucket each, far ones share buckets that grow with the logarithm of the distance (section 2.1).

Shapes: H head, Q query, K key, N bucket.
"""

import math

import torch
from torch import Tensor


def buckets(distance_QK: Tensor, n_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """The bucket of every distance key - query, integers in its shape.

    both_ways: half of the buckets are for keys after the query, as in an encoder; else those share bucket 0. Of the
    buckets for one direction the first half are single distances, the others are of equal width in log(distance) up to
    max_distance, and the last has all that is further away.

    >>> buckets(torch.tensor([-40, -3, -1, 0, 1]), n_buckets=8, max_distance=16, both_ways=True)
    tensor([3, 2, 1, 0, 5])
    """
    n = n_buckets // 2 if both_ways else n_buckets
    away_QK = distance_QK.abs() if both_ways else (-distance_QK).clamp_min(0)
    single = n // 2
    # float32 in the authors' order of operations: where a bucket begins may hang on the last bit of a logarithm
    log_QK = (away_QK.clamp_min(1).float() / single).log() / math.log(max_distance / single) * (n - single)
    shared_QK = (single + log_QK.long()).clamp_max(n - 1)
    after_QK = (distance_QK > 0).long() * n if both_ways else 0
    return torch.where(away_QK < single, away_QK, shared_QK) + after_QK


def relative_bias(table_NH: Tensor, query_Q: Tensor, key_K: Tensor, *, max_distance: int, both_ways: bool) -> Tensor:
    """The bias (H, Q, K) to add to the logits, from the table's entry for each pair's bucket.

    >>> relative_bias(torch.tensor([[0.5], [2.0]]), *[torch.arange(2)] * 2, max_distance=4, both_ways=False)
    tensor([[[0.5000, 0.5000],
             [2.0000, 0.5000]]])
    """
    distance_QK = key_K[None, :] - query_Q[:, None]
    return table_NH[buckets(distance_QK, len(table_NH), max_distance, both_ways)].permute(2, 0, 1)
