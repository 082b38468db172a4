"""The library in three lines: load a model, capture a text, read the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnscope.measure.probes import View
from attnscope.model.loading import LoadOptions
from attnscope.model.loading import load as load_model
from attnscope.observe import Observation, Request, observe
from attnscope.selection import select
from attnscope.text.prompt import Prompt, from_text

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel


def load(model: str = "demo", **options: Any) -> LoadedModel:
    """Load a decoder with its tokenizer: the embedded `demo`, a folder, or a hub id.

    options: the other fields of `attnscope.model.loading.LoadOptions` (device, dtype, revision, offline, ...). Raises
    ModelError when it cannot be found or read.

        >>> model = attnscope.load("demo")
    """
    return load_model(LoadOptions(model=model, **options))


def capture(model: LoadedModel, text: str | Prompt, layers: Sequence[int] | None = None) -> Observation:
    """One forward pass over one text: every head's weights, scores and role.

    Returns an Observation: `weights[layer]` is (H, Q, K) fp32 on the CPU, for all layers or for `layers`; `heads` has
    one entry a head; `prompt` the tokens. Raises InputError for a text that does not fit the model.

        >>> seen = attnscope.capture(model, "the financial bank is located on river bank")
        >>> seen.weights[0].shape
    """
    prompt = (
        from_text(model.tokenizer, text, max_tokens=model.geometry.max_positions) if isinstance(text, str) else text
    )
    heads_by_layer = {layer.index: layer.heads for layer in model.geometry.attention_layers}
    chosen = None if layers is None else select(",".join(map(str, layers)), heads_by_layer)
    [seen] = observe(model, [prompt], Request(view=View(heads=chosen), weights=True))
    return seen
