"""Towers that attend in windows of patches (Qwen2.5-VL): every weight at the true places of its patches.

Shapes: B text, H head, Q query, K key, T patch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

import attnscope
from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.operator import AttentionOperator, DenseAttention, UniformAttention
from attnscope.attention.questions import (
    AbsoluteDistance,
    At,
    Back,
    Entropy,
    Features,
    GroupMass,
    Holding,
    Key,
    MaxWeight,
    Received,
    RowSum,
    Strongest,
    SumOfSquares,
    TopK,
)
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import PieceAttention, RowsAttention, TiledAttention
from attnscope.inputs.processor import windows
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import VISION
from attnscope.observe.request import Request
from helpers.picture_models import picture, read_here, saved

TEXT = "What is on the river bank?"
MERGE, SIDE = 2, 4  # patches: of a merged block, of a window


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def field(place: Path) -> str:
    return picture(place / "field.png")


@pytest.fixture(autouse=True)
def no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)


@pytest.fixture(scope="module")
def loaded(place: Path) -> LoadedModel:
    return attnscope.load(saved("qwen2_5_vl", place))


def true_places(rows: int, columns: int) -> list[tuple[int, int]]:
    """Row and column of every patch as the processor hands them over: block by block."""
    return [
        (top * MERGE + down, left * MERGE + across)
        for top in range(rows // MERGE)
        for left in range(columns // MERGE)
        for down in range(MERGE)
        for across in range(MERGE)
    ]


def own_weights(model: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the tower's own eager attention computes, per layer (H, T, T), put in place by transformers' own index."""
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_window_index

    found: dict[Any, list[torch.Tensor]] = {}
    eager = modeling.eager_attention_forward

    def kept(module: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = eager(module, *args, **kwargs)
        found.setdefault(module, []).append(weights[0])
        return output, weights

    monkeypatch.setattr(modeling, "eager_attention_forward", kept)
    tower, grid = model.model.visual, inputs["image_grid_thw"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        tower(inputs["pixel_values"], grid_thw=grid)
    monkeypatch.undo()
    config = model.config.vision_config
    sizes = {"window_size": config.window_size, "patch_size": config.patch_size}
    index, bounds_of_windows = get_vision_window_index(grid, spatial_merge_size=MERGE, **sizes)
    order = [4 * cell + part for cell in index.tolist() for part in range(4)]
    layers = []
    for layer, weights in enumerate(found.values()):
        full = layer in config.fullatt_block_indexes
        bounds = (get_vision_cu_seqlens(grid) if full else bounds_of_windows).tolist()
        whole = torch.zeros(4, len(order), len(order))
        for start, stop, part in zip(bounds, bounds[1:], weights, strict=False):
            for query, row in enumerate(order[start:stop]):
                for key, column in enumerate(order[start:stop]):
                    whole[:, row, column] = part[:, query, key]
        layers.append(whole)
    return layers


@pytest.mark.parametrize("size", [pytest.param((160, 80), marks=pytest.mark.slow), (84, 200)])
def test_weights_are_the_towers_own_at_true_places(
    size: tuple[int, int], loaded: LoadedModel, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = picture(place / f"{size[0]}.png", size)
    seen = attnscope.capture(loaded, TEXT, picture=file, engine="eager")
    expected = own_weights(loaded.model, seen.prompt.medium.inputs, monkeypatch)
    tower = seen.of(VISION)
    assert not seen.failures
    assert not seen.unmeasured
    assert len(tower.weights) == len(expected) == 3
    for layer, weights in enumerate(expected):
        torch.testing.assert_close(tower.weights[layer], weights, atol=1e-6, rtol=0)
    rows, columns = seen.prompt.medium.inputs["image_grid_thw"][0, 1:].tolist()
    places = true_places(rows, columns)
    assert tower.queries.tokens == tuple(f"img {row},{column}" for row, column in places)
    assert len({(row // SIDE, column // SIDE) for row, column in places}) > 1
    for query, (row, column) in enumerate(places):  # zeros outside the window, by the labels alone
        inside = [(row // SIDE, column // SIDE) == (one // SIDE, other // SIDE) for one, other in places]
        assert ((tower.weights[0][:, query] > 0).all(0) == torch.tensor(inside)).all()
    assert (tower.weights[1] > 0).all()  # the full layer
    assert [tower.visible[layer] for layer in range(3)] == ["in windows of 16", "full", "in windows of 16"]


@pytest.mark.parametrize("engine", ["fused", pytest.param("probe", marks=pytest.mark.families)])
def test_an_engine_is_eager(engine: str, loaded: LoadedModel, field: str) -> None:
    eager, fused = (attnscope.capture(loaded, TEXT, picture=field, engine=one).of(VISION) for one in ("eager", engine))
    for layer, weights in fused.weights.items():
        torch.testing.assert_close(weights, eager.weights[layer], atol=1e-5, rtol=0)
    for name, score in fused.columns.scores.items():
        torch.testing.assert_close(
            torch.from_numpy(score.value),
            torch.from_numpy(eager.columns.scores[name].value),
            atol=1e-4,
            rtol=1e-4,
            equal_nan=True,
        )
    assert len(eager.report.calls) == 3
    assert {check.queries for check in eager.report.calls} == {40}


@pytest.mark.slow
def test_of_several_pictures_the_first_is_read(loaded: LoadedModel, field: str) -> None:
    one, two = (attnscope.capture(loaded, TEXT, picture=given) for given in (field, [field, field]))
    for layer, weights in two.of(VISION).weights.items():
        torch.testing.assert_close(weights, one.of(VISION).weights[layer], atol=1e-6, rtol=0)
    assert any("attend more than once" in line for line in two.unmeasured)


def test_windows_that_do_not_fit_are_left_out(loaded: LoadedModel, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower whose calls are of other lengths than the windows that its config says."""
    monkeypatch.setattr("attnscope.inputs.pictures.window_side", lambda vision: 2)
    seen = attnscope.capture(loaded, TEXT, picture=field)
    assert {layer for layer, _ in seen.of(VISION).kv_of} == {1}


# The operator, against a matrix that loops make of its pieces


LAYOUTS = {
    "one at a time": [[[0, 1, 5, 6, 7]], [[2, 3, 8]], [[4, 9]]],
    "equal ones together": [[[0, 1, 5, 6]], [[2, 7], [9, 4], [3, 8]]],
}


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest) -> tuple[PieceAttention, PieceAttention, DenseAttention]:
    """P of pieces that stand apart, of matrices and of q and k; and the same as one matrix."""
    generator = torch.Generator().manual_seed(0)
    places = [torch.tensor(part) for part in LAYOUTS[request.param]]
    q, k, v = (torch.randn(1, 2, 10, 4, generator=generator) for _ in range(3))
    whole, mask = torch.zeros(1, 2, 10, 10), torch.zeros(1, 1, 10, 10, dtype=torch.bool)
    dense: list[AttentionOperator] = []
    tiled: list[AttentionOperator] = []
    for place_WN in places:
        count = place_WN.shape[1]
        visible = Visibility(count, count, causal=False)
        spec = AttentionSpec(*(x[0, :, place_WN].transpose(0, 1) for x in (q, k, v)), scale=0.5, visible=visible)
        weights = (spec.q_BHQD @ spec.k_BGKD.mT * 0.5).softmax(-1)
        dense.append(DenseAttention(weights, visible, spec))
        tiled.append(TiledAttention(spec) if len(place_WN) == 1 else RowsAttention(spec))
        for number, place in enumerate(place_WN):
            mask[..., place[:, None], place] = True
            for row, query in enumerate(place.tolist()):
                for column, key in enumerate(place.tolist()):
                    whole[:, :, query, key] = weights[number, :, row, column]
    spec = AttentionSpec(q, k, v, 0.5, Visibility(10, 10, causal=False))
    given = [place_WN[0] if len(place_WN) == 1 else place_WN for place_WN in places]
    of_matrices, of_specs = PieceAttention(dense, given, spec), PieceAttention(tiled, given, spec)
    return of_matrices, of_specs, DenseAttention(whole, Visibility(10, 10, mask))


groups = torch.tensor([[0, 0, 1, 1, -1, 0, 1, 1, 0, 1]])
QUESTIONS = [
    RowSum(), Entropy(), Entropy(skip_key0=True), SumOfSquares(), MaxWeight(), MaxWeight(True), Holding(90), Key(0),
    Key(3),
    Back(0), Back(2),
    AbsoluteDistance(), At(torch.tensor([[0, 5, 5, 2, 9, -1, 0, 7, 3, 4]])), Features(torch.arange(30.0).view(10, 3)),
    Features(torch.arange(20.0).view(1, 10, 2)), GroupMass(groups, groups), Received(torch.full((1, 10), 0.1)),
    TopK(4), TopK(2, heads=(1,)), TopK(3, skip_key0=True), Strongest(2, (0, 1), ((0, 4, 7),), ((1, 5, 9),)),
]  # fmt: skip


def numbers(answer: Any) -> list[torch.Tensor]:
    """An answer's tensors; of weights and keys, keys of weights that are none are -1."""
    if isinstance(answer, torch.Tensor):
        return [answer]
    if isinstance(answer, list):
        return [part for text in answer for part in numbers(text)]
    weights, keys = answer
    return [weights, keys.masked_fill(weights.isnan(), -1)]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
def test_pieces_answer_as_the_matrix_does(question: Any, pair: Any) -> None:
    of_matrices, of_specs, whole = pair
    expected = numbers(whole.ask(question))
    for P in (of_matrices, of_specs):
        torch.testing.assert_close(numbers(P.ask(question)), expected, atol=1e-6, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(of_specs.rows(3, 8), whole.rows(3, 8), atol=1e-6, rtol=0)
    torch.testing.assert_close(of_specs.scores(0, 10).softmax(-1), whole.dense(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [TiledAttention, CompiledAttention])
def test_queries_and_keys_of_pieces_are_read_piece_by_piece(kind: type[TiledAttention], pair: Any) -> None:
    """The tiles and the kernel, given the spec of the whole: no query sees a key of another piece."""
    whole, spec = pair[2], pair[1].spec
    for question, found in kind(spec).together(QUESTIONS).items():
        expected = numbers(whole.ask(question))
        torch.testing.assert_close(numbers(found), expected, atol=1e-5, rtol=1e-5, equal_nan=True, check_dtype=False)


def test_who_sees_whom(pair: Any) -> None:
    found, expected = pair[0].visible, pair[2].visible
    assert torch.equal(found.rows(2, 9), expected.rows(2, 9))
    assert torch.equal(found.counts_BHQ, expected.counts_BHQ)
    assert torch.equal(found.others_BHQ, expected.others_BHQ)
    assert torch.equal(found.reach_Q2, expected.reach_Q2)
    asked = torch.tensor([[0, 5, 5, 2, 9, -1, 0, 7, 3, 10]])
    assert torch.equal(found.at(asked), expected.at(asked))
    assert found.cells([5, 5], [5, 5]) is None
    for question in (Entropy(), Holding(90), At(asked), Received(torch.full((1, 10), 0.1)), Key(0)):
        uniform = [UniformAttention(visible).ask(question) for visible in (found, expected)]
        torch.testing.assert_close(*uniform)


def test_every_default_question_is_asked_of_the_pieces(
    loaded: LoadedModel, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row across windows is made where no matrix was asked for."""

    def refuse(self: Any, start: int, stop: int) -> Any:
        raise AssertionError("a row of all patches was made")

    monkeypatch.setattr(PieceAttention, "rows", refuse)
    seen = attnscope.capture(loaded, TEXT, picture=field, request=Request())
    assert len(seen.of(VISION).columns.layer) == 12


def test_windows_of_a_grid() -> None:
    """Window by window, within one block by block: index arithmetic on rows and columns."""
    rows, columns = 6, 10
    places = true_places(rows, columns)
    expected = [
        tuple(at for at, (row, column) in enumerate(places) if (row // SIDE, column // SIDE) == (down, across))
        for down in range(2)
        for across in range(3)
    ]
    assert windows((rows, columns), MERGE, SIDE) == tuple(expected)
