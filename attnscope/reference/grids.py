"""Where the patches of a picture are: their rows and columns, the windows of a tower, and positions next to text.

A tower that merges patches reads them in square blocks, one block after the other, each row by row (Wang et al. 2024,
"Qwen2-VL", section 2.1); one that attends in windows reads window by window (Bai et al. 2025, "Qwen2.5-VL", 2.1.1).

Shapes: T token, A axis.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor


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
    the largest of its positions (Wang et al. 2024, "Qwen2-VL", figure 3).

    >>> mixed_positions([False, True, True, False], [(1, 2)])
    tensor([[0, 1, 1, 3],
            [0, 1, 1, 3],
            [0, 1, 2, 3]])
    """
    return torch.cat(list(_runs(image_T, iter(grids))), dim=1)


def _runs(image_T: Sequence[bool], grids: Iterator[tuple[int, int]]) -> Iterator[Tensor]:
    start = 0
    for image, run in groupby(image_T):
        if image:
            rows, columns = next(grids)
            place_2T = grid_positions(rows, columns)
            yield start + torch.cat([torch.zeros_like(place_2T[:1]), place_2T])
            start += max(rows, columns)
        else:
            count = len(list(run))
            yield start + torch.arange(count).expand(3, -1)
            start += count
