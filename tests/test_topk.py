"""The k largest of every row, against torch.topk."""

import pytest
import torch

from attnscope.attention.rows import topk
from attnscope.attention.tiles import without_subnormals


@pytest.mark.parametrize("n", [1, 2, 16, 127, 129, 500, 1037, 2048, 5001])
@pytest.mark.parametrize("k", [1, 5, 9, 40, 3000])
def test_they_are_those_of_topk(n: int, k: int) -> None:
    rows = torch.randperm(6 * n).view(2, 3, n).float() - 3 * n  # no two are equal
    values, places = topk(rows, k)
    best = rows.topk(min(k, n))
    assert torch.equal(values, best.values)
    assert torch.equal(places, best.indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_exact_values(dtype: torch.dtype) -> None:
    rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    values, places = topk(rows, 7)
    assert torch.equal(values, rows.topk(7).values)
    assert torch.equal(values, rows.gather(-1, places))


def test_hidden_and_equal_entries() -> None:
    rows = torch.full((2, 700), float("-inf"))
    rows[:, 3], rows[:, 600] = -0.0, -2.0
    values, places = topk(rows, 3)
    assert values.tolist() == [[0.0, -2.0, float("-inf")]] * 2
    assert places[:, :2].tolist() == [[3, 600]] * 2
    same, places = topk(torch.zeros(1, 200), 4)
    assert same.tolist() == [[0.0] * 4]
    assert len(set(places[0].tolist())) == 4


@pytest.mark.parametrize("n", [10, 700])
def test_entries_of_0_keep_their_places_where_subnormal_numbers_count_as_0(n: int) -> None:
    """A place in the low bits of a float64 of 0 is a subnormal number."""
    rows = torch.zeros(2, n)
    rows[0, 0], rows[0, 7] = 0.7, 0.3
    with without_subnormals():
        values, places = topk(rows, 5)
    assert values.tolist() == [rows.sort(descending=True).values[row, :5].tolist() for row in (0, 1)]
    assert torch.equal(rows.gather(-1, places), values)
    assert [len(set(row)) for row in places.tolist()] == [5, 5]
