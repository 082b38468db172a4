"""Every metric against a second computation spelled with Python loops, and against matrices whose answer is known.

Shapes: B text, H head, Q query, K key, T token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from attnscope.attention.linear import LinearMap, LinearRule
from attnscope.attention.operator import AttentionOperator, DenseAttention, UniformAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import UsageError
from attnscope.hooks.listen import listen
from attnscope.metrics.metrics import (
    KNOWN,
    MASS,
    METRICS,
    SIGNED,
    Texts,
    measure,
    metric_ids,
    metrics_for,
    order_of,
    support,
    with_asked,
)
from attnscope.model.selection import LINEAR
from helpers.families import tiny_model
from helpers.roles import role_of

Row = list[float]


def entropy_of(row: Row) -> float:
    total = sum(row)
    return -sum(a / total * math.log(a / total) for a in row if a > 0)


def earlier(tokens: list[int], i: int) -> list[int]:
    return [j for j in range(i) if tokens[j] == tokens[i]]


def followers(tokens: list[int], i: int) -> list[int]:
    """What stands behind the earlier copies of a token, but for the token itself and the one before it."""
    return [j + 1 for j in earlier(tokens, i) if j + 1 not in (i - 1, i)]


def fewest(row: Row, share: float) -> int:
    """How many of the largest weights add up to a share of the row; 1e-6 of it is left to rounding."""
    taken, total = 0, 0.0
    for weight in sorted(row, reverse=True):
        if total >= (share - 1e-6) * sum(row):
            break
        taken, total = taken + 1, total + weight
    return taken


def streamed(row: Row, i: int, width: int) -> float:
    return sum(a for j, a in enumerate(row) if j < 4 or i - j < width)


NAMED = 4  # every fourth key is named, from key 1 on


def answer_at(tokens: list[int]) -> int:
    """The second half of a text is its answer; one token has none."""
    return (len(tokens) + 1) // 2


def looked_back(row: Row, seen: list[int], tokens: list[int], i: int, first: int) -> float | None:
    """A row of the answer but its last: the mean weight of the prompt's keys over that and the answer's."""
    at = answer_at(tokens)
    prompt, answer = [row[j] for j in seen if first <= j < at], [row[j] for j in seen if j >= at]
    if not prompt or not at <= i < len(tokens) - 1:
        return None
    a, b = sum(prompt) / len(prompt), sum(answer) / len(answer)
    return a / (a + b) if a + b else 0.0


# One row's value, from the row, its visible keys, the tokens and the query's position; None where it says nothing.
LOOPS: dict[str, Callable[[Row, list[int], list[int], int], float | None]] = {
    "previous_token": lambda a, v, t, i: a[i - 1] if len(v) >= 2 else None,
    "self": lambda a, v, t, i: a[i] if len(v) >= 2 else None,
    "sink": lambda a, v, t, i: a[0],
    "off_token_mass": lambda a, v, t, i: 1 - sum(a) if len(v) >= 2 else None,
    "duplicate_token": lambda a, v, t, i: sum(a[j] for j in earlier(t, i)) if len(v) >= 2 and earlier(t, i) else None,
    "induction": lambda a, v, t, i: sum(a[j] for j in followers(t, i)) if len(v) >= 2 and followers(t, i) else None,
    "entropy": lambda a, v, t, i: entropy_of(a) if len(v) >= 2 else None,
    "entropy_normalised": lambda a, v, t, i: entropy_of(a) / math.log(len(v)) if len(v) >= 2 else None,
    "effective_keys": lambda a, v, t, i: 1 / sum((x / sum(a)) ** 2 for x in a) if len(v) >= 2 else None,
    "confidence": lambda a, v, t, i: max(a) if len(v) >= 2 else None,
    "distance": lambda a, v, t, i: sum(x / sum(a) * (i - j) for j, x in enumerate(a)) if len(v) >= 2 else None,
    "local_mass_32": lambda a, v, t, i: sum(x for j, x in enumerate(a) if i - j < 32) if len(v) >= 2 else None,
    "keys_95": lambda a, v, t, i: fewest(a, 0.95) if len(v) >= 2 else None,
    "streaming_mass_32": lambda a, v, t, i: streamed(a, i, 32) if len(v) >= 2 else None,
    "streaming_mass_128": lambda a, v, t, i: streamed(a, i, 128) if len(v) >= 2 else None,
    "streaming_mass_512": lambda a, v, t, i: streamed(a, i, 512) if len(v) >= 2 else None,
    "lookback": lambda a, v, t, i: looked_back(a, v, t, i, 0),
    "lookback_without_key0": lambda a, v, t, i: looked_back(a, v, t, i, 1),
    "mass": lambda a, v, t, i: sum(a[1::NAMED]) if set(v) & set(range(1, len(t), NAMED)) else None,
    "focus": lambda a, v, t, i: (
        (1 - a[0]) * (1 - entropy_of(a[1:]) / math.log(len(set(v) - {0}))) if len(v) >= 3 else None
    ),
    **dict.fromkeys(SIGNED, lambda a, v, t, i: None),  # no softmax has a sign, or gates
}


def by_loops(weights_QK: torch.Tensor, visible_QK: torch.Tensor, tokens: list[int], name: str) -> float:
    values = []
    for i, (row, seen) in enumerate(zip(weights_QK.double().tolist(), visible_QK.tolist(), strict=True)):
        value = LOOPS[name](row, [j for j, there in enumerate(seen) if there], tokens, i)
        if value is not None:
            values.append(value)
    return sum(values) / len(values) if values else math.nan


def texts_of(tokens: list[int]) -> Texts:
    """One text, of which some keys are named, and whose second half is an answer."""
    named_BT = torch.arange(len(tokens))[None] % NAMED == 1
    answer_B = torch.tensor([answer_at(tokens)])
    return Texts(torch.tensor([tokens]), torch.tensor([len(tokens)]), key_BT=named_BT, answer_B=answer_B)


def assert_equals_loops(P: AttentionOperator, tokens: list[int]) -> None:
    scores = measure(P, texts_of(tokens), list(KNOWN))
    visible_QK = P.visible.rows(0, P.queries)[0, 0]
    for name in KNOWN:
        expected = [by_loops(P.dense()[0, head], visible_QK, tokens, name) for head in range(P.heads)]
        assert scores[name][0].tolist() == pytest.approx(expected, abs=2e-6, rel=2e-6, nan_ok=True), name


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gemma2"])
def test_metrics_equal_python_loops_on_real_calls(family: str) -> None:
    """Plain, windowed, sink-logit and soft-capped attention, 48 tokens with repeats; sharpened."""
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(12)
    tokens = torch.randint(6, 20, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    listen(model, torch.tensor([tokens]), lambda call: assert_equals_loops(call.P, tokens))


def test_a_wrong_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    P, tokens = random_attention(12), [1, 2, 3] * 4
    assert_equals_loops(P, tokens)
    wrong = {"induction": lambda a, v, t, i: sum(a[j] for j in earlier(t, i)) if earlier(t, i) else None}
    monkeypatch.setitem(LOOPS, *wrong.popitem())
    with pytest.raises(AssertionError, match="induction"):
        assert_equals_loops(P, tokens)


def decaying_rule(tokens: int, texts: int = 1, heads: int = 2) -> LinearRule:
    """A state that decays and takes what each token writes: y_t = q_t S_t, S_t = d_t S_t-1 + b_t k_t v_t."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(texts, tokens, heads, 3, generator=generator) for _ in "qk")
    d, b = (torch.rand(texts, tokens, heads, generator=generator) for _ in "db")

    def apply(
        by_token: Mapping[str, torch.Tensor], values: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.zeros(texts, heads, 3, values.shape[-1]) if state is None else state
        outputs = []
        for t in range(values.shape[1]):
            q, k, d, b = (by_token[name][:, t] for name in "qkdb")
            state = d[..., None, None] * state + b[..., None, None] * k[..., None] * values[:, t, :, None]
            outputs.append((q[..., None] * state).sum(-2))
        return torch.stack(outputs, 1), state

    by_token = dict(zip("qkdb", (q, k, d, b), strict=True))
    return LinearRule("decay", by_token, apply, torch.zeros(texts, tokens, heads, 4), 3, d.log(), b)


def test_metrics_of_signed_weights_equal_python_loops() -> None:
    """Spread is of |w| as a share of the row; mass, sign and gates are the map's own."""
    tokens = [1, 2, 3, 1, 2, 4] * 3
    rule = decaying_rule(len(tokens))
    P = LinearMap(rule)
    q, k, d, b = (rule.tokens[name][0].double() for name in "qkdb")
    seen = [list(range(i + 1)) for i in range(len(tokens))]
    scores = measure(P, replace(texts_of(tokens), stack=LINEAR), list(KNOWN))
    for head in range(P.heads):
        rows = [
            [float(q[i, head] @ k[j, head] * d[j + 1 : i + 1, head].prod() * b[j, head]) for j in v]
            for i, v in enumerate(seen)
        ]
        assert min(map(min, rows)) < 0
        sizes = [sum(map(abs, row)) for row in rows]
        shares = [
            [abs(w) / size for w in row] + [0.0] * (len(rows) - len(row)) for row, size in zip(rows, sizes, strict=True)
        ]
        expected = {
            "absolute_mass": sum(sizes) / len(rows),
            "negative_share": sum(sum(-w for w in row if w < 0) / size for row, size in zip(rows, sizes, strict=True))
            / len(rows),
            "decay_length": -len(rows) / sum(math.log(x) for x in d[:, head].tolist()),
            "write_gate": sum(b[:, head].tolist()) / len(rows),
        }
        for name in metrics_for([*METRICS, MASS.id], LINEAR):
            values = [LOOPS[name](row, seen[i], tokens, i) for i, row in enumerate(shares)]
            counted = [value for value in values if value is not None]
            expected[name] = sum(counted) / len(counted)
        assert expected.keys() == set(metrics_for(list(KNOWN), LINEAR))
        for name, value in expected.items():
            assert float(scores[name][0, head]) == pytest.approx(value, abs=2e-5, rel=2e-5), name


def test_a_head_that_never_decays_has_no_length_and_one_without_gates_no_gate() -> None:
    rule = decaying_rule(6)
    texts = replace(texts_of([1] * 6), stack=LINEAR)
    still = replace(rule, log_decay_BTH=torch.zeros(1, 6, 2), write_BTH=None)
    assert measure(LinearMap(still), texts, list(SIGNED))["decay_length"].isnan().all()
    assert measure(LinearMap(still), texts, list(SIGNED))["write_gate"].isnan().all()
    assert measure(LinearMap(replace(rule, log_decay_BTH=None)), texts, ["decay_length"])["decay_length"].isnan().all()


def test_a_row_of_zeros_has_no_key_that_counts_and_a_row_of_nan_no_number() -> None:
    rule = decaying_rule(6)
    texts = replace(texts_of([1] * 6), stack=LINEAR)
    names = metrics_for([*METRICS, "absolute_mass", "negative_share"], LINEAR)
    for fill, expected in ((0.0, 0.0), (math.nan, math.nan)):
        query = rule.tokens["q"].clone()
        query[:, :, 1] = fill
        scores = measure(LinearMap(replace(rule, tokens={**rule.tokens, "q": query})), texts, names)
        for name, value in scores.items():
            assert float(value[0, 1]) == pytest.approx(expected, nan_ok=True), name
            assert math.isfinite(float(value[0, 0])), name


def test_the_gates_of_a_shorter_text_do_not_hear_its_padding() -> None:
    rule = decaying_rule(9, texts=2)
    ids = torch.arange(9).repeat(2, 1)
    both = measure(LinearMap(rule), Texts(ids, torch.tensor([9, 5]), stack=LINEAR), ["decay_length", "write_gate"])
    short = {name: value[1:, :5] for name, value in rule.tokens.items()}
    values, logs = rule.values_BTHV[1:, :5], short["d"].log()
    alone = replace(rule, tokens=short, values_BTHV=values, log_decay_BTH=logs, write_BTH=short["b"])
    texts = Texts(ids[1:, :5], torch.tensor([5]), stack=LINEAR)
    for name, value in measure(LinearMap(alone), texts, list(both)).items():
        torch.testing.assert_close(both[name][1], value[0], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(both[name][0], both[name][1])


def random_attention(tokens: int, batch: int = 1, heads: int = 3) -> DenseAttention:
    logits = torch.randn(batch, heads, tokens, tokens, generator=torch.Generator().manual_seed(tokens)) * 3
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return DenseAttention(logits.masked_fill(~causal, -torch.inf).softmax(-1), Visibility(tokens, tokens))


def one_hot(keys: list[int]) -> DenseAttention:
    matrix = torch.zeros(1, 1, len(keys), len(keys))
    for query, key in enumerate(keys):
        matrix[0, 0, query, key] = 1
    return DenseAttention(matrix, Visibility(len(keys), len(keys)))


def scores_of(P: AttentionOperator, tokens: list[int]) -> dict[str, float]:
    return {name: float(score[0, 0]) for name, score in measure(P, texts_of(tokens), list(KNOWN)).items()}


def test_heads_whose_answer_is_known() -> None:
    tokens = [10, 11, 12, 13, 10, 11, 12, 13]
    previous = scores_of(one_hot([0, 0, 1, 2, 3, 4, 5, 6]), tokens)
    assert previous["previous_token"] == previous["confidence"] == previous["effective_keys"] == 1
    assert previous["distance"] == 1
    induction = scores_of(one_hot([0, 0, 0, 0, 1, 2, 3, 4]), tokens)
    assert (induction["induction"], induction["duplicate_token"]) == (1, 0)
    duplicate = scores_of(one_hot([0, 0, 0, 0, 0, 1, 2, 3]), tokens)
    assert (duplicate["induction"], duplicate["duplicate_token"]) == (0, 1)
    sink = scores_of(one_hot([0] * 8), tokens)
    assert (sink["sink"], sink["focus"]) == (1, 0)


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_a_head_that_looks_nearby_is_no_induction_head_where_text_repeats_closely(period: int) -> None:
    """On `a a a a`, `a b a b`, ... what followed the last copy is the token itself or the one before it."""
    tokens = list(range(period)) * 24
    for back in (0, 1):
        P = one_hot([max(0, query - back) for query in range(len(tokens))])
        texts = Texts(torch.tensor([tokens]), torch.tensor([len(tokens)]))
        score, rows = scores_of(P, tokens), support(P, texts)
        assert score["induction"] == 0
        uniform = scores_of(UniformAttention(P.visible), tokens)
        assert role_of(score, uniform, {name: int(count) for name, count in rows.items()}) != "induction"
    induction = scores_of(one_hot([max(0, query - period + 1) for query in range(len(tokens))]), tokens)
    assert induction["induction"] == (period > 2)


def test_uniform_attention_scores_what_uniform_means() -> None:
    uniform = scores_of(UniformAttention(Visibility(4, 4)), [1, 2, 3, 4])
    assert uniform["entropy_normalised"] == pytest.approx(1)
    assert uniform["focus"] == pytest.approx(0, abs=1e-6)
    assert uniform["previous_token"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert uniform["sink"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


@pytest.mark.parametrize("window", [None, 5])
def test_uniform_attention_equals_its_matrix(window: int | None) -> None:
    """What is known from the counts alone is what the uniform matrix gives."""
    visible, tokens = Visibility(40, 40, window=window), [1, 2, 3, 4] * 10
    uniform = UniformAttention(visible)
    dense = DenseAttention(uniform.dense(), visible)
    assert_equals_loops(uniform, tokens)
    assert scores_of(uniform, tokens) == pytest.approx(scores_of(dense, tokens), abs=1e-6, nan_ok=True)


def test_a_metric_without_a_row_is_null() -> None:
    one = scores_of(one_hot([0]), [7])
    assert math.isnan(one["entropy"])
    assert math.isnan(one["focus"])
    assert one["sink"] == 1
    assert math.isnan(scores_of(random_attention(4), [1, 2, 3, 4])["induction"])


def test_texts_of_a_padded_batch_score_as_they_do_alone() -> None:
    P, lengths = random_attention(20, batch=3), [20, 11, 1]
    ids_BT = torch.randint(0, 5, (3, 20), generator=torch.Generator().manual_seed(0))
    ids = [name for name in KNOWN if name != "mass"]

    def texts(rows: slice, longest: int) -> Texts:
        length_B = torch.tensor(lengths[rows])
        return Texts(ids_BT[rows, :longest], length_B, answer_B=(length_B + 1) // 2)

    together = measure(P, texts(slice(3), 20), ids)
    for row, n in enumerate(lengths):
        alone = DenseAttention(P.weights_BHQK[row : row + 1, :, :n, :n], Visibility(n, n))
        expected = measure(alone, texts(slice(row, row + 1), n), ids)
        for name in ids:
            torch.testing.assert_close(together[name][row], expected[name][0], atol=1e-6, rtol=1e-6, equal_nan=True)


def test_an_encoders_first_token_has_no_previous_token() -> None:
    """It sees every key, so that only its place tells that none stands before it."""
    weights_HQK = torch.zeros(1, 6, 6)
    weights_HQK[0, range(1, 6), range(5)] = 1
    weights_HQK[0, 0, 3] = 1
    P = DenseAttention(weights_HQK[None], Visibility(6, 6, causal=False))
    assert measure(P, Texts(torch.arange(6)[None], torch.tensor([6]), stack="encoder"), ["previous_token"]) == {
        "previous_token": torch.ones(1, 1)
    }


def test_support_counts_the_rows_behind_a_score() -> None:
    P, tokens = random_attention(40), [1, 2, 3, 4] * 10
    rows = support(P, Texts(torch.tensor([tokens]), torch.tensor([40])))
    assert {name: int(count[0, 0]) for name, count in rows.items()} == {
        "two_keys": 39,
        "previous": 39,
        "three_keys": 38,
        "all": 40,
        "repeats": 36,
        "repeats_apart": 36,
        "beyond_32": 8,
    }


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"'inductoin'.*'induction'"):
        metric_ids(["inductoin"])
    with pytest.raises(UsageError, match=r"'keys_59'.*'keys_95'"):
        with_asked("keys_59", "focus")
    with pytest.raises(UsageError, match=r"^mass .*keys"):
        with_asked("mass", "focus")


def test_metrics_of_length_are_measured_where_they_are_named() -> None:
    assert with_asked(None, "focus") == with_asked("entropy,", "mass") == tuple(METRICS)
    assert with_asked("str 32, keys_95", "-streaming_mass_512") == (
        *METRICS,
        "keys_95",
        "streaming_mass_32",
        "streaming_mass_512",
    )


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("prev", ("previous_token", False)),
        ("-entropy", ("entropy", True)),
        ("loc 32", ("local_mass_32", False)),
        ("-entr_norm", ("entropy_normalised", True)),
        ("layer", ("layer", True)),
        ("top key", ("top_key_mass", False)),
        *((metric.short, (metric.id, False)) for metric in KNOWN.values()),
    ],
)
def test_heads_are_sorted_by_ids_and_by_short_names(sort: str, expected: tuple[str, bool]) -> None:
    assert order_of(sort) == expected


def test_every_metric_says_what_it_is() -> None:
    for metric in KNOWN.values():
        assert all((metric.formula, metric.unit, metric.range, metric.source, metric.reading))
    assert set(KNOWN) == set(LOOPS)
