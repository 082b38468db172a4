"""Projections with LoRA next to them, as the one matrix that they amount to.

Shapes: O width out, I width in, R rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnscope.reference.given import UnreadableError


def adapted(module: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's parameters under the names that they have without adapters: W + s B A (Hu et al. 2021, section 4.1).

    Raises UnreadableError for an adapter that is something else than this.

    >>> adapted(attention, {"q_proj.base_layer.weight": W, "q_proj.lora_A.default.weight": A, ...}).keys()
    dict_keys(['q_proj.weight', ...])
    """
    layers = {path: part for path, part in module.named_modules() if path and hasattr(part, "base_layer")}
    for path, layer in layers.items():
        inside = {name: parameters[name] for name in parameters if name.startswith(f"{path}.")}
        parameters = {name: matrix for name, matrix in parameters.items() if name not in inside}
        parameters |= {
            name.replace(".base_layer.", "."): matrix for name, matrix in inside.items() if ".base_layer." in name
        }
        for name in [] if layer.merged or layer.disable_adapters else layer.active_adapters:
            parameters[f"{path}.weight"] = parameters[f"{path}.weight"] + _change(path, layer, name, inside)
    return parameters


def _change(path: str, layer: Any, name: str, inside: dict[str, Tensor]) -> Tensor | float:
    """What one adapter adds to a projection's weight, (O, I), or (I, O) where the layer keeps it so."""
    own = {key for key in inside if ".base_layer." not in key and name in key.split(".")}
    if not own:  # it leaves this projection alone
        return 0.0
    A, B = f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight"
    if own != {A, B} or name in layer.lora_variant:
        raise UnreadableError(f"{path} has an adapter that is not a plain LoRA")
    change_OI = layer.scaling[name] * (inside[B] @ inside[A])
    return change_OI.T if layer.fan_in_fan_out else change_OI
