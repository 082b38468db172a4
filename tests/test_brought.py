"""GGUF files, quantised models and checkpoints in pieces: read as transformers loads them, or refused in one line."""

import copy
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_hqq import HqqHfQuantizer
from transformers.utils.logging import is_progress_bar_enabled

import attnscope
from attnscope.certificate.check import certificate, check_parity
from attnscope.errors import AttnscopeError, ModelError, UsageError
from attnscope.hooks.projections import projection
from attnscope.model import gguf
from attnscope.model.libraries import bars_as_elsewhere, without_bars
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, bytes_in_memory, identify, load, load_config, wrap
from attnscope.model.options import LoadOptions
from attnscope.model.quantised import Arithmetic, dequantizing, is_quantised
from helpers.brought import a_gguf, an_adapter, compressed
from helpers.command_line import call
from helpers.families import tiny_model
from helpers.folders import edit_config, edit_weights, saved
from helpers.own import attentions

TEXT = "the financial bank is located on river bank"
IDS = [0, 423, 1165, 782, 295, 1650, 357, 1385, 782]  # of the text, with the begin token


def weights(loaded: LoadedModel, **asked: object) -> torch.Tensor:
    """(layers, H, Q, K)"""
    return torch.stack(list(attnscope.capture(loaded, IDS, **asked).weights.values()))


def own(loaded: LoadedModel) -> torch.Tensor:
    """What the model itself gives as its attentions."""
    return torch.stack(attentions(loaded.model, IDS))


def refusal(**options: object) -> str:
    with pytest.raises(AttnscopeError) as caught:
        load(LoadOptions(**options))
    assert isinstance(caught.value, ModelError)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value.for_shell()


# GGUF


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, demo: LoadedModel) -> Path:
    """The embedded model as a GGUF file in float32."""
    return a_gguf(tmp_path_factory.mktemp("gguf") / "exact.gguf", demo.model)


def test_a_gguf_file_is_the_model_that_was_written(exact: Path, demo: LoadedModel) -> None:
    loaded = load(LoadOptions(model=str(exact)))
    assert (loaded.name, loaded.dtype, loaded.geometry.parameters) == (str(exact), "float32", demo.geometry.parameters)
    # transformers 5.17 adds no begin token
    assert loaded.tokenizer(TEXT, add_special_tokens=False).input_ids == IDS[1:]
    torch.testing.assert_close(weights(loaded), weights(demo), rtol=0, atol=1e-6)


def test_its_blocks_are_unpacked_and_held_against_the_oracle(tmp_path: Path, demo: LoadedModel) -> None:
    path = a_gguf(tmp_path / "q8.gguf", demo.model, GGMLQuantizationType.Q8_0)
    loaded = load(LoadOptions(model=str(path)))
    torch.testing.assert_close(weights(loaded), own(loaded), rtol=0, atol=0)
    assert 1e-4 < (weights(loaded) - weights(demo)).abs().max() < 0.1
    report = check_parity(loaded, IDS)
    assert (report.level, report.holds, report.quantised) == ("full", True, False)
    assert set(certificate(report, loaded, IDS)["model"]["weights_sha256"]) == {"q8.gguf"}


@pytest.mark.e2e
def test_an_adapter_of_a_gguf_file(exact: Path, tmp_path: Path) -> None:
    adapter = an_adapter(tmp_path / "adapter")
    loaded, expected = (load(LoadOptions(model=str(adapter), base=base)) for base in (str(exact), "demo"))
    torch.testing.assert_close(weights(loaded), weights(expected), rtol=0, atol=1e-5)


def test_which_gguf_file_a_run_is_of(exact: Path, tmp_path: Path, demo: LoadedModel) -> None:
    other = a_gguf(tmp_path / exact.name, demo.model, GGMLQuantizationType.Q8_0)
    assert identify(LoadOptions(model=str(exact)))[0] == identify(LoadOptions(model=str(exact)))[0]
    assert identify(LoadOptions(model=str(exact)))[0] != identify(LoadOptions(model=str(other)))[0]


@pytest.mark.e2e
def test_a_gguf_file_on_the_command_line(exact: Path) -> None:
    done = call("heads", TEXT, "--model", str(exact), "--format", "jsonl").ok()
    assert len(done.out.splitlines()) == 24
    assert json.loads(call("info", str(exact), "--format", "json").out)["parameters"]


def test_what_is_no_gguf_file(tmp_path: Path, exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML and more")
    assert "not a GGUF file" in refusal(model=str(path))
    path.write_bytes(exact.read_bytes()[:50])
    assert "is cut short or damaged" in refusal(model=str(path))
    path.write_bytes(exact.read_bytes()[:-5000])
    assert "cannot be" in refusal(model=str(path))
    path.write_bytes(exact.read_bytes().replace(b"llama", b"llamb"))
    assert "llamb is not supported" in refusal(model=str(path))
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    assert refusal(model=str(exact)).endswith('; pip install "attnscope[gguf]"')


# Quantised


@pytest.mark.parametrize(("quantize", "dtype"), [("8bit", "auto"), ("4bit", "bfloat16")])
def test_a_model_is_quantised_on_the_cpu(demo: LoadedModel, quantize: str, dtype: str) -> None:
    pytest.importorskip("bitsandbytes")
    loaded = load(LoadOptions(quantize=quantize, dtype=dtype, device="cpu"))
    torch.testing.assert_close(weights(loaded), own(loaded).float(), rtol=0, atol=0)
    torch.testing.assert_close(weights(loaded, engine="fused"), own(loaded).float(), rtol=0, atol=0.05)
    assert 1e-4 < (weights(loaded) - weights(demo)).abs().max() < 0.5
    assert loaded.geometry.parameters == demo.geometry.parameters
    report = check_parity(loaded, IDS)
    assert report.quantised
    assert report.largest() is None


@pytest.mark.parametrize(("quantize", "dtype", "near"), [("4bit", "float32", 1e-5), ("8bit", "auto", 0.02)])
def test_quantised_weights_are_those_that_transformers_dequantises(
    demo: LoadedModel, quantize: str, dtype: str, near: float
) -> None:
    """In 4 bits to rounding; in 8 bits bitsandbytes rounds what enters a layer, too.

    In 4 bits it multiplies in bfloat16 where the processor can, whatever was asked for.
    """
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import has_avx512bf16

    near = max(near, 0.02) if has_avx512bf16() else near
    loaded = load(LoadOptions(quantize=quantize, dtype=dtype, device="cpu"))
    read = {engine: weights(loaded, engine=engine) for engine in ("eager", "fused")}
    unread = load(LoadOptions(quantize=quantize, dtype=dtype, device="cpu"))  # a pass may pack weights for this CPU
    expected = own(wrap(unread.model.dequantize(dtype=torch.float32).float(), unread.tokenizer))
    for found in read.values():
        torch.testing.assert_close(found, expected, rtol=0, atol=near)
    assert (weights(demo) - expected).abs().max() > 1e-3  # what was quantised differs from what was not


@pytest.fixture(scope="module")
def two_layers() -> Any:
    """A tiny llama, of which the tests take copies."""
    return tiny_model("llama", num_hidden_layers=2)


def in_int8(model: Any, to: torch.dtype = torch.float32) -> Any:
    """The same model with int8 weights in its layers, which are unpacked to a dtype at the first call of the whole."""
    packed = {}
    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            scale = layer.weight.detach().abs().amax() / 127
            packed[name] = scale
            number = (layer.weight.detach() / scale).round().to(torch.int8)
            del layer.weight
            layer.weight_packed = torch.nn.Parameter(number, requires_grad=False)

    def unpack(whole: Any, args: tuple[Any, ...]) -> None:
        handle.remove()
        for name, scale in packed.items():
            layer = whole.model.layers.get_submodule(name)
            layer.weight = torch.nn.Parameter((layer.weight_packed * scale).to(to), requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(scale.to(to), requires_grad=False)
            del layer.weight_packed

    handle = model.register_forward_pre_hook(unpack)
    model.hf_quantizer, model.is_quantized = Quantizer(), True
    return model.eval()


class Quantizer:
    """Of the package that left the hook."""


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_the_first_call_of_the_whole_would_unpack_are_unpacked(
    two_layers: Any, to: torch.dtype, demo: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = wrap(in_int8(copy.deepcopy(two_layers), to), demo.tokenizer)
    ids = [5, 6, 7, 8, 5, 6]
    found = torch.stack(list(attnscope.capture(loaded, ids).weights.values()))
    torch.testing.assert_close(found, torch.stack(attentions(loaded.model, ids)), rtol=0, atol=0)
    assert 1e-5 < (found - torch.stack(attentions(two_layers, ids))).abs().max() < 0.1
    assert not loaded.model._forward_pre_hooks
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert ("unpack to bfloat16, and are read as float32" in caplog.text) == (to == torch.bfloat16)
    report = check_parity(loaded, ids)  # what is left are plain weights
    assert (report.quantised, report.level, report.holds) == (False, "full", True)


def test_hooks_of_others_on_a_quantised_model_are_not_called_without_arguments(
    two_layers: Any, demo: LoadedModel
) -> None:
    model = copy.deepcopy(two_layers)
    model.hf_quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config())
    model.lm_head.to(torch.bfloat16)
    model.register_forward_pre_hook(lambda model, args: args[0])
    model.register_forward_pre_hook(lambda model, args, named: None, with_kwargs=True)
    wrap(model, demo.tokenizer)
    assert model.lm_head.weight.dtype == torch.bfloat16


def quantised_by_hand(model: Any, how: str) -> Any:
    """A model that somebody quantised before attnscope saw it, in one of five ways."""
    layer = model.model.layers[1].self_attn.o_proj
    if how == "dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torchao is to do it some day
            return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    if how == "of a class":
        layer.weight = torch.nn.Parameter(Packed(layer.weight.detach()), requires_grad=False)
    if how == "float8":
        layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    if how == "integers":
        layer.register_parameter("scales", torch.nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False))
    if how == "rounded input":
        layer.forward = lambda x: type(layer).forward(layer, (x * 16).round() / 16)
    return model


class Packed(torch.Tensor):
    """A weight of a library's own class, which knows matrix products and no transpose, as torchao's."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.T.__get__:
            raise NotImplementedError("unimplemented operator aten.permute")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("how", ["dynamic", "of a class", "float8", "integers", "rounded input"])
def test_quantised_is_asked_of_weights_and_layers(two_layers: Any, how: str) -> None:
    assert not is_quantised(two_layers)
    assert is_quantised(quantised_by_hand(copy.deepcopy(two_layers), how))


def test_what_does_not_round_is_not_quantised(two_layers: Any) -> None:
    """A forward of somebody's own, a model on the disk, and numbers beside the weights that count something."""
    model = copy.deepcopy(two_layers)
    layer = model.model.layers[1].self_attn.o_proj
    layer.forward = lambda x: type(layer).forward(layer, x)
    layer.register_parameter("weight_shape", torch.nn.Parameter(torch.tensor([64, 64]), requires_grad=False))
    assert not is_quantised(model)
    model.hf_quantizer = object()  # whose work is done
    assert not is_quantised(model)
    layer.forward = lambda x_BTE: torch.stack([type(layer).forward(layer, x_TE) for x_TE in x_BTE.unbind()])
    assert not is_quantised(model)
    layer.forward = lambda *others: 1 / 0  # which cannot be asked
    assert is_quantised(model)
    del layer.forward, layer.weight_shape
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert not is_quantised(model)
    model.register_buffer("qweight", torch.ones(2, dtype=torch.int32))
    assert is_quantised(model)


@pytest.mark.parametrize("how", ["dynamic", "of a class", "rounded input"])
def test_a_model_quantised_by_hand_is_read_and_nothing_of_it_is_judged(
    two_layers: Any, how: str, demo: LoadedModel
) -> None:
    loaded, ids = wrap(quantised_by_hand(copy.deepcopy(two_layers), how), demo.tokenizer), [5, 6, 7, 8, 5, 6]
    found = torch.stack(list(attnscope.capture(loaded, ids).weights.values()))
    torch.testing.assert_close(found, torch.stack(attentions(loaded.model, ids)), rtol=0, atol=0)
    report = check_parity(loaded, ids)
    assert (report.quantised, report.largest()) == (True, None)
    assert all(layer.rounding.weights is not None for layer in report.layers)
    attention = loaded.model.model.layers[1].self_attn
    W_O_HVE = projection(attention.o_proj, 4, torch.zeros(1, 16))  # which scan asks for
    plain = two_layers.model.layers[1].self_attn.o_proj.weight.T.view(4, 16, -1)
    torch.testing.assert_close(W_O_HVE, plain, rtol=0, atol=0.002)
    with pytest.raises(UsageError, match="quantized weights"):
        attnscope.why(loaded, ids, "L1H0", query=5)


@pytest.mark.parametrize(
    ("rounded", "products", "together"),
    [
        (lambda x: x.bfloat16().float(), "bfloat16", False),
        (lambda x: x.half().float(), "float16", False),
        (lambda x: (x / x.abs().amax() * 127).round() / 127 * x.abs().amax(), None, True),
        (lambda x: (x / x.abs().amax(-1, True) * 127).round() / 127 * x.abs().amax(-1, True), None, False),
    ],
    ids=["bfloat16", "float16", "a tensor in int8", "a token in int8"],
)
def test_a_layer_is_asked_how_it_computes(
    two_layers: Any,
    rounded: Callable[[torch.Tensor], torch.Tensor],
    products: str | None,
    together: bool,
    demo: LoadedModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copy.deepcopy(two_layers)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = lambda x, layer=module: torch.nn.functional.linear(rounded(x), layer.weight)
    loaded = wrap(model, demo.tokenizer)
    assert loaded.arithmetic == Arithmetic("torch", False, products, together)
    assert loaded.precision == (f"float32 (products in {products})" if products else "float32")
    assert ("earlier rows change with later tokens" in caplog.text) == together
    ids = [5, 6, 7, 8, 5, 6]
    short, long = (attnscope.capture(loaded, [*ids, *more]).weights for more in ((), range(9, 60)))
    changed = max((long[at][..., :6, :6] - short[at]).abs().max() for at in short)
    assert (changed > 1e-5) == together
    assert loaded.arithmetic.facts == certificate(check_parity(loaded, ids), loaded, ids)["model"]["arithmetic"]


@pytest.mark.parametrize(("quantize", "threshold"), [("8bit", 6.0), ("8bit", 0.0), ("4bit", 6.0)])
def test_bitsandbytes_is_described_as_it_computes(
    demo: LoadedModel, quantize: str, threshold: float, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import has_avx512bf16

    how = BitsAndBytesConfig(**{f"load_in_{quantize}": True}, llm_int8_threshold=threshold)
    model = LlamaForCausalLM.from_pretrained(DEMO_FOLDER, quantization_config=how, dtype="float32", device_map="cpu")
    loaded = wrap(model, demo.tokenizer)
    together = (quantize, threshold) == ("8bit", 6.0)
    narrow = "float16" if quantize == "8bit" else "bfloat16" if has_avx512bf16() else None
    assert loaded.arithmetic == Arithmetic("bitsandbytes", False, narrow, together)
    assert ("earlier rows change with later tokens" in caplog.text) == together


WEIGHTS_ALONE = {"W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"}  # the layers round nothing that enters them
SCHEMES = ("W8A8", "W4A16", "W4A16_ASYM", "FP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")


@pytest.mark.parametrize(
    "scheme", [pytest.param(one, marks=[pytest.mark.families] if one != "W8A8" else []) for one in SCHEMES]
)
def test_compressed_tensors_are_read_as_transformers_reads_them(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = compressed(tmp_path / "m", scheme)
    loaded, ids = load(LoadOptions(model=str(folder), device="cpu")), [5, 6, 7, 8, 5, 6]
    found = torch.stack(list(attnscope.capture(loaded, ids).weights.values()))
    assert loaded.dtype == "float32"
    torch.testing.assert_close(found, torch.stack(attentions(loaded.model, ids)), rtol=0, atol=0)
    other = {"W4A16_ASYM": "only as unpacked", "NVFP4A16": "unpack to bfloat16", "MXFP4A16": "unpack to bfloat16"}
    assert other.get(scheme, "") in caplog.text
    assert bool(caplog.text) == (scheme in other)
    if scheme not in other:  # which plain transformers does not run in float32
        plain = LlamaForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
        torch.testing.assert_close(found, torch.stack(attentions(plain, ids)), rtol=0, atol=0)
    assert loaded.arithmetic == Arithmetic("compressed-tensors", unpacked=scheme in WEIGHTS_ALONE)
    report = check_parity(loaded, ids)
    assert (report.quantised, report.holds) == (scheme not in WEIGHTS_ALONE, True)
    assert (report.largest() is None) == report.quantised


def test_keys_and_values_that_a_quantizer_rounds_are_read_and_not_judged(tmp_path: Path) -> None:
    """The weights are plain, and what a layer makes of its input is no longer what is attended to."""
    rounding = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    folder = compressed(tmp_path / "m", "W4A16", kv_cache_scheme=rounding)
    loaded, ids = load(LoadOptions(model=str(folder), device="cpu")), [5, 6, 7, 8, 5, 6]
    found = torch.stack(list(attnscope.capture(loaded, ids).weights.values()))
    torch.testing.assert_close(found, torch.stack(attentions(loaded.model, ids)), rtol=0, atol=0)
    exact = load(LoadOptions(model=str(compressed(tmp_path / "exact", "W4A16")), device="cpu"))
    assert (found - torch.stack(attentions(exact.model, ids))).abs().max() > 1e-3
    report = check_parity(loaded, ids)
    assert (report.quantised, report.largest()) == (True, None)


def test_an_attention_that_a_quantizer_put_in_place_is_refused(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap(demo.model, demo.tokenizer)
    own = {"rounding": lambda *args, **kwargs: None}
    monkeypatch.setattr("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS", own)
    monkeypatch.setattr(demo.model.config, "_attn_implementation_internal", "rounding")
    monkeypatch.setattr(demo.model, "hf_quantizer", HfQuantizer, raising=False)
    with pytest.raises(ModelError, match=r"rounds queries in an attention of its own \(rounding\)"):
        wrap(demo.model, demo.tokenizer)


@pytest.mark.e2e
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16_ASYM", "NVFP4A16"])
def test_a_second_instance_of_compressed_tensors_is_the_same(tmp_path: Path, scheme: str) -> None:
    loaded = load(LoadOptions(model=str(compressed(tmp_path / "m", scheme)), device="cpu"))
    whole = check_parity(loaded, [5, 6, 7, 8], whole=True).whole
    assert whole is not None
    assert whole.worst[1] == 0


def test_no_weights_are_unpacked_for_good_that_would_be_another_model() -> None:
    weights, config = {"num_bits": 4}, LlamaConfig()
    for groups, more in [
        ({"a": {"weights": weights, "input_activations": {"num_bits": 8}}}, {}),  # it rounds what enters a layer
        ({"a": {"weights": weights}, "b": {"weights": {"num_bits": 8}}}, {}),  # one of two schemes would be taken
        ({"a": {"weights": weights}}, {"kv_cache_scheme": {"num_bits": 8}}),
        ({"W4A16": ["Linear"]}, {}),
        ([], {}),
        ({"a": {"weights": weights}}, {"quant_method": "awq"}),  # which has no such way
    ]:
        config.quantization_config = {"quant_method": "compressed-tensors", "config_groups": groups, **more}
        assert dequantizing(config) is None
    assert dequantizing(LlamaConfig()) is None


def test_bars_of_other_libraries_are_drawn_where_those_of_transformers_are(capfd: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with without_bars() if not shown else nullcontext(), bars_as_elsewhere():
            assert list(tqdm([1, 2], desc="Compressing")) == [1, 2]
        assert ("Compressing" in capfd.readouterr().err) == (shown and is_progress_bar_enabled())


def test_info_names_the_method_of_quantisation(tmp_path: Path) -> None:
    """Without the package that reads it."""
    folder = saved(tmp_path / "m", vocab_size=2000)
    for method, says in ((None, ""), ({"quant_method": "gptq", "bits": 4}, "quantised ('gptq')")):
        edit_config(folder, quantization_config=method)
        shown = call("info", str(folder), columns=200).ok().out.decode()
        assert ("quantised" in shown, says in shown) == (method is not None, True)


def test_a_quantised_checkpoint_and_an_adapter_of_it(tmp_path: Path) -> None:
    """As transformers saved it, without --quantize; the adapter stays beside what merging would round."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path / "m"
    shutil.copytree(DEMO_FOLDER, folder)
    quantised = load(LoadOptions(model=str(folder), quantize="4bit", device="cpu"))
    adapter = an_adapter(tmp_path / "adapter", folder)
    quantised.model.save_pretrained(folder)
    loaded = load(LoadOptions(model=str(folder), device="cpu"))
    torch.testing.assert_close(weights(loaded), weights(quantised), rtol=0, atol=1e-6)
    facts = json.loads(call("info", str(folder), "--device", "cpu", "--format", "json").ok().out)
    scales = 0.05
    assert facts["weights_bytes"] == pytest.approx(sum(one.nbytes for one in loaded.model.parameters()), rel=scales)
    assert facts["weights_bytes"] < (4 - scales) * facts["parameters"]
    assert facts["quantised"] == "bitsandbytes"
    adapted = load(LoadOptions(model=str(adapter), device="cpu"))
    assert any("lora_A" in name for name, _ in adapted.model.named_parameters())
    torch.testing.assert_close(weights(adapted), own(adapted), rtol=0, atol=0)
    assert (weights(adapted) - weights(loaded)).abs().max() > 1e-3


def test_what_a_library_prints_while_a_model_is_loaded_is_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gptqmodel does, a dozen lines of it."""
    of_transformers = LlamaForCausalLM.from_pretrained

    def talks(*given: object, **how: object) -> object:
        sys.stdout.write("Kernel: selected\n")
        return of_transformers(*given, **how)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", talks)
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "m")
    done = call("relations", "-q", TEXT, "-m", str(folder))
    assert "Kernel" in done.err
    assert b"Kernel" not in done.out


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["quant_method"],
)
def test_a_checkpoint_whose_package_is_missing_names_it(tmp_path: Path, method: dict, package: str) -> None:
    if find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    folder = saved(tmp_path / "m", vocab_size=2000)
    edit_config(folder, quantization_config=method)
    message = refusal(model=str(folder))
    assert f"{folder} cannot be loaded" in message
    assert package in message


def packed(
    kind: torch.dtype, top: float, suffix: str, scale: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Projections become numbers up to `top`, beside the scales that turn them back, or without any."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scale_O1 = scale(tensors[name].abs()) / top
            tensors[name] = (tensors[name] / scale_O1).to(kind)
            if suffix:
                tensors[name.removesuffix(".weight") + suffix] = scale_O1
        return tensors

    return change


def whole(values: torch.Tensor) -> torch.Tensor:
    return values.max()


def rows(values: torch.Tensor) -> torch.Tensor:
    return values.amax(1, keepdim=True)


FP8, INT8 = (torch.float8_e4m3fn, 448), (torch.int8, 127)
FIRST = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("stored", "method", "named"),
    [
        ((*FP8, ".weight_scale", whole), {"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt'"),
        ((*FP8, ".weight_scale", whole), {"quant_method": "fp8", "weight_block_size": None}, "its {}.weight_scale"),
        ((*FP8, ".weight_scale_inv", whole), None, "its {}.weight_scale_inv"),
        ((*INT8, ".SCB", rows), None, "its {}.SCB"),
        ((*INT8, "", rows), None, "{}.weight as I8"),
        ((*FP8, "", whole), None, "{}.weight as F8_E4M3"),
        ((*FP8, "", whole), {"quant_method": "fp8"}, "{}.weight as F8_E4M3, and no scale of it"),
        ((torch.float32, 1, "", whole), {"quant_method": "unheard"}, "'unheard'"),
        ((torch.bfloat16, 127, ".scales", rows), None, "its {}.scales"),
    ],
    ids=[
        "modelopt",
        "fp8 by another name",
        "saved again",
        "rows",
        "integers",
        "cast",
        "no scales",
        "unheard",
        "wide",
    ],
)
def test_weights_that_stay_packed_are_refused(tmp_path: Path, stored: tuple, method: dict | None, named: str) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    edit_weights(folder, packed(*stored))
    if method:
        edit_config(folder, quantization_config=method)
    assert named.format(FIRST) in refusal(model=str(folder), device="cpu")


BLOCK = 32


def blocks_of(weight: torch.Tensor) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Each block of a weight, with its place in the grid of scales."""
    for row, at in product(range(0, weight.shape[0], BLOCK), range(0, weight.shape[1], BLOCK)):
        yield (row // BLOCK, at // BLOCK), weight[row : row + BLOCK, at : at + BLOCK]


def in_blocks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections as DeepSeek V3 and Qwen3-FP8 store them, the rest in bfloat16."""
    stored = {name: weight.bfloat16() for name, weight in tensors.items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = torch.empty([-(-side // BLOCK) for side in tensors[name].shape])
        for place, block in blocks_of(tensors[name]):
            scale[place] = block.abs().max() / 448
            block /= scale[place]
        stored |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    return stored


def in_float64(folder: Path) -> torch.Tensor:
    """The attention of a llama whose projections are scale times number."""
    stored = {name: weight.double() for name, weight in load_file(folder / "model.safetensors").items()}
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        scale = stored.pop(name)
        for place, block in blocks_of(stored[name.removesuffix("_scale_inv")]):
            block *= scale[place]
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, attn_implementation="eager")).double().eval()
    model.load_state_dict(stored, strict=False)
    return torch.stack(attentions(model, IDS))


BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def test_float8_in_blocks_is_read_in_float32(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000, initializer_range=0.2)
    edit_weights(folder, in_blocks)
    expected = in_float64(folder)
    edit_config(folder, quantization_config=BLOCKS, dtype="bfloat16")
    loaded = load(LoadOptions(model=str(folder), device="cpu"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    torch.testing.assert_close(weights(loaded).double(), expected, rtol=0, atol=5e-6)
    options = LoadOptions(model=str(folder))
    assert bytes_in_memory(options, load_config(options), "cpu") == sum(x.nbytes for x in loaded.model.parameters())
    report = check_parity(loaded, IDS)
    assert (report.level, report.holds, loaded.dtype) == ("full", True, "float32")


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_float8_in_blocks_on_the_command_line(tmp_path: Path, dtype: str) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    edit_weights(folder, in_blocks)
    edit_config(folder, quantization_config=BLOCKS, dtype="bfloat16")
    done = call("parity", TEXT, "-m", str(folder), "--whole", "--dtype", dtype, "--device", "cpu").ok()
    assert "parity holds" in done.err


@pytest.mark.parametrize("width", [90, 96], ids=["no whole blocks", "blocks of another size"])
def test_float8_in_blocks_that_do_not_fill_a_weight_is_refused(tmp_path: Path, width: int) -> None:
    """transformers takes the second, of 24 rows by 48 columns, for blocks of that size."""
    folder = saved(tmp_path / "m", vocab_size=2000, hidden_size=48, head_dim=12, intermediate_size=width)
    edit_weights(folder, in_blocks)
    edit_config(folder, quantization_config=BLOCKS, dtype="bfloat16")
    message = refusal(model=str(folder), device="cpu")
    assert f"{FIRST}.weight, 48 x {width}, in blocks of 32 x 32" in message


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    name = f"{FIRST}.weight"
    edit_weights(folder, lambda tensors: tensors | {name: torch.ones(7, 96)})
    assert f"{name} is (7, 96) in the files and (64, 96) by the config" in refusal(model=str(folder), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_method_that_needs_a_gpu_names_no_package(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    edit_config(folder, quantization_config={"quant_method": "fbgemm_fp8"})
    message = refusal(model=str(folder), device="cpu")
    assert "cannot be loaded here" in message
    assert "package" not in message


def test_what_no_weight_is_unpacked_with_is_read(tmp_path: Path) -> None:
    """Scales of a cache, and whole numbers where the model has such: a step that was counted, positions."""
    folder = saved(tmp_path / "m", vocab_size=2000)
    expected = weights(load(LoadOptions(model=str(folder), device="cpu")))
    more = {"k_proj.k_scale": torch.tensor([0.5]), "v_scale": torch.tensor(2.0), "q_proj.steps": torch.tensor(7)}
    edit_weights(folder, lambda tensors: tensors | {f"model.layers.0.self_attn.{name}": x for name, x in more.items()})
    torch.testing.assert_close(weights(load(LoadOptions(model=str(folder), device="cpu"))), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model_type", "name", "tensor"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight_ema", torch.ones(64, 64)),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj_bias", torch.ones(4, 192)),
    ],
    ids=["average", "bias of experts"],
)
def test_what_is_named_like_a_weight_and_scales_none_is_read(
    tmp_path: Path, model_type: str, name: str, tensor: torch.Tensor
) -> None:
    folder = saved(tmp_path / "m", model_type, vocab_size=2000)
    edit_weights(folder, lambda tensors: tensors | {name: tensor})
    assert name in load(LoadOptions(model=str(folder), device="cpu")).trusted[-1]


def test_a_method_that_is_switched_off_is_none(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    off = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False}
    edit_config(folder, quantization_config=off)
    assert load(LoadOptions(model=str(folder), device="cpu")).arithmetic is None
    edit_weights(folder, packed(*INT8, "", rows))
    assert f"{FIRST}.weight as I8" in refusal(model=str(folder), device="cpu")


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
def test_weights_in_float64_are_read(tmp_path: Path, pickled: bool) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    expected = weights(load(LoadOptions(model=str(folder), device="cpu")))
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = weights(load(LoadOptions(model=str(folder), device="cpu", allow_pickle=pickled)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_method_whose_steps_are_announced_is_refused(tmp_path: Path) -> None:
    if HqqHfQuantizer._process_model_after_weight_loading is not HfQuantizer._process_model_after_weight_loading:
        pytest.skip("this transformers makes layers of what HQQ stores")
    folder = saved(tmp_path / "m", vocab_size=2000)
    edit_config(folder, quantization_config={"quant_method": "hqq", "quant_config": {}})
    assert "quantised by 'hqq', a method that transformers does not read" in refusal(model=str(folder))


def test_a_pickle_of_packed_weights_is_refused_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", vocab_size=2000)
    tensors = packed(*FP8, "", whole)(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert f"{FIRST}.weight as F8_E4M3" in refusal(model=str(folder), device="cpu", allow_pickle=True)


def test_tensors_without_a_place_in_the_body_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not so a head, which the body does without."""
    folder = saved(tmp_path / "m", vocab_size=2000)
    edit_weights(folder, lambda tensors: tensors | {"score.weight": torch.ones(2, 64)})
    load(LoadOptions(model=str(folder), device="cpu"))
    assert not [record for record in caplog.records if record.name.startswith("attnscope")]
    bias = "model.layers.0.self_attn.q_proj.bias"
    edit_weights(folder, lambda tensors: tensors | {bias: torch.ones(64), bias.replace("0", "9"): torch.ones(64)})
    loaded = load(LoadOptions(model=str(folder), device="cpu"))
    assert f"{bias}, {bias.replace('0', '9')}, and transformers leaves that out" in caplog.text
    assert bias in certificate(check_parity(loaded, IDS), loaded, IDS)["not_shown"][-1]


def test_a_wrapped_model_of_packed_weights_is_refused(demo: LoadedModel) -> None:
    model = copy.deepcopy(demo.model)
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ModelError, match=re.escape("model.layers.1.self_attn.k_proj.weight in float8_e4m3fn")):
        wrap(model, demo.tokenizer)


# In pieces


def test_weights_in_several_files_are_the_same(tmp_path: Path) -> None:
    one, many = (saved(tmp_path / name, shard=size, vocab_size=2000) for name, size in (("1", "5GB"), ("9", "100KB")))
    assert len(list(many.glob("*.safetensors"))) > 1
    loaded, expected = load(LoadOptions(model=str(many))), load(LoadOptions(model=str(one)))
    torch.testing.assert_close(weights(loaded), weights(expected), rtol=0, atol=0)
    assert load_config(LoadOptions(model=str(many))).model_type == "llama"


def test_the_page_names_options_that_there_are() -> None:
    page = (Path(__file__).parents[1] / "docs/models.md").read_text("utf-8")
    commands = ("compare", "heads", "parity")
    there = "".join(call(command, "--help", "all", COLUMNS="200").out.decode() for command in commands)
    named, settings = set(re.findall(r"--[a-z][a-z-]+", page)), set(re.findall(r"--set (\w+)", page))
    assert {"--quantize"} <= named
    assert named <= set(re.findall(r"--[a-z-]+", there))
    assert {"adapter", "base", "task"} <= settings <= set(re.findall(r"(?m)^ +(\w+)=", there))
