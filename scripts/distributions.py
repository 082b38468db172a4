"""Scores and effects of known means, drawn as often as one likes: `intervals.py` and `p_values.py` count on them.

Shapes: S sequence or text, N head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

Draw = Callable[[np.random.Generator, int, int], np.ndarray]
Pair = Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray | float]]


@dataclass(frozen=True)
class Scores:
    """Scores (S, N), and nulls of the same sequences or 0; `mean`: of a score less its null."""

    draw: Pair
    mean: float


def _some(share: float, draw: Draw) -> Draw:
    """0 but in a share of the sequences."""
    return lambda g, s, n: np.where(g.random((s, n)) < share, draw(g, s, n), 0.0)


def _beta(a: float, b: float) -> Draw:
    return lambda g, s, n: g.beta(a, b, (s, n))


def _noisy(draw: Draw) -> Draw:
    """A mass that is never 0: 0.003 of it are noise."""
    return lambda g, s, n: 0.997 * draw(g, s, n) + 0.003 * g.random((s, n))


def _beside(score: Draw, null: Draw | float) -> Pair:
    return lambda g, s, n: (score(g, s, n), null if isinstance(null, float) else null(g, s, n))


def _moved_together(g: np.random.Generator, s: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """One sequence in ten moves score and null."""
    moves_SN = g.random((s, n)) < 0.1
    return np.where(moves_SN, g.beta(5, 2, (s, n)), 0.01), np.where(moves_SN, g.beta(2, 5, (s, n)), 0.01)


def _varied_and_rare(g: np.random.Generator, s: int, n: int) -> np.ndarray:
    """Every sequence varies a little, and a few differ much: a sample without them looks like one of many carriers."""
    return g.choice((0.1, 0.13), (s, n)) + 0.8 * (g.random((s, n)) < 0.02)


def _mirrored(scores: Scores) -> Scores:
    """1 - score of a mass alone; score and null exchanged where both vary."""

    def draw(g: np.random.Generator, s: int, n: int) -> tuple[np.ndarray, np.ndarray | float]:
        score_SN, null = scores.draw(g, s, n)
        return (1 - score_SN, 0.0) if isinstance(null, float) else (null, score_SN)

    varies = not isinstance(scores.draw(np.random.default_rng(0), 1, 1)[1], float)
    return Scores(draw, -scores.mean if varies else 1 - scores.mean)


_TENTH = _some(0.1, _beta(2, 2))
_ALONE: dict[str, tuple[Draw, float]] = {
    "10 % Beta(2, 2)": (_TENTH, 0.05),
    "10 % Beta(2, 2), noise": (_noisy(_TENTH), 0.997 * 0.05 + 0.0015),
    "5 % Beta(2, 2)": (_some(0.05, _beta(2, 2)), 0.025),
    "25 % Beta(2, 2)": (_some(0.25, _beta(2, 2)), 0.125),
    "25 % Beta(2, 2), noise": (_noisy(_some(0.25, _beta(2, 2))), 0.997 * 0.125 + 0.0015),
    "Beta(0.1, 1)": (_beta(0.1, 1), 0.1 / 1.1),
    "Beta(0.2, 0.8)": (_beta(0.2, 0.8), 0.2),
    "Beta(2, 5)": (_beta(2, 5), 2 / 7),
    "0 or 1, one in ten": (lambda g, s, n: (g.random((s, n)) < 0.1).astype(float), 0.1),
    "0 or 1, six in ten": (lambda g, s, n: (g.random((s, n)) < 0.6).astype(float), 0.6),
    "0.1 or 0.13, and 0.8 more in one of fifty": (_varied_and_rare, 0.115 + 0.02 * 0.8),
}
_PAIRS: dict[str, Scores] = {
    "10 % Beta(2, 2); null Beta(1, 30)": Scores(_beside(_TENTH, _beta(1, 30)), 0.05 - 1 / 31),
    "10 % Beta(2, 2); null 5 % Beta(2, 2)": Scores(_beside(_TENTH, _some(0.05, _beta(2, 2))), 0.025),
    "one in ten moves both": Scores(_moved_together, 0.1 * (5 / 7 - 2 / 7)),
    "Beta(2, 5); null Beta(1, 10)": Scores(_beside(_beta(2, 5), _beta(1, 10)), 2 / 7 - 1 / 11),
    "1 - 10 % Beta(2, 2); null 10 % Beta(2, 2)": Scores(_beside(lambda g, s, n: 1 - _TENTH(g, s, n), _TENTH), 0.9),
    "10 % Beta(2, 2), noise; null 5 %, noise": Scores(
        _beside(_noisy(_TENTH), _noisy(_some(0.05, _beta(2, 2)))), 0.997 * 0.025
    ),
}
_AS_THEY_ARE = {
    **{name: Scores(_beside(draw, 0.0), mean) for name, (draw, mean) in _ALONE.items()},
    **_PAIRS,
}

# Masses, in [0, 1]: as they are, and mirrored.
MASSES: dict[str, tuple[Scores, Scores]] = {name: (each, _mirrored(each)) for name, each in _AS_THEY_ARE.items()}


@dataclass(frozen=True)
class Effects:
    """Effects (S, N) of mean 0 and standard deviation 1, and their median where effects equal to it are rare."""

    draw: Draw
    median: float | None


def _standard(draw: Draw, mean: float, deviation: float, median: float | None) -> Effects:
    return Effects(
        lambda g, s, n: (draw(g, s, n) - mean) / deviation, None if median is None else (median - mean) / deviation
    )


def _lognormal(sigma: float) -> Effects:
    variance = (exp(sigma**2) - 1) * exp(sigma**2)
    return _standard(lambda g, s, n: g.lognormal(0, sigma, (s, n)), exp(sigma**2 / 2), sqrt(variance), 1.0)


def _correlated(g: np.random.Generator, s: int, n: int) -> np.ndarray:
    common_SN = sqrt(0.9) * g.normal(0, 1, (s, 1)) + sqrt(0.1) * g.normal(0, 1, (s, n))
    return np.exp(common_SN)


def _half_and_half(g: np.random.Generator, s: int, n: int) -> np.ndarray:
    kinds = (EFFECTS["normal"], EFFECTS["one in ten"])
    return np.concatenate([kind.draw(g, s, many) for kind, many in zip(kinds, (n // 2, n - n // 2), strict=True)], 1)


# Effects in nats, which have no bound.
EFFECTS: dict[str, Effects] = {
    "normal": _standard(lambda g, s, n: g.normal(0, 1, (s, n)), 0, 1, 0),
    "exponential": _standard(lambda g, s, n: g.exponential(1, (s, n)), 1, 1, log(2)),
    "lognormal": _lognormal(1),
    "Pareto 2.5": _standard(
        lambda g, s, n: g.pareto(2.5, (s, n)), 1 / 1.5, sqrt(2.5 / (1.5**2 * 0.5)), 2 ** (1 / 2.5) - 1
    ),
    "one in ten": _standard(lambda g, s, n: (g.random((s, n)) < 0.1).astype(float), 0.1, 0.3, None),
    "lognormal, correlated 0.9": _standard(_correlated, exp(0.5), sqrt((exp(1) - 1) * exp(1)), 1.0),
    "half normal, half one in ten": Effects(_half_and_half, None),
    "t, 3 degrees": _standard(lambda g, s, n: g.standard_t(3, (s, n)), 0, sqrt(3), 0),
    "normal, texts of unequal spread": _standard(
        lambda g, s, n: g.normal(0, 1, (s, n)) * np.exp(g.normal(0, 0.7, (s, 1))), 0, exp(0.7**2), 0
    ),
    "20 % lognormal": _standard(
        _some(0.2, lambda g, s, n: g.lognormal(0, 1, (s, n))), 0.2 * exp(0.5), sqrt(0.2 * exp(2) - 0.04 * exp(1)), None
    ),
    "lognormal, sd 1.5": _lognormal(1.5),
}
