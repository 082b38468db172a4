"""Do the atlas' intervals hold? `python scripts/intervals.py` prints the tables of docs/atlas.md. Minutes on one core.

Scores are made with a known mean, S sequences of N heads, as often as --times. Two things are counted: how often the
intervals of all heads hold all means (95 % is meant), and how much of its lower bound a head keeps when heads that give
next to nothing are beside it. Each is there in two ways: `before`, the largest |t| of all heads in a resample, without
a margin; and `paired` of attnscope.study.statistics, as it is.

Shapes: S sequence, N head, B draw.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from attnscope.study.statistics import paired

Scores = Callable[[np.random.Generator, int, int], np.ndarray]
DRAWS = 2_000

# Scores (S, N) of a known mean.
SCORES: dict[str, tuple[Scores, float]] = {
    "normal": (lambda g, s, n: g.normal(0.3, 0.1, (s, n)), 0.3),
    "t, 3 degrees": (lambda g, s, n: g.standard_t(3, (s, n)), 0.0),
    "sequences of unequal spread": (lambda g, s, n: g.normal(0, 1, (s, n)) * np.exp(g.normal(0, 0.7, (s, 1))), 0.0),
    "lognormal": (lambda g, s, n: g.lognormal(0, 1, (s, n)), float(np.exp(0.5))),
    "0 or 1, one in ten": (lambda g, s, n: (g.random((s, n)) < 0.1).astype(float), 0.1),
    "0 or 1, one in five": (lambda g, s, n: (g.random((s, n)) < 0.2).astype(float), 0.2),
}


def _once(g: np.random.Generator, s: int, n: int) -> np.ndarray:
    found = 1e-9 * g.random((s, n))
    found[g.integers(0, s, n), np.arange(n)] = 0.5
    return found


# Heads that give next to nothing.
NEARLY_NOTHING: dict[str, Scores] = {
    "mass exp(-25 ± 3)": lambda g, s, n: np.exp(g.normal(-25, 3, (s, n))),
    "0.5 in one of 64": _once,
}
PLANTED = [(0.5, 0.06), (0.5, 0.2), (0.9, 0.06), (0.9, 0.2)]


def before(score_SN: np.ndarray, g: np.random.Generator) -> np.ndarray:
    """Half the width of the intervals of all heads: standard errors times the largest |t|, 95 % of the resamples."""
    count = len(score_SN)
    times_BS = g.multinomial(count, np.full(count, 1 / count), DRAWS) / count
    off_SN = score_SN - score_SN.mean(0)
    moved_BN = times_BS @ off_SN
    error_BN = np.sqrt(np.maximum(times_BS @ off_SN**2 - moved_BN**2, 0) / (count - 1))
    t_BN = np.divide(np.abs(moved_BN), error_BN, out=np.zeros_like(moved_BN), where=error_BN > 1e-15)
    return np.quantile(t_BN.max(1), 0.95) * score_SN.std(0, ddof=1) / np.sqrt(count)


def now(score_SN: np.ndarray, g: np.random.Generator) -> np.ndarray:
    found = paired(score_SN, np.zeros_like(score_SN), seed=int(g.integers(1 << 31)), flips=0, draws=DRAWS)
    return found.high_all - found.effect


def coverage(times: int, heads: int, sequences: int, g: np.random.Generator) -> None:
    """A row per kind of scores: how often all means are held at once, and the median width."""
    for name, (scores, mean) in SCORES.items():
        cells = []
        made = [scores(g, sequences, heads) for _ in range(times)]
        for way in (before, now):
            half = np.stack([way(one, g) for one in made])
            off = np.abs(np.stack([one.mean(0) for one in made]) - mean)
            cells.append(f"{(off <= half).all(1).mean():.3f} (± {np.median(half):.2f})")
        print(f"| {name} | {sequences} | {heads} | {cells[0]} | {cells[1]} |", flush=True)


def kept(times: int, heads: int, g: np.random.Generator) -> None:
    """A row per kind of heads beside: the share of its bound that a planted head keeps, the least of all heads."""
    for name, scores in NEARLY_NOTHING.items():
        cells = []
        for way in (before, now):
            shares = []
            for _ in range(times):
                four = np.stack([np.clip(g.normal(mean, sd, 64), 0, 1) for mean, sd in PLANTED], 1)
                every = np.hstack([four, scores(g, 64, heads - len(PLANTED))])
                alone, beside = (one.mean(0)[:4] - way(one, g)[:4] for one in (four, every))
                shares.append(beside / alone)
            least = np.mean(shares, 0).min()
            cells.append(f"{least:.2f}" if least > -100 else "below -100")
        print(f"| {name} | {heads} | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--times", type=int, default=400, help="of each row with 24 heads; fewer with more")
    asked.add_argument("--heads", type=int, nargs="+", default=[24, 144, 1000])
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    g = np.random.default_rng(given.seed)
    print("| scores | sequences | heads | before | now |\n|---|---|---|---|---|")
    for heads in given.heads:
        for sequences in (32, 64):
            coverage(max(given.times * 24 // heads, 20), heads, sequences, g)
    print("\n| heads next to four planted | heads | before | now |\n|---|---|---|---|")
    for heads in given.heads:
        kept(max(given.times * 24 // heads // 10, 5), heads, g)


if __name__ == "__main__":
    main()
