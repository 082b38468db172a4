"""The Triton engine without a card: its kernels interpreted, and compiled for cards that are not here.

Triton reads how it is to run when it is imported, so both run in processes of their own, by default in forks.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from attnscope.attention.kernels_cuda import operator
from attnscope.attention.kernels_cuda.operator import TritonAttention, device_can, usable
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from helpers import interpreted
from helpers.forks import forked, server
from helpers.pretend import pretend
from helpers.seconds import once

TESTS = Path(__file__).parent
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")
SHARED = {80: 163 * 2**10, 86: 99 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10}  # bytes that a program may have
WIDTHS = (64, 128)


def call(dtype: torch.dtype = torch.float32, dim: int = 16) -> AttentionSpec:
    q, k = (torch.randn(1, heads, 20, dim).to(dtype) for heads in (2, 1))
    return AttentionSpec(q, k, k, 0.25, Visibility(20, 20))


def run(*arguments: str, **environment: str) -> str:
    """What `python -m ARGUMENTS` prints; fails with all of it."""
    places = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": places, **environment}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=given, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# By default some of its tests, in one fork: of rows of NaN and of masks one each.
TRIED = """
    a_kernel_that_fails_after_its_proof_leaves_the_call_to_the_tiles a_kernel_that_gives_a_key_twice_is_refused
    a_planted_kernel_leaves_its_questions_to_the_tiles all_top_keys_of_a_call_are_found_in_one_walk
    answers_lie_further_apart_than_32_bits_count memory_that_runs_out_is_no_verdict
    a_planted_sum_between_runs_leaves_what_keys_receive_to_its_kernel
    one_walk_answers_what_keys_receive_and_the_mass_between_runs
    the_walk_over_rows_gives_the_sums_of_exact_weights the_mass_of_a_run_that_goes_to_the_next_is_seen
    the_strongest_keys_are_those_of_exact_weights
    the_largest_are_found_in_blocks_that_every_row_sees_whole
    statistics_that_raise_leave_everything_to_the_tiles statistics_under_options
    the_closed_set_is_that_of_the_tiles_and_of_dense_rows the_kernels_are_given_what_is_on_the_call_s_own_device
""".split()  # noqa: SIM905
OF_ANSWERS = "(statistics_under or closed_set or nan or walk)"
LEFT_OUT = "additive or 40- or plain or infinite or proves_itself"


@once
def tried(kind: str) -> str:
    """What pytest says of each test of a kind, or of those of another."""
    how = ("-q", "-n", "0", "-p", "no:cacheprovider", "-rA", "-k", f"{kind} and not ({LEFT_OUT})")
    done = forked(interpreted.__file__, *how, "tests/triton_kernels.py", cwd=TESTS.parent)
    return done.stdout + done.stderr


@with_triton
@pytest.mark.parametrize("name", [*TRIED, "a_key_of_nan_makes_the_rows_nan_that_see_it"])
def test_interpreted_kernels_answer(name: str) -> None:
    server()  # whose start is not what a test of many costs
    said = tried(OF_ANSWERS if re.search(OF_ANSWERS.replace(" or ", "|").strip("()"), name) else f"not {OF_ANSWERS}")
    if "Triton's interpreter of 3.6 fails" in said:
        pytest.skip("Triton's interpreter of 3.6 fails with NumPy 2.4 and later")
    found = re.findall(rf"^([A-Z]+) tests/triton_kernels.py::test_{name}\b", said, re.MULTILINE)
    assert set(found) == {"PASSED"}, said


@with_triton
@pytest.mark.e2e
def test_interpreted_kernels_answer_as_the_tiles_do() -> None:
    run("pytest", "-q", "-n", "0", "tests/triton_kernels.py", TRITON_INTERPRET="1")


@with_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interpreted_kernels_answer_as_the_tiles_do_under_every_option() -> None:
    run("pytest", "-q", "-n", "0", "-m", "slow", "tests/triton_kernels.py", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_on_a_card_answer_as_the_tiles_do() -> None:
    run("pytest", "-q", "-n", "0", "tests/triton_kernels.py", TRITON_INTERPRET="0")


def compiled(asked: list[dict]) -> list[dict]:
    done = forked(TESTS / "helpers/triton_compiled.py", json.dumps(asked), cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@once
def for_one_card() -> dict:
    """The statistics for the smallest of the cards."""
    [row] = compiled([{"arch": 80, "width": 64, "kernels": ["statistics"]}])
    return row


@with_triton
def test_statistics_compile_for_a_card_that_is_not_here() -> None:
    server()
    row = for_one_card()
    assert (row["arch"], row["width"], row["M"]) == (80, 64, 64)
    assert row["stack"] == 0
    assert row["shared"] <= SHARED[80]


@with_triton
@pytest.mark.e2e
def test_statistics_compile_for_cards_that_are_not_here() -> None:
    """64 queries a program, nothing spilled, within the chip's shared memory."""
    forms = [{"arch": arch, "width": width} for arch in (80, 90) for width in WIDTHS]
    masked = {"arch": 90, "width": 128, "options": ["boolean"], "tokens": 250}  # no multiple of 16, as most texts
    found = compiled([{**form, "kernels": ["statistics"]} for form in (*forms, masked)])
    assert [(row["arch"], row["width"]) for row in found] == [
        (form["arch"], form["width"]) for form in (*forms, masked)
    ]
    for row in found:
        assert row["M"] == 64
        assert row["stack"] == 0
        assert row["shared"] <= SHARED[row["arch"]]
    page = (TESTS.parent / "docs/cuda.md").read_text("utf-8")
    if f"(here {version('triton')})" in page:  # another compiler has other figures
        cells = {(row["arch"], row["width"]): f"{row['registers']}, 0, {row['shared']:,}" for row in found[:-1]}
        for width in WIDTHS:
            assert f"| `statistics` | {width} | 64 x 64; 64 x 128 | {cells[80, width]} | {cells[90, width]} |" in page


SPILLED = {(100, 192, "statistics"): 8}  # bytes, with a bias, a window and sinks: docs/cuda.md
FORMS = ["boolean", "additive", "bias", "sinks", "softcap", "window", "ahead"]


@with_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_no_kernel_that_is_chosen_spills(arch: int, width: int) -> None:
    """What the seam makes of models: every kernel plain, the statistics under every option, and options together."""
    statistics = [["boolean", "softcap"], ["additive", "sinks"], ["bias", "window", "sinks"], *([one] for one in FORMS)]
    asked = [{"arch": arch, "width": width}]
    asked += [
        {"arch": arch, "width": width, "options": one, "kernels": ["statistics"], "tokens": tokens}
        for one in statistics
        for tokens in (256, 250)  # most texts are no multiple of 16: their masks are loaded number by number
    ]
    unmasked = [[], ["softcap", "window", "sinks"], *([one] for one in FORMS[3:])]
    asked += [{"arch": arch, "width": width, "options": one, "kernels": ["statistics, largest"]} for one in unmasked]
    if width == 128:
        others = ["largest", "received", "runs", "received, runs", "groups", "output"]
        asked += [{"arch": arch, "width": width, "options": [one], "kernels": others} for one in FORMS[:3]]
    for row in compiled(asked):
        assert row["stack"] <= SPILLED.get((arch, width, row["kernel"]), 0), row
        assert row["shared"] <= SHARED[arch], row


@with_triton
def test_what_is_proven_is_what_runs() -> None:
    """Triton compiles a kernel anew for numbers of another kind: the slice's are of the kind of the call's."""
    shapes: list[dict] = [{"shape": shape} for shape in ([2048, 2048], [2050, 2050], [100, 100], [1, 900], [64, 9000])]
    more = [{"options": ["window"], "shape": [8192, 8192]}, {"options": ["boolean"], "shape": [1024, 1024]}]
    found = compiled([*shapes, *more, {"shape": [512, 512], "heads": [8, 8]}])
    assert {row["kernel"] for row in found} > {"statistics", "one_key", "largest", "groups", "output"}
    assert [row for row in found if not row["same"]] == []
    assert {row["queries"] for row in found} == {208, 210, 100, 1, 32}


@with_triton
@pytest.mark.slow
def test_a_kernel_that_spills_is_seen() -> None:
    blocks = {"M": 128, "N": 128, "C": 0, "warps": 4, "stages": 2}
    [row] = compiled([{"arch": 90, "width": 128, "kernels": ["statistics"], "given": blocks}])
    assert row["stack"] > 0


def test_without_a_card_the_tiles_answer() -> None:
    spec = call()
    P = TritonAttention(spec, with_output=True)
    assert not usable(spec)
    assert torch.equal(P.entropy(), TiledAttention(spec).entropy())
    assert_close(P.output(), TiledAttention(spec).output())
    assert P.answered_by == {"Entropy": "tiles"}


def test_a_device_that_is_pretended_is_none_for_triton() -> None:
    with pretend():
        assert not device_can.__wrapped__(torch.device("cuda:0"))


def test_what_the_kernels_cannot_take_is_left_to_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.attention.kernels_cuda.operator.device_can", lambda device: True)
    assert usable(call(torch.bfloat16, 256))
    assert not usable(call(torch.bfloat16, 257))
    assert not usable(call(torch.float32))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert usable(call(torch.float32))
    assert not usable(call(torch.float64))


def test_a_machine_without_triton_is_asked_for_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    device_can.cache_clear()
    monkeypatch.setattr("attnscope.attention.kernels_cuda.operator.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    assert not usable(call())
    device_can.cache_clear()


def test_the_room_is_imported_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "usable" in runpy.run_path(operator.__file__)
