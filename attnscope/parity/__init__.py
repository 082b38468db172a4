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

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnscope.parity.comparing import Comparison
from attnscope.parity.given import is_quantised
from attnscope.parity.unshown import not_shown
from attnscope.parity.verdicts import ATOL, Difference, LayerParity, Level, ParityReport
from attnscope.seam.engines import Engine
from attnscope.seam.listen import listen
from attnscope.seam.modules import ModuleRecorder
from attnscope.selection import everything
from attnscope.selection import select as selected

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.text.prompt import Prompt

__all__ = ["ATOL", "TEXT", "Difference", "LayerParity", "Level", "ParityReport", "check_parity", "is_quantised"]

TEXT = (
    "The financial bank is located on the river bank, and the river runs past the old mill; when the mill wheel turns, "
    "the people at the bank hear the river, and the financial bank is quiet again."
)


def check_parity(
    loaded: LoadedModel,
    prompt: Prompt | Tensor | Sequence[int],
    *,
    select: str | None = None,
    atol: float = ATOL,
    level: Level = "full",
    engine: Engine | None = None,
) -> ParityReport:
    """Run the model once over a text and compare every attention layer with the oracle.

    prompt: a prompt, or token ids (T,) or (B, T) without padding. select: heads whose weights are compared, in the
    grammar of `selection.select` (default: all); outputs are compared for the whole of their layers. atol: what the
    weights, and the outputs relative to their norm, may differ by, as long as rounding alone does less to weights of
    logits that large. level: go no higher than this. engine: that runs
    the model, as it is without; under one that returns no weights only outputs are compared.
    Raises UsageError for a selection that cannot be read, ModelError where a layer that should attend was not observed.

    >>> check_parity(loaded, [1, 2, 3]).holds
    True
    """
    heads = chosen(loaded, select)
    ids_BT = _ids(prompt, loaded.device)
    comparison = Comparison(loaded, heads, atol, level)
    with ModuleRecorder(loaded.model, comparison.judge) as recorder:
        listen(
            loaded.model,
            ids_BT,
            recorder.record,
            engine=engine,
            expected_layers=tuple(layer.index for layer in loaded.geometry.attention_layers),
            windows=loaded.geometry.windows,
        )
    layers = tuple(sorted(comparison.found, key=lambda one: (one.layer, one.call)))
    tokens = ids_BT.shape[-1]
    unseen = not_shown(loaded, {one.layer for one in layers}, tokens)
    return ParityReport(layers, atol, loaded.dtype, comparison.quantised, tokens, select, unseen)


def chosen(loaded: LoadedModel, expression: str | None) -> dict[int, tuple[int, ...]]:
    """The heads to compare, by layer.

    >>> chosen(loaded, "0.0-1")
    {0: (0, 1)}
    """
    heads = {layer.index: layer.heads for layer in loaded.geometry.attention_layers}
    return everything(heads) if expression is None else selected(expression, heads)


def _ids(prompt: Prompt | Tensor | Sequence[int], device: str) -> Tensor:
    ids = torch.as_tensor(getattr(prompt, "ids", prompt), device=device)
    return ids if ids.dim() == 2 else ids[None]
