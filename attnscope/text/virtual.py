"""Tokens that no text has: those that an adapter puts before it, named by their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnscope.text.prompt import Medium, Prompt, Span


def with_virtual(prompt: Prompt, ids: Sequence[int], keys_alone: bool = False) -> Prompt:
    """The tokens with virtual ones before them, key 0 the first of these, unless they are there already.

    keys_alone: whether they have no queries, as prefix tuning's.

    >>> with_virtual(prompt, [2000, 2001]).tokens[:2]
    ('virtual 0', 'virtual 1')
    """
    count = len(ids)
    medium = Medium(unasked=count) if ids and keys_alone else Medium() if prompt.medium.unasked else prompt.medium
    if not ids or prompt.ids[:count] == tuple(ids):
        return prompt if prompt.medium == medium else replace(prompt, medium=medium)
    names = tuple(f"virtual {number}" for number in range(count))
    return replace(
        prompt,
        ids=(*ids, *prompt.ids),
        tokens=(*names, *prompt.tokens),
        labels=(*names, *prompt.labels),
        special=(*(True,) * count, *prompt.special),
        plain=(*(f"{name.replace(' ', '_')} " for name in names), *prompt.plain),  # a word each, to align texts by
        turns=tuple(Span(turn.start + count, turn.stop + count, turn.name) for turn in prompt.turns),
        characters=(*((0, 0),) * count, *prompt.characters),
        medium=medium,
        segments=tuple(Span(span.start + count, span.stop + count, span.name) for span in prompt.segments),
        types=(*(0,) * count, *prompt.types) if prompt.types else (),
    )
