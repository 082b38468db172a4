"""Shares over pairs: the ratio of two means, and an interval of it that the correlation of both goes into."""

import numpy as np
import pytest

from attnscope.studies.intervals import FEWEST
from attnscope.studies.statistics import means, ratios


def correlated(correlation, away, pairs, runs, seed=0):
    """Effects and gaps of spread 1 (S, N): a share of 0.5 of a gap that is so many standard errors from 0."""
    generator = np.random.default_rng(seed)
    gap, other = generator.standard_normal((2, pairs, runs))
    mean = away / np.sqrt(pairs)
    return 0.5 * mean + correlation * gap + np.sqrt(1 - correlation**2) * other, mean + gap


def test_a_ratio_is_of_the_means_and_has_no_interval_of_few_pairs():
    found = ratios(np.array([[1.0, 0.0, np.nan], [2.0, 6.0, 1.0]]), np.array([1.0, 5.0]))
    assert found.ratio == pytest.approx([0.5, 1.0, np.nan], nan_ok=True)  # means 1.5 and 3 of 3, where ratios mean 0.7
    assert np.isnan([found.low, found.high]).all()
    few = FEWEST - 1
    assert np.isnan(ratios(*correlated(0.0, 20, few, 1)).low).all()
    assert np.isnan(ratios(np.ones((4, 1)), np.array([1.0, -1.0, 1.0, -1.0])).ratio).all()  # of nothing


def test_at_both_ends_what_is_left_is_as_many_standard_errors_from_0_as_resamples_reach():
    """By a loop: t of resampled part - ratio whole, its quantiles, and t of the mean of part - end whole."""
    part_SN, whole_SN = correlated(-0.9, 6, 40, 3)
    found = ratios(part_SN, whole_SN, draws=400, seed=3)

    def t(rest):
        return rest.mean() / (rest.std() / np.sqrt(len(rest) - 1))

    times = np.random.default_rng(3).multinomial(40, np.full(40, 1 / 40), 400)
    for place in range(3):
        part, whole = part_SN[:, place], whole_SN[:, place]
        rest = part - part.mean() / whole.mean() * whole
        every = np.sort([t(np.repeat(rest, time)) for time in times])
        either = np.sort(np.abs(every))[380]
        above, below = max(either, every[389]), max(either, -every[10])
        assert t(part - found.low[place] * whole) == pytest.approx(above, rel=0.01)
        assert t(part - found.high[place] * whole) == pytest.approx(-below, rel=0.01)


def test_a_part_that_goes_with_the_whole_has_a_narrow_share():
    """A whole of 35 +- 10 of which every pair loses 99 to 101 %: the interval of the mean part is 20 % wide."""
    generator = np.random.default_rng(0)
    whole = generator.normal(35, 10, 48)
    part = (whole * generator.uniform(0.99, 1.01, 48))[:, None]
    found, alone = ratios(part, whole), means(part)
    assert found.low[0] < found.ratio[0] < found.high[0]
    assert found.high[0] - found.low[0] < 0.004 < 0.1 < (alone.high[0] - alone.low[0]) / whole.mean()


@pytest.mark.parametrize(
    ("correlation", "away", "runs"),
    [
        (-0.9, 5, 400),
        *(
            pytest.param(correlation, away, 2_000, marks=pytest.mark.e2e)
            for correlation in (0.9, 0.0, -0.9)
            for away in (2, 5, 20)
        ),
    ],
)
def test_intervals_cover_the_share(correlation, away, runs):
    """0.93 is asked, of the runs in which there is a share; scripts/shares.py has more of them, and other shapes. The
    interval of the mean part over the mean whole has 0.84 where one falls as the other rises."""
    part_SN, whole_SN = correlated(correlation, away, 32, runs)
    found, alone = ratios(part_SN, whole_SN, draws=400), means(part_SN, draws=400)
    given = ~np.isnan(found.ratio)
    held = ~(found.low > 0.5) & ~(found.high < 0.5)
    assert held[given].mean() >= 0.93
    assert given.mean() > (0.35 if away == 2 else 0.98)
    low, high = np.sort([alone.low / whole_SN.mean(0), alone.high / whole_SN.mean(0)], axis=0)
    before = ((low <= 0.5) & (high >= 0.5)).mean()
    assert before < 0.88 or correlation >= 0


def test_a_whole_that_may_be_0_has_no_shares():
    """Each column has its own whole, and the others' do not matter."""
    part_SN, whole_SN = correlated(0.5, 8, 64, 3)
    whole_SN[:, 1] -= whole_SN[:, 1].mean() - 0.01
    found = ratios(part_SN, whole_SN)
    assert np.isnan(found.ratio).tolist() == np.isnan(found.low).tolist() == [False, True, False]
    for place in (0, 2):
        alone = ratios(part_SN[:, [place]], whole_SN[:, place])
        of_all = [found.ratio[place], found.low[place], found.high[place]]
        assert np.ravel(alone) == pytest.approx(of_all)


def test_signs_turn_shares_and_ends_round():
    part_SN, whole_SN = correlated(0.5, 8, 64, 2)
    whole, found = whole_SN[:, 0], ratios(part_SN, whole_SN[:, 0])
    both, part = ratios(-part_SN, -whole), ratios(-part_SN, whole)
    assert np.stack(both) == pytest.approx(np.stack(found))
    assert np.stack(part) == pytest.approx(-np.stack([found.ratio, found.high, found.low]))


def test_an_end_that_few_pairs_decide_is_open():
    """Two of 48 pairs lose all, the others nothing: larger ones may be missing above."""
    generator = np.random.default_rng(0)
    whole, part = generator.normal(10, 1, 48), generator.normal(0, 0.01, 48)
    part[:2] = whole[:2]
    found = ratios(part[:, None], whole)
    assert found.ratio[0] == pytest.approx(2 / 48, abs=0.01)
    assert np.isnan(found.high[0])
    nothing = ratios(np.zeros((48, 1)), whole)
    assert nothing.ratio[0] == 0
    assert np.isnan([nothing.low[0], nothing.high[0]]).all()
