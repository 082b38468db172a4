"""What the judge of rounding counts and concludes, on results that are made up. No model, no network."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from external.common import Check
from external.transformers_rounding import (
    Ended,
    Results,
    alike,
    differing,
    ending,
    kind,
    near,
    of_pytorch,
    one_of_each,
    only_same,
    results,
)
from external.transformers_suite import Found

PRECISIONS = ("fp16", "fp32", "bf16")
CASES = [
    f"{precision}_pad_{side}{mask}{kernel}"
    for precision in PRECISIONS
    for side in ("left", "right")
    for mask in ("", "_no_attn_mask")
    for kernel in ("_sdpa_kernels", "")
]
NAMED = [f"{number:02}_{case}" for number, case in enumerate([*CASES, "fp32_pad_left_output_attentions"])]
SAME, ROUNDED = Ended(False, True, 6, 1.0), Ended(False, False, 5, 1.1)
FAILED = Ended(True, False, 0, 0.9)


def test_each_kind_of_case_is_run_once_and_counted_as_often_as_it_occurs() -> None:
    assert [kind(case) for case in NAMED if one_of_each(case)] == [
        *("fp16 left", "fp32 left", "fp32 nothing", "fp32 right", "bf16 left"),
    ]
    every = [kind(case) for case in NAMED]
    assert {case: every.count(case) for case in every if "fp32" in case} == {
        "fp32 left": 3,
        "fp32 nothing": 4,
        "fp32 right": 2,
    }
    assert sum(map(of_pytorch, NAMED)) == 6
    with pytest.raises(AssertionError, match="a case of another kind: 99_fp8_pad_left"):
        one_of_each("99_fp8_pad_left")


def test_results_are_read_from_what_was_noted() -> None:
    left, right = (case for case in NAMED if case[3:] in ("fp32_pad_left", "fp32_pad_right"))
    heard = {left: [[False, 0, 2.0, 3.0]], right: [[True, 7, 2.0, 2.0]], NAMED[0]: []}
    found = {"llama": Found(cases=3, failed={left: "ValueError"}, heard=heard)}
    assert results(found, kind) == {
        ("llama", "fp32 left"): Ended(True, False, 0, 1.5),
        ("llama", "fp32 right"): Ended(False, True, 7, 1.0),
    }


def near_numba(check: Check, tiles: Results, numba: Results) -> None:
    near(check, numba)


def tiles_same(check: Check, tiles: Results, numba: Results) -> None:
    only_same(check, tiles, numba, tiles)


@pytest.mark.parametrize(
    ("holds", "tiles", "numba", "case", "expected"),
    [
        (near_numba, SAME, FAILED, "fp32 left", (1, 1)),
        (near_numba, SAME, Ended(True, False, 0, 5.1), "fp32 left", (0, 1)),
        (near_numba, SAME, Ended(True, False, 0, float("nan")), "fp32 left", (0, 1)),
        (tiles_same, SAME, FAILED, "fp32 left", (1, 1)),
        (tiles_same, ROUNDED, FAILED, "fp32 left", (0, 1)),
        (tiles_same, FAILED, FAILED, "fp32 left", (0, 0)),
        (alike, FAILED, FAILED, "fp16 left", (1, 1)),
        (alike, SAME, FAILED, "fp16 left", (0, 1)),
        (alike, SAME, FAILED, "fp32 left", (0, 0)),
    ],
)
def test_what_a_check_holds(holds, tiles: Ended, numba: Ended, case: str, expected: tuple[int, int]) -> None:
    check, place = Check("what"), ("llama", case)
    holds(check, {place: tiles}, {place: numba})
    assert (check.passed, check.of) == expected


def test_what_is_said_of_the_cases() -> None:
    tiles = {("a", "fp32 left"): SAME, ("a", "fp32 right"): FAILED, ("b", "fp32 left"): ROUNDED}
    numba = {("a", "fp32 left"): FAILED, ("a", "fp32 right"): ROUNDED, ("b", "fp32 left"): ROUNDED}
    assert ending(tiles) == (
        "1 of 3 cases give eager's states bit for bit, of which 0 fail; of the other 2 fail 1, and they are 0.99 times"
        " as far from float64 as eager attention (geometric mean)"
    )
    assert differing(tiles, numba, {"fp32 left": 3, "fp32 right": 2}) == [
        "float32, numba fails and the tiles pass: 1 cases, which the whole test runs as 3; the tiles' states are"
        " eager's in 1. Families: a",
        "float32, the tiles fail and numba passes: 1 cases, which the whole test runs as 2; the tiles' states are"
        " eager's in 0. Families: a",
        "of the whole test's cases in float32, numba fails 1 more than the tiles",
    ]
