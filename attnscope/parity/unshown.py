"""What a text is too short to show: there parity holds whatever the model does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from attnscope.reference.given import setting

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel

# The config's entry with the length up to which a kind of rotary positions does not stretch.
STRETCHED_FROM = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


def not_shown(loaded: LoadedModel, layers: Iterable[int], tokens: int) -> tuple[str, ...]:
    """What a text of so many tokens cannot show of these layers, in words.

    >>> not_shown(loaded, [0, 1], tokens=1)
    ('any weight but 1',)
    """
    if tokens == 1:
        return ("any weight but 1",)
    compared = set(layers)
    lengths = set(_stretched(loaded.model.config.get_text_config(decoder=True)))
    for layer in loaded.geometry.layers:
        if layer.index in compared and layer.window:
            lengths.add((layer.window, f"the {'chunk' if layer.kind == 'chunked' else 'window'} of {layer.window}"))
    return tuple(what for length, what in sorted(lengths) if tokens <= length)


def _stretched(config: Any) -> Iterator[tuple[int, str]]:
    rope = setting(config, "rope_parameters", {})
    for one in [rope] if "rope_type" in rope else rope.values():  # or one for each type of layer
        kind = setting(one, "rope_type", "")
        name = STRETCHED_FROM.get(kind, "")
        length = setting(one, name) or setting(config, name)
        if length:
            yield length, f"{kind} positions past {length}"
