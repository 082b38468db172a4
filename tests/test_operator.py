"""Answers read off a dense matrix, block by block, against Python loops over its entries.

Shapes: B text, H head, Q query, K key.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from attnscope.attention import questions as ask
from attnscope.attention import spec
from attnscope.attention.operator import AttentionOperator, DenseAttention, LastQueries, UniformAttention
from attnscope.attention.questions import EqualLabels, Holding, TopK, Window
from attnscope.attention.spec import Visibility
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.metrics.metrics import Texts
from helpers.families import tiny_model


def random_attention(queries: int, keys: int, causal: bool = True) -> DenseAttention:
    """Two texts, two heads; a weight that underflows to 0 stands where the query may look."""
    torch.manual_seed(0)
    visible = Visibility(queries, keys, causal=causal)
    logits = torch.randn(2, 2, queries, keys) * 3
    logits[..., 1] = -200.0
    return DenseAttention(logits.masked_fill(~visible.rows(0, queries), -math.inf).softmax(-1), visible)


@pytest.fixture(params=[64 * 2**20, 900, 1])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All rows in one block, some, one."""
    monkeypatch.setattr(spec, "BLOCK_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [1, 3, 50])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9), (1, 1)])
def test_window_mass_counts_the_last_keys(block_bytes: int, queries: int, keys: int, width: int, causal: bool) -> None:
    P = (
        random_attention(queries, keys, causal)
        if keys > 1
        else DenseAttention(torch.ones(2, 2, 1, 1), Visibility(1, 1))
    )
    found = P.ask(Window(width))
    for b, h, q in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(queries)).tolist():
        position = q + keys - queries
        near = range(max(0, position - width + 1), position + 1)
        assert found[b, h, q] == pytest.approx(sum(P.dense()[b, h, q, k].item() for k in near), abs=1e-6)


def gathered(P: AttentionOperator, key_BQ: torch.Tensor) -> torch.Tensor:
    """(B, H, Q), an entry at a time; 0 where there is no such key."""
    dense, found = P.dense(), torch.zeros(P.batch, P.heads, P.queries)
    for b, h, q in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        key = int(key_BQ[b if len(key_BQ) > 1 else 0, q])
        found[b, h, q] = dense[b, h, q, key] if 0 <= key < P.keys else 0.0
    return found


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9)])
def test_at_takes_keys_of_each_text(block_bytes: int, queries: int, keys: int) -> None:
    """Of every text its own, of all the same, of no text; -1 and keys past the end are asked of nobody."""
    P = random_attention(queries, keys)
    key_BQ = torch.randint(-1, keys + 1, (2, queries), generator=torch.Generator().manual_seed(4))
    key_BQ[1, :2] = -1
    for asked in (key_BQ, key_BQ[:1]):
        assert_close(P.at(asked), gathered(P, asked))
    assert_close(P.at(key_BQ[0]), gathered(P, key_BQ[:1]))
    assert P.at(key_BQ)[1, :, :2].abs().max() == 0
    assert not P.at(key_BQ)[0].equal(P.at(key_BQ.flip(0))[0])


@pytest.mark.parametrize("mask", ["none", "per text", "per head"])
def test_which_keys_of_each_text_are_seen(block_bytes: int, mask: str) -> None:
    shape = {"none": None, "per text": (2, 1, 9, 9), "per head": (1, 3, 9, 9)}[mask]
    generator = torch.Generator().manual_seed(5)
    visible = Visibility(9, 9, None if shape is None else torch.rand(shape, generator=generator) > 0.4)
    key_BQ = torch.randint(-1, 10, (2, 9), generator=generator)
    found, seen = visible.at(key_BQ), visible.rows(0, 9).expand(2, -1, -1, -1)
    for b, h, q in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        key = int(key_BQ[b, q])
        assert bool(found[b, h, q]) == (0 <= key < 9 and bool(seen[b, h, q, key]))


@pytest.mark.parametrize("percent", [1, 50, 95, 100])
def test_how_many_keys_hold_a_share_of_a_row(block_bytes: int, percent: int) -> None:
    P = random_attention(9, 9)
    found = P.ask(Holding(percent))
    for b, h, q in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(9)).tolist():
        row = sorted(P.dense()[b, h, q].double().tolist(), reverse=True)
        held = [sum(row[:count]) >= (percent / 100 - 1e-6) * sum(row) for count in range(10)]
        assert found[b, h, q] == held.index(True)
    empty = DenseAttention(torch.zeros(1, 1, 2, 2), Visibility(2, 2))
    assert empty.ask(Holding(percent)).tolist() == [[[0, 0]]]


def test_mass_where_equal_keeps_its_questions_apart(block_bytes: int) -> None:
    P = random_attention(6, 6)
    labels = torch.tensor([[1, 2, 1, 1, 2, 3], [4, 4, 4, 5, 5, 4]])
    others = labels.flip(1)
    for queries, keys, gap in [(labels, labels, 1), (labels, labels, 0), (labels, others, 1), (labels, labels, 1)]:
        found = P.ask(EqualLabels(queries, keys, gap))
        for b, h, q in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(6)).tolist():
            same = [k for k in range(6) if k <= q - gap and queries[b, q] == keys[b, k]]
            assert found[b, h, q] == pytest.approx(sum(P.dense()[b, h, q, k].item() for k in same), abs=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9)])
def test_what_a_key_receives(block_bytes: int, queries: int, keys: int) -> None:
    P, share_BQ = random_attention(queries, keys), torch.rand(2, queries)
    given, mean = P.received(share_BQ), P.received()
    for b, h, k in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(keys)).tolist():
        column = P.dense()[b, h, :, k].tolist()
        assert mean[b, h, k] == pytest.approx(sum(column) / queries, abs=1e-6)
        expected = sum(share * weight for share, weight in zip(share_BQ[b].tolist(), column, strict=True))
        assert given[b, h, k] == pytest.approx(expected, abs=1e-6)


def test_entropy_of_rows_with_nothing_in_places(block_bytes: int) -> None:
    P = random_attention(9, 9)
    found, rest = P.entropy(), P.entropy(skip_key0=True)
    for b, h, q in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(9)).tolist():
        row = P.dense()[b, h, q].double().tolist()
        assert found[b, h, q] == pytest.approx(-sum(a * math.log(a) for a in row if a > 0), abs=1e-5)
        total = sum(row[1:])
        if total > 0:
            expected = -sum(a / total * math.log(a / total) for a in row[1:] if a > 0)
            assert rest[b, h, q] == pytest.approx(expected, abs=1e-5)


def test_nan_in_a_row_stays_to_be_seen() -> None:
    weights = random_attention(5, 5).dense().clone()
    weights[0, 1, 3, 2] = math.nan
    P = DenseAttention(weights, Visibility(5, 5))
    assert P.entropy()[0, 1, 3].isnan()
    assert P.entropy().isnan().sum() == P.ask(Holding(95)).isnan().sum() == 1


def test_topk_tells_a_visible_zero_from_a_hidden_one() -> None:
    weights, keys = random_attention(4, 4).topk(4)
    assert weights[0, 0].isnan().sum(-1).tolist() == [3, 2, 1, 0]
    row = dict(zip(keys[0, 0, 2].tolist(), weights[0, 0, 2].tolist(), strict=True))
    assert row[1] == 0.0  # seen, and nothing
    assert math.isnan(row[3])  # not seen


@pytest.mark.parametrize("k", [1, 2, 3])
def test_topk_without_the_first_key(k: int) -> None:
    P = random_attention(8, 8)
    asked = TopK(k, skip_key0=True)
    weights, keys = P.together([TopK(5), asked])[asked]  # beside a question for more
    for q in range(8):
        row = P.dense()[1, 1, q]
        expected = sorted((row[j].item() for j in range(1, q + 1)), reverse=True)[:k]
        found = [one for one in weights[1, 1, q].tolist() if not math.isnan(one)]
        assert found == pytest.approx(expected)
        assert [row[j].item() for j in keys[1, 1, q, : len(found)].tolist()] == found


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_what_a_key_receives_of_a_padded_texts_own_rows(engine: str) -> None:
    ids_BT, model = torch.randint(6, 30, (2, 24), generator=torch.Generator().manual_seed(0)), tiny_model("mistral")
    received: list[torch.Tensor] = []

    def hear(call: AttentionCall) -> None:
        for P in (call.P, UniformAttention(call.visible)):
            received.append(P.received(texts.mean_BT).expand(len(texts.ids_BT), -1, -1))

    texts = Texts(ids_BT, torch.tensor([24, 9]))
    listen(model, ids_BT, hear, engine=ENGINES[engine])
    beside, received = received, []
    texts = Texts(ids_BT[1:, :9], torch.tensor([9]))
    listen(model, texts.ids_BT, hear, engine=ENGINES[engine])
    for padded, alone in zip(beside, received, strict=True):
        assert_close(padded[1:, :, :9], alone, atol=1e-6, rtol=0)
        assert_close(padded.sum(-1), torch.ones_like(padded[..., 0]))
        assert padded[1, :, 9:].abs().max() == 0


def test_questions_of_equal_values_are_one_question() -> None:
    keys_BQ = torch.zeros(1, 3, dtype=torch.long)
    alike = [ask.Key(1), ask.TopK(2, (0,)), ask.At(keys_BQ), ask.Entropy()]
    again = [ask.Key(1), ask.TopK(2, (0,)), ask.At(keys_BQ), ask.Entropy(skip_key0=False)]
    others = [ask.Key(0), ask.TopK(2), ask.At(keys_BQ.clone()), ask.Entropy(skip_key0=True), ask.Back(1)]
    assert alike == again
    assert len({*alike, *again, *others}) == 9


def of_all(P: AttentionOperator, first: int) -> dict[str, ask.Question]:
    """A question of each kind about the queries from `first` on."""
    labels, share = torch.arange(P.keys)[None] % 3, torch.zeros(1, P.keys)
    share[:, first:] = 1 / (P.keys - first)
    groups = torch.where(share > 0, torch.arange(P.keys)[None] % 2, -1)
    row_alone = (ask.RowSum(), ask.Entropy(), ask.Entropy(True), ask.SumOfSquares(), ask.MaxWeight(), Holding(90))
    of_places = (ask.Distance(), ask.AbsoluteDistance(), ask.Back(1), ask.Key(2), Window(3), ask.At(labels + 1))
    of_keys = (EqualLabels(labels, labels, 1), ask.Features(torch.eye(P.keys)), TopK(3), ask.Received(share))
    tokens = (tuple(range(first, P.keys)),) * P.batch
    others = (ask.GroupMass(groups, labels), ask.Strongest(2, (1,), tokens, (tuple(range(P.keys)),) * P.batch))
    return {
        type(question).__name__ + str(place): question
        for place, question in enumerate(row_alone + of_places + of_keys + others)
    }


FIRST, WHOLE = 5, random_attention(9, 9)


@pytest.mark.parametrize("name", of_all(WHOLE, FIRST))
def test_the_last_queries_answer_as_the_rows_of_a_whole_matrix(name: str) -> None:
    """Before them rows are zeros; what has no axis of queries is of them alone."""
    question = of_all(WHOLE, FIRST)[name]
    rows = DenseAttention(WHOLE.dense()[:, :, FIRST:], Visibility(9 - FIRST, 9))
    P = LastQueries(rows, WHOLE.visible)
    answer, expected = P.ask(question), WHOLE.ask(question)
    if isinstance(question, ask.Strongest):
        for pair, other in zip(answer, expected, strict=True):
            assert_close(pair, other, equal_nan=True)
        return
    pairs = zip(*((answer, expected) if isinstance(question, TopK) else ([answer], [expected])), strict=True)
    for own, whole in pairs:
        if isinstance(question, ask.GroupMass | ask.Received):
            assert_close(own, whole)
        else:
            assert_close(own[:, :, FIRST:], whole[:, :, FIRST:], equal_nan=True)
            assert not own[:, :, :FIRST].any()
    assert_close(P.dense(), WHOLE.dense() * (torch.arange(9) >= FIRST)[:, None])
