"""Families that attend outside the interface: their logits, values and effects, against loops and the oracle.

Shapes: H head, T token, Q query, K key, D head dim, E model width.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnscope
from attnscope.certificate.check import check_parity, in_words
from attnscope.errors import UsageError
from attnscope.hooks.listen import listen
from attnscope.model.families import FAMILIES
from attnscope.model.loading import wrap
from attnscope.observe.request import Request, View
from attnscope.studies.copying import copying_of
from helpers.parity_models import TYPES, as_loaded, ids_for, roused_model

IDS = [6, 9, 7, 41, 30, 9, 12]
HEADS, D = 4, 16
SPELLED = ["bloom", "mpt", "gptj"]
OUTSIDE = [name for name in TYPES if name in FAMILIES and FAMILIES[name].bypasses_interface]


def some(names: list[str]) -> list[Any]:
    return [one if one in SPELLED else pytest.param(one, marks=pytest.mark.families) for one in names]


def seen_as(loaded: Any, weights: Any, ids: list[int] = IDS) -> list[Tensor]:
    """Whole matrices of a view, (H, Q, K) by layer."""
    request = Request(view=View(weights), metrics=(), weights=True)
    return list(attnscope.capture(loaded, ids, request=request).weights.values())


@pytest.mark.parametrize("family", some(OUTSIDE))
def test_scores_are_the_logits_of_the_weights_and_values_make_the_outputs(family: str) -> None:
    model, heard = roused_model(family), []
    report = listen(model, ids_for(family)[:1, :9], heard.append)
    assert heard
    for call in heard:
        seen = call.visible.rows(0, call.P.queries)
        logits_BHQK = call.P.scores(0, call.P.queries).double().masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(logits_BHQK.softmax(-1), call.weights_BHQK.double(), rtol=0, atol=1e-6)
        assert logits_BHQK[..., -1, :].isfinite().any()
        _, H, Q, K = call.weights_BHQK.shape
        for head in range(H):
            v_KV = call.v_BGKV[0, head * call.v_BGKV.shape[1] // H]
            for query in range(Q):
                output_V = sum(call.weights_BHQK[0, head, query, key] * v_KV[key] for key in range(K))
                torch.testing.assert_close(call.output_BQHV[0, query, head], output_V, rtol=0, atol=1e-5)
    assert all(check.value_error is not None for check in report.calls)


# The same from the raw weights, entry by entry.


def turned(x_D: list[float], place: int, dims: int) -> list[float]:
    """Rotary positions of GPT-J: pairs of neighbours."""
    found = list(x_D)
    for pair in range(dims // 2):
        angle = place * 10000.0 ** (-2 * pair / dims)
        a, b = x_D[2 * pair], x_D[2 * pair + 1]
        found[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        found[2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    return found


class Spelled:
    """One layer of a family: its modules, and which rows of their weights are whose."""

    def __init__(self, model: nn.Module, family: str, layer: int) -> None:
        self.family, self.rotary = family, getattr(model.config, "rotary_dim", None)
        block = (model.transformer.blocks if family == "mpt" else model.transformer.h)[layer]
        self.attention = {"bloom": "self_attention", "mpt": "attn", "gptj": "attn"}[family]
        attention = getattr(block, self.attention)
        parts = {"bloom": ["query_key_value"], "mpt": ["Wqkv"], "gptj": ["q_proj", "k_proj", "v_proj"]}[family]
        self.given = getattr(attention, parts[0])
        self.made = [getattr(attention, part) for part in parts]
        self.out: nn.Linear = attention.dense if family == "bloom" else attention.out_proj

    def vectors(self, x_TE: Tensor, which: int) -> list[list[list[float]]]:
        """[token][head][dim] of queries, keys or values."""
        parts = [part.weight.double() @ x_E for part in self.made for x_E in x_TE.double()]
        biases = [0 if part.bias is None else part.bias.double() for part in self.made for _ in x_TE]
        rows = [made + bias for made, bias in zip(parts, biases, strict=True)]
        T, width = len(x_TE), HEADS * D
        if self.family == "gptj":
            of_part = rows[which * T : (which + 1) * T]
            return [[row[head * D : (head + 1) * D].tolist() for head in range(HEADS)] for row in of_part]
        first = [
            (3 * head + which) * D if self.family == "bloom" else which * width + head * D for head in range(HEADS)
        ]
        return [[row[start : start + D].tolist() for start in first] for row in rows]

    def logit(self, q_D: list[float], k_D: list[float], head: int, query: int, key: int, T: int) -> float:
        if self.rotary:
            q_D, k_D = turned(q_D, query, self.rotary), turned(k_D, key, self.rotary)
        slope = 0.0 if self.family == "gptj" else 2.0 ** (-8 * (head + 1) / HEADS)
        place = key if self.family == "bloom" else key - (T - 1)
        return sum(a * b for a, b in zip(q_D, k_D, strict=True)) / math.sqrt(D) + slope * place


@pytest.mark.parametrize("family", SPELLED)
def test_scores_and_norms_of_values_are_those_of_a_loop(family: str, demo) -> None:
    model = roused_model(family)
    layer = Spelled(model, family, 1)
    given: list[Tensor] = []
    layer.given.register_forward_pre_hook(lambda _, args: given.append(args[0][0].clone()))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    q, k, v = (layer.vectors(given[0], which) for which in range(3))
    T, loaded = len(IDS), wrap(model, demo.tokenizer)
    scores_HQK, norms_HQK = seen_as(loaded, "scores")[1], seen_as(loaded, "value")[1]
    for head in range(HEADS):
        W_O_DE = layer.out.weight.double().T[head * D : (head + 1) * D]
        for query in range(T):
            row = [layer.logit(q[query][head], k[key][head], head, query, key, T) for key in range(query + 1)]
            assert scores_HQK[head, query, : query + 1].tolist() == pytest.approx(row, abs=1e-5)
            total = sum(map(math.exp, row))
            for key, logit in enumerate(row):
                written_E = math.exp(logit) / total * torch.tensor(v[key][head]).double() @ W_O_DE
                assert float(norms_HQK[head, query, key]) == pytest.approx(float(written_E.norm()), abs=1e-5)
    assert norms_HQK.triu(1).abs().max() == 0


# What was seen is held against the oracle.


def shifted(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, mask: own(q, k, v, mask + 1)


def doubled(own: Callable[..., Any]) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = own(q, k, 2 * v, mask)
        return output / 2, weights

    return attend


@pytest.mark.parametrize(
    ("change", "says"),
    [(shifted, "its logits differ from the oracle's by 1"), (doubled, "its values differ from the oracle's by ")],
)
def test_parity_fails_by_logits_and_values_alone(change: Callable[..., Any], says: str) -> None:
    """Weights and outputs are what they were."""
    model = roused_model("gptj")
    attention = model.transformer.h[2].attn
    attention._attn = change(attention._attn)
    report = check_parity(as_loaded(model), ids_for("gptj"))
    assert [layer.layer for layer in report.failures] == [2]
    assert report.failures[0].implementation.holds
    assert says in in_words(report.failures[0], report)


def test_values_that_no_product_was_made_of_are_refused_in_a_line(demo) -> None:
    """Weights are heard, and what else they were used for is not guessed."""
    model = roused_model("gptj")
    for block in model.transformer.h:

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            weights = (torch.matmul(q, k.transpose(-1, -2)) / D**0.5 + mask).softmax(-1)
            return (weights[..., None] * v[:, :, None]).sum(-2), weights

        block.attn._attn = attend
    loaded = wrap(model, demo.tokenizer)
    assert len(seen_as(loaded, "scores")) == len(model.transformer.h)
    with pytest.raises(UsageError, match="does not show the values") as refused:
        seen_as(loaded, "value")
    assert "\n" not in str(refused.value)


def test_a_residual_in_the_attention_module_makes_no_norm_behind_it() -> None:
    """BLOOM's adds it, and the norm before the MLP takes the sum."""
    copying = copying_of(as_loaded(roused_model("bloom")), IDS)
    assert not isinstance(copying, str)
    assert len(copying.out) == 4
    assert not copying.after
