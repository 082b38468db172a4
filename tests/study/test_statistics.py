"""Statistics over texts: p against an exact count, intervals against simulated coverage."""

import importlib
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from attnscope.observe import Request, observe
from attnscope.study.statistics import FEWEST, means, paired
from attnscope.text.prompt import from_text


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


@pytest.mark.parametrize(("runs", "most"), [(60, 8), pytest.param(200, 20, marks=pytest.mark.e2e)])
def test_family_wise_error_without_any_effect(runs, most):
    """One in twenty is expected, and `most` is above the 99th percentile of it."""
    named = sum(
        (paired(draws(64, 24, seed), np.zeros((64, 24)), flips=200, draws=9).p <= 0.05).any() for seed in range(runs)
    )
    assert named <= most


def test_intervals_cover_at_the_smallest_n():
    skewed = [np.random.default_rng(seed).gamma(2.0, 1.0, (FEWEST, 20)) for seed in range(100)]
    found = [paired(one, np.zeros_like(one), flips=1, draws=999) for one in skewed]
    held = np.mean([(one.low <= 2.0) & (one.high >= 2.0) for one in found])
    at_once = np.mean([((one.low_all <= 2.0) & (one.high_all >= 2.0)).all() for one in found])
    assert 0.93 <= held <= 0.97
    assert at_once >= 0.93


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
    same = np.full((64, 1), value)
    found = paired(same, np.zeros((64, 1)), flips=2000, span=0.0)
    assert (found.p[0], found.t[0], found.low[0], found.high_all[0]) == pytest.approx((p, t, value, value))
    beside = paired(np.hstack([same, draws(64, 3)]), np.zeros((64, 4)), span=0.0)
    alone = paired(draws(64, 3), np.zeros((64, 3)), span=0.0)
    assert beside.high_all[1:] == pytest.approx(alone.high_all, rel=0.05)  # the margin knows of one head more


def test_equal_masses_have_the_interval_of_an_event_that_none_of_them_showed():
    """Of 64 sequences an event of chance 0.0560 is absent in 2.5 %: (1 - 0.0560)^64 = 0.025. Clopper & Pearson 1934."""
    found = paired(np.zeros((64, 24)), np.zeros((64, 24)))
    assert (1 - found.high) ** 64 == pytest.approx(np.full(24, 0.05 / 2))
    assert (1 - found.high_all) ** 64 == pytest.approx(np.full(24, 0.05 / 2 / 24))
    assert found.low_all == pytest.approx(-found.high_all)


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
    alone, found = (paired(one, np.zeros_like(one), flips=1).low_all[:4] for one in (four, every))
    assert (found >= 0.9 * alone).all()


RATES = {"one in ten": 0.1, "one in five": 0.2, "one in twenty": 0.05}


DEFAULT = [("one in ten", 24, FEWEST), ("one in five", 24, 64), ("one in twenty", 144, FEWEST)]


@pytest.mark.parametrize(
    ("rate", "heads", "count", "runs"),
    [
        *((*case, 50) for case in DEFAULT),
        *(pytest.param(*case, 100, marks=pytest.mark.e2e) for case in product(RATES, (24, 144), (FEWEST, 64))),
    ],
)
def test_intervals_of_rates_hold_for_all_heads_at_once(rate, heads, count, runs):
    generator, held = np.random.default_rng(0), []
    for _ in range(runs):
        yes = (generator.random((count, heads)) < RATES[rate]).astype(float)
        found = paired(yes, np.zeros_like(yes), flips=1, draws=499)
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
        found = means(sample_SMN.reshape(FEWEST, -1), seed=seed, draws=draws)
        low_MN, high_MN = (end.reshape(sample_SMN.shape[1:]) for end in (found.low, found.high))
        held.append((low_MN <= true_N) & (true_N <= high_MN))
    return np.concatenate(held).mean(0)


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("demo_corpus")


@pytest.mark.parametrize(
    ("count", "samples", "least", "most"),
    [(60, 400, 0.90, 0.99), pytest.param(150, 2000, 0.92, 0.98, marks=pytest.mark.e2e)],
)
def test_intervals_over_texts_cover_their_level(demo, corpus, count, samples, least, most):
    texts = list(corpus._made_documents(random.Random(0), count=count))
    found = covered(sinks(demo, texts), draws=499, samples=samples)
    assert 0.93 <= found.mean() <= 0.97
    assert found.min() >= least  # 499 draws are few: the next test has four times as many
    assert found.max() <= most


@pytest.mark.slow
def test_intervals_over_written_and_made_texts_cover_their_level_head_by_head(demo, corpus):
    read = corpus.read_corpus(seed=0)
    for texts in (read.made[:150], read.held_out[:150], read.train[:150]):
        found = covered(sinks(demo, texts), draws=2000)
        assert ((found >= 0.93) & (found <= 0.97)).all()
        assert 0.93 <= found.mean() <= 0.97
