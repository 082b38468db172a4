"""Masks against a loop over positions, and against transformers' own rules."""

import pytest
import torch
from torch.testing import assert_close
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from attnscope.reference.masks import (
    additive_mask,
    causal_mask,
    chunked_mask,
    key_padding_mask,
    packed_mask,
    positions,
    sliding_window_mask,
)

NO_PADDING = torch.zeros(1, dtype=torch.long)
LENGTHS = [(7, 7, 0), (3, 7, 4), (1, 7, 6), (7, 7, 2), (3, 7, 0)]


def table(rule, n_queries, n_keys, offset, text=0):
    head = torch.tensor(0)
    queries, keys = torch.arange(offset, offset + n_queries), torch.arange(n_keys)
    return torch.tensor([[bool(rule(torch.tensor(text), head, i, j)) for j in keys] for i in queries])


@pytest.mark.parametrize(("n_queries", "n_keys", "offset"), LENGTHS)
def test_masks_equal_transformers_rules(n_queries, n_keys, offset):
    place = positions(n_queries, n_keys, offset=offset)
    size = (n_queries, n_keys, offset)
    assert_close(causal_mask(*place), table(causal_mask_function, *size))
    for width in (1, 2, 3, 7, 20):
        causal = causal_mask(*place)
        window = sliding_window_mask(*place, window=width)
        assert_close(causal & window, table(sliding_window_causal_mask_function(width), *size))
        chunk = chunked_mask(*place, chunk=width)
        assert_close(causal & chunk, table(chunked_causal_mask_function(width, NO_PADDING), *size))
        both_sides = sliding_window_mask(*place, window=width + 1)
        assert_close(both_sides, table(sliding_window_bidirectional_mask_function(width), *size))


def test_a_cached_query_sees_what_the_last_row_of_the_full_mask_sees():
    full = causal_mask(*positions(9)) & sliding_window_mask(*positions(9), window=4)
    for n_queries in range(1, 10):
        place = positions(n_queries, 9)
        assert_close(causal_mask(*place) & sliding_window_mask(*place, window=4), full[9 - n_queries :])


def test_chunks_start_at_the_first_real_token_of_each_text():
    padding_B = torch.tensor([0, 1])
    place = torch.arange(6)[None] - padding_B[:, None]
    mask_BQK = chunked_mask(place, place, chunk=2)
    rule = chunked_causal_mask_function(2, padding_B)
    for b in range(2):
        assert_close(mask_BQK[b] & causal_mask(*positions(6)), table(rule, 6, 6, 0, text=b))


def test_padding_and_packing_combine_with_the_causal_mask():
    real = torch.tensor([[0, 1, 1], [1, 1, 0]])
    mask = causal_mask(*positions(3)) & key_padding_mask(real)
    assert mask.shape == (2, 1, 3, 3)
    for b in range(2):
        for i in range(3):
            assert [bool(x) for x in mask[b, 0, i]] == [j <= i and bool(real[b, j]) for j in range(3)]
    ids = [0, 0, 1, 1, 1, 2]
    packed = packed_mask(torch.tensor([ids]))[0, 0]
    assert [[bool(x) for x in row] for row in packed] == [[a == b for b in ids] for a in ids]


def test_additive_mask_is_zero_where_it_attends():
    mask = torch.tensor([True, False])
    assert_close(additive_mask(mask), torch.tensor([0.0, torch.finfo(torch.float32).min]))
    half = additive_mask(mask, torch.float16)
    assert half.dtype == torch.float16
    assert half[1] == torch.finfo(torch.float16).min
    assert additive_mask(mask, hidden=-torch.inf)[1] == -torch.inf


@pytest.mark.parametrize(("mask", "name"), [(sliding_window_mask, "window"), (chunked_mask, "chunk")])
def test_a_width_below_one_is_refused(mask, name):
    with pytest.raises(ValueError, match=f"{name} of at least 1, got 0"):
        mask(*positions(3), 0)
