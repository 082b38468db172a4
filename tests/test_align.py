"""Tokens of two texts that stand for the same characters, counted out by hand."""

import pytest

from attnscope.text.align import aligned

WHEN_A = ("<s>", " When", " Mary", " and", " John", ".")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((), (), []),
        (("a",), (), []),
        (("the", " cat"), ("the", " cat"), [(0, 0), (1, 1)]),
        # one text, two tokenizers
        (("un", "likely"), ("unlike", "ly"), [(0, 0), (1, 0), (1, 1)]),
        (("unlikely",), ("un", "like", "ly"), [(0, 0), (0, 1), (0, 2)]),
        (("<s>", " the", " cat"), ("the", " cat"), [(1, 0), (2, 1)]),
        (("the", " cat"), ("the", " ", "cat"), [(0, 0), (1, 1), (1, 2)]),
        # a word for another, of one token or of more
        (WHEN_A, ("<s>", " When", " Anna", " and", " Tom", "."), [(n, n) for n in range(6)]),
        (WHEN_A[:4], ("<s>", " When", " An", "na", " and"), [(0, 0), (1, 1), (2, 2), (2, 3), (3, 4)]),
        (("a", " x", " y", " b"), ("a", " z", " w", " b"), [(0, 0), (1, 1), (2, 2), (3, 3)]),
        # words that only one of them has
        (("the", " big", " cat"), ("the", " cat"), [(0, 0), (2, 1)]),
        (("the", " cat"), ("the", " big", " black", " cat"), [(0, 0), (1, 3)]),
        (("a", " b"), ("c", " d", " e"), []),
        # a character over several tokens, marks, blanks at the end
        (("日", "", ""), ("日",), [(0, 0), (1, 0), (2, 0)]),
        (("", "a"), ("a",), [(1, 0)]),
        (("don", "'", "t"), ("don't",), [(0, 0), (1, 0), (2, 0)]),
        (("a", "\n"), ("a",), [(0, 0)]),
    ],
)
def test_the_pairs(a, b, expected):
    assert aligned(a, b) == expected
    assert sorted((one, other) for other, one in aligned(b, a)) == expected


def test_a_long_text_beside_itself_takes_no_time():
    words = [" the"] * 20_000
    assert aligned(words, words) == [(place, place) for place in range(20_000)]
