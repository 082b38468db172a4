"""Which query may attend to which key: boolean masks, True = attend, to be combined with `&`.

A mask is a rule over positions, so a cache is no special case: the queries' positions start later than the keys'.

    query_Q, key_K = positions(n_queries=1, n_keys=9)      # one new token after eight cached ones
    mask_QK = causal_mask(query_Q, key_K) & sliding_window_mask(query_Q, key_K, window=4)

Shapes: B text, Q query, K key, T token, A axis. Positions (Q,) and (K,) give (Q, K); positions (B, Q) and (B, K) give
(B, Q, K), which needs `.unsqueeze(1)` to broadcast over heads.

Pictures: which tokens of a text with pictures see each other, also those ahead, by what a family says with their types;
and where patches are, by their rows and columns, the windows of a tower, and positions next to text.

A tower that merges patches reads them in square blocks, one block after the other, each row by row (Wang et al. 2024,
"Qwen2-VL", section 2.1); one that attends in windows reads window by window (Bai et al. 2025, "Qwen2.5-VL", 2.1.1).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

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


def runs_of(image_T: Tensor) -> Tensor:
    """Each run of tokens that are a picture's is a block, -1 elsewhere, (T,).

    >>> runs_of(torch.tensor([False, True, True, False, True]))
    tensor([-1,  1,  1, -1,  2])
    """
    begins_T = image_T & ~torch.nn.functional.pad(image_T, (1, 0))[:-1]
    return torch.where(image_T, begins_T.cumsum(0), -1)


# What families say with the types of tokens, (T,): the blocks of those that see each other.
BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gemma3": lambda type_T: runs_of(type_T == 1),  # the tokens of each picture
    "paligemma": lambda type_T: torch.where(type_T == 0, 0, -1),  # all of the prompt, and none of the answer
}


def grid_positions(rows: int, columns: int, merge: int = 1) -> Tensor:
    """Row and column of every patch, (2, T), in blocks of merge x merge.

    >>> grid_positions(2, 4, merge=2)
    tensor([[0, 0, 1, 1, 0, 0, 1, 1],
            [0, 1, 0, 1, 2, 3, 2, 3]])
    """
    row_T, column_T = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
    block_T = (row_T // merge) * columns + column_T // merge
    return torch.stack([row_T, column_T])[:, block_T.argsort(stable=True)]


def centre_angles(rows: int, columns: int) -> Tensor:
    """Where the middle of every patch is on both axes, the picture from -2 pi to 2 pi, (2, T), row by row.

    DINOv3's positions (Simeoni et al. 2025, section 3.2), which do not depend on the number of patches.

    >>> centre_angles(1, 2) / torch.pi
    tensor([[ 0.,  0.],
            [-1.,  1.]])
    """
    sides_21 = torch.tensor([[rows], [columns]])
    return 2 * torch.pi * ((2 * grid_positions(rows, columns) + 1) / sides_21 - 1)


# How the patches of a picture alone are placed, by the type of its tower: (rows, columns) -> (2, patches).
PLACES: Mapping[str, Callable[[int, int], Tensor]] = {"dinov3_vit": centre_angles}


def windows(axes_2T: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The order in which a tower reads patches window by window, and the window of each in that order, (T,) both.

    axes_2T: row and column of every patch. side: of a window, in patches; those at the edges are what is left.

    >>> windows(grid_positions(1, 4), side=2)
    (tensor([0, 1, 2, 3]), tensor([0, 0, 1, 1]))
    """
    row_T, column_T = axes_2T // side
    window_T = row_T * (int(column_T.max()) + 1) + column_T
    return window_T.argsort(stable=True), window_T.sort(stable=True).values


def mixed_positions(image_T: Sequence[bool], grids: Sequence[tuple[int, int]]) -> Tensor:
    """Positions on the axes time, row and column of a text with pictures, (3, T).

    image_T: which tokens are a picture's. grids: rows and columns of each picture, in the order of their tokens. A text
    counts on on all axes. A picture has one time, and its rows and columns count from there; the text continues after
    the largest of its positions (Wang et al. 2024, "Qwen2-VL", figure 3). Raises ValueError where a size is missing.

    >>> mixed_positions([False, True, True, False], [(1, 2)])
    tensor([[0, 1, 1, 3],
            [0, 1, 1, 3],
            [0, 1, 2, 3]])
    """
    runs, of_pictures, start = [], iter(grids), 0
    for image, run in groupby(image_T):
        if image:
            if (sides := next(of_pictures, None)) is None:
                raise ValueError(f"expected a size of every picture, got {len(grids)}")
            rows, columns = sides
            place_2T = grid_positions(rows, columns)
            runs.append(start + torch.cat([torch.zeros_like(place_2T[:1]), place_2T]))
            start += max(rows, columns)
        else:
            count = len(list(run))
            runs.append(start + torch.arange(count).expand(3, -1))
            start += count
    return torch.cat(runs, dim=1)
