"""The Triton kernels beside the tiles and the dense rows: on a card where there is one, else in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these run in a process of their own, in which it is set or not;
test_triton.py runs them interpreted, benchmarks/gpu.sh on a card:

    TRITON_INTERPRET=1 pytest -n 0 tests/triton_kernels.py            # a few cases; -m slow for the others

The interpreter multiplies the bits of bfloat16 as integers: here it multiplies their values, as a card does.
On a card nothing is answered in float32.
Shapes: B text, H head, G kv head, Q query, K key, D width of q and k, V width of v.
"""

import logging
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import attnscope
from attnscope import Request
from attnscope.attention.kernels_cuda import TritonAttention, kernels, operator, proof
from attnscope.attention.kernels_cuda.sweep import Sweep, joinable
from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.questions import (
    At,
    Back,
    Distance,
    Entropy,
    EqualLabels,
    Features,
    GroupMass,
    Holding,
    Key,
    MaxWeight,
    Question,
    Received,
    RowSum,
    SumOfSquares,
    TopK,
    Window,
)
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import wrap
from attnscope.observe import engine_choice
from helpers.parity_models import roused_model
from helpers.pretend import MixedDevicesError, devices_of, held, place, pretend

TEXT = "the financial bank is located on river bank"
LEAST = torch.finfo(torch.float32).min
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED and triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter of 3.6 fails with NumPy 2.4 and later", allow_module_level=True)
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("there is no CUDA device, and TRITON_INTERPRET is not set", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES) if INTERPRETED else HALVES
CLOSE = 1e-5 if INTERPRETED else 2e-3  # as `proof.ALLOWED`: a tensor core adds up in its own way


def widened(part: Any) -> Any:
    """An operand of the interpreter in float32, where it is in bfloat16, of which NumPy has the bits alone."""
    if part.dtype.scalar != triton.language.bfloat16:
        return part
    return TensorHandle((part.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)


def multiplied(self: InterpreterBuilder, left: Any, right: Any, *more: Any) -> Any:
    return MULTIPLIED(self, widened(left), widened(right), *more)


MULTIPLIED = InterpreterBuilder.create_dot
InterpreterBuilder.create_dot = multiplied


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def holes(queries: int, keys: int) -> Tensor:
    """Causal with holes; one row sees nothing, one column is never seen."""
    mask = (made(1, 1, queries, keys) > -0.3).tril(keys - queries)
    mask[..., min(5, keys - 1)] = False
    mask[:, :, queries // 2] = False
    return mask


def spec_of(
    queries: int = 130,
    keys: int = 0,
    texts: int = 1,
    heads: int = 2,
    groups: int = 1,
    dim: int = 40,
    value_dim: int = 24,
    size: float = 2.0,
    dtype: torch.dtype = DTYPES[0],
    **more: Any,
) -> AttentionSpec:
    """A call of the shape. more: mask (one of `masks`), window, causal, bias, sinks, softcap."""
    keys = keys or queries
    q, k = ((size * made(texts, n, h, dim)).to(dtype).transpose(1, 2) for n, h in ((queries, heads), (keys, groups)))
    v = made(texts, groups, keys, value_dim).to(dtype)
    masks = {"boolean": holes, "additive": _additive, "infinite": _infinite, "bias": _sloped, None: _none}
    mask = masks[more.pop("mask", None)](queries, keys)
    visible = Visibility(queries, keys, mask, more.pop("causal", True), more.pop("window", None), DEVICE)
    if more.pop("bias", False):
        more["bias"] = made(1, heads, queries, keys)
    if sinks := more.pop("sinks", None):
        rows = queries if sinks == "rows" else 1
        more["sinks"] = torch.linspace(-2, 3, heads * rows, device=DEVICE).view(1, heads, rows)
    return AttentionSpec(q, k, v, dim**-0.5, visible, **more)


def _additive(queries: int, keys: int) -> Tensor:
    return torch.zeros(1, 1, queries, keys, device=DEVICE).masked_fill(~holes(queries, keys), LEAST)


def _infinite(queries: int, keys: int) -> Tensor:
    """Of a row that it hides whole half the keys by -inf, the others by the least number; of another all by -inf."""
    mask = _additive(queries, keys)
    mask[:, :, queries // 2, ::2] = -torch.inf
    mask[:, :, queries // 3] = -torch.inf
    return mask


def _sloped(queries: int, keys: int) -> Tensor:
    return (
        (torch.arange(float(keys), device=DEVICE) * -0.1)
        .expand(1, 1, queries, keys)
        .masked_fill(~holes(queries, keys), LEAST)
    )


def _none(queries: int, keys: int) -> None:
    return None


def statistics() -> list[Question]:
    return [RowSum(), Entropy(), Entropy(True), SumOfSquares(), MaxWeight(), MaxWeight(True), Distance()]


def closed_set(spec: AttentionSpec) -> list[Question]:
    """One question of every kind that the kernels answer."""
    (B, _, Q, _), K, numbers = spec.q_BHQD.shape, spec.visible.keys, torch.Generator().manual_seed(1)

    def labels(least: int, most: int, count: int) -> Tensor:
        return torch.randint(least, most, (B, count), generator=numbers).to(DEVICE)

    ids, before = labels(0, 9, K), labels(0, 9, K)
    return [
        *(*statistics(), Back(0), Back(1), Key(0), Key(3), At(labels(-1, K, Q)), Window(7), Window(90)),
        *(EqualLabels(ids[:, K - Q :], ids, 1), EqualLabels(ids[:, K - Q :], before, 2)),
        *(Received(made(B, Q).sigmoid()), Received(torch.full((1, Q), 1 / Q, device=DEVICE))),
        *(TopK(min(5, K)), TopK(min(3, K), (spec.heads - 1,), True)),
        *(Features(made(B, K, 1)), Features(made(K, 20)), GroupMass(labels(-1, 3, Q), labels(-1, 5, K))),
        of_runs(spec, 1, 31),
    ]


def of_runs(spec: AttentionSpec, *starts: int) -> GroupMass:
    """Groups of consecutive tokens: a run begins at each of these places and 30 tokens after the last, and so on.

    Of each later text a token later. Every third is in no group, and the others in two groups by turns.
    """
    (B, _, Q, _), K = spec.q_BHQD.shape, spec.visible.keys
    place_BK = (torch.arange(K) - torch.arange(B)[:, None]).to(DEVICE)
    run_BK = sum(((place_BK >= start).long() for start in (*starts, *range(starts[-1] + 30, K, 30))), place_BK * 0)
    group_BK = torch.where(run_BK % 3 == 2, -1, run_BK % 2)
    return GroupMass(group_BK[:, K - Q :], group_BK)


def assert_same(spec: AttentionSpec, asked: list[Question], expected: AttentionOperator | None = None) -> None:
    """Every answer is the kernels', and the tiles' to 1e-5; the output to what its dtype allows."""
    P, tiles = TritonAttention(spec, with_output=True), TiledAttention(spec)
    answers, known = P.together(asked), (expected or tiles).together(asked)
    assert set(P.answered_by.values()) == {"triton"}
    assert P._output is not None
    for question in asked:
        found, right = answers[question], known[question]
        if isinstance(question, TopK):
            found, right = as_weights(found, question, tiles), as_weights(right, question, tiles)
        right = distances(tiles) if isinstance(question, Distance) else right
        ahead = isinstance(question, Distance) and not spec.visible.causal  # what is ahead and what is behind cancel
        allowed = CLOSE * spec.visible.keys if ahead else CLOSE
        assert_close(found, right, atol=allowed, rtol=CLOSE, equal_nan=True, msg=lambda m, q=question: f"{q}: {m}")
    allowed = proof.ALLOWED[spec.q_BHQD.dtype][1]
    assert_close(P.output(), tiles.output(), atol=allowed, rtol=allowed)


def distances(tiles: TiledAttention) -> Tensor:
    """In float64: in float32 the tiles count from a row up to 256 tokens away, and keep fewer digits near 0."""
    rows, position = tiles.dense().double(), tiles.visible.position_Q
    back = (position[:, None] - torch.arange(tiles.keys, device=DEVICE)).double()
    return ((rows * back).sum(-1) / rows.sum(-1).clamp_min(1e-30)).float()


def as_weights(top: tuple[Tensor, Tensor], question: TopK, tiles: TiledAttention) -> Tensor:
    """The weights, and those of their keys: equal ones may stand in any order, but none twice."""
    weights, keys = top
    rows = tiles.dense() if question.heads is None else tiles.dense()[:, list(question.heads)]
    there = ~weights.isnan()
    apart = (
        torch.where(there, keys.long(), -1 - torch.arange(keys.shape[-1], device=DEVICE)).sort(-1).values.diff(dim=-1)
    )
    assert bool((apart != 0).all())
    return torch.stack([weights, rows.gather(-1, keys.long()).masked_fill(~there, torch.nan)])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "wide window": {"window": 50},
    "looks ahead": {"causal": False},
    "looks ahead in a window": {"causal": False, "window": 9},
    "soft-cap": {"softcap": 3.0},
    "sinks": {"sinks": "heads"},
    "a sink a query": {"sinks": "rows"},
    "sinks of the output": {"sinks": "heads", "sinks_scale_output": True},
    "boolean mask": {"mask": "boolean"},
    "additive mask": {"mask": "additive"},
    "infinite mask": {"mask": "infinite"},
    "mask with bias": {"mask": "bias"},
    "position bias": {"bias": True},
    "all": {"window": 30, "softcap": 5.0, "sinks": "heads", "bias": True},
    "sharp": {"size": 3.0},
    "a kv head a head": {"heads": 3, "groups": 3},
    "wide values": {"value_dim": 130},
}
SHAPES = {"1 row": (1, 1), "2 rows": (2, 2), "1 of 70": (1, 70), "40 of 130": (40, 130), "64": (64, 64), "65": (65, 65)}


@pytest.mark.usefixtures("trusted")
def test_the_closed_set_is_that_of_the_tiles_and_of_dense_rows() -> None:
    spec = spec_of(70)
    dense = DenseAttention(spec.weights(0, 70), spec.visible, spec)
    assert_same(spec, closed_set(spec), dense)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("name", ["all", "additive mask", "infinite mask"])
def test_statistics_under_options(name: str) -> None:
    spec = spec_of(66, 70, **OPTIONS[name])
    assert_same(spec, [*statistics(), Back(1), Received(made(1, 66).sigmoid())])


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("options", ["plain", "boolean mask", "additive mask", "infinite mask"])
@pytest.mark.parametrize("key", [0, 40])
def test_a_key_of_nan_makes_the_rows_nan_that_see_it(key: int, options: str) -> None:
    spec = spec_of(66, 70, **OPTIONS[options])
    spec.k_BGKD[:, :, key] = torch.nan
    dense = DenseAttention(spec.weights(0, 66), spec.visible, spec)
    seen_Q = spec.visible.at(torch.full((1, 66), key, device=DEVICE))[0, 0]
    found = TritonAttention(spec).together([*statistics(), Back(1), Window(7), TopK(3)])
    for question, answer in found.items():
        expected = dense.ask(question)
        answer, expected = (one[0] if isinstance(question, TopK) else one for one in (answer, expected))
        assert bool(answer[:, :, seen_Q].isnan().all()), question
        assert_close(
            answer, expected, atol=CLOSE * 70, rtol=CLOSE, equal_nan=True, msg=lambda m, q=question: f"{q}: {m}"
        )


@pytest.mark.usefixtures("trusted")
def test_all_top_keys_of_a_call_are_found_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the statistics, of each head as many as any question wants; those of too many have one of their own."""
    launched: list[tuple[Any, int]] = []
    launch = Sweep._launch

    def noted(self: Sweep, kernel: Any, grid: tuple[int, ...], *rest: Any, **known: Any) -> None:
        launched.append((kernel, grid[1]))
        launch(self, kernel, grid, *rest, **known)

    monkeypatch.setattr(Sweep, "_launch", noted)
    spec = spec_of(12, heads=3, dim=16, value_dim=16)
    every: list[Question] = [TopK(1, None, True), TopK(4, (2,)), TopK(2, (2, 0))]
    for asked, walks in ((every, []), (every[2:], []), ([*every, TopK(64, (1,), True)], [3, 1])):
        launched.clear()
        assert_same(spec, asked)
        assert [kernel for kernel, _ in launched].count(kernels.statistics) == 1
        assert [heads for kernel, heads in launched if kernel is kernels.largest] == walks
    P = TritonAttention(spec)
    P.ask(Entropy())
    launched.clear()
    P.ask(TopK(2, (2, 0)))  # when the statistics are known
    assert launched == [(kernels.largest, 2)]


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("most", [5, 9], ids=["with the statistics", "in a walk of their own"])
def test_the_largest_are_found_in_blocks_that_every_row_sees_whole(most: int) -> None:
    """Of 130 keys the second 64: neither the first block nor the one with the rows' own places."""
    spec = spec_of(2, 130, heads=1, dim=16, value_dim=16)
    assert_same(spec, [TopK(most), TopK(1, None, True)])
    keys = TritonAttention(spec).ask(TopK(most))[1]
    assert bool(((keys >= 64) & (keys < 128)).any())


def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """What is launched from now on: kernels, and how many rows a program has."""
    launched: list[tuple[Any, int]] = []
    launch = Sweep._launch

    def noted(self: Sweep, kernel: Any, grid: Any, rest: Any, form: Any, **known: Any) -> None:
        launched.append((kernel, form.M))
        launch(self, kernel, grid, rest, form, **known)

    monkeypatch.setattr(Sweep, "_launch", noted)
    return launched


@pytest.mark.usefixtures("trusted")
def test_one_walk_answers_what_keys_receive_and_the_mass_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter runs are a product with their members."""
    launched = launches(monkeypatch)
    spec, received = spec_of(50, heads=1, dim=16, value_dim=16), Received(made(1, 50).sigmoid())
    for starts, rows, products in (((1, 17), 16, 1), ((1, 16), 64, 2)):  # of which one is the output
        launched.clear()
        assert_same(spec, [received, of_runs(spec, *starts)])
        assert [M for kernel, M in launched if kernel is kernels.received] == [rows]
        assert [kernel for kernel, _ in launched].count(kernels.product) == products


def exactly(spec: AttentionSpec) -> Tensor:
    """The weights of a causal call in float64, from q and k as its dtype holds them."""
    k_BHKD = spec.k_BGKD.double().repeat_interleave(spec.heads // spec.kv_heads, 1)
    logits = spec.scale * spec.q_BHQD.double() @ k_BHKD.mT
    return logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)


def assert_mass(spec: AttentionSpec, share: Received, groups: GroupMass) -> None:
    """Both answers of the walk over rows, beside the sums of the exact weights, group by group."""
    answers, weights = TritonAttention(spec).together([share, groups]), exactly(spec)
    expected = torch.zeros(*weights.shape[:2], *groups.counts, dtype=torch.float64, device=DEVICE)
    for text, (rows, keys) in enumerate(zip(groups.query_group_BQ, groups.key_group_BK, strict=True)):
        for row, key in product(*map(range, groups.counts)):
            expected[text, :, row, key] = weights[text][:, rows == row][:, :, keys == key].sum((1, 2))
    received = (weights * share.query_share_BQ[:, None, :, None]).sum(2)
    assert_close(answers[groups].double(), expected, atol=CLOSE, rtol=CLOSE)
    assert_close(answers[share].double(), received, atol=CLOSE, rtol=CLOSE)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_walk_over_rows_gives_the_sums_of_exact_weights(dtype: torch.dtype) -> None:
    spec = spec_of(50, texts=2, heads=1, dim=16, dtype=dtype)
    assert_mass(spec, Received(made(2, 50).sigmoid()), of_runs(spec, 1, 17))


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("runs", ["rows", "keys"])
def test_the_mass_of_a_run_that_goes_to_the_next_is_seen(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbour(self: Sweep, kernel: Any, grid: Any, rest: Any, form: Any, **known: Any) -> None:
        launch(self, kernel, grid, rest, form, **known)
        if kernel is kernels.received:  # sums between runs: (B, H, runs of rows, runs of keys)
            rest[-1].copy_(rest[-1].roll(1, {"rows": 2, "keys": 3}[runs]))

    launch = Sweep._launch
    monkeypatch.setattr(Sweep, "_launch", neighbour)
    spec = spec_of(50, heads=1, dim=16, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="not close"):
        assert_mass(spec, Received(made(1, 50).sigmoid()), of_runs(spec, 1, 17))


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("most", [5, 9], ids=["with the statistics", "in a walk of their own"])
def test_the_strongest_keys_are_those_of_exact_weights(most: int, dtype: torch.dtype) -> None:
    spec = spec_of(33, heads=1, dim=16, dtype=dtype)
    weights, keys = TritonAttention(spec).ask(TopK(most))
    exact = exactly(spec)
    there = ~weights.isnan()
    assert torch.equal(there.sum(-1)[0, 0], torch.arange(1, 34, device=DEVICE).clamp_max(most))
    of_keys = exact.gather(-1, keys.long()).where(there, 0.0)
    for values in (weights.nan_to_num(0.0).double(), of_keys):
        assert_close(values, exact.topk(most).values, atol=CLOSE, rtol=CLOSE)


@pytest.mark.slow
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "starts"),
    [*((name, (1, 70, 140)) for name in OPTIONS), ("plain", (1, 37, 70)), ("all", (1, 30, 47)), ("plain", (1, 47))],
)
def test_the_mass_between_runs_under_every_option(
    name: str, starts: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each length of runs so many rows a step as hold one start."""
    launched = launches(monkeypatch)
    spec = spec_of(starts[-1] + 28, texts=2, dtype=dtype, **OPTIONS[name])
    assert_same(spec, [Received(made(2, spec.visible.queries).sigmoid()), of_runs(spec, *starts)])
    assert (kernels.received, {70: 64, 37: 32, 47: 32, 30: 16}[starts[1]]) in launched


@pytest.mark.skipif(not INTERPRETED, reason="the numbers lie in a file with holes")
@pytest.mark.usefixtures("trusted")
def test_answers_lie_further_apart_than_32_bits_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As those of 114 texts of 131,072 tokens: 8 answers, each 400 million numbers behind the one before."""
    spec, room, apart = spec_of(20), Sweep._room, 400_000_000
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(8 * 4 * apart)
    far = torch.from_numpy(np.memmap(tmp_path / "holes", np.float32, "r+"))

    def spread(self: Sweep, *shape: int) -> Tensor:
        made = room(self, *shape)
        return far.as_strided(made.shape, (apart, *made.stride()[1:])) if shape[0] == 8 else made

    monkeypatch.setattr(Sweep, "_room", spread)
    assert_same(spec, statistics())


@pytest.mark.slow
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_closed_set_under_every_option(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(70, texts=2, dtype=dtype, **OPTIONS[name])
    assert_same(spec, closed_set(spec))
    assert_same(spec, [TopK(9)])  # too many to be found with the statistics


@pytest.mark.slow
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 128, 192, 256])
def test_the_closed_set_at_every_width(dim: int) -> None:
    spec = spec_of(66, dim=dim, value_dim=dim)
    assert_same(spec, closed_set(spec))


@pytest.mark.slow
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("options", ["plain", "all", "boolean mask"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_closed_set_of_few_rows(shape: str, options: str) -> None:
    spec = spec_of(*SHAPES[shape], **OPTIONS[options])
    assert_same(spec, closed_set(spec))


@pytest.mark.slow
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("options", ["plain", "wide window", "all"])
def test_the_closed_set_of_300_rows(options: str) -> None:
    """Only here are there keys that are neither hidden nor in the first block."""
    spec = spec_of(300, **OPTIONS[options])
    assert_same(spec, closed_set(spec))


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof, which asks the same again of calls as small as these."""
    monkeypatch.setattr(proof, "refused", lambda spec, asked: {})
    monkeypatch.setattr(proof, "joins", joinable)


class Wrong:
    """A kernel that adds to what it is to find."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(call: Any, known: Any, keys: Any, found: Tensor, *rest: Any, **options: Any) -> None:
            self.kernel[grid](call, known, keys, found, *rest, **options)
            found += 0.25

        return launch


class Raising:
    """A kernel that does not compile."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise RuntimeError("ptxas fatal: no card\nand more")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_verdicts", {})


@pytest.mark.usefixtures("verdicts")
@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (Wrong(kernels.one_key), "differs from the tiles by 0.2"),
        (Raising(), "raised RuntimeError: ptxas fatal: no card"),
    ],
    ids=["wrong", "raises"],
)
def test_a_planted_kernel_leaves_its_questions_to_the_tiles(
    kernel: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiles answer, one line says why once, and the reason stays with the answers."""
    spec = spec_of(20)
    expected = TiledAttention(spec).together([Back(1), Entropy()])
    monkeypatch.setattr(kernels, "one_key", kernel)
    with caplog.at_level(logging.WARNING, "attnscope"):
        for _ in range(2):
            P = TritonAttention(spec)
            answers = P.together([Back(1), Entropy(), Holding(95)])
            assert torch.equal(answers[Back(1)], expected[Back(1)])
            assert_close(answers[Entropy()], expected[Entropy()], atol=CLOSE, rtol=CLOSE)
            assert P.answered_by["Entropy"] == "triton"
            assert P.answered_by["Holding"] == "tiles"
            assert P.answered_by["Back"].startswith(f"tiles: {why}")
    [record] = caplog.records
    assert why in record.message
    assert "\n" not in record.message


@pytest.mark.usefixtures("verdicts")
def test_every_kernel_proves_itself() -> None:
    """Also of rows that see fewer keys than are asked for: what stands in their gaps is no key that comes twice."""
    spec = spec_of(40)
    P = TritonAttention(spec, with_output=True)
    P.together(closed_set(spec))
    assert set(P.answered_by.values()) == {"triton"}


class WrongBetween:
    """A kernel whose sums between runs are wrong, and not what keys receive."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            RECEIVED[grid](*given, **options)
            if given[-1] is not None:
                given[-1].add_(0.25)

        return launch


RECEIVED = kernels.received


@pytest.mark.usefixtures("verdicts")
def test_a_planted_sum_between_runs_leaves_what_keys_receive_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are proven in the launch that they share, and then the one that is left in its own."""
    monkeypatch.setattr(kernels, "received", WrongBetween())
    spec = spec_of(40, heads=1, dim=16)
    asked = [Received(made(1, 40).sigmoid()), of_runs(spec, 1, 20)]
    P, tiles = TritonAttention(spec), TiledAttention(spec)
    answers, expected = P.together(asked), tiles.together(asked)
    assert P.answered_by["Received"] == "triton"
    assert P.answered_by["GroupMass"].startswith("tiles: differs from the tiles by")
    assert torch.equal(answers[asked[1]], expected[asked[1]])
    assert_close(answers[asked[0]], expected[asked[0]], atol=CLOSE, rtol=CLOSE)


class Twice:
    """A kernel that gives a row's largest key in two places, where all its weights are equal."""

    def __init__(self, kernel: Any, places: int) -> None:
        self.kernel, self.places = kernel, places

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.kernel[grid](*arguments, **options)
            if arguments[self.places] is not None:
                arguments[self.places][..., 1] = arguments[self.places][..., 0]

        return launch


@pytest.mark.usefixtures("verdicts")
def test_a_kernel_that_gives_a_key_twice_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The walk of the statistics leaves the strongest to one of their own, and that leaves them to the tiles."""
    spec = spec_of(12, heads=1, dim=16, size=0.0)
    for name, answered, reason in (
        ("statistics", "triton", "statistics with the strongest keys gives a key twice"),
        ("largest", "tiles: gives a key twice", "TopK gives a key twice"),
    ):
        monkeypatch.setattr(proof, "_verdicts", {variant: why for variant, why in proof._verdicts.items() if why})
        monkeypatch.setattr(kernels, name, Twice(getattr(kernels, name), -1))
        P, top = TritonAttention(spec), TopK(3)
        keys = P.together([top, Entropy()])[top][1]
        assert (P.answered_by["TopK"], P.answered_by["Entropy"]) == (answered, "triton")
        assert reason in caplog.text
        assert bool((keys[:, :, 3:].sort(-1).values.diff(dim=-1) > 0).all()), "no key twice"


@pytest.mark.usefixtures("verdicts")
def test_statistics_that_raise_leave_everything_to_the_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(20)
    monkeypatch.setattr(kernels, "statistics", Raising())
    P, tiles = TritonAttention(spec, with_output=True), TiledAttention(spec)
    assert torch.equal(P.together([Entropy()])[Entropy()], tiles.entropy())
    assert torch.equal(P.output(), tiles.output())
    assert P.answered_by["Entropy"].startswith("tiles: raised")
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("verdicts")
def test_a_machine_that_builds_no_kernel_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    why = "needs a C compiler, and there is none: install gcc"
    monkeypatch.setattr(operator, "_interpreted", lambda: False)
    monkeypatch.setattr(operator, "device_can", lambda device: True)
    monkeypatch.setattr(operator, "missing", lambda: why)
    monkeypatch.setattr(proof, "_unbuilt", set())
    spec = spec_of(20, dtype=torch.float16)
    with caplog.at_level(logging.WARNING, "attnscope"):
        for asked in (Entropy(), Back(1)):
            P = TritonAttention(spec)
            assert torch.equal(P.ask(asked), TiledAttention(spec).ask(asked))
            assert P.answered_by == {type(asked).__name__: f"tiles: Triton {why}"}
    assert [record.message for record in caplog.records] == [f"Triton {why}; the tiles answer"]


@pytest.mark.usefixtures("verdicts")
@pytest.mark.parametrize(("name", "question"), [("one_key", Back(1)), ("statistics", TopK(3))], ids=["Back", "TopK"])
def test_a_kernel_that_fails_after_its_proof_leaves_the_call_to_the_tiles(
    name: str, question: Question, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(12, heads=1, dim=16)
    TritonAttention(spec).ask(question)
    monkeypatch.setattr(kernels, name, Raising())
    for _ in range(2):  # the second time it is not tried
        P = TritonAttention(spec)
        answers, expected = P.ask(question), TiledAttention(spec).ask(question)
        assert_close(answers, expected, rtol=0, atol=0, equal_nan=True)
        assert P.answered_by[type(question).__name__].startswith("tiles: raised")
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("verdicts")
def test_memory_that_runs_out_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(20)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    TritonAttention(spec).entropy()  # proven: memory runs out afterwards
    with monkeypatch.context() as patched:
        patched.setattr(Sweep, "answers", full)
        P = TritonAttention(spec)
        assert torch.equal(P.entropy(), TiledAttention(spec).entropy())
    assert P.answered_by["Entropy"] == "tiles"
    P = TritonAttention(spec)
    P.entropy()
    assert P.answered_by["Entropy"] == "triton"


def launch_on_held(self: Sweep, kernel: Any, grid: tuple[int, ...], rest: Any, form: Any, **known: Any) -> None:
    """A launch over pretended tensors, all on the call's device, as a card demands; computed of what they hold."""
    elsewhere = {one.device for one in tree_flatten([self.call, rest])[0] if isinstance(one, Tensor)}
    if elsewhere != {self.spec.device}:
        raise MixedDevicesError(f"{kernel}: {elsewhere} for a call on {self.spec.device}")
    kernel[grid](held(self.call), *held(rest), M=form.M, **known, num_warps=form.warps, num_stages=form.stages)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may run on pretended devices."""
    if not INTERPRETED:
        pytest.skip("there is a card")
    for room in (operator, engine_choice):
        monkeypatch.setattr(room, "device_can", lambda device: True)
    monkeypatch.setattr(operator, "missing", lambda: "")
    monkeypatch.setattr(Sweep, "_launch", launch_on_held)


@pytest.mark.usefixtures("trusted", "cards")
def test_the_kernels_are_given_what_is_on_the_call_s_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for kind, device in ((TiledAttention, "cpu"), (TritonAttention, "cuda:1")):
        monkeypatch.setattr(sys.modules[__name__], "DEVICE", torch.device(device))
        with pretend():
            P = kind(spec_of(20, **OPTIONS["all"]))
            asked = [one for one in closed_set(P.spec) if not isinstance(one, TopK | Distance)]
            found = P.together(asked)
            answers.append([found[one].cpu() for one in asked])
    assert set(P.answered_by.values()) == {"triton"}
    assert_close(*answers, atol=CLOSE, rtol=CLOSE, equal_nan=True)


@pytest.mark.slow
@pytest.mark.usefixtures("verdicts", "cards")
def test_a_model_on_two_pretended_cards_is_read_by_the_kernels(demo: LoadedModel) -> None:
    """With a proof on each device; all numbers are those of the tiles in place."""
    model = roused_model("llama", vocab_size=len(demo.tokenizer), num_hidden_layers=2)
    asked = Request(relations=True, maps="all", rollout="words", group="words", per_token=True)
    expected = attnscope.capture(wrap(model, demo.tokenizer), TEXT, request=asked, engine="tiles")
    with pretend():
        place(model, devices_of(model, 2))
        seen = attnscope.capture(wrap(model, demo.tokenizer), TEXT, request=asked, engine="triton")
    assert {call.answered_by["Entropy"] for call in seen.report.calls} == {"triton"}
    assert not any(who.startswith("tiles:") for call in seen.report.calls for who in call.answered_by.values())
    for name, score in expected.columns.scores.items():
        assert_close(seen.columns.scores[name].value, score.value, atol=CLOSE, rtol=CLOSE, equal_nan=True)
    assert_close(seen.rollout.share_GG, expected.rollout.share_GG, atol=CLOSE, rtol=CLOSE)
