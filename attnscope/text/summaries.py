"""Keys that are not tokens, named by what they represent: summaries after a text's tokens, and patches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnscope.text.prompt import Prompt


def with_summaries(prompt: Prompt, rate: int, overlap: bool = False) -> Prompt:
    """The tokens, and after them a summary for every `rate` of them, with overlap of the `rate` before them too.

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


def of_patches(prompt: Prompt, patches: Sequence[Sequence[int]], parts: int = 1) -> Prompt:
    """A text as patches of its tokens, each of them as so many vectors. patches: their tokens, of some none.

    >>> of_patches(prompt, [[0], [1, 2, 3]], parts=2).tokens
    ('patch 0 1/2', 'patch 0 2/2', 'patch 1-3 1/2', 'patch 1-3 2/2')
    """
    tokens = ["-".join(str(at) for at in sorted({*patch[:1], *patch[-1:]})) or "empty" for patch in patches]
    marks = [f" {part}/{parts}" for part in range(1, parts + 1)] if parts > 1 else [""]
    names = tuple(f"patch {of}{mark}" for of in tokens for mark in marks)
    none, count = ("",) * len(names), len(names)
    return Prompt(prompt.text, (-1,) * count, names, names, (True,) * count, none, (), characters=((0, 0),) * count)
