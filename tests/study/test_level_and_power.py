"""What docs/statistics.md counts: a cell of each claim, by the rows of scripts/intervals.py and scripts/p_values.py."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from distributions import EFFECTS, MASSES  # noqa: E402
from intervals import SHARE, ends, of_masses, of_nats, unruled  # noqa: E402
from intervals import generator as draws_of  # noqa: E402
from p_values import DRAWS, PLANTED, of_means, p_of_means, planted  # noqa: E402

from attnscope.studies.intervals import symmetric_p  # noqa: E402

PAGE = (ROOT / "docs/statistics.md").read_text("utf-8")
ASKED = 7  # kinds of effects, the first ones: those for which p is to keep its level and power
UNSEEN = "0.1 or 0.13, and 0.8 more in one of fifty"


def tables(first):
    """(header, {(row, n): cells}) of each table with such a first column."""
    for found in re.finditer(rf"^\| {first} \| .*\n\|[-|]+\n(?:\|.*\n)+", PAGE, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in found[0].splitlines())
        yield header, {(row[0], int(row[1])): row[2:] for row in rows}


@pytest.mark.parametrize(("name", "resampled"), [("10 % Beta(2, 2)", 0.85), ("10 % Beta(2, 2), noise", 0.5)])
def test_masses_that_few_sequences_carry_are_held_for_all_heads_at_once(name, resampled):
    g, before, now = np.random.default_rng(3), [], []
    for run in range(20):
        scores = MASSES[name][run % 2]
        score_SN, null = scores.draw(g, 32, 24)
        before.append((np.abs(score_SN.mean(0) - scores.mean) <= unruled(score_SN, null, g, reach=1.0)).all())
        low_N, high_N = ends(score_SN, null, g, SHARE)
        now.append(((low_N <= scores.mean) & (high_N >= scores.mean)).all())
    assert np.mean(before) <= resampled
    assert np.mean(now) >= 0.93


@pytest.mark.parametrize("name", ["10 % Beta(2, 2)", "Beta(2, 5)", "one in ten moves both"])
def test_a_mirrored_score_has_the_mirrored_interval(name):
    score_SN, null = MASSES[name][0].draw(np.random.default_rng(4), 32, 24)
    mirrored, shift = ((1 - score_SN, null), 1) if isinstance(null, float) else ((null, score_SN), 0)
    low_N, high_N = ends(score_SN, null, np.random.default_rng(5), SHARE)
    mirrored_low_N, mirrored_high_N = ends(*mirrored, np.random.default_rng(5), SHARE)
    assert mirrored_low_N == pytest.approx(shift - high_N, abs=1e-9)
    assert mirrored_high_N == pytest.approx(shift - low_N, abs=1e-9)


def test_skew_makes_effects_of_sign_flips_and_none_of_p():
    g, flips, inverted, found = np.random.default_rng(6), [], [], []
    for _ in range(30):
        effect_SN = EFFECTS["lognormal"].draw(g, 32, 24)
        flips.append((symmetric_p(effect_SN, DRAWS, g) <= 0.05).any())
        inverted.append((p_of_means(effect_SN, g) <= 0.05).any())
        found.append((p_of_means(planted(effect_SN, 5), g)[:PLANTED] <= 0.05).mean())
    assert np.mean(flips) >= 0.5
    assert np.mean(inverted) <= 0.1
    assert np.mean(found) >= 0.95


def test_nats_that_few_texts_carry_have_no_end_on_their_side():
    """Without that end, few families are wrong; with it, four of ten."""
    g, before, now = np.random.default_rng(7), [], []
    for run in range(40):
        effect_SN = (-1) ** run * EFFECTS["20 % lognormal"].draw(g, 32, 24)
        before.append((np.abs(effect_SN.mean(0)) <= unruled(effect_SN, 0.0, g, reach=0.0)).all())
        low_N, high_N = ends(effect_SN, 0.0, g, None)
        now.append(not ((low_N > 0) | (high_N < 0)).any())
    assert np.mean(before) <= 0.75
    assert np.mean(now) >= 0.9


def test_drawn_effects_have_the_mean_and_deviation_that_they_claim():
    """So that what is counted is not due to the rows."""
    g = np.random.default_rng(8)
    for name, effects in EFFECTS.items():
        effect_SN = effects.draw(g, 20_000, 4)
        heavy = name in ("Pareto 2.5", "lognormal, sd 1.5", "t, 3 degrees")
        assert effect_SN.mean() == pytest.approx(0, abs=0.03), name
        assert heavy or effect_SN.std() == pytest.approx(1, abs=0.1), name
        assert effects.median is None or np.median(effect_SN) == pytest.approx(effects.median, abs=0.03), name
    for name, pair in MASSES.items():
        for scores in pair:
            score_SN, null = scores.draw(g, 20_000, 4)
            assert (score_SN - null).mean() == pytest.approx(scores.mean, abs=0.004), name
            assert min(score_SN.min(), np.min(null)) >= 0, name
            assert max(score_SN.max(), np.max(null)) <= 1, name


def test_the_page_has_every_row_and_what_is_claimed_of_it():
    masses = dict(item for _, rows in tables("masses") for item in rows.items())
    assert {name for name, _ in masses} == set(MASSES)
    for (name, n), cells in masses.items():
        if name == UNSEEN:  # what no rule sees, and the page says so
            continue
        for heads, cell in zip((24, 144, 1000), cells, strict=True):
            held, width = map(float, re.fullmatch(r"[\d.]+ → ([\d.]+) \(([\d.]+)\)", cell).groups())
            assert held >= (0.9 if heads == 1000 else 0.93), (name, n, heads)
            assert width <= 1.15 or "null" in name or "both" in name, (name, n, heads)
    of_p = [rows for header, rows in tables("effects") if "heads: found" in header[3] and "median" not in header[4]]
    assert {n for rows in of_p for _, n in rows} == {32, 64}
    for rows in of_p:
        assert [name for name, _ in rows] == list(EFFECTS)
        for (name, n), cells in list(rows.items())[:ASKED]:
            for level, power in zip(cells[::2], cells[1::2], strict=True):
                assert float(level.split(" → ")[1]) <= 0.1, (name, n)
                assert float(power.split(", ")[0]) >= 0.95, (name, n)


@pytest.mark.slow
def test_a_row_of_each_table_is_made_again():
    """By its own seed: to the digit, with the same NumPy."""
    name = "Beta(2, 5)"
    assert f"| {name} | 32 | {of_masses(MASSES[name], 32, 24, 400, draws_of(name, 32, 24))} |" in PAGE
    name = "t, 3 degrees"
    assert f"| {name} | 32 | {of_nats(EFFECTS[name], 32, 24, 400, draws_of(name, 32, 24))} |" in PAGE
    false, found = of_means(EFFECTS[name], 32, 24, 400, draws_of(name, "p", 32, 24))
    assert f"| {name} | 32 | {false} | {found} |" in PAGE
