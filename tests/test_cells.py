"""Values as the text of a cell, against texts written by hand."""

import math

import numpy as np
import pytest

from attnscope.utils import display as cells

NUMBERS = [
    (0.25, "0.25", "+0.25", "+0.250", "0.25"),
    (-0.25, "-0.25", "-0.25", "-0.250", "−0.25"),
    (0.0, "0.00", "+0.00", "0.000", "0.00"),
    (-0.0, "0.00", "+0.00", "0.000", "0.00"),
    (-0.0004, "0.00", "+0.00", "0.000", "0.00"),
    (-0.006, "-0.01", "-0.01", "-0.006", "−0.01"),
    (123.456, "123.46", "+123.46", "+123.456", "123.46"),
]


@pytest.mark.parametrize(("value", "number", "signed", "effect", "printed"), NUMBERS)
def test_numbers(value: float, number: str, signed: str, effect: str, printed: str) -> None:
    for one in (value, np.float64(value), np.float32(value)):
        assert (cells.number(one), cells.signed(one)) == (number, signed)
        assert (cells.effect(one), cells.printed(one)) == (effect, printed)


def test_an_interval_has_the_digits_of_its_number_and_an_open_end_is_a_dash() -> None:
    assert cells.interval(-0.0301, 0.25) == "[-0.030, 0.250]"
    assert cells.interval(0.2, None) == "[0.200, -]"
    assert cells.interval(math.nan, 1.2e-5, cells.divergence) == "[-, 1.2e-05]"


def test_decimals() -> None:
    assert cells.number(0.12345, 4) == "0.1235"
    assert cells.signed(-0.0004, 3) == "+0.000"
    assert cells.printed(-12.34, 1) == "−12.3"


def test_a_share_that_is_not_0_is_not_printed_as_0() -> None:
    assert list(map(cells.share, (0.25, 0.0005, 0.0004, 0.0, 1.0))) == ["0.250", "0.001", "<0.001", "0.000", "1.000"]
    assert list(map(cells.share, (-0.0004, -5.6e-9, -0.066))) == [">-0.001", ">-0.001", "-0.066"]


@pytest.mark.parametrize("missing", [None, math.nan, np.float32("nan")])
def test_a_missing_value_is_a_dash(missing: float | None) -> None:
    every = (
        cells.number,
        cells.signed,
        cells.effect,
        cells.score,
        cells.share,
        cells.p_value,
        cells.percentage,
    )
    assert {of(missing) for of in every} == {"-"}
    assert cells.printed(missing) == "–"


@pytest.mark.parametrize(
    ("of", "value", "expected"),
    [
        (cells.score, 0.614, "0.61"),
        (cells.score, 99.9, "99.90"),
        (cells.score, 123.6, "124"),
        (cells.score, -100.0, "-100"),
        (cells.divergence, 0.0, "0"),
        (cells.divergence, 1.2e-5, "1.2e-05"),
        (cells.divergence, 0.001, "0.0010"),
        (cells.divergence, math.nan, "-"),
        (cells.p_value, 0.0125, ".013"),
        (cells.p_value, 0.0009, "<.001"),
        (cells.p_value, 0.001, ".001"),
        (cells.p_value, 1.0, "1.000"),
        (cells.percentage, 0.816, "82 %"),
        (cells.percentage, 0.0, "0 %"),
        (cells.exact, 3.0, "3"),
        (cells.exact, -3.0, "−3"),
        (cells.exact, 0.5, "0.500"),
        (cells.exact, -0.00012, "−1.2e−04"),
        (cells.exact, 12345.0, "1.2e+04"),
        (cells.power, 0.0, "0"),
        (cells.power, 3e-4, "3e-4"),
        (cells.power, 2e-11, "2e-11"),
        (cells.decimal_bytes, 0, "0 B"),
        (cells.decimal_bytes, 999, "999 B"),
        (cells.decimal_bytes, 1000, "1 kB"),
        (cells.decimal_bytes, 1_234_567, "1.23 MB"),
        (cells.decimal_bytes, 5e12, "5 TB"),
    ],
)
def test_each_kind_of_value(of, value: float, expected: str) -> None:
    assert of(value) == expected


def test_names_of_heads() -> None:
    assert cells.head_name(27, 3) == "L27H3"
    assert cells.head_name(27, 1, by_kv=True) == "L27KV1"
    assert cells.head_names([(3, 0), (3, 1)]) == "L3H0 L3H1"
    assert cells.head_names([]) == ""


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [("a bank", 6, "a bank"), ("a banks", 6, "a ban…"), ("the bank", 5, "the…"), ("", 3, "")],
)
def test_long_texts_are_cut_short(text: str, most: int, expected: str) -> None:
    assert cells.shortened(text, most) == expected
