"""Maps of linear layers from chunks of a text, against the recurrence token by token and against dense rows.

Shapes: B text, T token, H head, G key head, D width of a key, Q query, K key.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from attnscope.attention.linear import Chunks, LinearMap, LinearRule
from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import (
    AbsoluteDistance,
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
    SizeSum,
    Strongest,
    SumOfSquares,
    TopK,
    Window,
)
from attnscope.attention.spec import Visibility
from attnscope.attention.tiling import TILE_BYTES
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.listen import listen
from attnscope.hooks.mixers import delta_rule, mamba2_scan
from attnscope.metrics.metrics import METRICS, SIGNED, Texts, metrics_for, questions, stacked_means
from attnscope.model.selection import LINEAR
from helpers.dispatched import largest_tensor, thread_count
from helpers.families import tiny_model

H, G, D = 4, 2, 8


def gated_delta(T: int, B: int = 1, decay: float = 0.05, dtype: torch.dtype = torch.float32) -> LinearRule:
    """The model's own rule on random tokens; two value heads share a key head. decay: the largest -g of a token."""
    random = torch.Generator().manual_seed(T)
    query, key = torch.randn(2, B, T, G, D, generator=random).to(dtype)
    arguments = {
        "query": query,
        "key": key,
        "value": torch.randn(B, T, H, 6, generator=random).to(dtype),
        "g": -decay * torch.rand(B, T, H, generator=random),
        "beta": torch.rand(B, T, H, generator=random).to(dtype),
        "use_qk_l2norm_in_kernel": True,
        "initial_state": None,
        "output_final_state": False,
    }
    return delta_rule(modeling_qwen3_next.torch_chunk_gated_delta_rule, arguments)


def delta_recurrence(rule: LinearRule) -> Tensor:
    """The map in float64, token by token: the state forgets, then takes what a key does not yet recall."""
    query, key = (tensor.double().repeat_interleave(H // G, 2) for tensor in (rule.tokens["query"], rule.tokens["key"]))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    B, T, _ = rule.shape
    state = torch.zeros(B, H, D, T, dtype=torch.float64)
    rows = []
    for t in range(T):
        state = state * rule.tokens["g"][:, t].double().exp()[..., None, None]
        new = torch.zeros(T, dtype=torch.float64).index_fill(0, torch.tensor(t), 1.0)
        error = new - torch.einsum("bhd,bhdk->bhk", key[:, t], state)
        error = error * rule.tokens["beta"][:, t].double()[..., None]
        state = state + key[:, t, :, :, None] * error[:, :, None]
        rows.append(torch.einsum("bhd,bhdk->bhk", query[:, t] * D**-0.5, state))
    return torch.stack(rows, 2)


def mamba2(T: int, B: int = 1) -> LinearRule:
    random = torch.Generator().manual_seed(T)
    left, right = torch.randn(2, B, T, G, D, generator=random)
    arguments = {
        "hidden_states": torch.randn(B, T, H, 6, generator=random),
        "dt": torch.randn(B, T, H, generator=random),
        "A": -torch.rand(H, generator=random),
        "B": left,
        "C": right,
        "D": torch.rand(H, generator=random),
        "chunk_size": 32,
        "dt_bias": torch.rand(H, generator=random),
        "dt_softplus": True,
        "return_final_states": False,
    }
    return mamba2_scan(modeling_mamba2.mamba2_chunk_scan, arguments)


def unit_vectors(rule: LinearRule) -> Tensor:
    """The map by the rule on the whole text at once, a unit vector as the value of each token."""
    B, T, _ = rule.shape
    return rule.run(torch.eye(T)[None, :, None].expand(B, T, H, T).contiguous()).transpose(1, 2)


def assert_map(actual: Tensor, expected: Tensor) -> None:
    """To a millionth of the largest weight."""
    assert_close(actual.double(), expected.double(), rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(("tokens", "texts", "chunk"), [(1, 1, 64), (64, 1, 64), (70, 2, 64), (9, 1, 4), (101, 2, 4)])
def test_a_map_is_that_of_the_recurrence(tokens: int, texts: int, chunk: int) -> None:
    """Chunks shorter than the state is wide are joined: 4 tokens to 16."""
    rule = replace(gated_delta(tokens, texts), chunk=chunk)
    M = LinearMap(rule)
    assert_map(M.dense(), delta_recurrence(rule))
    assert M.chunks.size == (min(tokens, 64) if chunk == 64 else 16)


@pytest.mark.parametrize("tokens", [5, 32, 33, 100])
def test_a_map_of_a_scan_has_what_skips_the_state_on_its_diagonal(tokens: int) -> None:
    rule = mamba2(tokens, 2)
    assert_map(LinearMap(rule).dense(), unit_vectors(rule))


def test_a_state_passed_on_by_another_chunk_is_seen() -> None:
    """The comparison above fails where a chunk's state passes through the wrong one."""
    rule = gated_delta(150)
    M = LinearMap(rule)
    M.__dict__["chunks"] = replace(M.chunks, keep=M.chunks.keep.roll(1, 1))
    with pytest.raises(AssertionError):
        assert_map(M.dense(), delta_recurrence(rule))


@pytest.mark.parametrize("decay", [0.0, 0.3, 5.0, 60.0])
def test_a_map_is_right_however_fast_the_state_forgets(decay: float) -> None:
    """To where its weights are smaller than float32 has numbers: they are 0, and no ratio of them is infinite.

    The rule itself adds its decays up in float32, so the recurrence is met less closely.
    """
    rule = gated_delta(200, decay=decay)
    M = LinearMap(rule)
    assert_map(M.dense(), unit_vectors(rule))
    assert_close(M.dense().double(), delta_recurrence(rule), rtol=0, atol=1e-6 if decay < 1 else 1e-4)
    assert M.rows(190, 200)[..., :64].count_nonzero() == (0 if decay > 1 else H * 10 * 64)


@pytest.mark.parametrize(("decay", "products"), [(0.0, 6), (60.0, 1)])
def test_chunks_that_a_state_does_not_reach_take_no_product(
    decay: float, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, taken, own = LinearMap(gated_delta(400, decay=decay)), [], torch.bmm
    M.rows(0, 1)
    monkeypatch.setattr(torch, "bmm", lambda *args, **more: taken.append(own(*args, **more)))
    M.rows(384, 400)
    assert len(taken) == products


@pytest.mark.parametrize("before", [False, True])
def test_a_thread_counts_small_numbers_as_it_did_before(before: bool) -> None:
    torch.set_flush_denormal(before)
    try:
        LinearMap(gated_delta(200, decay=60.0)).together([SumOfSquares()])
        assert bool(torch.full((), 1e-39) * 1.0 == 0) == before
    finally:
        torch.set_flush_denormal(False)


def test_half_precision_runs_in_float32() -> None:
    rule = gated_delta(100, dtype=torch.bfloat16)
    M = LinearMap(rule)
    assert M.dense().dtype == torch.float32
    assert_map(M.dense(), delta_recurrence(rule))


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (37, 38), (60, 70), (15, 150), (149, 150)])
def test_rows_are_those_of_the_whole(start: int, stop: int) -> None:
    M = LinearMap(gated_delta(150, 2))
    assert_close(M.rows(start, stop), M.dense()[:, :, start:stop], rtol=0, atol=1e-7)


def test_products_with_features_are_signed() -> None:
    rule = gated_delta(100, 2)
    M, random = LinearMap(rule), torch.Generator().manual_seed(0)
    for_all, by_text = torch.randn(100, 3, generator=random), torch.randn(2, 100, 1, generator=random)
    answers = M.together([Features(for_all), RowSum(), Features(by_text)])
    dense = delta_recurrence(rule).float()
    of_text = torch.stack([dense[text] @ by_text[text] for text in range(2)])
    expected = [dense @ for_all, dense.sum(-1), of_text]
    for answer, whole in zip(answers.values(), expected, strict=True):
        assert_close(answer, whole, atol=1e-5, rtol=1e-5)
    assert bool((dense.sum(-1) < 0).any())


def every_question(B: int, T: int) -> list[Question]:
    random = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, 9, (B, T), generator=random)
    groups_BT = (torch.arange(T) // 7 - 1).expand(B, -1)
    return [
        *(RowSum(), SizeSum(), Entropy(), Entropy(skip_key0=True), SumOfSquares()),
        *(MaxWeight(), MaxWeight(skip_key0=True)),
        *(Distance(), AbsoluteDistance(), Back(0), Back(1), Key(0), Key(3), Window(32)),
        At(torch.randint(-1, T, (B, T), generator=random)),
        EqualLabels(ids_BT, ids_BT, gap=1),
        EqualLabels(ids_BT, ids_BT.roll(1, 1), gap=2),
        Features(torch.randn(T, 2, generator=random)),
        Features(torch.randn(T, 1, generator=random), of_size=True),
        Features(torch.randn(T, 2, generator=random), of_size=True),
        GroupMass(groups_BT, ids_BT),
        Received(torch.full((1, T), 1 / T)),
        Received(torch.rand(B, T, generator=random)),
        TopK(5),
        TopK(3, (1, 2), skip_key0=True),
        TopK(1, skip_key0=True),
        Strongest(2, (3, 0), ((5, T - 1),) * B, ((0, 4, T - 2),) * B),
        Holding(90),
    ]


@pytest.fixture(params=[(2**13, 2), (2**22, 1)], ids=["small tiles", "large tiles"])
def in_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of a size, by so many threads; no text is too short for them."""
    size, threads = request.param
    monkeypatch.setitem(TILE_BYTES, "cpu", size)
    monkeypatch.setattr("attnscope.attention.linear.SMALL", 0)
    with thread_count(threads):
        yield


def dense_answers(signed_BHQK: Tensor, asked: Sequence[Question]) -> dict[Question, Any]:
    """Of shares of |w|, but for what is asked of the weights themselves: sums, products and the strongest keys."""
    size_BHQK = signed_BHQK.abs()
    T = signed_BHQK.shape[-1]
    shares = DenseAttention(size_BHQK / size_BHQK.sum(-1, keepdim=True), Visibility(T, T))
    answers = dict(shares.together(asked))
    for question in asked:
        match question:
            case RowSum():
                answers[question] = signed_BHQK.sum(-1)
            case SizeSum():
                answers[question] = size_BHQK.sum(-1)
            case Features(features=features, of_size=False):
                answers[question] = signed_BHQK @ features
            case TopK(heads=heads):
                size, key = answers[question]
                own = signed_BHQK if heads is None else signed_BHQK[:, list(heads)]
                answers[question] = own.gather(-1, key.long()).masked_fill(size.isnan(), torch.nan), key
            case Strongest(heads=heads, query=query):
                answers[question] = [
                    (signed_BHQK[text][list(heads)][:, list(query[text])].gather(-1, key) + 0 * size, key)
                    for text, (size, key) in enumerate(answers[question])
                ]
    return answers


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize(("tokens", "texts", "decay"), [(37, 2, 0.05), (70, 1, 0.05), (70, 1, 9.0)])
def test_answers_are_those_of_dense_rows(tokens: int, texts: int, decay: float) -> None:
    """Of the recurrence in float64, by tiles; sums and products are the rule's own."""
    rule = replace(gated_delta(tokens, texts, decay), chunk=8)
    M, asked = LinearMap(rule), every_question(texts, tokens)
    answers = M.together(asked)
    for question, expected in dense_answers(delta_recurrence(rule).float(), asked).items():
        assert_answer(question, answers[question], expected)
    weights = answers[TopK(5)][0]
    assert bool((weights < 0).any())
    assert bool((weights > 0).any())
    assert {kind for kind, who in M.answered_by.items() if who != "tiles"} == {"RowSum"}


@pytest.mark.usefixtures("in_tiles")
def test_keys_that_a_state_forgot_are_each_given_once() -> None:
    """Weights too small for float32 are 0, and so many keys have one that the strongest of a row are among them."""
    M = LinearMap(replace(gated_delta(70, decay=60.0), chunk=8))
    expected, chosen = M.dense()[0], (0, 1, 2, 3, 5, 6, 7, 69)
    weights_HQk, keys_HQk = (part[0] for part in M.ask(TopK(40)))
    [(few_HQk, few_keys_HQk)] = M.ask(Strongest(8, tuple(range(H)), (range(70),), (chosen,)))
    for weights, keys in ((weights_HQk, keys_HQk.long()), (few_HQk, few_keys_HQk)):
        own = expected.gather(-1, keys).masked_fill(weights.isnan(), torch.nan)
        assert_close(weights, own, atol=0, rtol=0, equal_nan=True)
        assert (weights[:, -1] == 0).any()
        assert all(len({*row}) == len(row) for row in keys[:, -1].tolist())


@pytest.mark.usefixtures("in_tiles")
def test_a_row_of_zeros_is_0_to_every_question() -> None:
    rule = gated_delta(70)
    query = rule.tokens["query"].clone()
    query[:, 40] = 0.0
    M, asked = LinearMap(replace(rule, tokens={**rule.tokens, "query": query})), every_question(1, 70)
    by_row = [question for question in asked if not isinstance(question, GroupMass | Received | Strongest | TopK)]
    answers = M.together([*by_row, TopK(5)])
    for answer in (*(answers[question] for question in by_row), answers[TopK(5)][0]):
        assert not answer[:, :, 40].any()
        assert not answer[:, :, 5:].isnan().any()


@pytest.mark.parametrize("decay", [0.05, 9.0])
def test_rows_answer_as_tiles_do(decay: float) -> None:
    rule = gated_delta(37, 2, decay)
    M, asked = LinearMap(rule), every_question(2, 37)
    answers = M.together(asked)
    for question, expected in dense_answers(delta_recurrence(rule).float(), asked).items():
        assert_answer(question, answers[question], expected)
    assert set(M.answered_by.values()) == {"rule", "rows"}


def assert_answer(question: Question, answer: Any, expected: Any) -> None:
    if isinstance(question, Strongest | TopK):  # weights that are nearly equal may change places
        pairs = [(answer, expected)] if isinstance(question, TopK) else zip(answer, expected, strict=True)
        for (weights, keys), (own_weights, own_keys) in pairs:
            assert_close(weights, own_weights, atol=1e-5, rtol=1e-4, equal_nan=True)
            strong = own_weights.abs() > 1e-3
            assert float((keys[strong].long() == own_keys[strong].long()).float().mean()) > 0.999
    elif isinstance(question, Holding):
        assert float((answer - expected).abs().max()) <= 1
        assert float((answer != expected).float().mean()) < 1e-2
    else:
        assert_close(answer, expected, atol=1e-4, rtol=1e-4, equal_nan=True, msg=lambda text: f"{question}: {text}")


@pytest.mark.parametrize(("tokens", "who"), [(20, "rows"), (200, "tiles")])
def test_a_short_text_is_answered_by_its_rows(tokens: int, who: str) -> None:
    M = LinearMap(gated_delta(tokens))
    M.together([Entropy(), Back(1), RowSum()])
    assert M.answered_by == {"Entropy": who, "Back": who, "RowSum": "rule"}


def test_no_tensor_is_as_large_as_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILE_BYTES, "cpu", 2**16)
    T = 512
    M = LinearMap(gated_delta(T))
    with largest_tensor() as largest:
        M.together([SumOfSquares(), Received(torch.full((1, T), 1 / T)), MaxWeight(True), RowSum()])
        M.rows(T - 3, T)
    assert 0 < largest[0] < 4 * T * T


def test_an_odd_chunk_is_joined_with_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    own, write, read, keep = (
        torch.randn(1, 3, 1, *shape, generator=random) for shape in ((4, 4), (2, 4), (4, 2), (2, 2))
    )
    joined = Chunks(own, write, read, keep).joined()
    assert joined.count == 2
    assert_close(joined.own[0, 0, 0, 4:, :4], read[0, 1, 0] @ write[0, 0, 0])
    assert_close(joined.own[0, 1, 0, :4, :4], own[0, 2, 0])
    assert joined.own[0, 1, 0, 4:].count_nonzero() == 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1"])
def test_a_hybrid_is_answered_by_tiles_as_by_rows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is asked of every head, and the check of each call, in a model whose chunks are the rule's own."""
    model, ids = tiny_model(model_type), torch.randint(3, 60, (2, 140), generator=torch.Generator().manual_seed(0))
    texts = Texts(ids, torch.full((2,), 140), stack=LINEAR)
    names = metrics_for([*METRICS, *SIGNED], LINEAR)
    asked = [*questions(names, texts), Received(texts.mean_BT), TopK(2)]
    scores: dict[int, list[Tensor]] = {0: [], 2**40: []}

    def on_call(call: AttentionCall) -> None:
        if call.stack == LINEAR:
            for size, kept in scores.items():
                monkeypatch.setattr("attnscope.attention.linear.SMALL", size)
                answers = call.P.together(asked)
                kept += [stacked_means(call.P, texts, answers, names), answers[asked[-2]], answers[asked[-1]][0]]

    report = listen(model, ids, on_call, mixers=True)
    assert_close(scores[0], scores[2**40], atol=1e-4, rtol=1e-4, equal_nan=True)
    checks = [call for call in report.calls if call.stack == LINEAR]
    assert checks
    assert max(check.value_error for check in checks) < 1e-6
    assert all(set(check.answered_by.values()) == {"rule", "rows"} for check in checks)  # who read them last
