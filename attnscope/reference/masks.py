"""Which query may attend to which key: boolean masks, True = attend, to be combined with `&`.

A mask is a rule over positions, so a cache is no special case: the queries' positions start later than the keys'.

    query_Q, key_K = positions(n_queries=1, n_keys=9)      # one new token after eight cached ones
    mask_QK = causal_mask(query_Q, key_K) & sliding_window_mask(query_Q, key_K, window=4)

Shapes: B text, Q query, K key, T token. Positions (Q,) and (K,) give (Q, K); positions (B, Q) and (B, K) give
(B, Q, K), which needs `.unsqueeze(1)` to broadcast over heads.
"""

import torch
from torch import Tensor


def positions(
    n_queries: int, n_keys: int | None = None, *, offset: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Positions of the queries (Q,) and of the keys (K,), counted from 0 at the first key.

    n_keys: as many as queries where it is None. offset: the first query's position; where it is None the queries are
    the last of the keys, as with a cache (PyTorch's `is_causal=True` has offset 0).

    >>> positions(2, 5)
    (tensor([3, 4]), tensor([0, 1, 2, 3, 4]))
    """
    n_keys = n_queries if n_keys is None else n_keys
    offset = n_keys - n_queries if offset is None else offset
    return torch.arange(offset, offset + n_queries, device=device), torch.arange(n_keys, device=device)


def causal_mask(query_Q: Tensor, key_K: Tensor) -> Tensor:
    """A query attends to itself and to what precedes it: key <= query (Vaswani et al. 2017, section 3.2.3).

    >>> causal_mask(*positions(2))
    tensor([[ True, False],
            [ True,  True]])
    """
    return key_K[..., None, :] <= query_Q[..., :, None]


def sliding_window_mask(query_Q: Tensor, key_K: Tensor, window: int) -> Tensor:
    """Keys less than `window` positions away, on either side: |query - key| < window.

    With a causal mask: the last `window` keys, the query's own among them (Jiang et al. 2023, "Mistral 7B", section 2).
    transformers' bidirectional windows count |query - key| <= w: pass w + 1. Raises ValueError for a window below 1.

    >>> (causal_mask(*positions(3)) & sliding_window_mask(*positions(3), window=2)).sum(-1)
    tensor([1, 2, 2])
    """
    _at_least_one("window", window)
    return (query_Q[..., :, None] - key_K[..., None, :]).abs() < window


def chunked_mask(query_Q: Tensor, key_K: Tensor, chunk: int) -> Tensor:
    """Keys of the query's own chunk: query // chunk == key // chunk (Llama 4's local layers, 2025).

    Positions count from a text's first real token: with left padding subtract its length from them before.
    Raises ValueError for a chunk below 1.

    >>> chunked_mask(*positions(3), chunk=2)[2]
    tensor([False, False,  True])
    """
    _at_least_one("chunk", chunk)
    return _same(query_Q // chunk, key_K // chunk)


def block_mask(block_T: Tensor) -> Tensor:
    """Tokens of the same block, (T, T), whichever comes first; -1 is no block. (T,) numbers, as of a picture's patches.

    >>> block_mask(torch.tensor([-1, 0, 0])).long()
    tensor([[0, 0, 0],
            [0, 1, 1],
            [0, 1, 1]])
    """
    return _same(block_T, block_T) & (block_T >= 0)


def packed_mask(sequence_BT: Tensor) -> Tensor:
    """Tokens of the same sequence, for texts packed in one row: sequence numbers (B, T) -> (B, 1, T, T).

    >>> packed_mask(torch.tensor([[0, 0, 1]]))[0, 0, 2]
    tensor([False, False,  True])
    """
    return _same(sequence_BT, sequence_BT)[:, None]


def key_padding_mask(real_BK: Tensor) -> Tensor:
    """Keys that are real tokens: a tokenizer's attention mask (B, K), 1 or True = real -> (B, 1, 1, K).

    >>> key_padding_mask(torch.tensor([[0, 1]]))
    tensor([[[[False,  True]]]])
    """
    return real_BK.bool()[:, None, None, :]


def additive_mask(mask: Tensor, dtype: torch.dtype = torch.float32, *, hidden: float | None = None) -> Tensor:
    """A boolean mask as numbers to add: 0 where it attends, `hidden` elsewhere (`finfo(dtype).min` where it is None).

    >>> additive_mask(torch.tensor([True, False]), hidden=-1e4)
    tensor([     0., -10000.])
    """
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)


def _same(query_Q: Tensor, key_K: Tensor) -> Tensor:
    return query_Q[..., :, None] == key_K[..., None, :]


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"expected a {name} of at least 1, got {value}")
