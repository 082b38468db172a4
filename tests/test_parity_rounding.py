"""Parity against rounding: what a dtype alone does to correct weights is allowed, and what is more than that fails.

The faults are in the model's own run in half precision, where the float32 copy of a layer is right, or in float32
models whose logits are so large that their rounding shows.

Shapes: H head, Q query, K key.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope.certificate import verdicts as allowed
from attnscope.certificate.check import ParityReport, certificate, check_parity, in_words, parity_table, verify
from helpers.command_line import call
from helpers.parity_models import as_loaded, attend_otherwise, ids_for, in_half, roused_model, within

HALF = [torch.bfloat16, torch.float16]
BROKEN = 2


def model_in(dtype: torch.dtype, family: str = "llama", **how: Any) -> Any:
    return in_half(roused_model(family, **how), dtype)


def parity_of(model: Any, tokens: int = 24, seed: int = 0) -> ParityReport:
    return check_parity(as_loaded(model), ids_for("llama", seed, tokens))


# What rounding may do.


@pytest.mark.parametrize("terms", [0.5, 20.0, 2000.0])
def test_no_rounding_of_the_logits_changes_weights_by_more_than_is_allowed(terms: float) -> None:
    """And the worst rounding, one logit up and the others down, reaches what is allowed."""
    logits_K = terms * torch.tensor([0.99, 1.0, 0.9, -0.3, -1.0], dtype=torch.float64)
    exact_K = logits_K.softmax(-1)
    limit_K = allowed.weights_allowed(exact_K[None], torch.tensor([terms], dtype=torch.float64), torch.float32)[0]
    off = allowed.ROUNDINGS * allowed.epsilon(torch.float32) * terms
    for key in range(len(logits_K)):
        one_up_K = torch.full_like(logits_K, -off)
        one_up_K[key] = off
        changes_K = torch.stack([(logits_K + sign * one_up_K).softmax(-1) - exact_K for sign in (1, -1)]).abs().amax(0)
        assert (changes_K <= limit_K).all()
        own_rounding = allowed.epsilon(torch.float32) * (1 + exact_K[key])
        torch.testing.assert_close(changes_K[key] + own_rounding, limit_K[key])


def test_weights_that_half_precision_cannot_hold_are_allowed_anything() -> None:
    """Logits of 2,000 in bfloat16: any of those above 1,900 may be the largest."""
    weights_K = torch.tensor([2000.0, 1950.0, 1900.0, 0.0], dtype=torch.float64).softmax(-1)
    limit_K = allowed.weights_allowed(weights_K[None], torch.tensor([2000.0]).double(), torch.bfloat16)[0]
    assert (limit_K[:3] > 0.9).all()
    assert limit_K[3] < 1e-6


# The model's own run in half precision.


def with_scale(factor: float) -> Callable[..., Any]:
    return lambda mask, scaling: (mask, factor * scaling)


def without_the_last_key_hidden(mask: torch.Tensor, scaling: float) -> tuple[torch.Tensor, float]:
    """Every query sees the key after its own."""
    return mask.triu(2), scaling


IN_HALF_ONLY: dict[str, Callable[..., Any]] = {
    "uniform": with_scale(0.0),
    "scale x 1.5": with_scale(1.5),
    "no mask": lambda mask, scaling: (torch.zeros_like(mask), scaling),
    "a key of the future": without_the_last_key_hidden,
    "NaN": with_scale(float("nan")),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("fault", IN_HALF_ONLY)
def test_a_fault_of_half_precision_alone_fails(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    attend_otherwise(monkeypatch, IN_HALF_ONLY[fault], BROKEN)
    report = parity_of(model_in(dtype))
    assert report.failures[0].layer == BROKEN
    assert within(report.layers[BROKEN].implementation, 1e-5)
    assert len(report.failures) == (2 if fault == "NaN" else 1)  # the next layer is given NaN
    name = str(dtype).removeprefix("torch.")
    assert in_words(report.failures[0], report).startswith(f"layer {BROKEN}: as run in {name}, weights differ")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("projection", ["q_proj", "v_proj", "o_proj"])
def test_a_projection_that_is_wrong_in_half_precision_alone_fails(projection: str, dtype: torch.dtype) -> None:
    model = model_in(dtype)
    module = getattr(model.model.layers[BROKEN].self_attn, projection)
    module.register_forward_hook(lambda _, args, out: out * (1.5 if out.dtype != torch.float32 else 1))
    assert [layer.layer for layer in parity_of(model).failures] == [BROKEN]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_that_is_alive_fails_under_every_attention(attention: str) -> None:
    model = model_in(torch.bfloat16, attention=attention)
    layer = model.model.layers[BROKEN].self_attn
    layer.attention_dropout, layer.training = 0.5, True
    assert [layer.layer for layer in parity_of(model).failures] == [BROKEN]


def test_the_certificate_has_the_models_own_row_sums_and_masked_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in(torch.bfloat16)
    loaded, ids_BT = as_loaded(model), ids_for("llama")
    weights = model(ids_BT, output_attentions=True).attentions
    layers = certificate(check_parity(loaded, ids_BT), loaded, ids_BT)["layers"]
    for layer, weights_BHQK in zip(layers, weights, strict=True):
        assert layer["row_sum_error"] == float((weights_BHQK.float().sum(-1) - 1).abs().max()) > 1e-4
        assert layer["masked_weight"] == 0
        assert layer["as_run"]["weights"] <= layer["as_run"]["weights_allowed"]
    attend_otherwise(monkeypatch, IN_HALF_ONLY["no mask"], BROKEN)
    report = check_parity(loaded, ids_BT)
    assert report.layers[BROKEN].masked_weight > 0.1
    assert parity_table(report).to_pydict()["as_run_weights"][BROKEN] > 0.1


def test_the_manifest_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_otherwise(monkeypatch, IN_HALF_ONLY["uniform"], BROKEN)
    summary = verify(as_loaded(model_in(torch.bfloat16)), ids_for("llama"))
    assert summary["holds"] is False
    assert "bfloat16" in summary["failures"][0]


@pytest.mark.parametrize("command", [("parity",), ("heads", "--verify")])
def test_the_commands_leave_with_1(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    attend_otherwise(monkeypatch, IN_HALF_ONLY["uniform"], BROKEN)
    done = call(*command, "--text", "the bank on the river", "--dtype", "bfloat16")
    assert done.code == 1
    assert f"check failed: layer {BROKEN}: as run in bfloat16" in done.err


def test_the_last_line_says_how_far_half_precision_is_from_float32(tmp_path: Path) -> None:
    done = call("parity", "--dtype", "bfloat16", "--out", str(tmp_path / "certificate.json"))
    layers = json.loads((tmp_path / "certificate.json").read_text())["layers"]
    furthest = max(max(layer["rounding"]["weights"], layer["rounding"]["output_relative"]) for layer in layers)
    assert f"bfloat16 up to {furthest:.2g} (" in done.err.splitlines()[-1]
    assert done.code == 0


@pytest.mark.parametrize("dtype", HALF)
def test_sinks_are_logits_that_rounding_acts_on_too(dtype: torch.dtype) -> None:
    report = parity_of(model_in(dtype, "gpt_oss"))
    assert report.holds
    assert {layer.why for layer in report.layers} == {""}  # the mask of float16 hides the same keys in float32


@pytest.mark.parametrize("family", ["doge", "deepseek_v32"])
def test_layers_that_choose_other_keys_say_so_and_are_held_to_the_keys_they_chose(family: str) -> None:
    report = parity_of(model_in(torch.bfloat16, family))
    assert report.holds
    apart = [layer for layer in report.layers if "attends to other keys than in float32" in layer.why]
    assert max(layer.rounding.weights for layer in apart) > 0.1
    assert all(layer.as_run.weights < 0.02 for layer in report.layers)


# Float32 whose logits are large.


def with_large_logits(factor: float) -> Any:
    model = roused_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(factor)
        layer.self_attn.k_proj.weight.mul_(factor)
    return model


def test_logits_of_usual_size_are_held_to_the_tolerance_alone() -> None:
    for layer in parity_of(roused_model("llama")).layers:
        assert (layer.implementation.weights_allowed, layer.implementation.output_allowed) == (1e-5, 1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", ["scale", "q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_fault_of_one_in_a_thousand_is_caught_where_logits_are_large(fault: str, seed: int) -> None:
    model = with_large_logits(20)
    assert parity_of(model, seed=seed).holds
    attention = model.model.layers[BROKEN].self_attn
    if fault == "scale":
        attention.scaling *= 1.001
    else:
        getattr(attention, fault).register_forward_hook(lambda module, args, out: 1.001 * out)
    assert [layer.layer for layer in parity_of(model, seed=seed).failures] == [BROKEN]


def test_a_smaller_tolerance_allows_less_rounding_too() -> None:
    model, ids_BT = with_large_logits(20), ids_for("llama")
    assert check_parity(as_loaded(model), ids_BT).holds
    assert not check_parity(as_loaded(model), ids_BT, atol=1e-8).holds


def test_float64_is_held_to_float32_which_transformers_takes_for_softmax() -> None:
    assert parity_of(with_large_logits(20).double()).holds


@pytest.mark.parametrize("dtype", HALF)
def test_large_logits_hold_in_half_precision_though_weights_flip(dtype: torch.dtype) -> None:
    report = parity_of(in_half(with_large_logits(20), dtype), 100)
    assert report.holds
    assert max(layer.rounding.weights for layer in report.layers) > (0.2 if dtype == torch.bfloat16 else 0.02)


def test_an_output_is_not_blamed_for_weights_that_rounding_explains() -> None:
    report = parity_of(with_large_logits(20))
    layer = max(report.layers, key=lambda one: one.implementation.weights)
    assert 1e-5 < layer.implementation.weights <= layer.implementation.weights_allowed
    assert layer.implementation.output_relative < 2e-6


# What accelerate's hooks do: the cosines and sines that reach a layer are copies on its device.


def test_cosines_that_were_moved_to_a_layer_are_still_asked_in_float32() -> None:
    model = model_in(torch.bfloat16)

    def move(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"position_embeddings": tuple(part.clone() for part in kwargs["position_embeddings"])}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(move, with_kwargs=True)
    assert parity_of(model).holds


@pytest.mark.parametrize(
    ("dtype", "back", "family"),
    [
        (torch.bfloat16, False, "llama"),
        (torch.float16, True, "llama"),
        *(
            pytest.param(dtype, back, family, marks=pytest.mark.families)
            for dtype, back, family in [
                (torch.float16, False, "llama"),
                (torch.bfloat16, True, "llama"),
                (torch.float16, False, "gemma3_text"),
                (torch.bfloat16, True, "gemma3_text"),
            ]
        ),
    ],
)
def test_rotary_frequencies_that_were_rounded_are_named(dtype: torch.dtype, back: bool, family: str) -> None:
    """As `model.half()` does, and no later `.float()` undoes it; asked for a dtype, transformers keeps them."""
    kept, rounded = model_in(dtype, family), roused_model(family).to(dtype)
    kept, rounded = (model.float() if back else model for model in (kept, rounded))
    words = f"its rotary frequencies are rounded to {str(dtype).removeprefix('torch.')}"
    assert all(words not in layer.why for layer in parity_of(kept).layers)
    report = parity_of(rounded)
    assert not report.holds
    assert all(words in in_words(layer, report) for layer in report.failures)
