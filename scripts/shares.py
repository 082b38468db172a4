"""Do the intervals of shares hold? `python scripts/shares.py` prints rows of docs/statistics.md. Minutes on one core.

A share is the mean effect of a patch over the mean gap of S pairs. Pairs are made with a known share; counted is how
often its interval holds it (95 % is meant), of the runs in which a share is given: `before`, the interval of the mean
effect over the mean gap, as if the gap had no error; and `ratios` of studies/statistics.py, whose open ends hold.

Shapes: S pair, N run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from attnscope.studies.intervals import bootstrap_widths
from attnscope.studies.statistics import ratios

Made = tuple[np.ndarray, np.ndarray]  # effects and gaps, (S, N) each
Pairs = Callable[[np.random.Generator, int, int], Made]
RUNS_AT_ONCE, DRAWS = 100, 1_000
CORRELATIONS, STANDARD_ERRORS = (0.9, 0.0, -0.9), (2, 5, 20)
SHAPES = ("normal", "lognormal gaps", "lognormal effects and gaps")


def lognormal(normal: np.ndarray) -> np.ndarray:
    """A lognormal of mean 0 and spread 1, of a normal one."""
    return (np.exp(normal) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


def correlated(shape: str, correlation: float, away: int, g: np.random.Generator, pairs: int, runs: int) -> Made:
    """A share of 0.5 of a gap that is `away` of its own standard errors from 0."""
    gap_SN, other_SN = g.normal(size=(2, pairs, runs))
    effect_SN = correlation * gap_SN + np.sqrt(1 - correlation**2) * other_SN
    gap_SN = gap_SN if shape == "normal" else lognormal(gap_SN)
    effect_SN = lognormal(effect_SN) if shape == "lognormal effects and gaps" else effect_SN
    mean = away / np.sqrt(pairs)
    return 0.5 * mean + effect_SN, mean + gap_SN


def shared(share: Callable[..., np.ndarray], spread: float, g: np.random.Generator, pairs: int, runs: int) -> Made:
    """A lognormal gap, of which each pair has a share of its own."""
    gap_SN = g.lognormal(0, spread, (pairs, runs))
    return gap_SN * share(g, (pairs, runs)), gap_SN


# name: effects and gaps, and their share
OTHERS: dict[str, tuple[Pairs, float]] = {
    "share N(1, .01)": (partial(shared, lambda g, size: g.normal(1, 0.01, size), 0.5), 1.0),
    "share Beta(2, 2)": (partial(shared, lambda g, size: g.beta(2, 2, size), 0.5), 0.5),
    "share Beta(2, 2), gaps of sd 1": (partial(shared, lambda g, size: g.beta(2, 2, size), 1.0), 0.5),
    "share 0 or 1, one in five": (partial(shared, lambda g, size: (g.random(size) < 0.2).astype(float), 0.5), 0.2),
    "share Beta(2, 2) in one of ten": (
        partial(shared, lambda g, size: np.where(g.random(size) < 0.1, g.beta(2, 2, size), 0), 0.5),
        0.05,
    ),
    "1 - that share": (
        partial(shared, lambda g, size: 1 - np.where(g.random(size) < 0.1, g.beta(2, 2, size), 0), 0.5),
        0.95,
    ),
}


def kinds() -> Iterator[tuple[str, Pairs, float]]:
    for shape in SHAPES:
        for correlation in CORRELATIONS:
            for away in STANDARD_ERRORS:
                name = f"{shape}, correlation {correlation:+.1f}, gap of {away} standard errors"
                yield name, partial(correlated, shape, correlation, away), 0.5
    for name, (pairs, share) in OTHERS.items():
        yield f"lognormal gaps, {name}", pairs, share


def counted(made: Pairs, share: float, pairs: int, runs: int, g: np.random.Generator) -> list[str]:
    """Cells of a row: how often either interval holds the share, runs without a share, open ends, median widths."""
    before_N, now = [], []
    for _ in range(runs // RUNS_AT_ONCE):
        effect_SN, gap_SN = made(g, pairs, RUNS_AT_ONCE)
        seed = int(g.integers(1 << 31))
        width_N = bootstrap_widths(effect_SN, np.random.default_rng(seed), draws=DRAWS, at_once=False).own
        before_N.append(np.sort((effect_SN.mean(0) + [[-1], [1]] * width_N) / gap_SN.mean(0), axis=0))
        now.append(np.stack(ratios(effect_SN, gap_SN, seed=seed, draws=DRAWS)))
    before, (ratio_N, *now_ends) = np.concatenate(before_N, 1), np.concatenate(now, 1)
    given_N = ~np.isnan(ratio_N)
    cells = [str(pairs)]
    for ends in (before, np.stack(now_ends)):
        low_N, high_N = ends[:, given_N]
        held = 1 - ((low_N > share) | (high_N < share)).mean()  # an open end, NaN, holds
        cells.append(f"{held:.3f} ({np.nanmedian(high_N - low_N):.2f})")
    open_ends = np.isnan(np.stack(now_ends)[:, given_N]).any(0).mean()
    return [*cells, f"{1 - given_N.mean():.2f}", f"{open_ends:.2f}"]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--runs", type=int, default=2_000, help="of each row, in hundreds")
    asked.add_argument("--pairs", type=int, nargs="+", default=[32, 64])
    asked.add_argument("--kind", default="", help="rows whose name holds this")
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    print("| effects and gaps | pairs | before (width) | now (width) | no share | an open end |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, made, share in kinds():
        for pairs in options.pairs if options.kind in name else ():
            g = np.random.default_rng(options.seed)
            print("|", " | ".join([name, *counted(made, share, pairs, options.runs, g)]), "|", flush=True)


if __name__ == "__main__":
    main()
