"""What a parity run proves, as JSON: which weights, on which machine, and how far every layer was from the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from attnscope.hooks.engines import ENGINES
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.libraries import versions
from attnscope.parity import ATOL, check_parity
from attnscope.parity.verdicts import Difference, LayerParity, ParityReport, WholeParity
from attnscope.utils.tables import as_table

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel

SCHEMA = "certificate/4"  # goes up when a field is renamed, or means something else


def certificate(
    report: ParityReport,
    loaded: LoadedModel,
    prompt: Prompt | Tensor | Sequence[int],
    source: Prompt | Tensor | Sequence[int] | None = None,
) -> dict[str, Any]:
    """The certificate of one parity run; prompt and source as `check_parity` took them.

    Weights are named by the sha256 of each safetensors file in the model's folder; empty for a model made in memory.

    >>> certificate(report, loaded, prompt)["level"]
    'full'
    """
    # Of an encoder-decoder two texts were read: the decoder's, and with it the encoder's.
    texts = {"text": (prompt, report.tokens)} | ({} if source is None else {"source": (source, report.source_tokens)})
    return {
        "schema": SCHEMA,
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "type": loaded.geometry.model_type,
            "weights_sha256": weights_sha256(loaded.source_folder, loaded.base_folder),
            **({"arithmetic": loaded.arithmetic.facts} if loaded.arithmetic else {}),
        },
        # How it was run: the same weights round otherwise on another device, and in another dtype.
        "device": loaded.device,
        "dtype": loaded.dtype,
        "engine": "eager",
        "quantised": report.quantised,
        "versions": versions(),
        **{name: {"sha256": getattr(text, "sha256", None), "tokens": count} for name, (text, count) in texts.items()},
        "select": report.select,
        "atol": report.atol,
        "holds": report.verdict,
        "level": report.level,
        "levels": report.levels,
        "not_shown": list(report.not_shown),
        "whole": None if report.whole is None else {"holds": report.whole.holds, **asdict(report.whole)},
        "layers": [asdict(layer) for layer in report.layers],
    }


def verify(
    loaded: LoadedModel,
    prompt: Prompt | Tensor | Sequence[int],
    *,
    source: Prompt | Tensor | Sequence[int] | None = None,
    atol: float = ATOL,
) -> dict[str, Any]:
    """A parity run in short, for a manifest: whether it held, at which level, the largest difference of each layer.

    >>> verify(loaded, [1, 2, 3])["holds"]
    True
    """
    report = check_parity(loaded, prompt, source=source, atol=atol, engine=ENGINES["eager"])
    measured = {  # by layer: `3`, or `cross 3` of a stack other than the plain one
        report.name(layer).replace("layer ", ""): (layer.implementation.weights, layer.implementation.output_relative)
        for layer in report.layers
    }
    largest = {
        name: max((value for value in values if value is not None), default=None) for name, values in measured.items()
    }
    return {
        "holds": report.verdict,
        "level": report.level,
        "levels": report.levels,
        "atol": atol,
        "not_shown": list(report.not_shown),
        "failures": [in_words(layer, report) for layer in report.failures],
        "unchecked": [in_words(layer, report) for layer in report.unchecked],
        "largest_difference": largest,
    }


def in_words(layer: LayerParity, report: ParityReport) -> str:
    """Why a layer does not hold, or was not checked, in words.

    >>> in_words(check_parity(loaded, prompt, atol=0.0).failures[0], report)  # doctest: +ELLIPSIS
    'layer 0: weights differ from the oracle by ...e-07 (allowed 0), output by ...e-07 of its norm (allowed 0)'
    """
    if layer.verdict is None:
        return f"{report.name(layer)}: cannot be checked, {layer.why}"
    parts = [] if layer.implementation.holds else [_apart(layer.implementation)]
    parts += [] if layer.as_run.holds else [f"as run in {report.dtype}, {_apart(layer.as_run)}"]
    parts += [words for words in (layer.turned, layer.apart) if words]
    parts = parts or [f"rows sum to 1 but for {layer.row_sum_error:.2g}"]
    return f"{report.name(layer)}: {'; '.join([*parts, *filter(None, [layer.why])])}"


def whole_in_words(whole: WholeParity) -> str:
    """How far the whole model is from the second instance, in words.

    >>> whole_in_words(WholeParity({"model.layers.0.self_attn": 2e-7, "logits": 0.25}, allowed=1e-5))
    'the whole model differs from a second instance by 0.25 of the norm (logits, allowed 1e-05)'
    """
    name, off = whole.shown
    return (
        f"the whole model differs from a second instance by {off:.2g} of the norm ({name}, allowed {whole.allowed:.2g})"
    )


def _apart(difference: Difference) -> str:
    parts = (
        ("weights differ from the oracle by", difference.weights, "", difference.weights_allowed),
        ("output by", difference.output_relative, " of its norm", difference.output_allowed),
    )
    phrases = (f"{name} {off:.2g}{of} (allowed {allowed:.2g})" for name, off, of, allowed in parts if off is not None)
    return ", ".join(phrases)


def parity_table(report: ParityReport) -> pa.Table:
    """The report as rows, one per attention call; what could not be measured is null, a difference of NaN stays NaN."""
    # A row has both precisions: what was compared with the oracle, and how the run in half precision differs.
    layers = report.layers

    def numbers(of: str, name: str) -> pa.Array:
        return pa.array([getattr(getattr(layer, of), name) for layer in layers], pa.float64())

    return as_table(
        {
            "layer": [layer.layer for layer in layers],
            "call": [layer.call for layer in layers],
            "level": [layer.level for layer in layers],
            "holds": pa.array([layer.verdict for layer in layers], pa.bool_()),
            "weights": numbers("implementation", "weights"),
            "output": numbers("implementation", "output"),
            "output_relative": numbers("implementation", "output_relative"),
            "weights_allowed": numbers("implementation", "weights_allowed"),
            "row_sum_error": [layer.row_sum_error for layer in layers],
            "masked_weight": [layer.masked_weight for layer in layers],
            "as_run_weights": numbers("as_run", "weights"),
            "as_run_weights_allowed": numbers("as_run", "weights_allowed"),
            "as_run_output_relative": numbers("as_run", "output_relative"),
            "rounding_weights": numbers("rounding", "weights"),
            "rounding_output": numbers("rounding", "output"),
            "rounding_output_relative": numbers("rounding", "output_relative"),
            "why": [layer.why for layer in layers],
            "stack": [layer.stack for layer in layers],
        }
    )
