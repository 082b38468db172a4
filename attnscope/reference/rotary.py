"""Rotary positions: q and k are turned by an angle that grows with their position, so q . k knows their distance.

    (a, b) -> (a cos t - b sin t, b cos t + a sin t),   t = position * inv_freq_m
                                                        Su et al. 2021, "RoFormer", equations 15 and 34

One pair of dims per frequency; `frequencies.py` says how fast each turns. Families differ in which dims make a pair,
and in how many dims turn at all.

Shapes: T token, A axis, D width of q or k, M pairs that turn (2 M <= D).
"""

import torch
from torch import Tensor

LAYOUTS = ("half", "interleaved", "deinterleaved")


def cos_sin(positions_T: Tensor, inv_freq_M: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles: two tensors (..., T, M), in the frequencies' dtype.

    scaling: YaRN's and LongRoPE's attention factor; it multiplies q and k, so the logits get its square.

    >>> cos_sin(torch.tensor([0, 1]), torch.tensor([torch.pi]))[0]
    tensor([[ 1.],
            [-1.]])
    """
    angle_TM = positions_T[..., None].to(inv_freq_M.dtype) * inv_freq_M
    return angle_TM.cos() * scaling, angle_TM.sin() * scaling


def axial_cos_sin(
    positions_AT: Tensor, axis_M: Tensor, inv_freq_M: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same where tokens have positions on several axes, and pair m turns by axis_M[m]; two tensors (T, M).

    >>> axial_cos_sin(torch.tensor([[0], [1]]), torch.tensor([0, 1]), torch.tensor([torch.pi, torch.pi]))[0]
    tensor([[ 1., -1.]])
    """
    angle_TM = positions_AT[axis_M].T.to(inv_freq_M.dtype) * inv_freq_M
    return angle_TM.cos() * scaling, angle_TM.sin() * scaling


def apply_rotary(
    x_TD: Tensor, cos_TM: Tensor, sin_TM: Tensor, *, layout: str = "half", part: str = "first", reverse: bool = False
) -> Tensor:
    """q or k with 2 M of its dims turned, the others as they were; shape and dtype of x.

    x: (..., H, T, D). cos, sin: (T, M), or (B, T, M) where texts have their own positions.
    layout, which dims are pair m: "half": m and m + M (GPT-NeoX, Llama); "interleaved": 2m and 2m + 1 (RoFormer,
    GPT-J, Cohere, GLM); "deinterleaved": reads interleaved, leaves half (DeepSeek; the same logits as interleaved).
    part: "first" or "last" 2 M dims. reverse: turn the other way (nanochat). Raises ValueError for another layout or
    part, and where 2 M > D.

    >>> cos, sin = cos_sin(torch.tensor([1]), torch.tensor([torch.pi / 2]))
    >>> apply_rotary(torch.tensor([[1.0, 0.0, 7.0]]), cos, sin).round()
    tensor([[-0., 1., 7.]])
    """
    width = 2 * cos_TM.shape[-1]
    _check(x_TD, width, layout, part)
    cos_TM, sin_TM = (t.unsqueeze(-3) if t.dim() == 3 else t for t in (cos_TM, sin_TM))
    turned, unturned = (x_TD[..., :width], x_TD[..., width:]) if part == "first" else _last(x_TD, width)
    turned = _turn(turned, cos_TM, -sin_TM if reverse else sin_TM, layout).to(x_TD.dtype)
    return torch.cat([turned, unturned] if part == "first" else [unturned, turned], dim=-1)


def _turn(x_TD: Tensor, cos_TM: Tensor, sin_TM: Tensor, layout: str) -> Tensor:
    a_TM, b_TM = x_TD.chunk(2, dim=-1) if layout == "half" else (x_TD[..., 0::2], x_TD[..., 1::2])
    pair = (a_TM * cos_TM - b_TM * sin_TM, b_TM * cos_TM + a_TM * sin_TM)
    return torch.stack(pair, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(pair, dim=-1)


def _last(x_TD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    unturned = x_TD.shape[-1] - width
    return x_TD[..., unturned:], x_TD[..., :unturned]


def _check(x_TD: Tensor, width: int, layout: str, part: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"expected a layout out of {', '.join(LAYOUTS)}, got {layout!r}")
    if part not in ("first", "last"):
        raise ValueError(f"expected part to be first or last, got {part!r}")
    if width > x_TD.shape[-1]:
        raise ValueError(f"expected at most {x_TD.shape[-1]} dims to turn, got {width}")
