"""Keys that are not tokens: a text with the summaries of its tokens behind it, named by what they stand for."""

from __future__ import annotations

from dataclasses import replace

from attnscope.text.prompt import Prompt


def with_summaries(prompt: Prompt, rate: int, overlap: bool = False) -> Prompt:
    """The tokens, and behind them a summary for every `rate` of them, with overlap of the `rate` before them too.

    >>> with_summaries(prompt, 4).tokens[-1]
    'summary 4-7'
    """
    starts = range(0, len(prompt) // rate * rate, rate)
    names = tuple(f"summary {max(0, start - rate * overlap)}-{start + rate - 1}" for start in starts)
    return replace(
        prompt,
        ids=(*prompt.ids, *(-1,) * len(names)),
        tokens=(*prompt.tokens, *names),
        labels=(*prompt.labels, *names),
        special=(*prompt.special, *(True,) * len(names)),
        plain=(*prompt.plain, *("",) * len(names)),
        characters=(*prompt.characters, *((0, 0),) * len(names)),
    )
