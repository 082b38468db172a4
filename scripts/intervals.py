"""Do intervals hold? `python scripts/intervals.py` prints tables of docs/statistics.md: an hour on one core.

Masses of a known mean and effects of mean 0 are drawn, S sequences of N heads: how often the intervals for all heads at
once hold all means (95 % is meant), without the rules for what few sequences carry (`before`) and with them, as
`attnscope.studies.statistics` has them. Each row has draws of its own: `--only NAME --sequences 32 --heads 24` repeats
one, and rows of several processes can be put together.

Shapes: S sequence, N head.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from zlib import crc32

import numpy as np
from distributions import EFFECTS, MASSES, Effects, Scores

from attnscope.studies.intervals import LEVEL, SHARE, Range, bootstrap_widths, intervals

Table = Callable[[int, list[int], int, str], Iterator[str]]  # lines, of sequences, heads, times and words of a name
DRAWS = 500
MANY = 1_000  # heads, from which on a quarter of --times is enough
SELDOM = 8  # of so many runs two are counted `before`, too
ROUNDING = 1e-9
PLANTED = [(0.5, 0.06), (0.5, 0.2), (0.9, 0.06), (0.9, 0.2)]  # mean and deviation


def generator(*row: str | int) -> np.random.Generator:
    """The draws of one row, whichever others are made."""
    return np.random.default_rng(crc32(repr(row).encode()))


def unruled(score_SN: np.ndarray, null: np.ndarray | float, g: np.random.Generator, reach: float) -> np.ndarray:
    """Half the width for all heads at once without those rules; `reach` is that of a head whose scores are equal."""
    width_N = bootstrap_widths(score_SN - null, g, draws=DRAWS).all_heads
    unseen = 1 - ((1 - LEVEL) / 2 / len(width_N)) ** (1 / len(score_SN))
    return np.where(width_N == 0, reach * unseen, width_N)


def ends(
    score_SN: np.ndarray, null: np.ndarray | float, g: np.random.Generator, within: Range | None
) -> tuple[np.ndarray, np.ndarray]:
    """Of the interval for all heads at once; NaN where one is open."""
    null = np.full(score_SN.shape[1], null) if isinstance(null, float) else null
    made = intervals(score_SN, null, g, within=within, draws=DRAWS)
    return made.low_all, made.high_all


def runs(times: int, heads: int) -> range:
    return range(max(times // 4 if heads >= MANY else times, 1))


def of_masses(pair: tuple[Scores, Scores], sequences: int, heads: int, times: int, g: np.random.Generator) -> str:
    """How often all means are held, before and now, and how wide the intervals are, times before.

    Every other run is of mirrored scores.
    """
    before, now, wider = [], [], []
    for run in runs(times, heads):
        scores = pair[run % 2]
        score_SN, null = scores.draw(g, sequences, heads)
        low_N, high_N = ends(score_SN, null, g, SHARE)
        now.append(((low_N <= scores.mean + ROUNDING) & (high_N >= scores.mean - ROUNDING)).all())
        if run % SELDOM > 1:
            continue
        half_N = unruled(score_SN, null, g, reach=1.0)
        before.append((np.abs((score_SN - null).mean(0) - scores.mean) <= half_N + ROUNDING).all())
        wider.append(np.median(high_N - low_N) / np.median(2 * half_N))
    return f"{np.mean(before):.2f} → {np.mean(now):.3f} ({np.median(wider):.2f})"


def masses(sequences: int, heads: list[int], times: int, only: str) -> Iterator[str]:
    yield row("masses", "sequences", *(f"{n} heads" for n in heads))
    yield row(*["---"] * (2 + len(heads)))
    for name, pair in MASSES.items():
        if only in name:
            cells = [of_masses(pair, sequences, n, times, generator(name, sequences, n)) for n in heads]
            yield row(name, sequences, *cells)


def of_nats(effects: Effects, sequences: int, heads: int, times: int, g: np.random.Generator) -> str:
    """How often all means are held, before and by the ends that are given now, and how many heads lack an end."""
    before, now, opened = [], [], []
    for run in runs(times, heads):
        effect_SN = effects.draw(g, sequences, heads)
        low_N, high_N = ends(effect_SN, 0.0, g, None)
        now.append(not ((low_N > ROUNDING) | (high_N < -ROUNDING)).any())
        opened.append((np.isnan(low_N) | np.isnan(high_N)).mean())
        if run % SELDOM < 2:
            half_N = unruled(effect_SN, 0.0, g, reach=0.0)
            before.append((np.abs(effect_SN.mean(0)) <= half_N + ROUNDING).all())
    return f"{np.mean(before):.2f} → {np.mean(now):.3f} ({np.mean(opened):.0%} open)"


def nats(sequences: int, heads: list[int], times: int, only: str) -> Iterator[str]:
    yield row("effects", "texts", *(f"{n} heads" for n in heads))
    yield row(*["---"] * (2 + len(heads)))
    for name, effects in EFFECTS.items():
        if only in name:
            cells = [of_nats(effects, sequences, n, times, generator(name, sequences, n)) for n in heads]
            yield row(name, sequences, *cells)


def beside_nothing(sequences: int, heads: list[int], times: int, only: str) -> Iterator[str]:
    """What planted heads keep of their lower bounds when all other heads give next to nothing: the least of four."""

    def once(g: np.random.Generator, s: int, n: int) -> np.ndarray:
        mass_SN = 1e-9 * g.random((s, n))
        mass_SN[g.integers(0, s, n), np.arange(n)] = 0.5
        return mass_SN

    others = {"mass exp(-25 ± 3)": lambda g, s, n: np.exp(g.normal(-25, 3, (s, n))), "0.5 in one sequence": once}
    yield row("heads next to four planted", "sequences", *(f"{n} heads" for n in heads))
    yield row(*["---"] * (2 + len(heads)))
    for name, draw in others.items():
        cells = []
        for n in heads if only in name else []:
            g, shares = generator(name, sequences, n), []
            for _ in range(max(times // 40, 1)):
                planted_S4 = np.stack([np.clip(g.normal(mean, sd, sequences), 0, 1) for mean, sd in PLANTED], 1)
                all_SN = np.hstack([planted_S4, draw(g, sequences, n - len(PLANTED))])
                alone, beside = (ends(each, 0.0, g, SHARE)[0][: len(PLANTED)] for each in (planted_S4, all_SN))
                shares.append(beside / alone)
            cells.append(f"{np.mean(shares, 0).min():.2f}")
        if cells:
            yield row(name, sequences, *cells)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def print_tables(about: str | None, tables: Mapping[str, Table], sequences: list[int], heads: list[int]) -> None:
    """The command line: which rows of which tables, and for how many sequences and heads."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=400, help=f"runs of each cell; a quarter from {MANY} heads on")
    parser.add_argument("--sequences", type=int, nargs="+", default=sequences, help="or texts")
    parser.add_argument("--heads", type=int, nargs="+", default=heads)
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    parser.add_argument("--only", default="", help="rows whose name has these words")
    options = parser.parse_args()
    for table, count in product(options.tables, options.sequences):
        for line in tables[table](count, options.heads, options.times, options.only):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    print_tables(__doc__, {"masses": masses, "nats": nats, "beside": beside_nothing}, [32, 64, 128], [24, 144, 1000])
