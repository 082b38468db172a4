"""Uniform attention without a mask is read off running sums; the same as of its rows."""

import pytest
import torch
from torch.testing import assert_close

from attnscope.attention.operator import DenseAttention, UniformAttention
from attnscope.attention.questions import (
    At,
    Back,
    Distance,
    Entropy,
    EqualLabels,
    Holding,
    Key,
    MaxWeight,
    RowSum,
    SumOfSquares,
    Window,
)
from attnscope.attention.spec import Visibility
from attnscope.metrics.metrics import LENGTHS, METRICS, Texts, measure

VISIBLE = {
    "causal": Visibility(40, 40),
    "window": Visibility(40, 40, window=7),
    "fewer queries than keys": Visibility(25, 40),
    "all": Visibility(40, 40, causal=False),
    "a mask per head": Visibility(40, 40, torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(2)) > 0.3),
    "boolean mask": Visibility(40, 40, torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()),
}


@pytest.mark.parametrize("case", VISIBLE)
def test_it_answers_like_its_matrix(case: str) -> None:
    visible = VISIBLE[case]
    seen_QK = visible.rows(0, visible.queries)
    dense = DenseAttention(seen_QK / seen_QK.sum(-1, keepdim=True), visible)
    uniform = UniformAttention(visible)
    generator = torch.Generator().manual_seed(0)
    query_BQ, key_BK = (torch.randint(0, 5, (2, n), generator=generator) for n in (visible.queries, visible.keys))
    for gap in (0, 1, 2):
        equal = EqualLabels(query_BQ, key_BK, gap)
        assert_close(uniform.ask(equal), dense.ask(equal))
    for width in (1, 5, 32, 100):
        assert_close(uniform.ask(Window(width)), dense.ask(Window(width)))
    for features in (torch.randn(visible.keys, 3, generator=generator), torch.rand(1, visible.keys, 2)):
        assert_close(uniform @ features, dense @ features)
    for question in (RowSum(), Entropy(), SumOfSquares(), MaxWeight(), MaxWeight(skip_key0=True), Distance()):
        assert_close(uniform.ask(question), dense.ask(question), atol=1e-4, rtol=1e-5, equal_nan=True)
    share_BQ = torch.rand(2, visible.queries, generator=generator)
    for share in (None, share_BQ):
        assert_close(uniform.received(share).expand(2, -1, -1), dense.received(share).expand(2, -1, -1))
    key_BQ = torch.randint(-1, visible.keys, (2, visible.queries), generator=generator)  # of each text its own
    asked = (Back(0), Back(1), Key(0), At(key_BQ[:1]), At(key_BQ), Entropy(skip_key0=True), Holding(95), Holding(50))
    two = DenseAttention(dense.dense().expand(2, -1, -1, -1), visible)
    for question in asked:
        assert_close(uniform.ask(question).expand(2, -1, -1), two.ask(question), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["causal", "window"])
def test_every_metric_of_uniform_attention(case: str) -> None:
    visible = VISIBLE[case]
    texts = Texts(torch.randint(0, 6, (1, 40), generator=torch.Generator().manual_seed(1)), torch.tensor([40]))
    seen_QK, ids = visible.rows(0, 40), [*METRICS, *LENGTHS]
    expected = measure(DenseAttention(seen_QK / seen_QK.sum(-1, keepdim=True), visible), texts, ids)
    for name, value in measure(UniformAttention(visible), texts, ids).items():
        assert_close(value, expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", VISIBLE)
@pytest.mark.parametrize("sizes", [([10, 10, 5], [1, 9, 10, 10, 10]), ([25], [40]), ([1] * 25, [1] * 40)])
def test_which_cells_are_seen(case: str, sizes: tuple[list[int], list[int]]) -> None:
    visible = Visibility(25, 40, None, VISIBLE[case].causal, VISIBLE[case].window)
    seen_QK = visible.rows(0, 25)[0, 0]
    expected = [[bool(cell.any()) for cell in row.split(sizes[1], 1)] for row in seen_QK.split(sizes[0])]
    cells = visible.cells(*sizes)
    assert cells is not None
    assert cells.tolist() == expected
