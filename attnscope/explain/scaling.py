"""How far q . k spreads, and what dividing by sqrt(d_k) makes of it, measured on random q and k.

For independent entries with means mu and deviations sigma, each of the d products has the variance
E[q^2] E[k^2] - (E[q] E[k])^2, and their sum

    Var(q . k) = d ((sigma_q^2 + mu_q^2) (sigma_k^2 + mu_k^2) - mu_q^2 mu_k^2)

which is d for standard normal entries: the reason for 1 / sqrt(d_k) in Vaswani et al. 2017, section 3.2.1, footnote 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FORMULA = "Var(q·k) = d ((σq² + μq²)(σk² + μk²) − μq² μk²)"
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SAMPLES = 8192


@dataclass(frozen=True)
class Entries:
    """Mean and standard deviation of the entries of q and of k."""

    mean_q: float = 0.0
    std_q: float = 1.0
    mean_k: float = 0.0
    std_k: float = 1.0

    @property
    def label(self) -> str:
        """`mean 0, std 1`, or both where q and k differ."""
        q, k = f"mean {self.mean_q:g}, std {self.std_q:g}", f"mean {self.mean_k:g}, std {self.std_k:g}"
        return f"q and k: {q}" if q == k else f"q: {q}; k: {k}"

    def product_std(self, width: int) -> float:
        """Standard deviation of q . k by the formula.

        >>> Entries(std_q=2.0).product_std(16)
        8.0
        """
        squares = (self.std_q**2 + self.mean_q**2) * (self.std_k**2 + self.mean_k**2)
        return math.sqrt(width * (squares - self.mean_q**2 * self.mean_k**2))


CASES = (Entries(), Entries(0, 2, 0, 2), Entries(1, 1, 1, 1), Entries(0, 0.5, 2, 1))


@dataclass(frozen=True)
class Spread:
    """One measurement: the standard deviation of q . k at one width, as measured and by the formula."""

    entries: Entries
    width: int
    measured: float
    predicted: float

    @property
    def scaled(self) -> float:
        """The measured deviation after the division by sqrt(d_k)."""
        return self.measured / math.sqrt(self.width)


def measure_scaling(
    cases: Sequence[Entries] = CASES, widths: Sequence[int] = WIDTHS, samples: int = SAMPLES, seed: int = 0
) -> list[Spread]:
    """std(q . k) over `samples` pairs of random q and k, for each case and width; the same numbers for the same seed.

    >>> [spread] = measure_scaling([Entries()], [64])
    >>> round(spread.scaled, 1)
    1.0
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(mean: float, std: float, width: int) -> torch.Tensor:
        return mean + std * torch.randn(samples, width, generator=generator)

    spreads = []
    for entries in cases:
        for width in widths:
            q_SD, k_SD = (
                draw(entries.mean_q, entries.std_q, width),
                draw(entries.mean_k, entries.std_k, width),
            )
            measured = float((q_SD * k_SD).sum(-1, dtype=torch.float64).std())
            spreads.append(Spread(entries, width, measured, entries.product_std(width)))
    return spreads
