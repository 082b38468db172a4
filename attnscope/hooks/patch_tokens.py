"""Which patch of a picture each token of a vision tower is, measured on the model and not looked up by family.

Patches are changed together whose numbers share a bit, and the states that enter the first attention layer show which
tokens that changes. So each token spells the number of its patch. What no patch changes is [CLS], a register or the
like, and is named by the parameter that it is made of.

Shapes: B text, T token, E model width, H pixel row, W pixel column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attnscope.errors import ModelError
from attnscope.hooks.forward import attention_modules, backbone, bare_model, hooks_around, own_errors, temporary
from attnscope.hooks.listen import running

SHORT = {"class": "CLS", "distillation": "DIST", "detection": "DET", "register": "REG"}
OTHER = "choose a model that makes a token of each patch, as ViT and CLIP do"


class PatchTokens(NamedTuple):
    """The tokens of a picture: the number of a patch, counted row by row, or the name of what is none.

    grid: rows and columns of patches.

        >>> patch_tokens(vit, pixels, {}, (16, 16)).tokens[:3]
        ('[CLS]', 0, 1)
    """

    tokens: tuple[int | str, ...]
    grid: tuple[int, int]


def patch_tokens(
    model: nn.Module, pixels_BCHW: Tensor, inputs: Mapping[str, Any], side: tuple[int, int]
) -> PatchTokens:
    """The tokens that a vision tower makes of one picture; side: height and width of a patch, in pixels.

    inputs: further arguments of its forward. Raises ModelError where its tokens are not patches: where one is made of
    several, or patches are left out by chance; ForwardError where its own code fails.
    """
    grid = pixels_BCHW.shape[-2] // side[0], pixels_BCHW.shape[-1] // side[1]
    states = _States(model, pixels_BCHW, inputs)
    if not torch.equal(states.plain_TE, states.of(pixels_BCHW)):
        raise ModelError("the model leaves out patches by chance, so that its tokens differ from pass to pass", OTHER)

    # Each patch has a number; pixels at the edge that fill no patch stay as they are.
    count, number_HW = grid[0] * grid[1], torch.full(pixels_BCHW.shape[-2:], -1)
    of_grid = torch.arange(count).view(grid).repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)
    number_HW[: of_grid.shape[0], : of_grid.shape[1]] = of_grid
    number_HW = number_HW.to(pixels_BCHW.device)
    noise_BCHW = _noise(pixels_BCHW)
    moved_2NT = torch.stack(
        [
            states.moved(states.of(torch.where(number_HW >= 0, pixels_BCHW + noise_BCHW * on_HW, pixels_BCHW)))
            for value in (0, 1)
            for bit in range(max(1, (count - 1).bit_length()))
            for on_HW in [(number_HW >> bit) & 1 == value]
        ]
    ).unflatten(0, (2, -1))

    # A token of one patch moves with a bit's zeros or with its ones; with both if several patches are in it.
    each_NT = moved_2NT.sum(0)
    if (each_NT > 1).any():
        raise ModelError("the model makes tokens of several patches each", OTHER)
    bit_N1 = 2 ** torch.arange(len(each_NT), device=each_NT.device)[:, None]
    number_T, of_patch_T = (moved_2NT[1] * bit_N1).sum(0), each_NT.all(0)
    names = dict(_names(states, ~of_patch_T))
    tokens = (int(number_T[at]) if of_patch else names.get(at, f"[{at}]") for at, of_patch in enumerate(of_patch_T))
    return PatchTokens(tuple(tokens), grid)


class _EnteredError(Exception):
    """The first attention layer is reached, and what follows of the pass is not needed."""


class _States:
    """What enters the first attention layer of a model, (T, E), for changed pixels or a changed parameter."""

    def __init__(self, model: nn.Module, pixels_BCHW: Tensor, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.part = bare_model(model) if hooks_around(model) else backbone(model)
        self.pixels_BCHW, self._entered = pixels_BCHW, list[Tensor]()
        self.plain_TE = self.of(pixels_BCHW)

    def of(self, pixels_BCHW: Tensor, changed: Mapping[str, Tensor] | None = None) -> Tensor:
        """The states; changed: parameters in place of the model's own."""
        self._entered.clear()
        modules = attention_modules(self.model)
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in modules]
        with suppress(_EnteredError), temporary(hooks), own_errors(self.model), running(self.model, None):
            functional_call(self.part, dict(changed or {}), (pixels_BCHW,), dict(self.inputs))
        states = self._entered[0] if self._entered else torch.empty(0)
        if states.ndim != 3 or len(states) != 1:
            raise ModelError("the first attention layer of the model does not see all of the picture at once", OTHER)
        return states[0]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = (*args, *kwargs.values())
        tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
        self._entered += [value.detach().clone() for value in tensors][:1]
        raise _EnteredError

    def moved(self, states_TE: Tensor) -> Tensor:
        """Which tokens differ from what they are unchanged, (T,) boolean."""
        difference_T = (states_TE - self.plain_TE).float().norm(dim=-1)
        return difference_T > 1e-3 * difference_T.max()


def _names(states: _States, other_T: Tensor) -> Iterator[tuple[int, str]]:
    """{position: name} of the tokens that are no patches, by the parameter that each is made of."""
    width = states.plain_TE.shape[-1]
    outside = [  # of the layers, which change tokens that are there already
        (name, parameter)
        for name, parameter in states.part.named_parameters()
        if parameter.shape[-1:] == (width,) and not re.search(r"\.\d+\.", name)
    ]
    for name, parameter in reversed(outside) if other_T.any() else ():
        moved_T = states.moved(states.of(states.pixels_BCHW, {name: parameter + _noise(parameter)}))
        at = moved_T.nonzero()[:, 0].tolist()
        if at and not (moved_T & ~other_T).any():
            word = re.sub(r"_?(tokens?|embeddings?|embed)$", "", name.rpartition(".")[2])
            word = SHORT.get(word, word.upper())
            yield from ((place, f"[{word}{number if at[1:] else ''}]") for number, place in enumerate(at))


def _noise(like: Tensor) -> Tensor:
    """Numbers that no norm takes out again, the same every time."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
