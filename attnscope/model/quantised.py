"""Whether a model's weights are stored quantised."""

from __future__ import annotations

from typing import Any


def is_quantised(model: Any) -> bool:
    """Whether the model's weights are stored quantised, so that no layer can be copied to float32 as it is.

    Those of a GGUF file are not, where transformers unpacked them.

    >>> is_quantised(loaded.model)
    False
    """
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if method == "gguf" and not getattr(quantizer, "packed_modules", None):
        return False
    return bool(getattr(model, "is_quantized", False) or quantizer)
