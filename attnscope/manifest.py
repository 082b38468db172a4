"""What made an export: enough to repeat the run, and whether it held."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnscope._version import __version__

if TYPE_CHECKING:
    import torch

    from attnscope.model.loading import LoadedModel
    from attnscope.observe import Observation


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    import torch
    import transformers

    return {
        "attnscope": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def manifest(loaded: LoadedModel, seen: Observation, options: Mapping[str, Any], files: list[str]) -> dict[str, Any]:
    """The manifest of one observed text: model, engine, versions, text, options, and what was checked.

    row_sum_error, masked_weight and value_error are the largest over all calls; null where they were not measured.
    """
    checks = seen.report.calls
    return {
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "type": loaded.geometry.model_type,
            "layers": len(loaded.geometry.layers),
            "layers_without_attention": {
                str(layer.index): layer.kind for layer in loaded.geometry.layers if not layer.attention
            },
        },
        "device": loaded.device,
        "dtype": loaded.dtype,
        "attention": loaded.attention,
        **seen.context,
        "versions": versions(),
        "text": {"sha256": seen.prompt.sha256, "tokens": len(seen.prompt), "removed_tokens": seen.prompt.removed},
        "options": dict(options),
        "checks": {
            "row_sum_error": _largest([check.row_sum_error for check in checks]),
            "masked_weight": _largest([check.masked_weight for check in checks]),
            "value_error": _largest([check.value_error for check in checks]),
            "sink_logits": any(check.sink_logits for check in checks),
            "failures": failures(loaded, seen),
            "unmeasured": unmeasured(seen),
        },
        "calls": [
            {
                "layer": check.layer,
                "call": check.call,
                "module": check.path,
                "heads": check.heads,
                "route": check.route,
                "mask": check.mask,
                "kernel": check.kernel,
            }
            for check in checks
        ],
        "files": files,
    }


def failures(loaded: LoadedModel, seen: Observation) -> list[str]:
    """What did not hold in this run, in words; empty when all did."""
    return [line for check in seen.report.calls for line in check.failures(_dtype(loaded))]


def unmeasured(seen: Observation) -> list[str]:
    """What this run could not measure, in words."""
    calls = seen.report.calls
    again = sorted({check.layer for check in calls if check.call > 0})
    other_keys = sorted({check.layer for check in calls if check.call == 0 and check.keys != seen.report.tokens})
    no_output = sorted({check.layer for check in calls if check.value_error is None})
    lines = []
    if again:
        lines.append(f"layers {again} attend more than once; the scores are of each layer's first call")
    if other_keys:
        lines.append(f"layers {other_keys} attend to keys that are not tokens; they have no scores")
    if no_output:
        lines.append(f"layers {no_output}: P V was not compared with the layer's own output")
    return lines


def _largest(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return max(measured) if measured else None


def _dtype(loaded: LoadedModel) -> torch.dtype:
    import torch

    dtype = getattr(torch, loaded.dtype, torch.float32)
    assert isinstance(dtype, torch.dtype)
    return dtype
