"""Paired statistics: p against an exact count, intervals against simulated coverage."""

from itertools import product

import numpy as np
import pytest

from attnscope.study.statistics import FEWEST, paired


def draws(count, heads, seed=0, shift=0.0):
    return np.random.default_rng(seed).standard_normal((count, heads)) + shift


def test_p_is_the_share_of_sign_flips_that_reach_it():
    difference = draws(8, 3, shift=[0.0, 0.5, 2.0])

    def largest(signs):
        flipped = difference * np.array(signs)[:, None]
        return np.abs(flipped.mean(0) / (flipped.std(0, ddof=1) / np.sqrt(8))).max()

    every = np.array([largest(signs) for signs in product((-1, 1), repeat=8)])
    own = np.abs(difference.mean(0) / (difference.std(0, ddof=1) / np.sqrt(8)))
    exact = [(every >= one * (1 - 1e-12)).mean() for one in own]
    assert paired(difference, np.zeros_like(difference), flips=20_000).p == pytest.approx(exact, abs=0.01)


def test_t_effect_score_and_null_are_what_they_are_called():
    score, null = draws(40, 2, shift=1.0), draws(40, 2, seed=1)
    found, difference = paired(score, null), score - null
    assert found.score == pytest.approx(score.mean(0))
    assert found.null == pytest.approx(null.mean(0))
    assert found.effect == pytest.approx(difference.mean(0))
    assert found.t == pytest.approx(difference.mean(0) / (difference.std(0, ddof=1) / np.sqrt(40)))
    assert found.n.tolist() == [40, 40]


def test_family_wise_error_without_any_effect():
    named = sum((paired(draws(64, 24, seed), np.zeros((64, 24)), flips=400).p <= 0.05).any() for seed in range(200))
    assert named <= 20  # 10 expected, and 20 is above the 99.8th percentile of it


def test_intervals_cover_at_the_smallest_n():
    skewed = [np.random.default_rng(seed).gamma(2.0, 1.0, (FEWEST, 20)) for seed in range(100)]
    found = [paired(one, np.zeros_like(one), flips=1, draws=999) for one in skewed]
    held = np.mean([(one.low <= 2.0) & (one.high >= 2.0) for one in found])
    at_once = np.mean([((one.low_all <= 2.0) & (one.high_all >= 2.0)).all() for one in found])
    assert 0.93 <= held <= 0.97
    assert at_once >= 0.88


def test_few_sequences_have_no_interval():
    found = paired(draws(FEWEST - 1, 2), np.zeros((FEWEST - 1, 2)))
    assert np.isnan([found.low, found.high, found.low_all, found.high_all]).all()
    assert not np.isnan(found.p).any()


def test_a_head_that_cannot_show_it_is_null_and_counts_for_nobody():
    score = draws(64, 3, shift=0.4)
    score[5, 1] = np.nan
    found = paired(score, np.zeros_like(score))
    alone = paired(score[:, [0, 2]], np.zeros((64, 2)))
    for name in ("score", "effect", "low", "high_all", "p", "t"):
        assert np.isnan(getattr(found, name)[1])
        assert getattr(found, name)[[0, 2]] == pytest.approx(getattr(alone, name))
    assert found.n.tolist() == [64, 0, 64]


@pytest.mark.parametrize(("value", "p", "t"), [(0.0, 1.0, 0.0), (0.3, 1 / 2001, np.inf)])
def test_values_without_spread(value, p, t):
    found = paired(np.full((64, 1), value), np.zeros((64, 1)), flips=2000)
    assert (found.p[0], found.t[0], found.low[0], found.high_all[0]) == pytest.approx((p, t, value, value))


def test_no_head_at_all():
    found = paired(np.full((64, 2), np.nan), np.zeros((64, 2)))
    assert np.isnan(found.p).all()
    assert found.n.tolist() == [0, 0]


def test_the_same_seed_gives_the_same_bits():
    score = draws(64, 5)
    first, again = (paired(score, np.zeros_like(score), seed=3) for _ in range(2))
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in vars(first))
