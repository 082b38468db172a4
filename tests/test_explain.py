"""`explain`: every step against numbers computed another way, broken models caught, words and pictures as promised."""

import doctest
import importlib
import io
import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from attnscope.cli.explain import Telling
from attnscope.cli.explain_tables import steps_sheet
from attnscope.errors import ModelError, UsageError
from attnscope.figures.explain import Curve, EffectSheet, curves_figure, effect_figure, scaling_effect
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import Style
from attnscope.figures.writer import drawing
from attnscope.inputs.prompt import from_text
from attnscope.model.geometry import geometry_of
from attnscope.model.loaded import LoadedModel
from attnscope.reference import attention as reference
from attnscope.steps import attention, toy
from attnscope.steps import attention as steps
from attnscope.steps.records import Check, json_lines
from attnscope.steps.toy import CASES, Entries, explain_toy, measure_scaling
from attnscope.steps.traced import explain_head
from helpers.command_line import call, on_terminal
from helpers.families import tiny_model
from helpers.own import attentions
from helpers.parity_cases import CASES as FAMILY_CASES
from helpers.parity_models import as_loaded
from helpers.parity_stacks import stack_model

SENTENCE = "the financial bank is located on river bank"
IDS = (3, 17, 5, 9, 17, 5, 44, 60, 2, 31, 17, 8)


class Tokens(SimpleNamespace):
    """A prompt of a tiny model, whose tokens are their ids."""

    ids = IDS
    tokens = labels = tuple(map(str, IDS))

    def __len__(self) -> int:
        return len(self.ids)


def tiny(family: str, **overrides: Any) -> LoadedModel:
    torch.manual_seed(0)
    model = tiny_model(family, **overrides).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    geometry = geometry_of(model.config, count=False)
    return LoadedModel(model, None, geometry, family, None, "cpu", "float32")  # type: ignore[arg-type]


def text_of(explanation: Any, width: int = 100, whole: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(steps_sheet(explanation, whole))
    return console.file.getvalue()  # type: ignore[attr-defined]


def numbers_of(explanation: Any, step: str, name: str) -> np.ndarray:
    found = next(one for one in explanation.steps if one.name == step)
    return next(one.values for one in found.numbers if one.name == name)


# The toy


@pytest.mark.parametrize("head", [0, 1])
def test_toy_is_what_a_pencil_gives(head: int) -> None:
    def times(x: Any, matrix: Any) -> list[float]:
        return [sum(a * row[column] for a, row in zip(x, matrix, strict=True)) for column in range(4)]

    vectors = [toy.VECTORS[token] for token in toy.TOKENS]
    q, k, v = ([times(x, matrix) for x in vectors] for matrix in map(toy.MATRICES.__getitem__, toy.PROJECTIONS))
    outputs = []
    for i, j in itertools.product(range(4), range(2)):
        dims = (2 * j, 2 * j + 1)
        scores = [sum(q[i][d] * k[key][d] for d in dims) / math.sqrt(2) for key in range(i + 1)]
        total = sum(math.exp(score) for score in scores)
        weights = [math.exp(score) / total for score in scores]
        outputs.append([sum(weight * v[key][d] for key, weight in enumerate(weights)) for d in dims])
        if j == head:
            np.testing.assert_allclose(explain_toy(head, i).weights_QK[i, : i + 1], weights, atol=1e-12)
    expected = [times(outputs[2 * i] + outputs[2 * i + 1], toy.MATRICES["W_O"]) for i in range(4)]
    np.testing.assert_allclose(numbers_of(explain_toy(head), "output projection", "y"), expected, atol=1e-12)
    assert explain_toy(head).failures == []


def test_the_two_saw_are_told_apart_by_the_mask_alone() -> None:
    explanation = explain_toy()
    x, weights = numbers_of(explanation, "token vectors", "x"), explanation.weights_QK
    np.testing.assert_array_equal(x[1], x[3])
    assert weights[3, 1] == weights[3, 3]
    assert weights[1, 3] == 0 < weights[3, 3]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (
            {"softmax": lambda logits, sinks=None: torch.exp2(logits) / torch.exp2(logits).sum(-1, keepdim=True)},
            "softmax",
        ),
        ({"apply_mask": lambda logits, mask: logits}, "softmax"),
        ({"attention_output": lambda weights, v: weights @ v.flip(0)}, "weighted values"),
    ],
)
def test_a_broken_step_of_the_toy_is_named(monkeypatch: Any, broken: dict[str, Any], named: str) -> None:
    for name, function in broken.items():
        monkeypatch.setattr(attention if name == "attention_output" else reference, name, function)
    failures = explain_toy().failures
    assert failures
    assert named in failures[0]


def test_toy_prints_every_number_and_the_products() -> None:
    printed = text_of(explain_toy(), whole=True)
    assert "0·1 + 2·2 = 4" in printed
    assert "✓ all 9 checks hold" in printed
    assert "more" not in printed.replace("more weight", "")
    assert "saw gives most weight to I (0.73), a (0.18)" in printed


# Comparing


def test_hidden_logits_agree_only_with_hidden_ones() -> None:
    hidden, additive = torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.finfo(torch.float32).min])
    assert steps.check_against("theirs", hidden, additive, 1e-5).holds
    assert not steps.check_against("theirs", hidden, torch.tensor([1.0, 2.0]), 1e-5).holds
    assert not steps.check_against("theirs", torch.tensor([torch.nan]), torch.tensor([1.0]), 1e-5).holds
    assert not steps.check_against("theirs", torch.tensor([1.0]), torch.tensor([1.0001]), 1e-5).holds
    with pytest.raises(ValueError, match="shape"):
        steps.check_against("theirs", torch.zeros(2), torch.zeros(3), 1e-5)


# A model


def test_every_head_of_the_demo_equals_the_models_own(demo: LoadedModel) -> None:
    prompt = from_text(demo.tokenizer, SENTENCE)
    weights = attentions(demo.model, prompt.ids)
    for layer in demo.geometry.attention_layers:
        for head in range(layer.heads):
            explanation = explain_head(demo, prompt, layer.index, head)
            assert explanation.failures == []
            expected_QK = weights[layer.index][head].numpy()
            np.testing.assert_allclose(explanation.weights_QK, expected_QK, atol=1e-5)
    first = ["hidden states", "projections", "split into heads", "positions", "scores", "scaling"]
    last = ["mask", "softmax", "weighted values", "concatenation", "output projection"]
    assert [step.name for step in explanation.steps] == [*first, *last]
    assert sum(len(step.checks) for step in explanation.steps) == 13


def test_real_weights_hold(real_model_folder: Path) -> None:
    from attnscope.model.loading import load
    from attnscope.model.options import LoadOptions

    loaded = load(LoadOptions(model=str(real_model_folder)))
    explanation = explain_head(loaded, from_text(loaded.tokenizer, "Once upon a time"), 3, 5, query=2)
    assert explanation.failures == []
    assert explanation.query == 2


def test_half_precision_is_held_to_a_float32_copy(demo: LoadedModel) -> None:
    from attnscope.model.loading import load
    from attnscope.model.options import LoadOptions

    half = load(LoadOptions(dtype="bfloat16"))
    explanation = explain_head(half, from_text(half.tokenizer, SENTENCE), 1, 2)
    assert explanation.failures == []
    assert "bfloat16; compared with its layer copied to float32" in explanation.source


@pytest.mark.parametrize(
    ("family", "shown"),
    [
        ("gpt2", "split into heads"),
        ("gemma2", "soft-cap"),
        ("qwen3", "norm of q and k"),
        ("qwen3_next", "gate"),
        ("gpt_oss", "softmax"),
        ("bloom", "position bias"),
        ("opt", "scaling"),
        ("deepseek_v3", "positions"),
    ],
)
def test_families_hold_from_their_weights(family: str, shown: str) -> None:
    loaded = tiny(family)
    for layer in loaded.geometry.attention_layers[-2:]:
        explanation = explain_head(loaded, Tokens(), layer.index, layer.heads - 1)  # type: ignore[arg-type]
        assert explanation.failures == []
        assert shown in [step.name for step in explanation.steps]
        assert not any(step.missing for step in explanation.steps)


@pytest.mark.parametrize(
    "family", ["bloom", *(pytest.param(one, marks=pytest.mark.families) for one in ("falcon", "gptj", "mpt", "xglm"))]
)
def test_logits_values_and_heads_are_compared_where_q_and_k_are_not_seen(family: str) -> None:
    loaded = tiny(family)
    explanation = explain_head(loaded, Tokens(), 1, 2)  # type: ignore[arg-type]
    assert explanation.failures == []
    against = {check.against for step in explanation.steps for check in step.checks}
    assert {f"the model's {what}, all heads" for what in ("logits", "v")} <= against
    assert {"the model's heads side by side", "the model's output of each head"} <= against
    assert "the model's q, all heads" not in against


def test_albert_holds_to_the_norm_in_its_attention_module() -> None:
    """Its attention module adds the token's own vector and norms the sum: explain and the oracle share that step."""
    loaded = as_loaded(stack_model("albert"))
    for layer in loaded.geometry.attention_layers:
        explanation = explain_head(loaded, Tokens(), layer.index, 0)  # type: ignore[arg-type]
        assert explanation.failures == []
        assert not any(step.missing for step in explanation.steps)
    last = explanation.steps[-1]
    assert "layer norm([heads] W_O + bias + x)" in last.formula
    y_TE = numbers_of(explanation, last.name, "y")
    assert np.abs(y_TE - numbers_of(explanation, last.name, "[heads] W_O")).max() > 0.1


@pytest.mark.parametrize("case", ["gemma3n_text", "gemma4_text, keys shared by later layers"])
def test_a_layer_with_an_earlier_layers_keys_and_values_holds_from_its_weights(case: str) -> None:
    family, overrides = FAMILY_CASES.get(case, (case, {}))
    loaded = tiny(family, **overrides)
    layer = loaded.geometry.attention_layers[-1]
    assert not hasattr(loaded.model.model.layers[layer.index].self_attn, "k_proj")
    explanation = explain_head(loaded, Tokens(), layer.index, layer.heads - 1)  # type: ignore[arg-type]
    assert explanation.failures == []
    assert not any(step.missing for step in explanation.steps)
    assert [one.name for one in explanation.steps[1].numbers] == ["q"]
    assert "keys and values are those of an earlier layer" in explanation.steps[1].why
    handle = bent(loaded.model.model.layers[layer.index - 2].self_attn.k_proj, lambda k: 2 * k)
    try:  # the earlier layer is not read from its weights: its keys and values are taken as they came
        assert explain_head(loaded, Tokens(), layer.index, layer.heads - 1).failures == []  # type: ignore[arg-type]
    finally:
        handle.remove()


def test_a_family_without_a_layout_says_what_it_cannot_show() -> None:
    loaded = tiny("diffllama")
    explanation = explain_head(loaded, Tokens(), 3, 1)  # type: ignore[arg-type]
    assert explanation.failures == []
    missing = {step.name: step.missing for step in explanation.steps if step.missing}
    assert list(missing) == ["projections and positions", "output projection"]
    assert "diffllama" in missing["output projection"]
    assert "not shown: no layout of diffllama's weights is known" in text_of(explanation, width=240)
    assert sum(len(step.checks) for step in explanation.steps) == 2


def test_quantised_weights_begin_with_what_was_heard(monkeypatch: Any, demo: LoadedModel) -> None:
    monkeypatch.setattr("attnscope.steps.traced.is_quantised", lambda model: True)
    explanation = explain_head(demo, from_text(demo.tokenizer, SENTENCE), 2, 3)
    assert explanation.failures == []
    assert "the weights are quantised" in text_of(explanation, width=240)


def test_sinks_are_explained_from_what_was_observed_too(monkeypatch: Any) -> None:
    monkeypatch.setattr("attnscope.steps.traced.is_quantised", lambda model: True)
    explanation = explain_head(tiny("gpt_oss"), Tokens(), 1, 3)  # type: ignore[arg-type]
    assert explanation.failures == []
    softmax = next(step for step in explanation.steps if step.name == "softmax")
    assert "a sink logit of " in softmax.why
    assert len(softmax.checks) == 1


def test_what_cannot_be_heard_is_refused() -> None:
    loaded = tiny("xlnet")
    with pytest.raises(ModelError):
        explain_head(loaded, Tokens(), 0, 0)  # type: ignore[arg-type]


# Broken models: weights are read raw, so a hook on a module makes the model another than its weights say


def bent(module: Any, change: Any) -> Any:
    return module.register_forward_hook(lambda _, args, output: change(output))


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("q_proj", lambda q: q * 1.01, "projections"),
        ("k_proj", lambda k: k.roll(32, -1), "projections"),  # kv heads in another order
        ("v_proj", lambda v: v.flip(1), "projections"),
        ("o_proj", lambda y: y * 1.001, "output projection"),
    ],
)
def test_a_bent_model_is_caught_where_it_is_bent(demo: LoadedModel, part: str, change: Any, named: str) -> None:
    prompt = from_text(demo.tokenizer, SENTENCE)
    handle = bent(getattr(demo.model.model.layers[2].self_attn, part), change)
    try:
        failures = explain_head(demo, prompt, 2, 3).failures
        untouched = explain_head(demo, prompt, 1, 3).failures
    finally:
        handle.remove()
    assert untouched == []
    assert named in failures[0]
    assert explain_head(demo, prompt, 2, 3).failures == []


@pytest.mark.parametrize(("name", "factor"), [("scaling", 1.01), ("scaling", 2.0)])
def test_another_scale_is_caught(demo: LoadedModel, name: str, factor: float) -> None:
    attention = demo.model.model.layers[2].self_attn
    right = attention.scaling
    attention.scaling = right * factor
    try:
        failures = explain_head(demo, from_text(demo.tokenizer, SENTENCE), 2, 3).failures
    finally:
        attention.scaling = right
    assert name in failures[0]


def test_another_rotary_base_is_caught(demo: LoadedModel) -> None:
    rotary = demo.model.model.rotary_emb
    right = rotary.inv_freq.clone()
    rotary.inv_freq.mul_(0.99)
    try:
        failures = explain_head(demo, from_text(demo.tokenizer, SENTENCE), 0, 0).failures
    finally:
        rotary.inv_freq.copy_(right)
    assert "positions" in failures[0]


# Words


def test_long_vectors_and_long_texts_are_shortened_and_say_so(demo: LoadedModel) -> None:
    explanation = explain_head(demo, from_text(demo.tokenizer, f"{SENTENCE} and {SENTENCE} near it"), 2, 3, query=15)
    printed = text_of(explanation, width=240)
    assert "… 188 more" in printed
    assert "(first 3 of 32)" in printed
    tokens, seen = len(explanation.tokens), 16
    assert f"{tokens} keys, this query sees {seen}, {tokens - seen} hidden" in printed
    shown = 11  # ten visible keys and a hidden one
    assert f"… {tokens - shown} more, {tokens - seen - 1} of them hidden" in printed
    assert "−∞" in printed
    assert "kv head 1 serves query heads 2 and 3" in printed


def test_a_check_that_fails_is_printed_as_such() -> None:
    explanation = explain_toy()
    bad = replace(explanation.steps[6], checks=(Check("torch's weights", 0.5, 1.0, 1e-5),))
    broken = replace(explanation, steps=(*explanation.steps[:6], bad))
    assert "✗ differs from torch's weights by 5.0e-01 (allowed 1.0e-05)" in text_of(broken)
    assert broken.failures == ["step 7, softmax: differs from torch's weights by 0.5 (allowed 1e-05)"]


EXAMPLES = ["attention", "records", "toy", "traced"]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_are_true(module: str, demo: LoadedModel) -> None:
    loaded = importlib.import_module(f"attnscope.steps.{module}")
    qkv = attention.QKV(torch.randn(2, 9, 4), torch.randn(1, 9, 4), torch.randn(1, 9, 4))
    causal = torch.ones(1, 9, 9).tril().bool()
    names = {
        "torch": torch,
        "loaded": demo,
        "prompt": from_text(demo.tokenizer, SENTENCE),
        "attention": attention.Attention(reference.Operands(*qkv, 0.5, causal)),
        "observed": steps.Observed("the model's", 1e-5),
        "explain_toy": explain_toy,
    }
    result = doctest.testmod(loaded, globs=names | vars(loaded))
    assert result.attempted > 0
    assert result.failed == 0


def test_queries_count_from_both_ends() -> None:
    assert steps.check_query(-1, 9) == 8
    assert steps.check_query(0, 9) == 0
    for query in (9, -10):
        with pytest.raises(UsageError, match="9 tokens"):
            steps.check_query(query, 9)


def test_json_lines_hold_every_number() -> None:
    lines = [json.loads(line) for line in json_lines(explain_toy())]
    assert lines[0]["tokens"] == ["I", "saw", "a", "saw"]
    assert [line["step"] for line in lines] == list(range(11))
    mask = lines[6]
    assert mask["numbers"][1]["values"][0][1:] == ["-inf"] * 3
    assert all(check["holds"] for line in lines[1:] for check in line["checks"])
    for one in (one for line in lines[1:] for one in line["numbers"]):
        assert list(np.shape(one["values"])) == one["shape"]
        assert len(one["axes"]) == len(one["shape"])


# Scaling


@pytest.mark.parametrize("entries", CASES)
def test_the_formula_is_the_variance_of_all_outcomes(entries: Entries) -> None:
    """Entries that are mean - std or mean + std, equally likely: every outcome of a q . k of width 2, counted."""
    q_values, k_values = (
        (mean - std, mean + std) for mean, std in ((entries.mean_q, entries.std_q), (entries.mean_k, entries.std_k))
    )
    outcomes = [a * c + b * d for a, b, c, d in itertools.product(q_values, q_values, k_values, k_values)]
    assert entries.product_std(2) == pytest.approx(np.std(outcomes))


def test_measured_spread_follows_the_formula_and_the_seed() -> None:
    found = measure_scaling(widths=(4, 64))
    for spread in found:
        assert spread.measured == pytest.approx(spread.predicted, rel=0.08)
    assert [round(spread.scaled) for spread in found if spread.entries == Entries()] == [1, 1]
    assert all(spread.scaled > 3.5 for spread in found if spread.entries == Entries(0, 2, 0, 2))
    assert found == measure_scaling(widths=(4, 64))
    assert found != measure_scaling(widths=(4, 64), seed=1)


# Pictures


def test_the_figures_numbers_are_those_of_loops() -> None:
    rng = np.random.default_rng(0)
    raw_QK, visible_QK = 5 * rng.normal(size=(6, 6)), np.tril(np.ones((6, 6), bool))
    effect = scaling_effect(raw_QK, visible_QK, 0.25)
    entropies = {}
    for scale, weights_QK in ((1.0, effect.raw_weights_QK), (0.25, effect.scaled_weights_QK)):
        rows = []
        for i in range(6):
            exps = [math.exp(scale * raw_QK[i, j]) for j in range(i + 1)]
            row = [value / sum(exps) for value in exps]
            np.testing.assert_allclose(weights_QK[i, : i + 1], row)
            assert np.isnan(weights_QK[i, i + 1 :]).all()
            rows.append(-sum(weight * math.log(weight) for weight in row))
        entropies[scale] = sum(rows[1:]) / 5
    assert effect.raw_entropy == pytest.approx(entropies[1.0])
    assert effect.scaled_entropy == pytest.approx(entropies[0.25])
    assert effect.uniform_entropy == pytest.approx(sum(math.log(n) for n in range(2, 7)) / 5)
    scores = [raw_QK[i, j] for i in range(6) for j in range(i + 1)]
    assert effect.raw_std == pytest.approx(np.std(scores))
    assert effect.scaled_std == pytest.approx(np.std(scores) / 4)


@pytest.mark.parametrize("tokens", [1, 9, 300, *(pytest.param(tokens, marks=pytest.mark.e2e) for tokens in (2, 5, 40))])
def test_four_panels_with_their_numbers_and_no_word_over_another(tokens: int) -> None:
    rng = np.random.default_rng(0)
    labels = [f"·word{place}" for place in range(tokens)]
    effect = scaling_effect(9 * rng.normal(size=(tokens, tokens)), np.tril(np.ones((tokens, tokens), bool)), 32**-0.5)
    with drawing(fonts_for(labels)):
        figure = effect_figure(EffectSheet(effect, labels, "L2H3 of demo", "/ √32"))
        words = [text.get_text() for text in figure.texts]
        for name in ("scores: q · k", "softmax of q · k", "scaled: q · k / √32", "softmax of q · k / √32"):
            assert name in words
        assert f"std {effect.raw_std:.2f}" in words
        assert f"std {effect.scaled_std:.2f}" in words
        if tokens > 1:
            assert f"entropy {effect.raw_entropy:.2f} nats" in words
            assert f"entropy {effect.scaled_entropy:.2f} nats" in words
        boxes = [text.get_window_extent() for text in figure.texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert all(box.x1 <= figure.bbox.width and box.y0 >= 0 for box in boxes)
    shown = (effect.raw_QK, effect.raw_weights_QK, effect.scaled_QK, effect.scaled_weights_QK)
    ends = [ax.collections[0].get_clim() for ax in figure.axes[:4]]
    for place, scores_QK in ((0, effect.raw_QK), (2, effect.scaled_QK)):
        reach = float(np.nanmax(abs(scores_QK)))
        assert ends[place] == pytest.approx((-reach, reach)), "each panel of scores reaches as far as its own"
    assert ends[1] == ends[3]
    for ax, values_QK in zip(figure.axes[:4], shown, strict=True):
        drawn_QK = np.ma.filled(ax.collections[0].get_array().astype(float), np.nan).reshape(tokens, tokens)
        np.testing.assert_allclose(drawn_QK, values_QK)


def test_curves_show_points_lines_and_the_root() -> None:
    width_W = np.array([1.0, 4.0, 16.0])
    curve = Curve("q and k: mean 0, std 2", width_W, 4.1 * np.sqrt(width_W), 4 * np.sqrt(width_W))
    with drawing(fonts_for([])):
        before, after = curves_figure([curve]).axes
    formula, points, root = before.lines
    np.testing.assert_allclose(formula.get_ydata(), [4, 8, 16])
    np.testing.assert_allclose(points.get_ydata(), [4.1, 8.2, 16.4])
    np.testing.assert_allclose(root.get_ydata(), [1, 2, 4])
    np.testing.assert_allclose(after.lines[1].get_ydata(), [4.1, 4.1, 4.1])
    with drawing(fonts_for([])):
        before, after = curves_figure([replace(curve, label=name) for name in "abc"], "", Style(width="column")).axes
    assert len({line.get_marker() for line in before.lines if line.get_linestyle() == "None"}) == 3
    assert after.get_position().y1 < before.get_position().y0, "one above the other in a column"


# The command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement over fewer samples."""
    few = partial(measure_scaling, samples=1000)
    monkeypatch.setattr("attnscope.steps.toy.measure_scaling", few)


def test_the_command_explains_in_a_pipe_and_draws(tmp_path: Path) -> None:
    done = call("explain", "--text", "the river", "--head", "L2H3", "--out", str(tmp_path / "a.svg"))
    lines = done.ok().records
    assert lines[-1]["name"] == "output projection"
    assert lines[0]["query"] == len(lines[0]["tokens"]) - 1
    assert (tmp_path / "a.svg").stat().st_size > 1000
    drawn = ("explain", "--text", "the river", "--head", "2.3", "--query", "1", "--out", str(tmp_path / "a.svg"))
    assert call(*drawn).ok().records[0]["query"] == 1  # a file that is there is drawn anew


def test_the_command_leaves_with_1_where_a_check_fails(monkeypatch: Any, demo: LoadedModel) -> None:
    monkeypatch.setattr("attnscope.model.loading.load", lambda options: demo)
    handle = bent(demo.model.model.layers[2].self_attn.o_proj, lambda y: y * 1.01)
    try:
        broken = call("explain", "--text", "the river", "--head", "L2H3", "--format", "table", "-q")
        whole = call("explain", "--text", "the river", "--head", "L1H3", "--format", "table", "-q")
    finally:
        handle.remove()
    assert (broken.code, whole.code) == (1, 0)
    assert "check failed: step 11, output projection" in broken.err
    assert "✗ 1 of 13 checks do not hold" in broken.out.decode()
    assert "✓ all 13 checks hold" in whole.out.decode()


@pytest.mark.parametrize("process", ["here", pytest.param("its own", marks=pytest.mark.e2e)])
def test_a_person_sees_the_toy_whole_at_100_columns(process: str) -> None:
    if process == "here":
        sent = call("explain", "--toy", columns=100).ok().out.decode()
    else:
        code, sent = on_terminal(["explain", "--toy"], columns=100)
        assert code == 0
    assert "\x1b[1;32m✓ all 9 checks hold" in sent
    plain = re.sub(r"\x1b\[[0-9;]*m", "", sent)
    assert "0·1 + 2·2 = 4" in plain
    assert max(map(len, plain.splitlines())) <= 100


def test_the_toy_needs_no_model(tmp_path: Path) -> None:
    call("explain", "--toy", "--head", "0.1", "--query", "1", "--out", str(tmp_path)).ok()
    assert [path.name for path in tmp_path.iterdir()] == ["toy-L0H1.png"]


def test_scaling_needs_no_model(tmp_path: Path, measured: None) -> None:
    scaling = call("explain", "--scaling", "--out", str(tmp_path)).ok()
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.png"]
    rows = scaling.records
    assert {row["d_k"] for row in rows} >= {1, 64, 512}
    assert rows[0]["std_formula"] == 1.0


def test_scaling_is_printed_as_a_table(measured: None) -> None:
    printed = call("explain", "--scaling", "--format", "table")
    assert "4.00·√d_k → 4.00" in printed.out.decode()
    assert "Var(q·k) = d ((σq² + μq²)(σk² + μk²) − μq² μk²)" in printed.err


@pytest.mark.parametrize("what", ["--toy", pytest.param("--scaling", marks=pytest.mark.e2e)])
def test_nothing_is_printed_where_the_picture_cannot_be_written(tmp_path: Path, what: str, measured: None) -> None:
    (tmp_path / "taken").write_text("")
    done = call("explain", what, "--out", str(tmp_path / "taken" / "runs"))
    assert (done.code, done.out) == (2, b"")
    assert done.err.startswith("attnscope: ")
    assert done.err.count("\n") == 1


def test_the_query_is_named_as_everywhere() -> None:
    asked = ("explain", SENTENCE, "--head", "2.3", "-q")
    assert call(*asked, "--query", "bank#1").out == call(*asked, "--query", "3").out
    several = call(*asked, "--query", "bank")
    assert (several.code, several.out) == (2, b"")
    assert all(one in several.err for one in ("bank(3), bank(8)", "bank#2"))
    assert call(*asked, "--query", "Mary").code == 4
    assert call(*asked, "--model", "./nowhere", "--query", "#2").code == 2


def test_a_role_is_no_head() -> None:
    said = call("explain", SENTENCE, "--head", "@induction", "-q")
    assert (said.code, said.out) == (2, b"")
    assert "head @induction" in said.err
    assert "; write it as L2H3 or 2.3" in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--toy", "--scaling"],
        ["--toy", "--text", "a"],
        ["--toy", "--query", "4"],
        ["--toy", "--query", "first"],
        ["--toy", "--head", "0.2"],
        ["--toy", "--head", "0"],
        ["--toy", "--out", "steps.txt"],
        ["--toy", "--set", "cmap=nosuch"],
        ["--text", "a"],
        ["--head", "0.0"],
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str]) -> None:
    done = call("explain", *arguments)
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("attnscope: ")
    assert done.out == b""


def test_out_names_a_folder_or_a_file(tmp_path: Path) -> None:
    assert Telling(out=tmp_path / "runs", image="svg").place("toy") == tmp_path / "runs" / "toy.svg"
    assert Telling(out=tmp_path / "a.pdf").place("toy") == tmp_path / "a.pdf"
    (tmp_path / "b.png").mkdir()
    assert Telling(out=tmp_path / "b.png").place("toy") == tmp_path / "b.png" / "toy.png"
    with pytest.raises(UsageError, match=r"expected a folder, or a file in \.png, \.svg, \.pdf"):
        Telling(out=tmp_path / "a.csv")


@pytest.mark.parametrize("head", range(6))
def test_a_head_says_whose_keys_and_values_it_shares(head):
    shown = call("explain", "--text", "the cat", "--head", f"L0H{head}", "--format", "jsonl", "-q").ok().out.decode()
    assert f"k of kv head {head // 2}" in shown
    assert f"v of kv head {head // 2}" in shown
