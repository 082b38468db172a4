"""Statistics over texts: p against an exact count, intervals against simulated coverage."""

import importlib
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from attnscope.cli.study_tables import interval_notes
from attnscope.inputs.prompt import from_text
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from attnscope.studies.intervals import FEWEST, SHARE, fewest_for_p
from attnscope.studies.statistics import beside_random, effect_columns, means, paired


def draws(count, heads, seed=0, shift=0.0):
    return np.random.default_rng(seed).standard_normal((count, heads)) + shift


def holds(low, high, mean):
    """An open end holds whatever lies beyond it."""
    return ~(low > mean) & ~(high < mean)


def test_p_of_symmetry_is_the_share_of_sign_flips_that_reach_it():
    difference = draws(8, 3, shift=[0.0, 0.5, 2.0])

    def largest(signs):
        flipped = difference * np.array(signs)[:, None]
        return np.abs(flipped.mean(0) / (flipped.std(0, ddof=1) / np.sqrt(8))).max()

    every = np.array([largest(signs) for signs in product((-1, 1), repeat=8)])
    own = np.abs(difference.mean(0) / (difference.std(0, ddof=1) / np.sqrt(8)))
    exact = [(every >= one * (1 - 1e-12)).mean() for one in own]
    assert paired(difference, np.zeros_like(difference), flips=20_000).p_symmetric == pytest.approx(exact, abs=0.01)


def test_t_effect_score_and_null_are_what_they_are_called():
    score, null = draws(40, 2, shift=1.0), draws(40, 2, seed=1)
    found, difference = paired(score, null), score - null
    assert found.score == pytest.approx(score.mean(0))
    assert found.null == pytest.approx(null.mean(0))
    assert found.effect == pytest.approx(difference.mean(0))
    assert found.t == pytest.approx(difference.mean(0) / (difference.std(0, ddof=1) / np.sqrt(40)))
    assert found.n.tolist() == [40, 40]


@pytest.mark.parametrize(("runs", "most"), [(60, 8), pytest.param(200, 20, marks=pytest.mark.e2e)])
def test_family_wise_error_of_symmetric_differences(runs, most):
    """One in twenty is expected, and `most` is above the 99th percentile of it."""
    named = sum(
        (paired(draws(64, 24, seed), np.zeros((64, 24)), flips=200, draws=9).p_symmetric <= 0.05).any()
        for seed in range(runs)
    )
    assert named <= most


def test_intervals_cover_at_the_smallest_n():
    skewed = [np.random.default_rng(seed).gamma(2.0, 1.0, (FEWEST, 20)) for seed in range(100)]
    found = [paired(one, np.zeros_like(one), flips=1, draws=999) for one in skewed]
    held = np.mean([holds(one.low, one.high, 2.0) for one in found])
    at_once = np.mean([holds(one.low_all, one.high_all, 2.0).all() for one in found])
    assert 0.93 <= held <= 0.97
    assert at_once >= 0.93


def test_few_sequences_have_no_interval():
    found = paired(draws(FEWEST - 1, 2), np.zeros((FEWEST - 1, 2)))
    assert np.isnan([found.low, found.high, found.low_all, found.high_all, found.p]).all()
    assert not np.isnan(found.p_symmetric).any()


def test_a_head_that_cannot_show_it_is_null_and_counts_for_nobody():
    score = draws(64, 3, shift=0.4)
    score[5, 1] = np.nan
    found = paired(score, np.zeros_like(score))
    alone = paired(score[:, [0, 2]], np.zeros((64, 2)))
    for name in ("score", "effect", "low", "high_all", "p", "p_symmetric", "t"):
        assert np.isnan(getattr(found, name)[1])
        assert getattr(found, name)[[0, 2]] == pytest.approx(getattr(alone, name))
    assert found.n.tolist() == [64, 0, 64]


@pytest.mark.parametrize(("value", "p", "t"), [(0.0, 1.0, 0.0), (0.3, 1 / 2001, np.inf)])
def test_values_without_spread(value, p, t):
    same = np.full((64, 1), value)
    found = paired(same, np.zeros((64, 1)), flips=2000)
    assert (found.p_symmetric[0], found.t[0], found.effect[0]) == pytest.approx((p, t, value))
    assert np.isnan([found.low[0], found.high[0], found.low_all[0], found.high_all[0], found.p[0]]).all()
    beside = paired(np.hstack([same, draws(64, 3)]), np.zeros((64, 4)))
    alone = paired(draws(64, 3), np.zeros((64, 3)))
    assert beside.high_all[1:] == pytest.approx(alone.high_all, rel=0.05)  # the margin knows of one head more


def test_equal_masses_have_the_interval_of_an_event_that_none_of_them_showed():
    """Of 64 sequences an event of chance 0.0560 is absent in 2.5 %: (1 - 0.0560)^64 = 0.025. Clopper & Pearson 1934.

    The bet on it has three quarters of the weight, and the others win next to nothing.
    """
    found = paired(np.zeros((64, 24)), 0.0, within=SHARE)
    assert (1 - found.high) ** 64 == pytest.approx(np.full(24, 0.75 * 0.05 / 2), rel=0.05)
    assert (1 - found.high_all) ** 64 == pytest.approx(np.full(24, 0.75 * 0.05 / 2 / 24), rel=0.05)
    assert found.low_all == pytest.approx(np.zeros(24))
    varying = paired(np.zeros((64, 24)), np.zeros((64, 24)), within=SHARE)
    assert varying.low_all == pytest.approx(-varying.high_all)
    assert (1 - varying.high_all) ** 64 == pytest.approx((1 - found.high_all) ** 64)


def planted(generator):
    """64 sequences of four heads that a bound must not lose."""
    kinds = [(0.5, 0.06), (0.5, 0.2), (0.9, 0.06), (0.9, 0.2)]
    return np.stack([np.clip(generator.normal(mean, sd, 64), 0, 1) for mean, sd in kinds], 1)


def silent(generator, heads):
    return np.exp(generator.normal(-25, 3, (64, heads)))


def once(generator, heads):
    """0.5 in one sequence, and nothing else but what a softmax leaves."""
    found = 1e-9 * generator.random((64, heads))
    found[generator.integers(0, 64, heads), np.arange(heads)] = 0.5
    return found


@pytest.mark.parametrize("nearly_nothing", [silent, once])
@pytest.mark.parametrize("heads", [24, 144, 1000])
def test_heads_that_give_next_to_nothing_take_no_bound_from_others(nearly_nothing, heads):
    generator = np.random.default_rng(heads)
    four = planted(generator)
    every = np.hstack([four, nearly_nothing(generator, heads - 4)])
    alone, found = (paired(one, 0.0, flips=1, within=SHARE).low_all[:4] for one in (four, every))
    assert (found >= 0.9 * alone).all()


RATES = {"one in ten": 0.1, "one in five": 0.2, "one in twenty": 0.05}


DEFAULT = [("one in ten", 24, FEWEST), ("one in five", 24, 64), ("one in twenty", 144, FEWEST)]


@pytest.mark.parametrize(
    ("rate", "heads", "count", "runs"),
    [
        *((*case, 20) for case in DEFAULT),
        *(pytest.param(*case, 100, marks=pytest.mark.e2e) for case in product(RATES, (24, 144), (FEWEST, 64))),
    ],
)
def test_intervals_of_rates_hold_for_all_heads_at_once(rate, heads, count, runs):
    generator, held = np.random.default_rng(0), []
    for _ in range(runs):
        yes = (generator.random((count, heads)) < RATES[rate]).astype(float)
        found = paired(yes, 0.0, flips=1, draws=499, within=SHARE)
        held.append(((found.low_all <= RATES[rate]) & (RATES[rate] <= found.high_all)).all())
    assert np.mean(held) >= 0.93


def test_no_head_at_all():
    found = paired(np.full((64, 2), np.nan), np.zeros((64, 2)))
    assert np.isnan(found.p).all()
    assert found.n.tolist() == [0, 0]


def test_the_same_seed_gives_the_same_bits():
    score = draws(64, 5)
    first, again = (paired(score, np.zeros_like(score), seed=3) for _ in range(2))
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in vars(first))


def test_means_without_nulls_are_the_effects_against_nothing():
    values = draws(64, 5, shift=0.3)
    found, one = means(values, seed=3), paired(values, np.zeros_like(values), seed=3, flips=1)
    assert found.mean == pytest.approx(values.mean(0))
    assert found.n.tolist() == [64] * 5
    half = means(values[:, :1], seed=3)
    assert (half.low[0], half.high[0]) == pytest.approx((found.low[0], found.high[0]))  # whatever stands beside it
    assert found.high - found.low == pytest.approx(one.high - one.low, rel=0.05)  # other draws: flips came before


def test_a_null_leaves_its_text_out_of_its_own_head_alone():
    values = draws(64, 4)
    values[:3, 1] = values[40:, 3] = np.nan
    found = means(values)
    alone = means(values[3:, 1:2])
    assert found.n.tolist() == [64, 61, 64, 40]
    assert found.mean == pytest.approx(np.nanmean(values, 0))
    assert (found.low[1], found.high[1]) == pytest.approx((alone.low[0], alone.high[0]))
    assert means(values[:, [0, 2]]).low == pytest.approx(found.low[[0, 2]])


def test_means_of_few_or_no_texts():
    values = draws(40, 2)
    values[FEWEST - 1 :, 0] = values[:, 1] = np.nan
    found = means(values)
    assert found.n.tolist() == [FEWEST - 1, 0]
    assert found.mean[0] == pytest.approx(values[: FEWEST - 1, 0].mean())
    assert np.isnan([*found.low, *found.high, found.mean[1]]).all()


def sinks(demo, texts):
    """The sink of every head in every text, (texts, heads)."""
    prompts = [from_text(demo.tokenizer, text, max_tokens=256, truncate="right") for text in texts]
    order = sorted(prompts, key=len)
    batches = [order[start : start + 16] for start in range(0, len(order), 16)]
    seen = [one for batch in batches for one in observe(demo, batch, Request(metrics=("sink",)))]
    return np.stack([one.columns.scores["sink"].value for one in seen])


def covered(population_SN, draws, samples=2000):
    """How often intervals over 32 texts hold the mean of all, head by head, in so many samples."""
    places = np.random.default_rng(0).integers(0, len(population_SN), (samples, FEWEST))
    true_N, held = population_SN.mean(0), []
    for seed in range(20):  # samples that share a seed share their draws, and are taken at once
        sample_SMN = population_SN[places[seed::20].T]
        found = means(sample_SMN.reshape(FEWEST, -1), seed=seed, draws=draws, within=SHARE)
        low_MN, high_MN = (end.reshape(sample_SMN.shape[1:]) for end in (found.low, found.high))
        held.append((low_MN <= true_N) & (true_N <= high_MN))
    return np.concatenate(held).mean(0)


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("demo_corpus")


@pytest.mark.parametrize(
    ("count", "samples", "least"), [(60, 400, 0.92), pytest.param(150, 2000, 0.93, marks=pytest.mark.e2e)]
)
def test_intervals_over_texts_cover_their_level(demo, corpus, count, samples, least):
    texts = list(corpus._made_documents(random.Random(0), count=count))
    found = covered(sinks(demo, texts), draws=499, samples=samples)
    assert found.mean() >= 0.95
    assert found.min() >= least  # 499 draws are few: the next test has four times as many


@pytest.mark.slow
def test_intervals_over_written_and_made_texts_cover_their_level_head_by_head(demo, corpus):
    read = corpus.read_corpus(seed=0)
    for texts in (read.made[:150], read.held_out[:150], read.train[:150]):
        found = covered(sinks(demo, texts), draws=2000)
        assert (found >= 0.93).all()


SKEWED = {
    "normal": lambda g, s, n: g.normal(0, 1, (s, n)),
    "lognormal": lambda g, s, n: (g.lognormal(0, 1, (s, n)) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e),
    "one in ten": lambda g, s, n: ((g.random((s, n)) < 0.1) - 0.1) / 0.3,
    "both sides": lambda g, s, n: np.where(g.random((s, n)) < 0.1, g.normal(0, 3, (s, n)), 0.01 * g.random((s, n))),
}


def excludes_0(result):
    low, high = (np.array(result[end]) for end in ("low_all", "high_all"))
    return (low > 0) | (high < 0)


@pytest.mark.parametrize("count", [31, 32, 63, 64])
@pytest.mark.parametrize("heads", [5, 50])
def test_p_is_at_most_5_percent_exactly_where_the_interval_of_all_heads_excludes_0(count, heads):
    open_ends = 0
    for seed, (kind, made) in enumerate(SKEWED.items()):
        generator = np.random.default_rng([seed, count, heads])
        effect_SN = made(generator, count, heads) + generator.choice([0, 0.3, 0.6, -0.6], heads)
        effect_SN[:, -1] = 0.5
        found = effect_columns(effect_SN)
        assert np.isnan(found["p"][-1])  # equal values have none
        if count < fewest_for_p(heads):
            assert np.isnan(found["p"]).all(), kind
            continue
        assert np.array_equal(found["p"] <= 0.05, excludes_0(found)), kind
        ends = np.isnan([found["low_all"], found["high_all"]])
        assert np.array_equal(np.isnan(found["p"]), np.where(found["effect"] > 0, *ends)), kind
        open_ends += ends[:, :-1].sum()
    assert open_ends > 0 or count < fewest_for_p(heads)


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("count", [32, 64])
def test_p_of_masses_is_read_off_their_bound(count, varies):
    for seed in range(5):
        generator = np.random.default_rng([seed, count])
        rate = generator.uniform(0.05, 0.6, 30)
        score_SN = np.where(generator.random((count, 30)) < rate, generator.beta(8, 2, (count, 30)), 0.003)
        null = generator.beta(1, 30, (count, 30)) if varies else generator.uniform(0.01, 0.3, 30)
        found = vars(paired(score_SN, null, flips=1, within=SHARE))
        p_N = np.nan_to_num(found["p"], nan=1)  # the few that are resampled have none at 32
        resampled_N = np.isnan(found["p"])
        assert resampled_N.sum() < 15
        assert np.array_equal(p_N[~resampled_N] <= 0.05, excludes_0(found)[~resampled_N])
        assert 0 < (p_N <= 0.05).sum() < 30


def test_the_columns_of_a_study():
    columns = "effect low high low_all high_all p p_symmetric positive p_positive median median_low median_high n"
    effect_SN = draws(64, 4, shift=[0, 0.2, 0.5, 2.0])
    found, one = effect_columns(effect_SN), paired(effect_SN, 0.0)
    assert list(found) == columns.split()
    for name in columns.split()[:7]:
        assert found[name] == pytest.approx(getattr(one, name)), name
    assert found["positive"] == pytest.approx((effect_SN > 0).mean(0))
    assert found["median"] == pytest.approx(np.median(effect_SN, 0))


def test_an_effect_that_some_texts_lack_is_read_over_its_own():
    effect_SN = draws(80, 5, shift=[0, 0.5, 0.5, 0.5, 0])
    effect_SN[70:, 1] = effect_SN[:10, 2] = effect_SN[31:, 3] = effect_SN[:, 4] = np.nan
    found = effect_columns(effect_SN)
    assert found["n"].tolist() == [80, 70, 70, 31, 0]
    assert found["effect"][:4] == pytest.approx(np.nanmean(effect_SN[:, :4], 0))
    alone = effect_columns(effect_SN[:70, [1]])
    assert found["high"][1] - found["low"][1] == pytest.approx(alone["high"][0] - alone["low"][0], rel=0.05)
    assert (found["low_all"][:3] < found["low"][:3]).all()
    assert (found["p"][1:3] <= 0.05).all()
    assert np.isnan([found["p"][3:], found["low"][3:], found["high_all"][3:], found["p_symmetric"][3:]]).all()
    assert np.isfinite(found["p_positive"][3])


def test_p_of_positive_effects_is_exact_and_for_all_heads():
    signs = np.array([*[[1, 1, 1, 0]] * 5, [1, 0, -1, 0], [1, -1, -1, 0]])
    found = effect_columns(signs.astype(float))
    tosses = [np.abs(np.sum(one)) for one in product((-1, 1), repeat=7)]
    exact = [np.mean([toss >= least for toss in tosses]) for least in (7, 3)]
    six = np.mean([np.abs(np.sum(one)) >= 4 for one in product((-1, 1), repeat=6)])
    assert found["positive"] == pytest.approx([1, 5 / 7, 5 / 7, 0])
    holm = [4 * exact[0], 3 * six, max(3 * six, 2 * exact[1]), 1.0]
    assert found["p_positive"] == pytest.approx(np.minimum(holm, 1))


def test_p_beside_random_sets_is_the_place_among_all_of_them():
    values = np.array([3.0, 1.0, 2.0, 2.0])
    beside = [beside_random(value, np.delete(values, place)) for place, value in enumerate(values)]
    assert [p for *_, p in beside] == [1 / 4, 1, 3 / 4, 3 / 4]  # never 0, and equal ones count
    assert beside[0][:2] == pytest.approx((1.01, 2.0))
    assert np.isnan(beside_random(3.0, np.empty(0))).all()


def test_medians_lie_between_order_statistics():
    """Of 32 the 10th smallest and largest: P(Binomial(32, 1/2) < 10) is 0.0100, and 0.0251 for 11."""
    values = np.arange(1.0, 33)[:, None]
    found = effect_columns(np.hstack([np.where(values <= count, values, np.nan) for count in (32, 6, 5)]))
    assert found["median"].tolist() == [16.5, 3.5, 3]
    assert found["median_low"][:2].tolist() == [10, 1]
    assert found["median_high"][:2].tolist() == [23, 6]
    assert np.isnan([found["median_low"][2], found["median_high"][2]]).all()


@pytest.mark.parametrize("kind", ["lognormal", "one in ten"])
def test_p_keeps_its_level_under_skew_and_finds_four_heads_of_5_standard_deviations(kind):
    """The p of symmetry names a head in about half of these families."""
    named, symmetric, found = [], [], []
    for seed in range(25):
        effect_SN = SKEWED[kind](np.random.default_rng(seed), 32, 24)
        one = paired(effect_SN, 0.0, flips=200, draws=499)
        named.append((one.p <= 0.05).any())
        symmetric.append((one.p_symmetric <= 0.05).any())
        effect_SN[:, :4] += 5
        found.append((paired(effect_SN, 0.0, flips=1, draws=499).p[:4] <= 0.05).mean())
    assert np.mean(named) <= 0.16
    assert np.mean(symmetric) >= 0.4
    assert np.mean(found) >= 0.95


def test_an_end_that_few_sequences_do_not_show_is_open():
    generator = np.random.default_rng(0)
    bulk = 0.1 * generator.standard_normal((32, 4)) + 1
    bulk[3, 0], bulk[4, 1] = 5, -5
    bulk[5, 2], bulk[6, 2] = 6, -4
    found = effect_columns(bulk)
    for low, high in (("low", "high"), ("low_all", "high_all")):
        assert np.isnan(found[low]).tolist() == [False, True, True, False]
        assert np.isnan(found[high]).tolist() == [True, False, True, False]
    assert np.isnan(found["p"]).tolist() == [False, True, True, False]
    assert np.isfinite([found["median_low"], found["median_high"]]).all()


def test_lines_beside_a_table_count_open_ends_and_say_why_there_is_no_p():
    effect_SN = draws(40, 50)
    effect_SN[3, 2] = 90
    opened, no_p = interval_notes(effect_columns(effect_SN), "pairs")
    assert opened.startswith("1 of 50 effects has an open end (-): too few pairs carry")
    assert no_p == "no p under 64 pairs: it is of all 50 effects at once"
    assert interval_notes(effect_columns(effect_SN[:, 3:20])) == interval_notes(effect_columns(effect_SN[:1])) == []
    assert interval_notes(effect_columns(effect_SN[:31])) == ["no intervals: they need 32 texts"]
