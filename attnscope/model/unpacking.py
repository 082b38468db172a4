"""Quantised weights that transformers leaves packed until a model's first forward: unpacked as soon as it is there.

A hook of the whole model does it (compressed-tensors). No part that is read alone has that hook, and PEFT, which calls
the forward of the model inside it, passes it by.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from attnscope.errors import ModelError
from attnscope.model.libraries import bars_as_elsewhere, needed
from attnscope.model.quantised import OTHERWISE

logger = logging.getLogger(__name__)


def unpack(model: Any, name: str) -> None:
    """Run what a quantizer left for the first forward of the model. name: the model's, for
    warnings and errors.

    Raises ModelError where it put an attention of its own in place of the model's.

    Some formats (NVFP4, MXFP4) unpack to bfloat16 whatever the model's dtype is. Its layers take one dtype, so these
    weights and their scales get it too, which changes no number where it is float32.

    >>> unpack(loaded.model, "demo")
    """
    import torch

    if not getattr(model, "hf_quantizer", None):
        return
    own = needed("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS").get(model.config._attn_implementation)
    if own is not None and not own.__module__.startswith("transformers."):
        raise ModelError(
            f"the quantizer of {name} rounds queries in an attention of its own ({model.config._attn_implementation}), "
            "and only those of transformers are read",
            OTHERWISE,
        )
    # Hooks of its quantizer's package, or of one that this works with: whoever loaded the model may have put others
    # there, which count on being given arguments.
    parts = (model.hf_quantizer, *getattr(model.hf_quantizer, "__dict__", {}).values())
    packages = {_package(type(part)) for part in parts} - {"builtins", "torch"}
    hooks = [hook for hook in model._forward_pre_hooks.values() if _package(hook) in packages]
    if not hooks:
        return
    dtype = model.dtype
    with bars_as_elsewhere():
        for hook in hooks:
            hook(model, ())

    # A layer with weights of two dtypes would fail in its product.
    halves = {torch.bfloat16, torch.float16} - {dtype}
    other = [weight for weight in model.parameters() if weight.dtype in halves]
    for kind in sorted({str(weight.dtype).removeprefix("torch.") for weight in other}):
        target = str(dtype).removeprefix("torch.")
        logger.warning("the weights of %s unpack to %s, and are read as %s", name, kind, target)
    for weight in other:
        weight.data = weight.data.to(dtype)


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]


def dequantizing(config: Any) -> Any | None:
    """The quantization config by which transformers unpacks a model's weights for good while it loads them.

    None where its method knows no such way, or where the model would be another one: the layers no longer round what
    enters them, and transformers takes the first of several schemes for all.

    >>> dequantizing(loaded.model.config)
    """
    stated = getattr(config, "quantization_config", None)
    stated = stated if isinstance(stated, dict) else {}
    kinds = needed("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING")
    kind, groups = kinds.get(str(stated.get("quant_method"))), stated.get("config_groups")
    if kind is None or "dequantize" not in inspect.signature(kind).parameters or not isinstance(groups, dict):
        return None
    schemes = [group for group in groups.values() if isinstance(group, dict)]
    rounding = [stated.get("kv_cache_scheme")]
    rounding += [scheme.get(f"{what}_activations") for scheme in schemes for what in ("input", "output")]
    weights = [scheme.get("weights") for scheme in schemes]
    same = len(weights) == len(groups) and all(scheme == weights[0] for scheme in weights)
    return kind(dequantize=True) if weights and same and not any(rounding) else None
