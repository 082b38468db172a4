"""Positions and blocks of a text with pictures, from what the model was given beside its ids: none of its own.

Shapes: T token, A axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnscope.model.geometry import window_side
from attnscope.reference.blocks import BLOCKS
from attnscope.reference.grids import PLACES, grid_positions, mixed_positions, windows
from attnscope.stacks import CROSSING, DECODER, VISION
from attnscope.text.prompt import Patch


@dataclass(frozen=True)
class Arrangement:
    """How the tokens of a stack stand to each other, where their order does not say it.

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
    """How decoder and vision tower stand to what they were given, and patches to their bytes; nothing of a text alone.

    config: the model's. given: the arguments of its forward beside the ids.

    >>> arrangements_of(model.config, prompt.ids, {"image_grid_thw": torch.tensor([[1, 4, 6]])})["vision"].axes_AT.shape
    torch.Size([2, 24])
    """
    found = dict.fromkeys(CROSSING, Arrangement(unknown="which bytes a patch has, its entropy model says"))
    if "image_grid_thw" in given:
        try:
            found |= _on_grids(config, ids, [tuple(grid) for grid in given["image_grid_thw"].tolist()])
        except (RuntimeError, ValueError, TypeError, AttributeError):  # a family that means something else by them
            found |= dict.fromkeys((DECODER, VISION), Arrangement(unknown="its pictures' sizes do not fit its tokens"))
    if "token_type_ids" in given:
        found[DECODER] = _blocks(config, given["token_type_ids"][0])
    if not given.get("pixel_attention_mask", torch.ones(1)).all():
        found[VISION] = Arrangement(unknown="its tiles have padding, which the oracle takes from the model's mask")
    return found


def of_picture(config: Any, tokens: int, patches: Mapping[int, Patch]) -> Arrangement:
    """How the tokens of a picture alone stand to each other; those that are no patch do not turn, as at place 0.

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


def _on_grids(config: Any, ids: Sequence[int], grids: Sequence[Any]) -> dict[str, Arrangement]:
    """By the frames, rows and columns of each picture's patches."""
    merge, image_T = config.vision_config.spatial_merge_size, [one == config.image_token_id for one in ids]
    sides = [(rows // merge, columns // merge) for _, rows, columns in grids]
    return {DECODER: Arrangement(mixed_positions(image_T, sides)), VISION: _tower(config.vision_config, grids)}


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


def _blocks(config: Any, type_T: Tensor) -> Arrangement:
    if config.model_type not in BLOCKS:
        return Arrangement(unknown="some tokens see each other, which the oracle takes from the model's own mask")
    return Arrangement(block_T=BLOCKS[config.model_type](type_T.cpu()))
