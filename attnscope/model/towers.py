"""Which models of pictures alone are read, and why others are not: those that read a picture as one grid of patches."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from attnscope.errors import ModelError
from attnscope.model.geometry import empty_model
from attnscope.model.libraries import knows_interface

if TYPE_CHECKING:
    from torch import nn

OTHER = "choose a model that reads one grid of patches, as ViT, DINOv2 and CLIP do"


def patch_side(tower: Any) -> tuple[int, int] | None:
    """Height and width of a tower's patches in pixels; None where its config does not give one size for all.

    >>> patch_side(AutoConfig.from_pretrained("google/vit-base-patch16-224"))
    (16, 16)
    """
    size = getattr(tower, "patch_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    return sides[0], sides[1]


def tower_of(model: Any) -> Any:
    """The part of a model that is given pictures: of CLIP's two towers one, of a classifier its body.

    DINOv3's own body is given patches, and is no such part: there it is the whole.
    """
    parts = (part for whole in (model.base_model, model) for part in whole.modules())
    named = (part for part in parts if getattr(part, "main_input_name", "") == "pixel_values")
    return next((part for part in named if "pixel_values" in inspect.signature(part.forward).parameters), model)


def check_tower(config: Any, name: str) -> None:
    """Raise ModelError for a vision tower that does not attend over one grid of patches; config: its own."""
    why = _why_not(config)
    if why:
        raise ModelError(f"{name} ({config.model_type}) reads pictures, but {why}", OTHER)


def _why_not(config: Any) -> str:
    heads, layers = (
        next((value for name in names if (value := getattr(config, name, None)) is not None), None)
        for names in (("num_attention_heads", "num_heads"), ("num_hidden_layers", "depth"))
    )
    if not _attends(config):
        return "has no attention: it is made of convolutions"
    if getattr(config, "is_encoder_decoder", False):
        return "looks at them with queries of its own, which are no patches"
    if getattr(config, "num_frames", None) is not None:
        return "expects videos, frame by frame"
    if isinstance(heads, list | tuple) or getattr(config, "depths", None) or getattr(config, "patch_sizes", None):
        return "attends in stages, each over fewer and larger patches than the one before"
    if patch_side(config) is None or not isinstance(heads, int) or not isinstance(layers, int):
        return "its config does not say how it divides them into patches"
    if getattr(config, "window_size", None) and getattr(config, "fullatt_block_indexes", None) is None:
        return "attends in windows of patches"
    return ""


def _attends(config: Any) -> bool:
    """Whether any module of the model's is of attention, by what its class is called, or lies in a file that has it."""
    try:
        parts: nn.Module = empty_model(config)
    except Exception:  # any family's constructor, with any config: loading says what is wrong with it
        return True
    kinds = {type(module) for module in parts.modules()}
    return any("attention" in kind.__name__.lower() or knows_interface(kind) for kind in kinds)
