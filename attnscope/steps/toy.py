"""Attention on "I saw a saw", small enough to follow with a pencil: 4 tokens, width 4, 2 heads of width 2.

Both "saw" have the same vector and there are no positions: what tells them apart here is the causal mask alone.
Checked against torch's `scaled_dot_product_attention` and `torch.nn.MultiheadAttention`.

After it: how far q . k spreads, and what dividing by sqrt(d_k) makes of it, measured on random q and k. For independent
entries with means mu and deviations sigma, each of the d products has the variance E[q^2] E[k^2] - (E[q] E[k])^2, and
their sum

    Var(q . k) = d ((sigma_q^2 + mu_q^2) (sigma_k^2 + mu_k^2) - mu_q^2 mu_k^2)

which is d for standard normal entries: the reason for 1 / sqrt(d_k) in Vaswani et al. 2017, section 3.2.1, footnote 4.

Shapes: H head, T token, Q query, K key, D head width, E model width, S sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnscope.reference.attention import Operands, split_heads
from attnscope.reference.masks import causal_mask, positions
from attnscope.steps.attention import Attention, Observed, attention_steps, check_query, concatenation, numbers
from attnscope.steps.records import Explanation, Step

TOKENS = ("I", "saw", "a", "saw")
VECTORS = {"I": (1.0, 0.0, 1.0, 0.0), "saw": (0.0, 2.0, 0.0, 1.0), "a": (1.0, 1.0, 0.0, 0.0)}
MATRICES = {  # rows by columns; x is multiplied from the left
    "W_Q": ((1, 0, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (0, 0, 1, 0)),
    "W_K": ((0, 1, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 0, -1, 0)),
    "W_V": ((2, 0, 0, 1), (0, 1, 1, 0), (0, 0, 0, 2), (0, 1, 0, 1)),
    "W_O": ((1, 0, 0, 1), (0, 1, 0, 0), (0, 0, 1, 1), (1, 0, 0, 0)),
}
PROJECTIONS = ("W_Q", "W_K", "W_V")
HEADS = 2
TOLERANCE = 1e-12  # float64 on both sides


def explain_toy(head: int = 0, query: int = 3) -> Explanation:
    """Every step of one head of the toy for one query; heads 0 and 1, queries 0 to 3, -1 the last.

    Raises UsageError for a query that is not there.

    >>> explain_toy().failures
    []
    """
    query = check_query(query, len(TOKENS))
    x_TE = torch.tensor([VECTORS[token] for token in TOKENS], dtype=torch.float64)
    matrices = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in MATRICES.items()}
    q_HTD, k_HTD, v_HTD = (split_heads(x_TE @ matrices[name], HEADS) for name in PROJECTIONS)
    mask_QK = causal_mask(*positions(len(TOKENS)))
    attention = Attention(Operands(q_HTD, k_HTD, v_HTD, q_HTD.shape[-1] ** -0.5, mask_QK))
    # Torch makes all of it from the same vectors and matrices, by functions of its own.
    observed = _torch(x_TE, matrices)
    # What the last step gives: the heads side by side, through W_O.
    first = 2 * head
    concat_TE = attention.heads_HQV.transpose(0, 1).flatten(-2)
    output_TE = concat_TE @ matrices["W_O"]
    # Words and numbers of each step together, so that the toy reads as the page does that shows it.
    steps = (
        Step(
            "token vectors",
            "X   4 tokens × 4 numbers",
            'Each token is a vector; both "saw" are the same one, for a vector knows its word and not its place.',
            (numbers("x", "token dim", x_TE),),
        ),
        Step(
            "projections",
            "q = x W_Q,  k = x W_K,  v = x W_V   each 4 → 4",
            "Three matrices make of each token a query (what it looks for), a key (what it is found by) and a value "
            "(what it hands over).",
            (
                *(numbers(name, "in out", matrices[name]) for name in PROJECTIONS),
                *(numbers(name, "token dim", x_TE @ matrices[f"W_{name.upper()}"]) for name in "qkv"),
            ),
        ),
        Step(
            "split into heads",
            f"head {head} takes numbers {first} and {first + 1} of q, k and v   4 → 2 heads × 2",
            'Each head attends on its own, with its own share of the numbers. This toy has no positions: both "saw" '
            "get the same q, k and v, and only the mask will tell them apart.",
            tuple(numbers(name, "token dim", x_HTD[head]) for name, x_HTD in zip("qkv", attention.qkv, strict=True)),
            (
                *observed.check("q", q_HTD, observed.q_HQD),
                *observed.check("k", k_HTD, observed.k_GKD),
                *observed.check("v", v_HTD, observed.v_GKV),
            ),
        ),
        *attention_steps(attention, head, query, observed),
        concatenation(attention.heads_HQV, head, observed.check("heads", attention.heads_HQV, observed.heads_HQV)),
        Step(
            "output projection",
            "y = [head 0; head 1] W_O   4 → 4",
            "A last matrix mixes what the heads found; this is what attention adds to the token.",
            (numbers("W_O", "in out", matrices["W_O"]), numbers("y", "token dim", output_TE)),
            observed.check("MultiheadAttention", output_TE, observed.output_QE),
        ),
    )
    return Explanation(f"L0H{head}", "the toy", TOKENS, TOKENS, query, steps, **attention.summary(head))


def _torch(x_TE: Tensor, matrices: dict[str, Tensor]) -> Observed:
    """What torch's own functions get."""
    q_HTD, k_HTD, v_HTD = (split_heads(functional.linear(x_TE, matrices[name].T), HEADS) for name in PROJECTIONS)
    attention = nn.MultiheadAttention(4, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([matrices[name].T for name in PROJECTIONS]))
        attention.out_proj.weight.copy_(matrices["W_O"].T)
        hidden_QK = ~causal_mask(*positions(len(TOKENS)))
        output_TE, _ = attention(x_TE, x_TE, x_TE, attn_mask=hidden_QK)
    # Its fused attention gives its weights where the values are the identity.
    identity_HTT = torch.eye(len(TOKENS), dtype=torch.float64).expand(HEADS, -1, -1)
    return Observed(
        "torch's",
        TOLERANCE,
        q_HQD=q_HTD,
        k_GKD=k_HTD,
        v_GKV=v_HTD,
        scale=q_HTD.shape[-1] ** -0.5,
        weights_HQK=functional.scaled_dot_product_attention(q_HTD, k_HTD, identity_HTT, is_causal=True),
        heads_HQV=functional.scaled_dot_product_attention(q_HTD, k_HTD, v_HTD, is_causal=True),
        output_QE=output_TE,
    )


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
            q_SD = draw(entries.mean_q, entries.std_q, width)
            k_SD = draw(entries.mean_k, entries.std_k, width)
            measured = float((q_SD * k_SD).sum(-1, dtype=torch.float64).std())
            spreads.append(Spread(entries, width, measured, entries.product_std(width)))
    return spreads
