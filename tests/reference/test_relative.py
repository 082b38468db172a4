"""T5's buckets of distances: by the paper's words, against transformers, and their bias against a loop.

Shapes: H head, Q query, K key, N bucket.
"""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

from attnscope.reference.masks import positions
from attnscope.reference.positions import buckets, relative_bias

DISTANCES = torch.arange(-600, 601)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000), (6, 17)])
def test_buckets_equal_transformers(n_buckets, max_distance, both_ways):
    expected = T5Attention._relative_position_bucket(DISTANCES, both_ways, n_buckets, max_distance)
    assert torch.equal(buckets(DISTANCES, n_buckets, max_distance, both_ways), expected)


def test_buckets_of_the_paper():
    """32 buckets: back alone 16 for single distances and 16 up to 128; both ways half of each, for either direction."""
    back = buckets(DISTANCES, 32, 128, both_ways=False)
    assert back[DISTANCES >= 0].eq(0).all()
    assert [int(back[-d == DISTANCES]) for d in (1, 15, 16, 127, 128, 600)] == [1, 15, 16, 31, 31, 31]
    both = buckets(DISTANCES, 32, 128, both_ways=True)
    assert [int(both[d == DISTANCES]) for d in (0, -1, -7, -8, -600)] == [0, 1, 7, 8, 15]
    assert [int(both[d == DISTANCES]) for d in (1, 7, 8, 600)] == [17, 23, 24, 31]


@pytest.mark.parametrize("both_ways", [True, False])
def test_the_bias_is_the_tables_entry_of_every_pair(both_ways):
    table_NH = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    bias_HQK = relative_bias(table_NH, *positions(5, 9), max_distance=12, both_ways=both_ways)
    assert bias_HQK.shape == (3, 5, 9)
    for i in range(5):
        for j in range(9):
            bucket = int(buckets(torch.tensor(j - (i + 4)), 8, 12, both_ways))
            assert_close(bias_HQK[:, i, j], table_NH[bucket])
