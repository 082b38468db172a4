"""Head metrics: what each number is, and how it is asked of an attention operator.

A metric gives one value a query row; a head's score is the mean over the rows that can show it, null where there is
none. Every metric is written against `AttentionOperator`, so it is the same on every engine.

Shapes: B text, H head, Q query, K key. A is the weight matrix, n the tokens, v_i the keys that query i may see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from attnscope.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator


@dataclass(frozen=True)
class Texts:
    """What the metrics know of a batch of texts: token ids (B, T) and how many of them are text."""

    ids_BT: Tensor
    length_B: Tensor

    @cached_property
    def real_BT(self) -> Tensor:
        """True where a token is text, not right padding."""
        import torch

        return torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device) < self.length_B[:, None]

    @cached_property
    def repeated_BT(self) -> Tensor:
        """True where an equal token stands earlier in the text."""
        import torch

        order_BT = torch.argsort(self.ids_BT, dim=1, stable=True)
        sorted_BT = self.ids_BT.gather(1, order_BT)
        again_BT = torch.zeros_like(sorted_BT, dtype=torch.bool)
        again_BT[:, 1:] = sorted_BT[:, 1:] == sorted_BT[:, :-1]
        return torch.zeros_like(again_BT).scatter(1, order_BT, again_BT) & self.real_BT

    @cached_property
    def previous_BT(self) -> Tensor:
        """The id of the token before each position; -1 before the first."""
        import torch

        return torch.nn.functional.pad(self.ids_BT[:, :-1], (1, 0), value=-1)

    def to(self, device: torch.device) -> Texts:
        """The same texts on another device."""
        return self if self.ids_BT.device == device else Texts(self.ids_BT.to(device), self.length_B.to(device))


@dataclass(frozen=True)
class Metric:
    """One head metric: its definition in words, and the function that measures it row by row."""

    id: str
    title: str
    formula: str
    unit: str
    range: str
    source: str
    reading: str
    rows: str  # which rows count: a key of ROWS
    values: Callable[[AttentionOperator, Texts], Tensor]  # -> (B, H, Q)


def _positions(P: AttentionOperator) -> Tensor:
    import torch

    return torch.arange(P.queries, device=P.device)


def _visible(P: AttentionOperator) -> Tensor:
    return P.visible.counts_BHQ.to(P.device).float()


def _key_zero(P: AttentionOperator) -> Tensor:
    return P.at(_positions(P) * 0)


def _entropy_normalised(P: AttentionOperator, texts: Texts) -> Tensor:
    return P.entropy() / _visible(P).clamp_min(2).log()


def _focus(P: AttentionOperator, texts: Texts) -> Tensor:
    sharpness = 1 - P.entropy(skip_first=True) / (_visible(P) - 1).clamp_min(2).log()
    return (1 - _key_zero(P)) * sharpness


ROWS: Mapping[str, tuple[str, Callable[[AttentionOperator, Texts], Tensor]]] = {
    "seeing": ("rows that see at least 2 keys", lambda P, texts: _visible(P) >= 2),
    "choosing": ("rows that see at least 3 keys", lambda P, texts: _visible(P) >= 3),
    "all": ("all rows", lambda P, texts: _visible(P) >= 1),
    "repeated": (
        "rows that see at least 2 keys and have an earlier equal token",
        lambda P, texts: (_visible(P) >= 2) & texts.repeated_BT[:, None],
    ),
}

METRICS: Mapping[str, Metric] = {
    metric.id: metric
    for metric in (
        Metric(
            "previous_token",
            "previous token",
            "mean of A[i,i-1]",
            "share of a row",
            "0 to 1",
            "Clark et al. 2019, arXiv 1906.04341; TransformerLens head detector",
            "near 1: the head looks at the token just before",
            "seeing",
            lambda P, texts: P.at(_positions(P) - 1),
        ),
        Metric(
            "self",
            "self",
            "mean of A[i,i]",
            "share of a row",
            "0 to 1",
            "Clark et al. 2019, arXiv 1906.04341",
            "near 1: the head looks at the token itself",
            "seeing",
            lambda P, texts: P.at(_positions(P)),
        ),
        Metric(
            "first_token",
            "first token",
            "mean of A[i,0]",
            "share of a row",
            "0 to 1",
            "Xiao et al. 2023 (StreamingLLM), arXiv 2309.17453",
            "near 1: the head rests on the first token, where it does nothing",
            "seeing",
            lambda P, texts: _key_zero(P),
        ),
        Metric(
            "sink",
            "sink",
            "sum over all i of A[i,0] / n",
            "share of a row",
            "0 to 1",
            "Gu et al. 2024, arXiv 2410.10781 (importance of key 0)",
            "above 0.3 on a text of at least 64 tokens: an attention sink",
            "all",
            lambda P, texts: _key_zero(P),
        ),
        Metric(
            "off_token_mass",
            "off-token mass",
            "mean of 1 - m_i, m_i the sum of row i",
            "share of a row",
            "0 to 1",
            "gpt-oss sink logits, arXiv 2508.10925",
            "above 0: a learned sink logit takes this share, no token gets it",
            "seeing",
            lambda P, texts: P.lost_mass(),
        ),
        Metric(
            "duplicate_token",
            "duplicate token",
            "over rows with an earlier equal token: mean of sum over j<i, t_j = t_i of A[i,j]",
            "share of a row",
            "0 to 1",
            "Wang et al. 2022 (IOI), arXiv 2211.00593",
            "near 1: the head looks at earlier copies of the same token",
            "repeated",
            lambda P, texts: P.match_mass(texts.ids_BT, texts.ids_BT, gap=1),
        ),
        Metric(
            "induction",
            "induction",
            "over rows with an earlier equal token: mean of sum over j<i, t_j = t_i of A[i,j+1]",
            "share of a row",
            "0 to 1",
            "Olsson et al. 2022, arXiv 2209.11895",
            "near 1: the head looks at what followed the last time this token came up",
            "repeated",
            lambda P, texts: P.match_mass(texts.ids_BT, texts.previous_BT, gap=0),
        ),
        Metric(
            "entropy",
            "entropy",
            "mean of -sum_j A[i,j] ln A[i,j], the row divided by its sum",
            "nats",
            "0 to ln n",
            "Clark et al. 2019, arXiv 1906.04341; Vig & Belinkov 2019, arXiv 1906.04284",
            "0: one key has it all; ln of the visible keys: spread evenly",
            "seeing",
            lambda P, texts: P.entropy(),
        ),
        Metric(
            "entropy_normalised",
            "entropy, normalised",
            "mean of H_i / ln v_i",
            "share of the largest entropy",
            "0 to 1",
            "entropy over its largest value for the keys that the row may see",
            "1: spread evenly over the visible keys",
            "seeing",
            _entropy_normalised,
        ),
        Metric(
            "effective_keys",
            "effective keys",
            "mean of 1 / sum_j A[i,j]^2, the row divided by its sum",
            "keys",
            "1 to n",
            "participation ratio (inverse Simpson index)",
            "how many keys really count",
            "seeing",
            lambda P, texts: 1 / P.squares(),
        ),
        Metric(
            "confidence",
            "confidence",
            "mean of max_j A[i,j]",
            "share of a row",
            "0 to 1",
            "Voita et al. 2019, arXiv 1905.09418 (they leave the end token out; here it stays)",
            "near 1: one key takes the row",
            "seeing",
            lambda P, texts: P.largest(),
        ),
        Metric(
            "distance",
            "distance",
            "mean of sum_j A[i,j] (i-j), the row divided by its sum",
            "tokens",
            "0 to n-1",
            "Vig & Belinkov 2019, arXiv 1906.04284",
            "how far back the head looks on average",
            "seeing",
            lambda P, texts: P.distance(),
        ),
        Metric(
            "local_mass_32",
            "local mass, 32 tokens",
            "mean of the mass on the last 32 keys, the query's own included",
            "share of a row",
            "0 to 1",
            "Xiao et al. 2024 (DuoAttention), arXiv 2410.10819, streaming heads",
            "near 1 on a text much longer than 32 tokens: the head needs no long context",
            "seeing",
            lambda P, texts: P.recent_mass(32),
        ),
        Metric(
            "focus",
            "focus",
            "over rows with v_i >= 3: mean of (1 - A[i,0]) (1 - H'_i / ln(v_i - 1)), H' the entropy without key 0",
            "share",
            "0 to 1",
            "attnscope",
            "near 1: looks sharply, and not at the sink; the default order",
            "choosing",
            _focus,
        ),
    )
}


def measure(P: AttentionOperator, texts: Texts, ids: Sequence[str]) -> dict[str, Tensor]:
    """Each metric of each head: the mean of its row values over the rows that can show it.

    Returns {id: (B, H) float64}, NaN where a text has no such row.

        >>> scores = measure(P, texts, ["entropy", "induction"])
        >>> scores["entropy"][0]    # one number a head, nats
    """
    import torch

    texts = texts.to(P.device)
    scores: dict[str, Tensor] = {}
    for kind, (_, rule) in ROWS.items():
        names = [name for name in ids if METRICS[name].rows == kind]
        if names:
            rows_BHQ = rule(P, texts) & texts.real_BT[:, None]
            values = torch.stack(torch.broadcast_tensors(*(METRICS[name].values(P, texts) for name in names)))
            sums = torch.where(rows_BHQ, values, 0.0).sum(-1, dtype=torch.float64) / rows_BHQ.sum(-1)
            scores.update(zip(names, sums, strict=True))
    return {name: scores[name] for name in ids}


def support(P: AttentionOperator, texts: Texts) -> dict[str, Tensor]:
    """How many rows stand behind each kind of metric: {rows: (B, H or 1)}; `far` rows see more than 32 keys."""
    texts = texts.to(P.device)
    rows = {name: rule(P, texts) for name, (_, rule) in ROWS.items()}
    rows["far"] = _visible(P) > 32
    return {name: (rows_BHQ & texts.real_BT[:, None]).sum(-1) for name, rows_BHQ in rows.items()}


def known(ids: Sequence[str]) -> list[str]:
    """The ids as given, each checked. Raises UsageError that names the nearest metric."""
    import difflib

    for name in ids:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`attnscope metrics` lists them"
            raise UsageError(f"no metric is called {name!r}", hint)
    return list(ids)
