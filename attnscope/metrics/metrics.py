"""Head metrics: what each number is, which rows count for it, and what it asks of an attention operator.

A metric gives one value per query row; a head's score is the mean over the rows that can show it, null where there is
none. A metric names its questions (`attention/questions.py`), so it is the same on every engine, and all metrics of a
layer are answered in one pass.

Shapes: B text, H head, Q query, K key. A is the weight matrix, n the tokens, v_i the keys that query i may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope.attention import questions as ask
from attnscope.attention.questions import Question
from attnscope.errors import UsageError, nearest
from attnscope.metrics.texts import Texts
from attnscope.model.selection import CAUSAL, ENCODER, GLOBAL, LINEAR, MIXING, SOFTMAX, VISION, is_causal

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One head metric: its definition in words, what it asks, and what it makes of the answers row by row.

    short: its heading in narrow tables; it and the title are the words of the id where they are left out. rows: which
    rows count, a key of ROWS. asks(texts): the questions. value(P, answer, ...): their answers, each (B, H, Q), to the
    metric's value per row; None for the first answer. extras(P, texts): what value takes after the answers, None for
    nothing. stacks: the stacks of whose layers it says something; of others it is null. of_visible: whether it is
    relative to the keys that a row sees: it is null where those are not known.
    """

    id: str
    short: str = ""
    title: str = ""
    formula: str
    source: str
    reading: str
    asks: Callable[[Texts], tuple[Question, ...]]
    rows: str = "two_keys"
    unit: str = "share of a row"
    range: str = "0 to 1"
    value: Callable[..., Tensor] | None = None
    extras: Callable[[AttentionOperator, Texts], tuple[Tensor, ...]] | None = None
    stacks: tuple[str, ...] = SOFTMAX
    of_visible: bool = False

    def __post_init__(self) -> None:
        words = self.id.replace("_", " ")
        object.__setattr__(self, "short", self.short or words)
        object.__setattr__(self, "title", self.title or words)

    @property
    def within(self) -> tuple[float, float] | None:
        """The range of a text's value: that of a share; None where no bound holds for all texts, however long."""
        return (0.0, 1.0) if self.range == "0 to 1" else None


OF_TEXT = (*CAUSAL, ENCODER)  # stacks of whose layers they speak
ITSELF = (*OF_TEXT, VISION, GLOBAL)


def visible_keys(P: AttentionOperator) -> Tensor:
    """(B or 1, H or 1, Q): v_i, how many keys each query may see."""
    return P.visible.counts_BHQ.to(P.device).float()


ROWS: Mapping[str, tuple[str, Callable[[AttentionOperator, Texts], Tensor]]] = {
    "two_keys": ("rows that see at least 2 keys", lambda P, texts: visible_keys(P) >= 2),
    "previous": (
        "rows that see at least 2 keys and have a token before them",
        lambda P, texts: (visible_keys(P) >= 2) & (texts.previous_BT >= 0)[:, None],
    ),
    "three_keys": ("rows that see at least 3 keys", lambda P, texts: visible_keys(P) >= 3),
    "all": ("all rows", lambda P, texts: visible_keys(P) >= 1),
    "repeats": (
        "rows that see at least 2 keys and have an earlier equal token",
        lambda P, texts: (visible_keys(P) >= 2) & texts.repeated(1)[:, None],
    ),
    "repeats_apart": (
        "rows that see at least 2 keys and have an equal token at least 3 tokens earlier",
        lambda P, texts: (visible_keys(P) >= 2) & texts.repeated(3)[:, None],
    ),
    "answer": (
        "rows of the answer's tokens but its last that see a token of the prompt",
        lambda P, texts: texts.answering(P, 0),
    ),
    "answer_beyond_0": (
        "rows of the answer's tokens but its last that see a token of the prompt other than key 0",
        lambda P, texts: texts.answering(P, 1),
    ),
    "sees_key": (
        "rows that see one of the named keys",
        lambda P, texts: (texts.shares(P.visible, texts.keys)[..., 0] > 0).to(P.device),
    ),
}


def by_id(*metrics: Metric) -> Mapping[str, Metric]:
    """Metrics by their ids, in order."""
    return {metric.id: metric for metric in metrics}


METRICS = by_id(
    Metric(
        id="previous_token",
        short="prev",
        formula="mean of A[i,i-1]",
        source="Clark et al. 2019, arXiv 1906.04341; TransformerLens head detector",
        reading="near 1: the head looks at the token just before",
        rows="previous",
        stacks=(*OF_TEXT, *MIXING),
        asks=lambda texts: (ask.Back(1),),
    ),
    Metric(
        id="self",
        formula="mean of A[i,i]",
        source="Clark et al. 2019, arXiv 1906.04341",
        reading="near 1: the head looks at the token itself",
        stacks=(*ITSELF, *MIXING),
        asks=lambda texts: (ask.Back(0),),
    ),
    Metric(
        id="sink",
        formula="sum over all i of A[i,0] / n",
        source="Gu et al. 2024, arXiv 2410.10781 (importance of key 0); Xiao et al. 2023, arXiv 2309.17453",
        reading="above 0.3 on a text of at least 64 tokens: an attention sink; the head may still do something",
        rows="all",
        stacks=(*SOFTMAX, *MIXING),
        asks=lambda texts: (ask.Key(0),),
    ),
    Metric(
        id="off_token_mass",
        short="off tok",
        title="off-token mass",
        formula="mean of 1 - m_i, m_i the sum of row i",
        source="gpt-oss sink logits, arXiv 2508.10925",
        reading="above 0: a learned sink logit takes this share, no token gets it",
        asks=lambda texts: (ask.RowSum(),),
        value=lambda P, row_sum: P.sink_share(row_sum).clamp_min(0),  # a row's sum is rounded to beside 1
    ),
    Metric(
        id="duplicate_token",
        short="dupl",
        formula="over rows with an earlier equal token: mean of sum over j<i, t_j = t_i of A[i,j]",
        source="Wang et al. 2022 (IOI), arXiv 2211.00593",
        reading="near 1: the head looks at earlier copies of the same token",
        rows="repeats",
        stacks=(*OF_TEXT, *MIXING),
        asks=lambda texts: (ask.EqualLabels(texts.ids_BT, texts.ids_BT, gap=1),),
    ),
    Metric(
        id="induction",
        short="induct",
        formula="over rows with such a key: mean of sum over t_j = t_i, j+1 <= i-2 of A[i,j+1]",
        source="Olsson et al. 2022, arXiv 2209.11895",
        reading="near 1: the head looks at what followed an earlier copy of this token; keys i and i-1 are left "
        "out, since a head that looks there does so without a repetition",
        rows="repeats_apart",
        stacks=(*CAUSAL, *MIXING),
        asks=lambda texts: (ask.EqualLabels(texts.ids_BT, texts.previous_BT, gap=2),),
    ),
    Metric(
        id="entropy",
        formula="mean of -sum_j A[i,j] ln A[i,j], the row divided by its sum",
        unit="nats",
        range="0 to ln n",
        source="Clark et al. 2019, arXiv 1906.04341; Vig & Belinkov 2019, arXiv 1906.04284",
        reading="0: one key has it all; ln of the visible keys: uniform",
        asks=lambda texts: (ask.Entropy(),),
    ),
    Metric(
        id="entropy_normalised",
        short="entr norm",
        title="entropy, normalised",
        formula="mean of H_i / ln v_i",
        unit="share of the largest entropy",
        source="entropy over its largest value for the keys that the row may see",
        reading="1: uniform over the visible keys; from 0.8 on the head is marked near_uniform",
        asks=lambda texts: (ask.Entropy(),),
        value=lambda P, entropy: entropy / visible_keys(P).clamp_min(2).log(),
        of_visible=True,
    ),
    Metric(
        id="effective_keys",
        short="eff keys",
        formula="mean of 1 / sum_j A[i,j]^2, the row divided by its sum",
        unit="keys",
        range="1 to n",
        source="participation ratio (inverse Simpson index)",
        reading="how many keys really count",
        stacks=(*SOFTMAX, *MIXING),
        asks=lambda texts: (ask.SumOfSquares(),),
        value=lambda P, squares: (1 / squares).masked_fill(squares == 0, 0.0),  # a linear layer's row may be all 0
    ),
    Metric(
        id="confidence",
        short="conf",
        formula="mean of max_j A[i,j]",
        source="Voita et al. 2019, arXiv 1905.09418 (they leave the end token out; here it stays)",
        reading="near 1: one key takes the row",
        asks=lambda texts: (ask.MaxWeight(),),
    ),
    Metric(
        id="distance",
        short="dist",
        formula="mean of sum_j A[i,j] |i-j|, the row divided by its sum",
        unit="tokens",
        range="0 to n-1",
        source="Vig & Belinkov 2019, arXiv 1906.04284 (they leave key 0 out; here it stays)",
        reading="how far back the head looks on average; in an encoder how far to either side",
        stacks=(*OF_TEXT, *MIXING),
        asks=lambda texts: (ask.Distance() if is_causal(texts.stack) else ask.AbsoluteDistance(),),
    ),
    Metric(
        id="local_mass_32",
        short="loc 32",
        title="local mass, 32 tokens",
        formula="mean of the mass on the last 32 keys, the query's own included",
        source="attnscope; see also Xiao et al. 2024 (DuoAttention), arXiv 2410.10819",
        reading="near 1 on a text much longer than 32 tokens: the head needs no long context",
        stacks=CAUSAL,
        asks=lambda texts: (ask.Window(32),),
    ),
    Metric(
        id="focus",
        formula="over rows with v_i >= 3: mean of (1 - A[i,0]) (1 - H'_i / ln w_i), "
        "H' the entropy without key 0, w_i the visible keys other than key 0",
        unit="share",
        source="attnscope",
        reading="near 1: looks sharply, and not at the sink; the default order",
        rows="three_keys",
        asks=lambda texts: (ask.Entropy(skip_key0=True), ask.Key(0)),
        value=lambda P, entropy, key0: (
            (1 - key0) * (1 - entropy / P.visible.others_BHQ.to(P.device).float().clamp_min(2).log())
        ),
        of_visible=True,
    ),
)
SINKS = 4  # first keys that StreamingLLM's cache keeps


def _streaming(width: int) -> Metric:
    """The mass on what a cache of the first SINKS and the last `width` keys holds."""

    def value(P: AttentionOperator, recent: Tensor, *first: Tensor) -> Tensor:
        query_Q = P.visible.position_Q.to(P.device)
        dropped = [mass * (query_Q - key >= width) for key, mass in enumerate(first)]  # no longer among the last
        return recent + sum(dropped)

    return Metric(
        id=f"streaming_mass_{width}",
        short=f"str {width}",
        title=f"streaming mass, {width} tokens",
        formula=f"mean of the mass on the first {SINKS} and the last {width} keys, the query's own included",
        source="Xiao et al. 2023 (StreamingLLM), arXiv 2309.17453: what its cache keeps",
        reading=f"near 1 on a text much longer than {width} tokens: the head reads sinks and recent keys alone",
        stacks=CAUSAL,
        asks=lambda texts: (ask.Window(width), *map(ask.Key, range(SINKS))),
        value=value,
    )


LENGTHS = by_id(  # what a head needs of a long text: measured where it is asked for
    Metric(
        id="keys_95",
        short="keys 95",
        title="keys that hold 95 %",
        formula="mean of the smallest number of keys whose weights add up to 0.95 of the row's sum",
        unit="keys",
        range="1 to n",
        source="top-p attention, Lin et al. 2025 (Twilight), arXiv 2502.02770",
        reading="how many keys a cache must keep for this head, if it keeps the right ones",
        asks=lambda texts: (ask.Holding(95),),
    ),
    *map(_streaming, (32, 128, 512)),
)
UNIFORM = "uniform"  # the column beside the mass on named keys: what uniform attention gives them
MASS = Metric(
    id="mass",
    title="mass on the named keys",
    formula="mean of sum over the named keys j of A[i,j]",
    source="attnscope",
    reading="what the named queries give the named keys; ranks by how far that is above uniform attention",
    rows="sees_key",
    stacks=(*SOFTMAX, *MIXING),
    asks=lambda texts: (texts.keys,),
    value=lambda P, mass: mass[..., 0],
)


def _lookback(P: AttentionOperator, mass_BHQ3: Tensor, seen_BHQ3: Tensor, part: int) -> Tensor:
    """Of mean weights per visible key: that of a part of the prompt, as a share of it and that of the answer."""
    mean_BHQ3 = mass_BHQ3 / seen_BHQ3.clamp_min(1e-30)  # times the keys that the row sees, in both means
    prompt, answer = mean_BHQ3[..., part], mean_BHQ3[..., 2]
    return prompt / (prompt + answer).clamp_min(1e-30)


LOOKBACK = Metric(
    id="lookback",
    title="lookback ratio",
    formula="over the answer's rows but the last: mean of a / (a + b), "
    "a the mean of A[i,j] over the prompt's visible keys, b over the answer's",
    unit="share of two mean weights",
    source="Chuang et al. 2024 (Lookback Lens), arXiv 2407.07071; here over the keys that the row sees",
    reading="above 0.5, which uniform attention gives: a key of the prompt gets more than one of the answer",
    rows="answer",
    stacks=CAUSAL,
    asks=lambda texts: (texts.parts,),
    extras=lambda P, texts: (texts.shares(P.visible, texts.parts).to(P.device),),
    value=partial(_lookback, part=0),
    of_visible=True,
)
LOOKBACKS = by_id(  # measured where a prompt has an answer
    LOOKBACK,
    replace(
        LOOKBACK,
        id="lookback_without_key0",
        short="lookb -0",
        title="lookback ratio without key 0",
        formula="the same, key 0 left out of a",
        reading="the same without the sink: where key 0 takes most, the plain ratio shows little else",
        rows="answer_beyond_0",
        value=partial(_lookback, part=1),
    ),
)


def _signed(P: AttentionOperator, value: Tensor) -> Tensor:
    """The value of a layer without a softmax; NaN of another, such as uniform attention."""
    return value if hasattr(P, "rule") else value * math.nan


def _negative_share(P: AttentionOperator, size: Tensor, signed: Tensor) -> Tensor:
    """NaN too of a mean over channels, which is of sizes."""
    share = ((size - signed) / (2 * size).clamp_min(1e-30)).clamp_min(0)
    return share if P.signed else share * math.nan


def _decay_length(P: AttentionOperator, _: Tensor, log_BHQ: Tensor, counts_BHQ: Tensor) -> Tensor:
    """One number for all rows, (B, H, 1): that of the decays of all rows that count."""
    logs_BHQ = log_BHQ.double().where(counts_BHQ, 0.0)
    mean_BH1 = logs_BHQ.sum(-1, keepdim=True) / counts_BHQ.sum(-1, keepdim=True)
    return -1 / mean_BH1.where(mean_BH1 < 0, math.nan)


def _gate(P: AttentionOperator, gate: str) -> Tensor:
    """A gate of a linear layer, (B, H, Q) `log_decay` or `write`; NaN without it."""
    import torch

    gate_BTH = getattr(getattr(P, "rule", None), f"{gate}_BTH", None)
    if gate_BTH is None:
        return torch.full((P.batch, P.heads, P.queries), torch.nan, device=P.device)
    return gate_BTH.float().transpose(1, 2)


GATES = (
    "attnscope; the gates of Yang et al. 2024 (Gated DeltaNet), arXiv 2412.06464, and Dao & Gu 2024 (Mamba-2), "
    "arXiv 2405.21060"
)
# Of linear layers, whose weights are signed and whose rows have no fixed sum: measured where a model has some.
SIGNED = by_id(
    Metric(
        id="absolute_mass",
        short="abs mass",
        formula="mean of sum_j |w[i,j]|",
        unit="sum of absolute weights",
        range="from 0",
        source="attnscope",
        reading="how much of the values of all tokens reaches the output, before gate and norm",
        rows="all",
        stacks=MIXING,
        asks=lambda texts: (ask.SizeSum(),),
        value=_signed,
    ),
    Metric(
        id="negative_share",
        short="neg",
        formula="mean of the sum of |w[i,j]| over w[i,j] < 0, divided by that over all j",
        source="attnscope",
        reading="above 0: values of some tokens are subtracted, which a softmax cannot do; null of a mean of sizes",
        rows="all",
        stacks=MIXING,
        asks=lambda texts: (ask.SizeSum(), ask.RowSum()),
        value=_negative_share,
    ),
    Metric(
        id="decay_length",
        short="decay",
        formula="-1 / (mean of ln d_i), d_i the share of the state that token i leaves",
        unit="tokens",
        range="from 0",
        source=GATES,
        reading="after so many tokens decay alone leaves 1/e of the state; null where nothing decays",
        rows="all",
        stacks=MIXING,
        asks=lambda texts: (ask.RowSum(),),
        value=_decay_length,
        extras=lambda P, texts: (_gate(P, "log_decay"), counted_rows(P, texts, "all")),
    ),
    Metric(
        id="write_gate",
        short="write",
        formula="mean of b_i, the share of its value that token i writes into the state; of Mamba-2 its step",
        unit="share of a value",
        range="from 0",
        source=GATES,
        reading="near 0: the head's state keeps what it has, and few tokens change it",
        rows="all",
        stacks=(LINEAR,),
        asks=lambda texts: (ask.RowSum(),),
        value=lambda P, _, write_BHQ: write_BHQ,
        extras=lambda P, texts: (_gate(P, "write"),),
    ),
)
# What tables show first, and narrow screens keep longest; the metrics not named here come after them.
KEPT_FIRST = (
    *("focus", "previous_token", "induction", "sink", "entropy", "top_key_mass", "duplicate_token", "self"),
    *("distance", "effective_keys", "confidence", "local_mass_32", "entropy_normalised", "off_token_mass"),
)
# METRICS are measured in any case, LENGTHS where asked for, LOOKBACKS where there is an answer, mass of named keys,
# SIGNED of linear layers
KNOWN = {**METRICS, **LENGTHS, **LOOKBACKS, **SIGNED, MASS.id: MASS}


def ends(metric: Metric, tokens: int) -> tuple[float, float] | None:
    """The ends of a metric's range on a text of so many tokens, as stated (`0 to ln n`); None where open or empty."""
    values = {"0": 0.0, "1": 1.0, "-1": -1.0, "n": float(tokens), "n-1": tokens - 1.0, "ln n": math.log(tokens)}
    low, _, high = metric.range.partition(" to ")
    return (values[low], values[high]) if low in values and high in values and values[low] < values[high] else None


def metrics_for(ids: Sequence[str], stack: str) -> list[str]:
    """Those of the metrics that say something of a stack's layers.

    >>> metrics_for(["entropy", "induction"], "cross")
    ['entropy']
    """
    return [name for name in ids if stack in KNOWN[name].stacks]


def questions(ids: Sequence[str], texts: Texts) -> list[Question]:
    """What these metrics ask of a layer; texts on the layer's device."""
    return [question for name in ids for question in _questions_of(texts, name)]


def _questions_of(texts: Texts, name: str) -> tuple[Question, ...]:
    """What a metric asks, the same objects each time: their answers are then found without comparing them."""
    if name not in texts.asked:
        texts.asked[name] = KNOWN[name].asks(texts)
    return texts.asked[name]


def row_values(P: AttentionOperator, texts: Texts, answers: Mapping[Question, Any], name: str) -> Tensor:
    """One metric before it is averaged: a value per row, broadcastable to (B, H, Q)."""
    metric = KNOWN[name]
    results = [answers[question] for question in _questions_of(texts, name)]
    extras = metric.extras(P, texts) if metric.extras else ()
    return metric.value(P, *results, *extras) if metric.value else results[0]


def counted_rows(P: AttentionOperator, texts: Texts, kind: str) -> Tensor:
    """Which rows count for metrics of a kind, a key of ROWS; boolean, broadcastable to (B, H, Q).

    Layers that share a mask share them.
    """
    masks = texts.counted.setdefault(P.visible, {})
    if kind not in masks:
        masks[kind] = ROWS[kind][1](P, texts) & texts.asked_BT[:, None]
    return masks[kind]


def stacked_means(P: AttentionOperator, texts: Texts, answers: Mapping[Question, Any], ids: Sequence[str]) -> Tensor:
    """Each of S metrics of each head: its mean over the rows that count; (S, B, H) float64, NaN without such a row."""
    import torch

    if not ids:
        return torch.empty(0, P.batch, P.heads, dtype=torch.float64, device=P.device)

    # The rows that count follow from the mask and the text alone: layers that share a mask share them.
    row_masks = texts.rows_of.setdefault(P.visible, {})
    if (names := tuple(ids)) not in row_masks:
        kinds = [counted_rows(P, texts, KNOWN[name].rows) for name in names]
        rows_SBHQ = torch.stack(torch.broadcast_tensors(*kinds))
        row_masks[names] = rows_SBHQ, rows_SBHQ.sum(-1)
    rows_SBHQ, count_SBH = row_masks[names]

    # Other rows may hold NaN, which a product with 0 would keep.
    values_SBHQ = torch.stack(torch.broadcast_tensors(*(row_values(P, texts, answers, name) for name in ids)))
    means_SBH = torch.where(rows_SBHQ, values_SBHQ, 0.0).sum(-1, dtype=torch.float64) / count_SBH
    if not P.visible.known:
        means_SBH[[place for place, name in enumerate(ids) if KNOWN[name].of_visible]] = torch.nan
    return means_SBH


def measure(P: AttentionOperator, texts: Texts, ids: Sequence[str]) -> dict[str, Tensor]:
    """Each metric of each head of one layer, from one pass: {id: (B, H) float64}, NaN where no row can show it.

    >>> measure(P, texts, ["entropy", "induction"])["entropy"][0]    # one number per head, nats
    """
    texts = texts.to(P.device)
    return dict(zip(ids, stacked_means(P, texts, P.together(questions(ids, texts)), ids), strict=True))


def support(P: AttentionOperator, texts: Texts) -> dict[str, Tensor]:
    """How many rows count for each kind of metric, {rows: (B, H or 1)}; `beyond_32` rows see more than 32 keys."""
    texts = texts.to(P.device)
    needs = {MASS.rows: texts.key_BT, **{metric.rows: texts.answer_B for metric in LOOKBACKS.values()}}
    kinds = [kind for kind in ROWS if kind not in needs or needs[kind] is not None]
    rows = {kind: counted_rows(P, texts, kind) for kind in kinds}
    rows["beyond_32"] = (visible_keys(P) > 32) & texts.asked_BT[:, None]
    return {kind: rows_BHQ.sum(-1) for kind, rows_BHQ in rows.items()}


def with_asked(text: str | None, sort: str) -> tuple[str, ...]:
    """What is measured: METRICS, those that a person names besides, by commas, and the one that heads are sorted by.

    Raises UsageError for a name that is no metric, and for `mass`, which keys ask for.
    """
    ids = metric_ids([part.strip() for part in (text or "").split(",") if part.strip()])
    if MASS.id in ids:
        raise UsageError("mass is measured where keys are named", "name them with {key}")
    chosen = {*ids, order_of(sort)[0]}
    return tuple(name for name in (*METRICS, *LENGTHS) if name in METRICS or name in chosen)


COLUMNS = {"layer": "layer", "top_key_mass": "top key"}  # of heads, which order them too, and their short names


def metric_ids(ids: Sequence[str]) -> list[str]:
    """The metrics of these ids or short names, by id. Raises UsageError that names the nearest."""
    return [_id_of(name, {metric.id: metric.short for metric in KNOWN.values()}) for name in ids]


def order_of(sort: str) -> tuple[str, bool]:
    """The metric or column that heads are sorted by, and whether its smallest come first: for `-entropy`, and `layer`.

    By `mass` they are sorted by how far it is above uniform attention.

    >>> order_of("-prev")
    ('previous_token', True)
    """
    name = _id_of(sort.removeprefix("-"), {metric.id: metric.short for metric in KNOWN.values()} | COLUMNS)
    return name, name == "layer" or sort.startswith("-")


def _id_of(name: str, shorts: Mapping[str, str]) -> str:
    ids = {name.replace(" ", "_"): id for id, short in shorts.items() for name in (short, id)}
    id = ids.get(name.replace(" ", "_"))
    if id is None:
        near = nearest(name, ids)
        hint = f"did you mean {near!r}?" if near else "`attnscope metrics` lists them"
        raise UsageError(f"no metric is called {name!r}", hint)
    return id
