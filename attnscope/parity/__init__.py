"""Model against oracle: does every layer's attention equal what the papers' equations give for its weights?

    report = check_parity(load(LoadOptions()), ids)     # per layer: level, largest differences, verdict
    certificate(report, loaded, ids)                    # the same as JSON, with the weights' sha256

Three levels, and a layer says which it reached and why not a higher one. `full`: from the hidden states that enter the
attention module and its raw weights, to the weights and the module's output. `scores`: from the captured q, k, v and
extras, to the weights and the heads' output. `none`: observed, but not as numbers that can be recomputed.

A model in half precision is compared with the oracle twice. Through a copy of each layer's module in float32 on the
same hidden states (the *implementation*), which shows small faults. And *as run*, held to what rounding in its dtype
does to weights and outputs (`allowed`): at level `scores` to the keys that it chose itself. How far the layer as run is
from the copy is its *rounding*, reported.

Shapes: B text, T token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import UsageError
from attnscope.hooks import forward as inputs
from attnscope.hooks.engines import Engine, exact_products
from attnscope.hooks.listen import listen
from attnscope.hooks.modules import ModuleRecorder
from attnscope.inputs.prompt import Prompt
from attnscope.model.quantised import is_quantised
from attnscope.model.selection import CROSS, SEQ2SEQ, STACKS, VISION, everything, is_vision, main_stack, select_stacks
from attnscope.model.tasks import stack_config, task_of
from attnscope.parity.arranged import arrangements_of, of_picture
from attnscope.parity.comparing import Comparison
from attnscope.parity.unshown import on_trust, too_short
from attnscope.parity.verdicts import ATOL, Difference, LayerParity, Level, ParityReport
from attnscope.parity.whole import check_whole
from attnscope.reference.layouts import layout_of
from attnscope.utils.callable_module import callable_room

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

__all__ = ["ATOL", "TEXT", "Difference", "LayerParity", "Level", "ParityReport", "check_parity", "is_quantised"]

callable_room(__name__)
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
    prompt: Prompt | Tensor | Sequence[int],
    *,
    source: Prompt | Tensor | Sequence[int] | None = None,
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
    heads, ids_BT = chosen(loaded, select), _ids(prompt, loaded.device)
    if (loaded.geometry.task == SEQ2SEQ) != (source is not None):
        raise UsageError(
            "an encoder-decoder reads two texts, other models one",
            "give the encoder's as source" if source is None else "leave out source",
        )
    # What the model's forward is given, and how tokens of pictures are arranged, which their order does not say.
    first, reads = _given(loaded, prompt if source is None else source)
    pictures = reads if isinstance(prompt, Prompt) and prompt.medium.patches else {}
    arrangements = arrangements_of(loaded.model.config, ids_BT[0].tolist(), pictures)
    if isinstance(prompt, Prompt) and is_vision(loaded.geometry.stack):
        arrangements[VISION] = of_picture(loaded.model.config, len(prompt), prompt.medium.patches)
    comparison = Comparison(loaded, heads, atol, level, arrangements)
    if source is not None:
        reads |= {"decoder_input_ids": ids_BT}
    # Each run of an attention module is compared as it ends, so that no more than one is held.
    with exact_products(ModuleRecorder(loaded.model, comparison.judge)) as recorder:
        listen(
            loaded.model,
            first,
            recorder.record,
            engine=engine,
            expected_layers=_expected(loaded.geometry.in_every_pass),
            windows=loaded.geometry.windows,
            **reads,
        )
    layers = tuple(sorted(comparison.found, key=lambda layer: (STACKS.index(layer.stack), layer.layer, layer.call)))
    # What the verdict leaves open is found last: it depends on the levels that layers reached.
    other_keys = comparison.keys.get(CROSS, 0), comparison.keys.get(VISION, 0)
    of_text = ids_BT.shape[-1], select, (), loaded.geometry.stack
    report = ParityReport(layers, atol, loaded.dtype, comparison.quantised, *of_text, *other_keys)
    if whole:
        modules = list(dict.fromkeys(layer.module for layer in layers))
        report = replace(report, whole=check_whole(loaded, first, reads, modules, atol=atol, engine=engine))
    return replace(report, too_short=too_short(loaded, report), on_trust=on_trust(loaded, report))


def chosen(loaded: LoadedModel, expression: str | None) -> dict[str, dict[int, tuple[int, ...]]]:
    """The heads to compare, by stack and layer.

    >>> chosen(loaded, "0.0-1")
    {'decoder': {0: (0, 1)}}
    """
    stacks = loaded.geometry.stacks
    heads = {stack: {index: layer.heads for index, layer in layers.items()} for stack, layers in stacks.items()}
    if expression is None:
        return {stack: everything(of_stack) for stack, of_stack in heads.items()}
    return select_stacks(expression, heads, loaded.geometry.stack)


def _expected(stacks: Mapping[str, Mapping[int, Any]]) -> list[int | tuple[int, str]]:
    """The layers that must be observed, with their stack where there are several."""
    return [layer if len(stacks) == 1 else (layer, stack) for stack, layers in stacks.items() for layer in layers]


def _given(loaded: LoadedModel, text: Prompt | Tensor | Sequence[int]) -> tuple[Tensor, dict[str, Any]]:
    """What the model's forward is given first, and what a prompt brings with it."""
    ids_BT = _ids(text, loaded.device)
    return inputs.given(loaded, [text], ids_BT) if isinstance(text, Prompt) else (ids_BT, {})


def _ids(prompt: Prompt | Tensor | Sequence[int], device: str) -> Tensor:
    ids = torch.as_tensor(getattr(prompt, "ids", prompt), device=device)
    return ids[None] if ids.dim() == 1 else ids
