"""Tokens of two texts that stand for the same characters, counted out by hand."""

import itertools
import random

import pytest

from attnscope.errors import InputError
from attnscope.inputs.spans import alignment, pair_tokens, units

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
    assert pair_tokens(a, b) == expected
    assert sorted((one, other) for other, one in pair_tokens(b, a)) == expected


def test_a_long_text_beside_itself_takes_no_time():
    words = [" the"] * 20_000
    assert pair_tokens(words, words) == [(place, place) for place in range(20_000)]


@pytest.mark.parametrize(
    ("a", "b", "of_a", "of_b"),
    [
        (("un", "likely", "."), ("unlike", "ly"), (0, 0, -1), (0, 0)),
        (("the", " big", " cat"), ("the", " cat"), (0, -1, 1), (0, 1)),
        (("<s>", " When", " Mary"), ("<s>", " When", " An", "na"), (0, 1, 2), (0, 1, 2, 2)),
        (("日", "", ""), ("日", "", ""), (0, 1, 2), (0, 1, 2)),  # the same tokens stay apart
        (("日", "", "", " a"), ("日", " a"), (0, 0, 0, 1), (0, 1)),
        (("a",), ("b", " c"), (-1,), (-1, -1)),
    ],
)
def test_the_units(a, b, of_a, of_b):
    found = units(a, b)
    assert (found.of_a, found.of_b, found.size) == (of_a, of_b, max(of_a) + 1)
    assert units(b, a) == (of_b, of_a, found.size)
    assert found.alone == tuple([at for at, unit in enumerate(of) if unit < 0] for of in (of_a, of_b))
    for of, members in zip((of_a, of_b), found.members, strict=True):
        assert members == [[at for at, one in enumerate(of) if one == unit] for unit in range(found.size)]


def test_units_are_the_connected_parts_of_the_pairs():
    pick = random.Random(0)
    for _ in range(200):
        a, b = ([pick.choice(["x", " y", "", " zz", "q."]) for _ in range(pick.randrange(9))] for _ in range(2))
        pairs, found = pair_tokens(a, b), units(a, b)
        if a == b:
            continue
        nodes = {node for one, two in pairs for node in ((0, one), (1, two))}
        label = {node: number for number, node in enumerate(nodes)}
        for _ in pairs:  # as often as a label can travel
            for one, two in pairs:
                label[0, one] = label[1, two] = min(label[0, one], label[1, two])
        for one, two in itertools.combinations(label, 2):
            same = (found.of_a, found.of_b)[one[0]][one[1]] == (found.of_a, found.of_b)[two[0]][two[1]]
            assert same == (label[one] == label[two])


@pytest.mark.parametrize(
    ("a", "b", "by", "words", "of_a", "of_b"),
    [
        (("un", "likely", "."), ("unlike", "ly"), "text", ([(0, 3)], [(0, 1), (1, 2)]), (0, 0, 0), (0, 0)),
        (
            ("a", " b", " c"),
            ("a", " b", " d", " c"),
            "text",
            ([(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 3), (3, 4)]),
            (0, 1, 2),
            (0, 1, 1, 2),
        ),
        (
            ("a", " b", " c"),
            ("x", " y", " z"),
            "position",
            ([(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]),
            (0, 0, 1),
            (0, 0, 1),
        ),
        (("a", " b"), ("c", " d", " e"), "text", ([(0, 2)], [(0, 3)]), (-1, -1), (-1, -1, -1)),
    ],
)
def test_the_units_of_whole_words(a, b, by, words, of_a, of_b):
    assert units(a, b, by).whole(*words) == (of_a, of_b, max(of_a) + 1)


SWAPPED = (("Mary", " gave", " John"), ("John", " gave", " Mary"))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (*SWAPPED, "position"),
        (("the", " big", " cat"), ("the", " cat"), "text"),
        (("un", "likely"), ("unlike", "ly"), "text"),  # one text, cut by two tokenizers into as many tokens
        (("the", " cat"), ("the", " cat"), "text"),
    ],
)
def test_how_tokens_are_paired_where_nobody_says(a, b, expected):
    assert alignment(a, b) == alignment(b, a) == expected
    assert alignment(a, b, "text") == "text"


def test_a_swapped_name_moves_by_text_and_not_by_position():
    assert pair_tokens(*SWAPPED, "position") == [(0, 0), (1, 1), (2, 2)]
    assert (units(*SWAPPED, "position").moved, units(*SWAPPED, "position").alone) == (0, ([], []))
    by_text = units(*SWAPPED, "text")
    assert by_text.moved > 0
    assert all(by_text.alone)


def test_positions_need_as_many_tokens():
    with pytest.raises(InputError, match=r"expected 3, got 2; use align=\"text\""):
        alignment(("a", " b", " c"), ("a", " b"), "position")
