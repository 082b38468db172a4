"""Which characters of the text each token covers, as [start, stop): in order, and both tokens of one that is split.

A token that no character belongs to, a begin token that the tokenizer adds, has none: [at, at) after those before it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from unicodedata import category

Characters = tuple[tuple[int, int], ...]

LATER_PIECE = re.compile(r".·[2-9]/[2-9]", re.DOTALL)
REACH = 16  # characters of the text that no token may say before a token counts as lost


def in_order(spans: Sequence[tuple[int, int]]) -> Characters:
    """What a tokenizer says, made to run forward: where it says (0, 0) of a token, that one follows the others.

    >>> in_order([(0, 0), (0, 3), (3, 8), (0, 0)])
    ((0, 0), (0, 3), (3, 8), (8, 8))
    """
    result: list[tuple[int, int]] = []
    first = reached = 0
    for start, stop in spans:
        first, reached = (max(start, first), max(stop, reached)) if start < stop else (reached, reached)
        result.append((first, reached))
    return tuple(result)


def over_marks(spans: Sequence[tuple[int, int]], text: str) -> Sequence[tuple[int, int]]:
    """What a tokenizer says, with the combining marks that no token covers given to the tokens before them.

    A normaliser that composes a letter and its mark, or drops the mark, leaves it out of every span.

    >>> over_marks([(0, 4), (5, 7)], "cafe\u0301 x")
    [(0, 5), (5, 7)]
    """
    marks = [] if text.isascii() else [at for at, char in enumerate(text) if category(char)[0] == "M"]
    if not marks:
        return spans
    by_start = sorted((start, stop) for start, stop in spans if start < stop)
    starts, reached = [start for start, _ in by_start], list(accumulate((stop for _, stop in by_start), max))
    further: dict[int, int] = {}  # where a span ends -> where it ends with the marks that follow
    for at in reversed(marks):
        before = bisect_right(starts, at)
        if before and reached[before - 1] <= at:
            further[at] = further.get(at + 1, at + 1)
    return [(start, further.get(stop, stop) if start < stop else stop) for start, stop in spans]


def located(plain: Sequence[str], tokens: Sequence[str], text: str) -> Characters:
    """The same by what the tokens say, for tokenizers that don't tell: `plain` and `tokens` as a Prompt has them.

    A token that the text does not say within reach has no characters.

    >>> located(["a", " 日", ""], ["a", " 日·1/2", "日·2/2"], "a 日")
    ((0, 1), (1, 3), (2, 3))
    """
    result: list[tuple[int, int]] = []
    at = 0
    for written, token in zip(plain, tokens, strict=True):
        split = written != token and LATER_PIECE.match(token) and result and result[-1][0] < result[-1][1]
        start, stop = _place(written, text, at) if written else (at, at)
        result.append((result[-1][1] - 1 if split else start, stop))
        at = stop
    return tuple(result)


def touched(characters: Characters, spans: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Of each run of characters [start, stop), the tokens that hold one of them, or a part of one.

    >>> touched(((0, 0), (0, 3), (3, 8)), [(2, 5), (0, 1)])
    [(1, 2), (1,)]
    """
    starts, stops = [start for start, _ in characters], [stop for _, stop in characters]
    near = (range(bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in spans)
    return [tuple(at for at in places if starts[at] < stops[at]) for places in near]


def _place(written: str, text: str, at: int) -> tuple[int, int]:
    """Where a token's text comes next, with its own white space where the text has it; [at, at) where it doesn't."""
    if text.startswith(written, at):
        return at, at + len(written)
    word, begin = written.strip(), at
    while begin < len(text) and text[begin].isspace() and not text.startswith(word, begin):
        begin += 1
    start = text.find(word, begin, begin + len(word) + REACH) if word else -1
    return (at, at) if start < 0 else (start, start + len(word))
