"""Level and power of p: `python scripts/p_values.py` prints tables of docs/statistics.md, an hour on one core.

Families of N effects of S texts with a mean of 0: how often any of them is called an effect (p at most 0.05; 5 % is
meant), by sign flips (`p_symmetric`) and by `p`, that of the interval for all at once. Then four of them get a mean of
5 of their own standard deviations, above 0 or below: how many of the four are found by `p`, and by `p` or `p_positive`.
The second table is of `p_positive` and of medians alone. Each row has draws of its own, as in `intervals.py`.

Shapes: S text, N head.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from distributions import EFFECTS, Effects
from intervals import SELDOM, generator, print_tables, row, runs

from attnscope.studies.intervals import FEWEST, fewest_for_p, intervals, symmetric_p
from attnscope.studies.statistics import medians, positive_share

LEVEL = 0.05
DRAWS = 1_000
PLANTED, DEVIATIONS = 4, 5.0


def p_of_means(effect_SN: np.ndarray, g: np.random.Generator) -> np.ndarray:
    return intervals(effect_SN, np.zeros(effect_SN.shape[1]), g, draws=DRAWS).p


def planted(effect_SN: np.ndarray, deviations: float) -> np.ndarray:
    return effect_SN + deviations * (np.arange(effect_SN.shape[1]) < PLANTED)


def of_means(effects: Effects, texts: int, heads: int, times: int, g: np.random.Generator) -> tuple[str, str]:
    """What of families is false, by sign flips and by p; what of four is found, above 0 and below."""
    false, flips, found, either = [], [], [], []
    for run in runs(times, heads):
        effect_SN = effects.draw(g, texts, heads)
        false.append((p_of_means(effect_SN, g) <= LEVEL).any())
        if run % SELDOM > 1:
            continue
        flips.append((symmetric_p(effect_SN, DRAWS, g) <= LEVEL).any())
        both = [planted(effect_SN, sign * DEVIATIONS) for sign in (1, -1)]
        by_p = [p_of_means(each, g)[:PLANTED] <= LEVEL for each in both]
        by_signs = [positive_share(each)[1][:PLANTED] <= LEVEL for each in both]
        found.append([each.mean() for each in by_p])
        either.append([(one | other).mean() for one, other in zip(by_p, by_signs, strict=True)])
    alone, together = (", ".join(f"{share:.2f}" for share in np.mean(each, 0)) for each in (found, either))
    return f"{np.mean(flips):.2f} → {np.mean(false):.3f}", f"{alone} ({together})"


def means(texts: int, heads: list[int], times: int, only: str) -> Iterator[str]:
    """A row per distribution; without the families that are too large for p with so few texts."""
    heads = [n for n in heads if texts >= fewest_for_p(n)]
    yield row("effects", "texts", *(f"{n} heads: {what}" for n in heads for what in ("false", "found")))
    yield row(*["---"] * (2 + 2 * len(heads)))
    for name, effects in EFFECTS.items():
        cells: list[str] = []
        for n in heads if only in name else []:
            cells += of_means(effects, texts, n, times, generator(name, "p", texts, n))
        if cells:
            yield row(name, texts, *cells)


def signs(texts: int, heads: list[int], times: int, only: str) -> Iterator[str]:
    """Effects less their median: as often positive as negative. Of medians the share held, each alone."""
    yield row("effects", "texts", *(f"{n} heads: {what}" for n in heads for what in ("false", "found", "median held")))
    yield row(*["---"] * (2 + 3 * len(heads)))
    for name, effects in EFFECTS.items():
        cells = []
        for n in heads if only in name and effects.median is not None else []:
            g, false, found, held = generator(name, "signs", texts, n), [], [], []
            for _ in runs(times, n):
                effect_SN = effects.draw(g, texts, n) - effects.median
                _, low_N, high_N = medians(effect_SN)
                false.append((positive_share(effect_SN)[1] <= LEVEL).any())
                found.append((positive_share(planted(effect_SN, DEVIATIONS))[1][:PLANTED] <= LEVEL).mean())
                held.append(((low_N <= 0) & (high_N >= 0)).mean())
            cells += [f"{np.mean(count):.2f}" for count in (false, found, held)]
        if cells:
            yield row(name, texts, *cells)


if __name__ == "__main__":
    print_tables(__doc__, {"means": means, "signs": signs}, [FEWEST, 2 * FEWEST], [24, 48, 144, 1000])
