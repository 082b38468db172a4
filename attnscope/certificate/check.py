"""Model against oracle: does every layer's attention equal what the papers' equations give for its weights?

    report = check_parity(load(LoadOptions()), ids)     # per layer: level, largest differences, verdict
    certificate(report, loaded, ids)                    # the same as JSON, with the weights' sha256

Three levels, and a layer says which it reached and why not a higher one. `full`: from the hidden states that enter the
attention module and its raw weights, to the weights and the module's output. `scores`: from the captured q, k, v and
extras, to the weights and the heads' output. `none`: observed, but not as numbers that can be recomputed.

A model in half precision is compared with the oracle twice. Through a copy of each layer's module in float32 on the
same hidden states (the *implementation*), which shows small faults. And *as run*, held to what rounding in its dtype
does to weights and outputs (`verdicts`): at level `scores` to the keys that it chose itself. How far the layer as run
is from the copy is its *rounding*, reported.

A certificate is what such a run proves: which weights, on which machine, how far every layer was from the oracle.

Shapes: B text, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch import Tensor

from attnscope.certificate.compare import Comparison, on_trust, too_short
from attnscope.certificate.oracle import arrangements_of, of_picture
from attnscope.certificate.verdicts import ATOL, Difference, LayerParity, Level, ParityReport, WholeParity
from attnscope.certificate.whole_model import check_whole
from attnscope.errors import UsageError
from attnscope.hooks import forward as inputs
from attnscope.hooks.engines import ENGINES, Engine, exact_products
from attnscope.hooks.listen import listen
from attnscope.hooks.modules import ModuleRecorder
from attnscope.inputs.prompt import Prompt
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.libraries import versions
from attnscope.model.selection import CROSS, SEQ2SEQ, STACKS, VISION, is_vision, main_stack, select_stacks
from attnscope.model.tasks import stack_config, task_of
from attnscope.reference.layouts import layout_of
from attnscope.utils.tables import as_table

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

Ids = Prompt | Tensor | Sequence[int]
TEXT = (
    "The financial bank is located on the river bank, and the river runs past the old mill; when the mill wheel turns, "
    "the people at the bank hear the river, and the financial bank is quiet again."
)


def known_departure(config: Any) -> str:
    """Where transformers is known to compute something else than a model's own rule; empty where that is not known.

    >>> known_departure(loaded.model.config)
    ''
    """
    layout = layout_of(stack_config(config, main_stack(task_of(config))))
    return layout.caveat if layout else ""


def check_parity(
    loaded: LoadedModel,
    prompt: Ids,
    *,
    source: Ids | None = None,
    select: str | None = None,
    atol: float = ATOL,
    level: Level = "full",
    engine: Engine | None = None,
    whole: bool = False,
) -> ParityReport:
    """Run the model once over a text and compare every attention layer with the oracle.

    prompt: a prompt, or token ids (T,) or (B, T) without padding; of an encoder-decoder what its decoder reads, and
    source what its encoder reads, ids or features (B, F, T). select: heads to compare the weights of, in the grammar
    of `selection.select_stacks` (default: all); outputs are compared for the whole of their layers. atol: what the
    weights, and the outputs relative to their norm, may differ by, as long as rounding alone does less to weights of
    logits that large. level: go no higher than this. engine: that runs the model, as it is without; under one that
    returns no weights only outputs are compared. whole: compare what enters these layers, and the output, with a second
    instance that transformers alone makes of its files; `whole.check_whole` says what that raises.
    Raises UsageError for a selection that cannot be read, and for a source that is missing or too many; ModelError
    where a layer that should attend was not observed.

    >>> check_parity(loaded, [1, 2, 3]).holds
    True
    """
    loaded.check_softmax("parity")
    counts = {stack: {at: layer.heads for at, layer in of.items()} for stack, of in loaded.geometry.stacks.items()}
    heads = select_stacks(select, counts, loaded.geometry.stack, takes="parity checks")
    ids_BT = _ids(prompt, loaded.device)
    if (loaded.geometry.task == SEQ2SEQ) != (source is not None):
        message = "an encoder-decoder reads two texts, other models one"
        raise UsageError(message, "give the encoder's as source" if source is None else "leave out source")
    # What the model's forward is given, and how tokens of pictures are arranged, which their order does not say.
    text = prompt if source is None else source
    first, reads = _ids(text, loaded.device), dict[str, Any]()
    if isinstance(text, Prompt):
        first, reads = inputs.batch_inputs(loaded, [text], first)
    pictures = reads if isinstance(prompt, Prompt) and prompt.medium.patches else {}
    arrangements = arrangements_of(loaded.model.config, ids_BT[0].tolist(), pictures)
    if isinstance(prompt, Prompt) and is_vision(loaded.geometry.stack):
        arrangements[VISION] = of_picture(loaded.model.config, len(prompt), prompt.medium.patches)
    comparison = Comparison(loaded, heads, atol, level, arrangements)
    if source is not None:
        reads |= {"decoder_input_ids": ids_BT}
    # A layer's number says which it is where there is one stack.
    stacks = loaded.geometry.in_every_pass
    expected_layers: list[int | tuple[int, str]] = [
        layer if len(stacks) == 1 else (layer, stack) for stack, layers in stacks.items() for layer in layers
    ]
    # Each run of an attention module is compared as it ends, so that no more than one is held.
    repeats = engine if engine and engine.probes else None
    with exact_products(ModuleRecorder(loaded.model, comparison.judge, repeats)) as recorder:
        listen(
            loaded.model,
            first,
            recorder.record,
            engine=engine,
            expected_layers=expected_layers,
            windows=loaded.geometry.windows,
            **reads,
        )
    layers = tuple(sorted(comparison.layers, key=lambda layer: (STACKS.index(layer.stack), layer.layer, layer.call)))
    # What the verdict leaves open is found last: it depends on the levels that layers reached.
    other_keys = comparison.keys.get(CROSS, 0), comparison.keys.get(VISION, 0)
    of_text = ids_BT.shape[-1], select, (), loaded.geometry.stack
    report = ParityReport(layers, atol, loaded.dtype, comparison.quantised, *of_text, *other_keys)
    report = replace(report, engine=engine.name if engine else report.engine)
    if whole:
        modules = list(dict.fromkeys(layer.module for layer in layers))
        report = replace(report, whole=check_whole(loaded, first, reads, modules, atol=atol, engine=engine))
    return replace(report, too_short=too_short(loaded, report), on_trust=on_trust(loaded, report))


def _ids(prompt: Ids, device: str) -> Tensor:
    ids = torch.as_tensor(getattr(prompt, "ids", prompt), device=device)
    return ids[None] if ids.dim() == 1 else ids


SCHEMA = "certificate/4"  # goes up when a field is renamed, or means something else


def certificate(report: ParityReport, loaded: LoadedModel, prompt: Ids, source: Ids | None = None) -> dict[str, Any]:
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
        "engine": report.engine,
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
    loaded: LoadedModel, prompt: Ids, *, source: Ids | None = None, engine: Engine = ENGINES["eager"]
) -> dict[str, Any]:
    """A parity run in short, for a manifest: whether it held, at which level, the largest difference of each layer.

    >>> verify(loaded, [1, 2, 3])["holds"]
    True
    """
    report = check_parity(loaded, prompt, source=source, engine=engine)
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
        "atol": report.atol,
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
    name, off = whole.worst
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
    layers = report.layers

    def facts(*names: str) -> dict[str, list[Any]]:
        return {name: [getattr(layer, name) for layer in layers] for name in names}

    def numbers(prefix: str, of: str, *names: str) -> dict[str, pa.Array]:
        differences = [getattr(layer, of) for layer in layers]
        return {prefix + name: pa.array([getattr(d, name) for d in differences], pa.float64()) for name in names}

    # A row has both precisions: what was compared with the oracle, and how the run in half precision differs.
    return as_table(
        {
            **facts("layer", "call", "level"),
            "holds": pa.array([layer.verdict for layer in layers], pa.bool_()),
            **numbers("", "implementation", "weights", "output", "output_relative", "weights_allowed"),
            **facts("row_sum_error", "masked_weight"),
            **numbers("as_run_", "as_run", "weights", "weights_allowed", "output_relative"),
            **numbers("rounding_", "rounding", "weights", "output", "output_relative"),
            **facts("why", "kernel", "stack"),
        }
    )
