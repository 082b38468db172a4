"""Parity: honest models pass, corrupted ones fail and the layer is named; in float32 and in half precision.

Every corruption is in what the model computes, by a hook on one of its modules; its parameters and its config stay
honest, and the oracle reads those.

Shapes: B text, T token, H head, G kv head, Q query, K key, D head dim.
"""

import doctest
import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.certificate.check import (
    ParityReport,
    certificate,
    check_parity,
    in_words,
    parity_table,
    verify,
    weights_sha256,
)
from attnscope.cli import run
from attnscope.cli.parity import parity_sheet
from attnscope.errors import ForwardError, UsageError
from attnscope.hooks.listen import listen
from attnscope.hooks.modules import ModuleRecorder
from attnscope.inputs.prompt import from_text
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.reference.layouts import layout_of
from attnscope.utils.files import save_json
from helpers.command_line import call
from helpers.compiling import compiling  # noqa: F401
from helpers.families import tiny_config
from helpers.parity_models import as_loaded, ids_for, in_half, roused_model, within

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BROKEN = 2  # the layer that is corrupted


def model_in(dtype: torch.dtype, family: str = "llama", **overrides: Any) -> Any:
    return in_half(roused_model(family, **overrides), dtype)


def parity_of(model: Any, **how: Any) -> ParityReport:
    return check_parity(as_loaded(model), ids_for("llama"), **how)


def assert_fails_only_in(report: ParityReport, layers: list[int]) -> None:
    """The one assertion of this file: [] for an honest model, the broken layers for a corrupted one."""
    assert report.level == "full"
    assert [layer.layer for layer in report.failures] == layers
    assert report.holds == (not layers)


def attention_of(model: Any, layer: int = BROKEN) -> Any:
    return model.model.layers[layer].self_attn


# Corruptions of one layer.


def swap_kv_heads(attention: Any) -> None:
    """Keys of kv head 0 and 1 change places, values don't."""
    attention.k_proj.register_forward_hook(
        lambda module, args, k_BTM: k_BTM.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    )


def scale_off_by_one_percent(attention: Any) -> None:
    attention.scaling *= 1.01


def drop_a_bias(attention: Any) -> None:
    attention.q_proj.register_forward_hook(lambda module, args, q: q - module.bias)


def widen_the_window(attention: Any) -> None:
    """Every query sees one key more than the window has."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        T = mask.shape[-1]
        kept_QK = torch.ones(T, T, dtype=torch.bool).tril().triu(-module.config.sliding_window)
        wider = torch.zeros_like(mask).masked_fill(~kept_QK, torch.finfo(mask.dtype).min)
        return args, kwargs | {"attention_mask": wider}

    attention.register_forward_pre_hook(change, with_kwargs=True)


def turn_faster(attention: Any) -> None:
    """Positions 1 % further apart than they are."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        cos, _ = kwargs["position_embeddings"]
        inv_freq_M = 1 / module.config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        angles_TM = 1.01 * torch.arange(cos.shape[1])[:, None] * inv_freq_M
        turned = torch.cat([angles_TM, angles_TM], -1)[None]
        return args, kwargs | {"position_embeddings": (turned.cos().to(cos), turned.sin().to(cos))}

    attention.register_forward_pre_hook(change, with_kwargs=True)


def drop_the_query_norm(attention: Any) -> None:
    attention.q_norm.register_forward_hook(lambda module, args, normed: args[0])


CORRUPTIONS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "two kv heads swapped": ("llama", swap_kv_heads),
    "scale off by 1 %": ("llama", scale_off_by_one_percent),
    "positions off by 1 %": ("llama", turn_faster),
    "window off by one": ("mistral", widen_the_window),
    "bias dropped": ("qwen2", drop_a_bias),
    "norm of q dropped": ("qwen3", drop_the_query_norm),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.families)]
)
@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupted_layer_fails_and_is_named(what: str, dtype: torch.dtype) -> None:
    family, corrupt = CORRUPTIONS[what]
    model = model_in(dtype, family, **({"sliding_window": 8} if family == "mistral" else {}))
    assert_fails_only_in(parity_of(model), [])
    corrupt(attention_of(model))
    report = parity_of(model)
    assert_fails_only_in(report, [BROKEN])
    assert in_words(report.failures[0], report).startswith(f"layer {BROKEN}: ")


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_rotary_base_fails_in_every_layer(dtype: torch.dtype) -> None:
    model = model_in(dtype)
    model.model.rotary_emb.inv_freq = 1 / 11000 ** (torch.arange(0, 16, 2) / 16)
    assert_fails_only_in(parity_of(model), [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_config_that_says_another_window_fails_where_the_window_is(dtype: torch.dtype) -> None:
    model = model_in(dtype, "gemma2")
    assert_fails_only_in(parity_of(model), [])
    model.config = tiny_config("gemma2", sliding_window=9)
    assert_fails_only_in(parity_of(model), [0, 2])


def test_tables_rounded_to_half_precision_fail_too() -> None:
    """`model.to(bfloat16)` rounds the frequencies, which `from_pretrained` does not."""
    model = roused_model("llama").to(torch.bfloat16)
    assert_fails_only_in(parity_of(model), [0, 1, 2, 3])


def test_a_scale_off_by_one_percent_hides_in_the_rounding_of_bfloat16() -> None:
    """Why half precision takes two figures: as run, honest and corrupted look alike."""
    honest, corrupted = model_in(torch.bfloat16), model_in(torch.bfloat16)
    scale_off_by_one_percent(attention_of(corrupted))
    honest_layer, corrupted_layer = parity_of(honest).layers[BROKEN], parity_of(corrupted).layers[BROKEN]
    assert corrupted_layer.rounding.weights < 2 * honest_layer.rounding.weights
    assert corrupted_layer.implementation.weights > 100 * honest_layer.implementation.weights


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounding_is_reported_beside_the_implementation(dtype: torch.dtype) -> None:
    for layer in parity_of(model_in(dtype)).layers:
        assert within(layer.implementation, 1e-5)
        assert 1e-4 < layer.rounding.weights < 0.05
        assert 1e-4 < layer.rounding.output_relative < 0.05
    for layer in parity_of(model_in(torch.float32)).layers:
        assert layer.rounding.weights is None


def test_the_model_is_left_as_it_was_found() -> None:
    model = model_in(torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    ids_BT = ids_for("llama")
    expected = model(ids_BT).logits
    parity_of(model)
    assert torch.equal(model(ids_BT).logits, expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_hooks_are_gone_when_the_forward_raises() -> None:
    model = model_in(torch.float32)
    attention_of(model).o_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ForwardError, match="division by zero"):
        parity_of(model)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 1


# Selection, levels, tolerance.


def test_only_selected_layers_and_heads_are_compared() -> None:
    model = model_in(torch.float32)
    report = parity_of(model, select="1,3.0")
    assert [layer.layer for layer in report.layers] == [1, 3]
    swap_kv_heads(attention_of(model, 0))
    assert parity_of(model, select="1-3").holds
    assert not parity_of(model, select="0").holds


def test_a_selected_head_is_judged_by_its_own_weights() -> None:
    """Only head 3's queries are wrong; the layer's output tells it too, whichever head is selected."""
    model = model_in(torch.float32)

    def change(module: Any, args: Any, q_BTM: torch.Tensor) -> torch.Tensor:
        q_BTHD = q_BTM.unflatten(-1, (4, -1)).clone()
        q_BTHD[..., 3, :] *= -1
        return q_BTHD.flatten(-2)

    attention_of(model).q_proj.register_forward_hook(change)
    weights = [parity_of(model, select=f"{BROKEN}.{head}").layers[0].implementation.weights for head in range(4)]
    assert max(weights[:3]) < 1e-5 < 1e-2 < weights[3]
    assert not parity_of(model, select=f"{BROKEN}.0").holds


def test_a_selection_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="layer 7"):
        parity_of(model_in(torch.float32), select="7")


def test_the_tolerance_is_what_was_asked() -> None:
    model = model_in(torch.float32)
    assert parity_of(model, atol=1e-5).holds
    assert not parity_of(model, atol=1e-9).holds


def test_levels_are_never_silently_weaker() -> None:
    model = model_in(torch.float32)
    scores = parity_of(model, level="scores")
    assert {(layer.level, layer.why) for layer in scores.layers} == {("scores", "asked for scores")}
    assert scores.holds
    none = parity_of(model, level="none")
    assert none.level == "none"
    assert not none.holds
    assert {layer.verdict for layer in none.layers} == {None}


def test_scores_do_not_see_what_happened_before_them() -> None:
    """Swapped keys are already in the captured k: why `scores` is the weaker level."""
    model = model_in(torch.float32)
    swap_kv_heads(attention_of(model))
    assert parity_of(model, level="scores").holds
    assert not parity_of(model).holds


def test_scores_see_a_call_that_is_not_what_it_was_given() -> None:
    model = model_in(torch.float32)
    attention = attention_of(model)
    attention.num_key_value_groups = 1  # repeat_kv repeats nothing: every query reads kv head 0 and 1 in turn
    attention.forward = forward_with_keys_repeated(attention)
    assert [layer.layer for layer in parity_of(model, level="scores").failures] == [BROKEN]


def forward_with_keys_repeated(attention: Any) -> Callable[..., Any]:
    """The module's forward around an eager attention that deals out kv heads in the wrong order."""
    from transformers.modeling_utils import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        module.num_key_value_groups = 1
        return eager_attention_forward(module, query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1), *args, **kwargs)

    original = type(attention).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = AttentionInterface.get_interface

        def wrong(self: Any, name: str, default: Any) -> Any:
            return found(self, name, attend)

        AttentionInterface.get_interface = wrong
        try:
            return original(attention, *args, **kwargs)
        finally:
            AttentionInterface.get_interface = found

    return forward


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_returns_no_weights_is_compared_by_its_output_and_says_so(dtype: torch.dtype) -> None:
    model = model_in(dtype, attention="sdpa")
    report = parity_of(model)
    assert_fails_only_in(report, [])
    for layer in report.layers:
        assert layer.implementation.weights is None
        assert layer.implementation.output_relative is not None
        assert "only its output" in layer.why
    scale_off_by_one_percent(attention_of(model))
    assert_fails_only_in(parity_of(model), [BROKEN])


@pytest.mark.e2e
@pytest.mark.usefixtures("compiling")
def test_a_compiled_model_is_compared_whole() -> None:
    model = roused_model("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    compiled(ids_for("llama"))
    assert_fails_only_in(check_parity(replace(as_loaded(model), model=compiled), ids_for("llama")), [])


def test_offloaded_weights_are_compared_by_scores_and_say_so() -> None:
    """As accelerate leaves a module: its weights are elsewhere once its forward has returned."""
    model = model_in(torch.float32)
    o_proj = attention_of(model).o_proj
    o_proj.register_forward_hook(lambda module, args, output: module.to("meta") and None)
    layer = parity_of(model).layers[BROKEN]
    assert (layer.level, layer.why, layer.verdict) == ("scores", "its weights are offloaded", True)


def test_a_layout_that_does_not_fit_is_told() -> None:
    """As with a family whose code is its repository's own: heads of another number than the config says."""
    model = model_in(torch.float32)
    loaded = as_loaded(model)
    layers = tuple(replace(layer, heads=3) for layer in loaded.geometry.layers)
    loaded = replace(loaded, geometry=replace(loaded.geometry, layers=layers))
    report = check_parity(loaded, ids_for("llama"))
    assert report.level == "scores"
    assert all("RuntimeError" in layer.why for layer in report.layers)


def test_a_layout_that_gives_another_shape_is_told() -> None:
    model = model_in(torch.float32)
    loaded = as_loaded(model)
    layers = tuple(replace(layer, heads=2, kv_heads=1) for layer in loaded.geometry.layers)
    report = check_parity(replace(loaded, geometry=replace(loaded.geometry, layers=layers)), ids_for("llama"))
    assert report.level == "scores"
    assert all("its layout gives weights (1, 2, 24, 24), the model (1, 4, 24, 24)" in one.why for one in report.layers)


def test_quantised_weights_are_not_judged() -> None:
    model = model_in(torch.bfloat16)
    layer = model.model.layers[0].mlp.down_proj
    layer.forward = lambda x: type(layer).forward(layer, (x * 16).round() / 16)
    report = parity_of(model)
    assert report.quantised
    assert report.holds
    assert report.largest() is None
    for layer in report.layers:
        assert layer.verdict is None
        assert "rounding only" in layer.why
        assert layer.implementation.weights is None
        assert 1e-5 < layer.rounding.weights < 0.05


def test_a_module_that_cannot_run_in_float32_is_not_passed() -> None:
    model = model_in(torch.bfloat16)

    def only_bfloat16(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["hidden_states"].dtype != torch.bfloat16:
            raise RuntimeError("bfloat16 only")

    attention_of(model).register_forward_pre_hook(only_bfloat16, with_kwargs=True)
    report = parity_of(model)
    [unchecked] = report.unchecked
    assert (unchecked.layer, unchecked.verdict) == (BROKEN, None)
    assert "cannot be checked" in in_words(unchecked, report)
    assert "bfloat16 only" in in_words(unchecked, report)
    assert (report.holds, report.verdict, report.failures) == (False, None, [])


def test_real_pretrained_weights_hold_in_full(real_model_folder: Path) -> None:
    loaded = load(LoadOptions(model=str(real_model_folder)))
    prompt = from_text(loaded.tokenizer, "Once upon a time there was a little girl, and the little girl had a dog.")
    assert_fails_only_in(check_parity(loaded, prompt), [])
    swap_first_and_last_kv_head(loaded.model.model.layers[BROKEN].self_attn)
    assert_fails_only_in(check_parity(loaded, prompt), [BROKEN])


def swap_first_and_last_kv_head(attention: Any) -> None:
    def change(module: Any, args: Any, k_BTM: torch.Tensor) -> torch.Tensor:
        k_BTGD = k_BTM.unflatten(-1, (-1, attention.head_dim))
        return k_BTGD.flip(-2).flatten(-2)

    attention.k_proj.register_forward_hook(change)


# Certificate, table, command.


def test_the_certificate_names_the_weights_and_every_layer(tmp_path: Path) -> None:
    loaded = load(LoadOptions())
    prompt = from_text(loaded.tokenizer, "the bank on the river")
    report = check_parity(loaded, prompt)
    save_json(certificate(report, loaded, prompt), tmp_path / "certificate.json")
    written = json.loads((tmp_path / "certificate.json").read_text())
    file = loaded.source_folder / "model.safetensors"
    assert written["model"]["weights_sha256"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    assert written["text"] == {"sha256": prompt.sha256, "tokens": len(prompt)}
    assert (written["holds"], written["level"], written["atol"]) == (True, "full", 1e-5)
    assert {"attnscope", "torch", "transformers", "python"} <= written["versions"].keys()
    assert [layer["layer"] for layer in written["layers"]] == [0, 1, 2, 3]
    assert 0 < written["layers"][0]["implementation"]["weights"] <= 1e-5


def test_a_model_made_in_memory_has_no_weight_files() -> None:
    assert weights_sha256(None) == {}


def test_the_summary_for_a_manifest() -> None:
    model = model_in(torch.float32)
    summary = verify(as_loaded(model), ids_for("llama"))
    assert summary["holds"]
    assert summary["largest_difference"].keys() == {"0", "1", "2", "3"}
    assert all(0 < value <= 1e-5 for value in summary["largest_difference"].values())
    swap_kv_heads(attention_of(model))
    broken = verify(as_loaded(model), ids_for("llama"))
    assert not broken["holds"]
    assert broken["largest_difference"][str(BROKEN)] > 1e-2
    [words] = broken["failures"]
    assert words.startswith(f"layer {BROKEN}: weights differ from the oracle by ")


def test_the_table_has_a_row_a_call() -> None:
    report = parity_of(model_in(torch.float32))
    rows = parity_table(report).to_pydict()
    assert rows["layer"] == [0, 1, 2, 3]
    assert rows["weights"] == [layer.implementation.weights for layer in report.layers]


def test_nan_is_never_within_tolerance() -> None:
    layer = parity_of(model_in(torch.float32)).layers[0]
    wrong = replace(layer.implementation, weights=float("nan"))
    assert not within(wrong, 1e30)


def test_the_command_on_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parity", "--out", str(tmp_path / "certificate.json")]) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()
    assert header.startswith("layer,call,level,holds,weights,")
    assert [row.split(",")[2:4] for row in rows] == [["full", "True"]] * 4
    assert err.splitlines()[-1].startswith("parity holds: 4 at level full; largest difference ")
    assert json.loads((tmp_path / "certificate.json").read_text())["holds"]


def test_the_command_leaves_with_1_and_names_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parity", "--atol", "1e-12", "--text", "the bank", "--select", "1-2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines if line.startswith("check failed")] == ["layer 1", "layer 2"]
    assert lines[-1].startswith("parity does not hold: ")


def test_the_kernel_is_a_column_where_its_rows_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    done = call("parity", "--engine", "probe", "--select", "0,last", "--format", "jsonl", "--out", str(file)).ok()
    assert "engine probe (sdpa) (output model, " in done.err
    assert [row["kernel"] for row in done.records] == ["flash (sdpa)"] * 2
    record = json.loads(file.read_text())
    assert (record["engine"], {layer["kernel"] for layer in record["layers"]}) == ("probe", {"flash (sdpa)"})
    table = attnscope.parity(attnscope.load("demo"), [1, 2, 3]).table()
    assert set(table["kernel"].to_pylist()) == {"eager"}
    assert [("kernel" in parity_sheet(table, engine).rows[0]) for engine in ("eager", "probe")] == [False, True]


def test_a_tolerance_below_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parity", "--atol", "-1"]) == 2
    assert "--atol" in capsys.readouterr().err


# Examples.


def what_examples_need(loaded: LoadedModel) -> dict[str, Any]:
    """The demo, a prompt, their report, and one run of layer 0 with what reads it."""
    prompt, runs, config = from_text(loaded.tokenizer, "the bank on the river"), [], loaded.model.config
    with ModuleRecorder(loaded.model, lambda run, recorder: runs.append(run)) as recorder:
        listen(loaded.model, torch.tensor([prompt.ids]), recorder.record)
    names = {"loaded": loaded, "prompt": prompt, "report": check_parity(loaded, prompt), "torch": torch}
    return names | {"run": runs[0], "config": config, "layout": layout_of(config), "layer": loaded.geometry.layers[0]}


UNRUN = ("adapted", "arrangements_of", "of_picture", "made_spec")  # whose examples need another model
MODULES = ("check", "compare", "oracle", "second_instance", "verdicts", "whole_model")


@pytest.mark.parametrize("module", MODULES)
def test_examples_are_true(module: str, demo: LoadedModel) -> None:
    loaded, runner = importlib.import_module(f"attnscope.certificate.{module}"), doctest.DocTestRunner()
    names = what_examples_need(demo) | vars(loaded) | {"attnscope": attnscope}
    for example in doctest.DocTestFinder().find(loaded, globs=names):
        if example.name.split(".")[-1] not in UNRUN:
            runner.run(example)
    result = runner.summarize()
    assert result.attempted > 0
    assert result.failed == 0
