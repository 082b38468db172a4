"""Room for longer texts than a model was made for."""

from __future__ import annotations

from typing import Any

from attnscope.errors import UsageError


def longer(config: Any, positions: int | None) -> Any:
    """The config with room for `positions` tokens, its rotary positions stretched linearly; unchanged where it has it.

    Raises UsageError for a family without rotary positions.
    """
    from attnscope.geometry import geometry_of

    text = config.get_text_config()
    current = geometry_of(config, count=False).max_positions
    if positions is None or current is None or positions <= current:
        return config
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise UsageError(f"{text.model_type} has no rotary positions to stretch", "use --truncate left or right")
    if rope["rope_type"] != "default":
        raise UsageError(
            f"{text.model_type} scales its positions already ({rope['rope_type']})", "leave out --positions"
        )
    text.rope_parameters = {**rope, "rope_type": "linear", "factor": positions / current}
    text.max_position_embeddings = positions
    return config
