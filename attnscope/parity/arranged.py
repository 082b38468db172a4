"""Positions and blocks of a text with pictures, from what the model was given with its ids: none of its own.

Shapes: T token, A axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnscope.inputs.prompt import Patch
from attnscope.model.geometry import window_side
from attnscope.model.selection import CROSSING, DECODER, VISION
from attnscope.reference.blocks import BLOCKS
from attnscope.reference.grids import PLACES, grid_positions, mixed_positions, windows


@dataclass(frozen=True)
class Arrangement:
    """How the tokens of a stack are arranged, where their order does not say it.

    axes_AT: their positions on several axes. block_T: the block of each, as in `reference.given.Given`; window_T: the
    same in the layers that attend in windows. unknown: what the oracle does not know of them, "" where it knows all.
    """

    axes_AT: Tensor | None = None
    block_T: Tensor | None = None
    window_T: Tensor | None = None
    unknown: str = ""

    def blocks(self, layer: Any) -> Tensor | None:
        """The blocks of a layer's tokens."""
        return self.window_T if layer.type == "windowed" else self.block_T


PLAIN = Arrangement()


def arrangements_of(config: Any, ids: Sequence[int], given: Mapping[str, Tensor]) -> dict[str, Arrangement]:
    """How decoder and vision tower arrange what they were given, and patches their bytes; nothing of a text alone.

    config: the model's. given: the arguments of its forward with the ids.

    >>> arrangements_of(model.config, prompt.ids, {"image_grid_thw": torch.tensor([[1, 4, 6]])})["vision"].axes_AT.shape
    torch.Size([2, 24])
    """
    result = dict.fromkeys(CROSSING, Arrangement(unknown="which bytes a patch has, its entropy model says"))
    if "image_grid_thw" in given:
        try:
            grids = [tuple(grid) for grid in given["image_grid_thw"].tolist()]
            merge = config.vision_config.spatial_merge_size
            image_T = [token == config.image_token_id for token in ids]
            sides = [(rows // merge, columns // merge) for _, rows, columns in grids]
            decoder = Arrangement(mixed_positions(image_T, sides))
            result |= {DECODER: decoder, VISION: _tower(config.vision_config, grids)}
        except (RuntimeError, ValueError, TypeError, AttributeError):  # a family that means something else by them
            result |= dict.fromkeys((DECODER, VISION), Arrangement(unknown="its pictures' sizes do not fit its tokens"))
    if "token_type_ids" in given:
        result[DECODER] = Arrangement(
            unknown="some tokens see each other, which the oracle takes from the model's own mask"
        )
        if config.model_type in BLOCKS:
            result[DECODER] = Arrangement(block_T=BLOCKS[config.model_type](given["token_type_ids"][0].cpu()))
    if not given.get("pixel_attention_mask", torch.ones(1)).all():
        result[VISION] = Arrangement(unknown="its tiles have padding, which the oracle takes from the model's mask")
    return result


def of_picture(config: Any, tokens: int, patches: Mapping[int, Patch]) -> Arrangement:
    """How the tokens of a picture alone are arranged; those that are no patch do not turn, as at place 0.

    >>> of_picture(DINOv3ViTConfig(), 5, {1: patch, 2: patch, 3: patch, 4: patch}).axes_AT.shape
    torch.Size([2, 5])
    """
    places, boxes = PLACES.get(config.model_type), [patch.box for patch in patches.values() if patch.box]
    if places is None:
        return PLAIN
    axes_AT, order = torch.zeros(2, tokens), [box[1::-1] for box in boxes]  # top and left edge
    rows, columns = (sorted(set(edges)) for edges in zip(*order, strict=True))
    numbers = [rows.index(top) * len(columns) + columns.index(left) for top, left in order]
    axes_AT[:, list(patches)] = places(len(rows), len(columns))[:, numbers]
    return Arrangement(axes_AT)


def _tower(config: Any, grids: Sequence[tuple[int, int, int]]) -> Arrangement:
    """The patches of all pictures in a tower's order; each picture is a block, each window one too."""
    axes, blocks, in_windows = [], [], []
    side, merge = window_side(config), config.spatial_merge_size
    for number, (frames, rows, columns) in enumerate(grids):
        axes_2T = grid_positions(rows, columns, merge)
        if side:
            order_T, window_T = windows(axes_2T, side)
            axes_2T = axes_2T[:, order_T]
            in_windows.append(window_T)
        axes += [axes_2T] * frames
        blocks.append(torch.full((rows * columns,), number).repeat(frames))
    starts = accumulate((int(window_T.max()) + 1 for window_T in in_windows), initial=0)
    apart = [start + window_T for start, window_T in zip(starts, in_windows, strict=False)]
    return Arrangement(torch.cat(axes, 1), torch.cat(blocks), torch.cat(apart) if side else None)
