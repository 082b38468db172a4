"""Choosing an engine: what was asked, what fits, and what the run says of it."""

import copy
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import attnscope
from attnscope.attention.questions import Entropy, Received, TopK
from attnscope.attention.tiling import TiledAttention
from attnscope.certificate.check import check_parity
from attnscope.certificate.oracle import from_call
from attnscope.certificate.verdicts import weights_allowed
from attnscope.errors import ForwardError, MemoryLimitError, ModelError, UsageError
from attnscope.hooks.calls import CHECKED_ROWS, AttentionCall, sampled_rows
from attnscope.hooks.engines import ENGINES, Engine, engine_named
from attnscope.hooks.listen import calls_interface, listen, listening
from attnscope.hooks.modules import EAGER_INSTEAD
from attnscope.inputs.prompt import from_text
from attnscope.model.geometry import geometry_of, stretch_positions
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.observe import engine_choice
from attnscope.observe.engine_choice import (
    FASTER_ROWS,
    FASTER_TOKENS,
    LACKING,
    Case,
    Choice,
    automatic,
    choose,
    difference_to_eager,
)
from attnscope.observe.request import Request, View
from attnscope.utils.memory import read_size
from helpers import stack_families
from helpers.command_line import call
from helpers.dispatched import thread_count
from helpers.families import BYPASS, MODEL_TYPES, WITHOUT_ATTENTION, few, tiny_config, tiny_model
from helpers.folders import saved
from helpers.parity_models import as_loaded, in_half

TEXT = "The river is by the bank, and the bank is by the river, and the mill is old. " * 4


@pytest.fixture
def loaded() -> LoadedModel:
    return load(LoadOptions(attention="sdpa"))


def test_auto_takes_eager_while_a_layer_fits_the_budget(loaded: LoadedModel) -> None:
    def chosen(*asked, **how) -> Engine:
        return choose(loaded, *asked, **how).engine

    eager, fused = ENGINES["eager"], ENGINES["fused"]
    assert chosen(100, "auto") == eager
    assert chosen(100, "auto", "10k") == fused
    assert chosen(10**6, "auto") == fused
    assert chosen(10**6, "auto", listen=True) == replace(fused, output="model") != fused
    assert chosen(600, "auto", "30MB") == eager
    assert chosen(600, "auto", "30MB", batch=10) == fused


def test_the_model_runs_under_the_implementation_that_is_listened_to(loaded: LoadedModel) -> None:
    ran = []
    ids_BT, engine = torch.tensor([[1, 2, 3]]), choose(loaded, 100, "auto").engine
    listen(loaded.model, ids_BT, lambda call: ran.append(loaded.attention), engine=engine)
    assert ran == ["eager"] * 4
    assert loaded.attention == "sdpa"  # as it was loaded


def test_eager_that_does_not_fit_says_what_would(loaded: LoadedModel) -> None:
    with pytest.raises(MemoryLimitError, match=r'1000000 tokens .* tokens fit: .*engine="fused"'):
        choose(loaded, 10**6, "eager")
    assert MemoryLimitError.exit_code == 5


def test_a_family_outside_the_interface_stays_eager() -> None:
    model = tiny_model("bloom")
    bloom = LoadedModel(model, None, load(LoadOptions()).geometry, "bloom", None, "cpu", "float32")
    assert choose(bloom, 10, "auto").engine.name == "eager"
    with pytest.raises(UsageError, match='use engine="eager"'):
        choose(bloom, 10, "fused")
    assert choose(bloom, 100, "auto", "600KB", request=Request()).engine.name == "eager"
    with pytest.raises(MemoryLimitError, match="eager attention over 100 tokens"):  # its logits are kept beside
        choose(bloom, 100, "auto", "600KB", request=Request(view=View(weights="scores")))


@pytest.fixture
def on_cpu(monkeypatch) -> Case:
    """The demo on a CPU, where the compiled kernel is."""
    monkeypatch.setattr(engine_choice.kernels_cpu, "installed", lambda: True)
    return Case(load(LoadOptions(device="cpu")).geometry, "cpu", "float32", can_fuse=True)


def test_auto_takes_what_is_faster_and_says_why(on_cpu: Case, monkeypatch) -> None:
    short, long = (automatic(on_cpu, tokens, Request(), fits=True) for tokens in (FASTER_TOKENS - 1, FASTER_TOKENS))
    assert short == Choice(ENGINES["eager"])
    assert (long.engine, long.for_speed, long.hint) == (ENGINES["fused"], True, "")
    assert (short.words, long.words) == ("eager", "fused (numba): faster from 1,000 tokens")
    monkeypatch.setattr(engine_choice.kernels_cpu, "installed", lambda: False)
    without = automatic(on_cpu, FASTER_TOKENS, Request(), fits=True)
    assert (without.words, without.hint) == ("fused (tiles): faster from 1,000 tokens", LACKING)
    assert automatic(on_cpu, FASTER_TOKENS - 1, Request(), fits=True).hint == ""
    for weights in ("scores", "value"):
        logits = Request(view=View(weights=weights))
        assert automatic(on_cpu, FASTER_ROWS - 1, logits, fits=True) == short
        assert automatic(on_cpu, FASTER_ROWS, logits, fits=True).words == "fused (tiles): faster from 2,000 tokens"
    drawn = automatic(on_cpu, FASTER_TOKENS, Request(maps="all"), fits=True)
    assert (drawn.words, drawn.hint) == (without.words, "")  # the kernel sums over cells no faster


@pytest.mark.parametrize(
    ("request_", "other", "why"),
    [
        (Request(weights=True), {}, "whole matrices are kept"),
        (Request(), {"dtype": "bfloat16"}, "fused rounds differently in bfloat16"),
        (Request(), {"dtype": "float64"}, "fused rounds differently in float64"),
        (Request(), {"device": "cuda:0"}, "fused was not timed on cuda in float32"),
        (Request(), {"can_fuse": False}, "llama does not show q and k"),
        (Request(), {"geometry": "diffllama"}, "differences of heads are taken of matrices"),
    ],
)
def test_auto_keeps_to_eager_where_fused_gives_something_else_or_was_not_timed(
    on_cpu: Case, request_: Request, other: dict, why: str
) -> None:
    if "geometry" in other:
        other = {"geometry": geometry_of(tiny_config(other["geometry"]))}
    case = on_cpu._replace(**other)
    assert automatic(case, FASTER_TOKENS, request_, fits=True) == Choice(ENGINES["eager"], why)
    assert automatic(case, FASTER_TOKENS - 1, request_, fits=True) == Choice(ENGINES["eager"])
    assert automatic(on_cpu, FASTER_TOKENS, Request(), fits=True).engine == ENGINES["fused"]
    full = automatic(case, 100, request_, fits=False)
    assert full.engine == ENGINES["fused" if case.can_fuse else "eager"]
    assert full.words.endswith("a layer's matrices do not fit") == case.can_fuse


@pytest.fixture
def soon(monkeypatch) -> None:
    """Auto reads without matrices from 60 tokens, by the kernel where it is."""
    monkeypatch.setattr(engine_choice, "FASTER_TOKENS", 60)
    for module in (engine_choice.kernels_cpu, engine_choice.kernels_cpu.sweep):
        monkeypatch.setattr(module, "PAYS", 0)


def test_a_long_text_under_auto_has_the_numbers_of_eager_and_says_who_read_it(soon) -> None:
    asked = ("heads", "--text", TEXT, "--device", "cpu", "--sort", "layer", "--format", "jsonl")
    done, eager = (call(*asked, "--engine", engine) for engine in ("auto", "eager"))
    assert "engine fused (numba): faster from 60 tokens (output attnscope, " in done.err
    assert "from eager on the first tokens)" in done.err
    assert "  engine eager\n" in eager.err
    for ours, theirs in zip(*(map(json.loads, one.out.splitlines()) for one in (done, eager)), strict=True):
        for name in theirs:
            number = isinstance(theirs[name], float)
            assert ours[name] == (pytest.approx(theirs[name], abs=1e-5, rel=1e-5) if number else theirs[name])


def test_a_missing_kernel_is_said_once_where_it_would_pay(soon, monkeypatch) -> None:
    monkeypatch.setattr(engine_choice.kernels_cpu, "installed", lambda: False)
    monkeypatch.setattr("attnscope.attention.kernels_cpu.sweep.installed", lambda: False)
    asked = ("heads", "--text", TEXT, "--device", "cpu")
    assert call(*asked).err.count(LACKING) == 1
    assert LACKING not in call("heads", TEXT[:60], "--device", "cpu").err
    assert call(*asked, "-q").err == ""


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("512M", 512 * 10**6), ("1e6", 10**6), ("10 kib", 10**4), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-4GB", "4 PB", "0", "1.2.3G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match='memory="4GB"'):
        read_size(text)


def test_the_difference_is_measured_in_the_run_s_dtype(loaded: LoadedModel) -> None:
    prompt = from_text(loaded.tokenizer, TEXT)
    assert difference_to_eager(loaded, prompt) < 1e-5
    assert loaded.model.config._attn_implementation == "sdpa"  # as it was
    half = load(LoadOptions(attention="sdpa", dtype="bfloat16"))
    assert 1e-4 < difference_to_eager(half, prompt) < 5e-2


@pytest.mark.parametrize("positions", [None, 100, 512])
def test_positions_that_are_there_are_left_alone(positions: int | None) -> None:
    config = tiny_config("llama")
    assert stretch_positions(config, positions).rope_parameters["rope_type"] == "default"


def test_positions_are_stretched_linearly() -> None:
    config = stretch_positions(tiny_config("llama"), 5120)
    assert config.rope_parameters["rope_type"] == "linear"
    assert config.rope_parameters["factor"] == 10
    assert config.max_position_embeddings == 5120
    with pytest.raises(UsageError, match="no rotary positions"):
        stretch_positions(tiny_config("gpt2"), 5120)


@pytest.mark.parametrize(
    ("command", "sentences"),
    [("relations", 36), pytest.param("heads", 120, marks=pytest.mark.e2e)],  # with a binned heatmap
)
def test_a_long_text_is_read_in_tiles(command: str, sentences: int, tmp_path: Path) -> None:
    """Beyond the model's positions, fused: tables, a binned heatmap and a manifest that says how."""
    file = tmp_path / "long.txt"
    file.write_text("".join(f"On day {day} the river rose and the boats went by. " for day in range(sentences)))
    done = call(
        command, "--file", str(file), "--set", "positions=4096", "--engine", "fused", "--out", str(tmp_path / "out")
    ).ok()
    assert "engine fused (output attnscope" in done.err
    assert "positions 512 stretched to 4096 by linear rope scaling" in done.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["engine"], manifest["output"]) == ("fused", "attnscope")
    assert manifest["largest_difference_to_eager"] < 1e-5
    assert manifest["positions"]["trained"] == 512
    assert {one["mask"] for one in manifest["calls"]} == {"none"}
    assert {one["route"] for one in manifest["calls"]} == {"answered"}
    assert command == "relations" or (tmp_path / "out" / "overview.png").stat().st_size > 0


def test_listening_keeps_the_model_s_own_call(tmp_path: Path) -> None:
    call("relations", "--text", TEXT, "--engine", "fused", "--set", "listen=true", "--out", str(tmp_path)).ok()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["output"] == "model"
    assert {one["route"] for one in manifest["calls"]} == {"interface"}


def test_both_engines_print_the_same_rows() -> None:
    rows = {}
    for engine in ("eager", "fused"):
        done = call("heads", "--text", TEXT, "--engine", engine, "--sort", "previous_token", "--format", "jsonl")
        rows[engine] = done.records
    for eager, fused in zip(rows["eager"], rows["fused"], strict=True):
        texts = [name for name, value in eager.items() if not isinstance(value, float)]
        assert {name: eager[name] for name in texts} == {name: fused[name] for name in texts}
        assert {"layer", "head", "role", "near_uniform", "top_key"} <= set(texts)
        for name in eager.keys() - set(texts):
            assert fused[name] == pytest.approx(eager[name], abs=1e-5, rel=1e-5)


def test_verify_goes_into_the_manifest(tmp_path: Path) -> None:
    call("relations", "--text", "the river bank", "--verify", "--out", str(tmp_path)).ok()
    parity = json.loads((tmp_path / "manifest.json").read_text())["parity"]
    assert parity["holds"]
    assert parity["level"] == "full"
    assert set(parity["largest_difference"]) == {"0", "1", "2", "3"}


def test_the_model_s_own_sdpa_takes_no_hidden_matrix() -> None:
    """A plain causal text passes no mask and runs the flash kernel: forbidding every other changes nothing."""
    model, ids_BT = tiny_model("llama", attention="sdpa"), torch.randint(6, 30, (1, 40))
    masks, expected = [], []
    listen(model, ids_BT, lambda call: (masks.append(call.visible.mask), expected.append(call.output_BQHV)))
    assert masks == [None] * 4
    with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found: list[torch.Tensor] = []
        listen(model, ids_BT, lambda call: found.append(call.output_BQHV))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, atol=0, rtol=0)


class Kernels(TorchDispatchMode):
    """Notes the queries of every call of the flash kernel, and every result that ends in heads x tokens x tokens."""

    def __init__(self, heads: int, tokens: int) -> None:
        super().__init__()
        self.matrix = (heads, tokens, tokens)
        self.flash: list[int] = []
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.flash.append(args[0].shape[-2])
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-3:] == self.matrix:
                self.made.append(func.name())
        return result


@pytest.mark.parametrize("answer", [True, False], ids=["answering", "listening"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
def test_which_kernel_ran(family: str, answer: bool) -> None:
    """Answering, the model's own attention runs over the sampled rows alone; listening, over all of them."""
    model, ids_BT = tiny_model(family, attention="sdpa"), torch.randint(6, 30, (1, 200))
    with thread_count(1), Kernels(4, 200) as ran:
        report = listen(model, ids_BT, lambda call: call.P.topk(2), engine=engine_named("tiles", listen=not answer))
    kernel = "attnscope" if answer else "math" if family == "deepseek_v3" else "flash"
    assert [check.kernel for check in report.calls] == [kernel] * 4
    if family == "deepseek_v3":  # no flash kernel takes values of another width: listening, its own sdpa makes matrices
        assert ran.flash == []
        assert bool(ran.made) is not answer
        return
    assert ran.flash == [CHECKED_ROWS if answer else 200] * 4
    assert ran.made == []


def test_a_matrix_of_every_head_would_be_noticed() -> None:
    model, ids_BT = tiny_model("llama", attention="sdpa"), torch.randint(6, 30, (1, 200))
    with Kernels(4, 200) as ran, torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        listen(model, ids_BT, lambda call: None)
    assert ran.flash == []
    assert len(ran.made) >= 4


def test_masks_that_a_model_builds_are_named() -> None:
    ids_BT = torch.randint(6, 30, (2, 40))
    padding_BT = torch.ones_like(ids_BT).index_fill(1, torch.arange(30, 40), 0)
    for engine in (ENGINES["tiles"], engine_named("tiles", listen=True)):
        windowed = listen(tiny_model("mistral", attention="sdpa"), ids_BT, lambda call: None, engine=engine)
        assert [check.mask for check in windowed.calls] == ["boolean"] * 4
        model = tiny_model("llama", attention="sdpa")
        padded = listen(model, ids_BT, lambda call: None, engine=engine, attention_mask=padding_BT)
        assert [check.mask for check in padded.calls] == ["boolean"] * 4
        assert [check.mask for check in listen(model, ids_BT, lambda call: None, engine=engine).calls] == ["none"] * 4


@pytest.mark.parametrize("listening", [[], ["--set", "listen=true"]], ids=["answering", "listening"])
@pytest.mark.parametrize(
    ("family", "masks"),
    [
        ("gemma3_text", ["boolean"] * 3 + ["none"]),
        *(
            pytest.param(*one, marks=pytest.mark.families)
            for one in (("llama", ["none"] * 4), ("mistral", ["boolean"] * 4))
        ),
    ],
)
def test_the_manifest_names_the_layers_with_masks(tmp_path: Path, family: str, masks: list, listening: list) -> None:
    folder = saved(tmp_path / "model", family, vocab_size=2000)
    out = tmp_path / "out"
    call(
        "relations", "--model", str(folder), "--text", TEXT, "--engine", "fused", "--out", str(out), "-q", *listening
    ).silent()
    manifest = json.loads((out / "manifest.json").read_text())
    assert [(one["layer"], one["mask"]) for one in manifest["calls"]] == list(enumerate(masks))
    assert manifest["output"] == ("model" if listening else "attnscope")


def test_a_forced_engine_that_cannot_read_here_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("attnscope.observe.engine_choice.device_can", lambda device: False)
    done = call("heads", "the bank", "--engine", "triton")
    assert (done.code, done.out) == (2, b"")
    assert re.fullmatch(r"attnscope: the engine triton needs .* cpu; use --engine fused.*\n", done.err)


def test_a_row_that_is_no_number_is_found_where_no_row_was_sampled(loaded: LoadedModel, monkeypatch) -> None:
    """Some rows are compared with the model's own attention; what is no number in any other is seen all the same."""
    ids_BT = torch.tensor([loaded.tokenizer(TEXT * 3)["input_ids"]])
    sampled = sampled_rows(ids_BT.shape[1])
    place = next(row for row in range(ids_BT.shape[1]) if row not in sampled)
    whole = TiledAttention.output

    def broken(P: TiledAttention) -> torch.Tensor:
        output = whole(P).clone()
        output[:, place, 0, 0] = torch.nan
        return output

    monkeypatch.setattr(TiledAttention, "output", broken)
    report = listen(loaded.model, ids_BT, lambda call: None, engine=ENGINES["tiles"])
    assert report.calls[0].failures(torch.float32) == ["layer 0: NaN in P V, or in its own output"]


def test_an_engine_named_is_its_row_unless_it_only_listens() -> None:
    assert engine_named("tiles") == ENGINES["tiles"]
    assert engine_named("tiles", listen=True).output == "model" != ENGINES["tiles"].output


def test_float16_that_overflows_is_said_with_what_reads_it(loaded: LoadedModel) -> None:
    made = tiny_model("qwen2", vocab_size=2000)
    for layer in made.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.bias.data.fill_(200.0)  # whose products are beyond float16, as those of Qwen2's own keys
    tokenizer, text = loaded.tokenizer, "the bank of the river"
    half = attnscope.wrap(copy.deepcopy(made).half(), tokenizer)
    with pytest.raises(ModelError, match=r"overflows in float16.* layer 0.*bfloat16.*fused"):
        attnscope.capture(half, text, engine="eager")
    expected = attnscope.capture(attnscope.wrap(made, tokenizer), text, engine="eager").table()
    for other, engine in ((half, "fused"), (attnscope.wrap(made.bfloat16(), tokenizer), "eager")):
        seen = attnscope.capture(other, text, engine=engine)
        assert not seen.failures
        found = seen.table()["top_key_mass"].to_numpy()
        assert found == pytest.approx(expected["top_key_mass"].to_numpy(), abs=2e-2)


def read_all(model, ids_BT: torch.Tensor, engine: Engine, **inputs) -> list[AttentionCall]:
    """All calls of a pass that come through the interface, each with its whole matrix as weights."""
    calls = []

    def keep(call: AttentionCall) -> None:
        if call.spec is not None:
            calls.append(replace(call, weights_BHQK=call.P.dense()))

    report = listen(model, ids_BT, keep, engine=engine, **inputs)
    assert report.failures(model.dtype) == []
    return calls


PROBE = ENGINES["probe"]
TINY = torch.finfo(torch.float32).tiny  # products of bfloat16 on a CPU round what is smaller to 0
NOT_IN_HALF = ("inkling2_text",)  # its own code mixes dtypes


def check_probe(model, ids_BT: torch.Tensor, **inputs) -> None:
    """The probe of eager attention gives what it returns; of sdpa what its own q, k and mask give."""
    eager, probe = (read_all(model, ids_BT, engine, **inputs) for engine in (ENGINES["eager"], PROBE))
    assert len(eager) == len(probe) > 0
    for expected, seen in zip(eager, probe, strict=True):
        assert (seen.kernel, seen.stack, seen.layer) == ("eager", expected.stack, expected.layer)
        # Where a sink scales the output, each row is divided by what its columns sum to.
        allowed = torch.finfo(model.dtype).eps if seen.spec.sinks_scale_output else TINY
        assert_close(seen.weights_BHQK, expected.weights_BHQK, atol=allowed, rtol=0)
    for seen in read_all(model, ids_BT, replace(PROBE, implementation="sdpa"), **inputs):
        oracle = from_call(seen)
        allowed_BHQK = weights_allowed(oracle.weights_BHQK, oracle.terms(), model.dtype).clamp_min(5e-7)
        assert bool(((seen.weights_BHQK - oracle.weights_BHQK).abs() <= allowed_BHQK).all())


@pytest.mark.parametrize("family", few(sorted({*MODEL_TYPES} - {*BYPASS, *WITHOUT_ATTENTION})))
def test_the_probe_gives_the_rows_of_the_kernel(family: str) -> None:
    ids_BT, model = torch.randint(6, 100, (1, 40)), tiny_model(family)
    check_probe(model, ids_BT)
    if family not in NOT_IN_HALF:
        check_probe(model.to(torch.bfloat16), ids_BT)


@pytest.mark.parametrize("family", few(stack_families.TYPES))
def test_the_probe_reads_encoders_and_cross_attention(family: str) -> None:
    model, ids_BT = stack_families.tiny(family), stack_families.ids(24)
    if calls_interface(model):
        check_probe(model, ids_BT, **stack_families.inputs_of(model))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_probe_leaves_the_output_and_calls_as_often_as_values_are_wide(family: str, monkeypatch) -> None:
    model, ids_BT = tiny_model(family, attention="sdpa"), torch.randint(6, 100, (1, 40))
    plain, calls = model.model(ids_BT, use_cache=False).last_hidden_state, []
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or own(*a, **k)
    )
    seen = listen(model, ids_BT, lambda call: call.layer == 2 and call.P.entropy(), engine=PROBE)
    assert torch.equal(seen.output.last_hidden_state, plain)
    assert len(calls) == 4 + -(-40 // 16)  # once a layer, and once more for 16 columns of the one that was asked
    assert [check.value_error is not None for check in seen.calls] == [False, False, True, False]
    assert seen.calls[2].kernel == ("math" if family == "deepseek_v3" else "flash")


def test_the_probe_holds_a_part_of_the_rows_where_memory_is_short(monkeypatch) -> None:
    model, ids_BT = tiny_model("mistral", attention="sdpa"), torch.randint(6, 100, (1, 60))
    asked = Entropy(), TopK(3), Received(torch.full((1, 60), 1 / 60))
    whole, parts, kernels = [], [], []
    listen(model, ids_BT, lambda call: whole.append(call.P.together(asked)), engine=PROBE)
    monkeypatch.setattr("attnscope.attention.operator.SURELY_HELD", 4 * 4 * 60 * 25)  # 25 rows of 60
    monkeypatch.setattr("attnscope.attention.operator.free_memory", lambda device: 0)

    def on_call(call: AttentionCall) -> None:
        own = call.P.kernel
        call.P.kernel = lambda values: kernels.append(call.layer) or own(values)
        parts.append(call.P.together(asked))

    monkeypatch.setattr("attnscope.attention.spec.BLOCK_BYTES", 4 * 4 * 60 * 10)
    report = listen(model, ids_BT, on_call, engine=PROBE)
    assert Counter(kernels) == dict.fromkeys(range(4), 3 * -(-60 // 16))  # 20 rows, 20 and 20, in blocks of 10
    for one, other in zip(whole, parts, strict=True):
        for question in asked:
            assert_close(one[question], other[question], equal_nan=True)
    assert all(check.value_error < 1e-5 and check.row_sum_error < 1e-5 for check in report.calls)


@pytest.mark.parametrize(
    "width", [8, pytest.param(128, marks=pytest.mark.e2e), pytest.param(4096, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_sees_a_window_that_a_kernel_has_wrong(width: int, dtype: torch.dtype, monkeypatch) -> None:
    """Of a kernel with one key too few in its window parity does not hold; of the right one, written alike, it does."""

    def windowed(off: int):
        def attend(module, query, key, value, attention_mask, **kwargs):
            T, width = query.shape[2], kwargs.pop("sliding_window") - off
            seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - width)
            return sdpa_attention_forward(module, query, key, value, seen[None, None], **kwargs)

        return attend

    kernels = {"right": windowed(0), "narrow": windowed(1)}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping, **kernels})
    size = (
        {"num_hidden_layers": 2}
        if width < 1000
        else {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 128}
    )
    model = tiny_model("mistral", sliding_window=width, max_position_embeddings=2 * width + 512, **size)
    model = model if dtype == torch.float32 else in_half(model, dtype)
    ids_BT, reports = torch.randint(6, 100, (1, width + 12)), {}
    for name in kernels:
        model.set_attn_implementation(name)
        reports[name] = check_parity(as_loaded(model), ids_BT, engine=PROBE)
    assert {layer.kernel for report in reports.values() for layer in report.layers} == set(kernels)
    assert reports["right"].holds
    assert not any(layer.verdict for layer in reports["narrow"].layers)
    worst = reports["narrow"].layers[0]
    assert worst.implementation.weights > 0.5 / width  # about what the missing key had
    assert check_parity(as_loaded(model), ids_BT, engine=ENGINES["eager"]).holds  # which that kernel has no part in


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "rounds"])
def test_a_kernel_without_float32_is_compared_as_it_ran(refuses: bool, monkeypatch) -> None:
    """One that refuses float32, or rounds it, as FlashAttention's do: eager attention is compared in its place."""

    def windowed(off: int):
        def attend(module, query, key, value, attention_mask, **kwargs):
            if refuses and query.dtype == torch.float32:
                raise RuntimeError("half precision only")
            T, width = query.shape[2], kwargs.pop("sliding_window") - off
            seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - width)
            halves = (part.bfloat16() for part in (query, key, value))
            return sdpa_attention_forward(module, *halves, seen[None, None], **kwargs)

        return attend

    kernels = {"right": windowed(0), "narrow": windowed(1)}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping, **kernels})
    model, ids_BT = (
        in_half(tiny_model("mistral", sliding_window=8, num_hidden_layers=2)),
        torch.randint(6, 100, (1, 20)),
    )
    for name, holds in (("right", True), ("narrow", False)):
        model.set_attn_implementation(name)
        report = check_parity(as_loaded(model), ids_BT, engine=PROBE)
        assert [layer.verdict for layer in report.layers] == [holds] * 2
        assert all(layer.implementation.holds and layer.why.endswith(EAGER_INSTEAD) for layer in report.layers)
        assert all(layer.as_run.weights is not None for layer in report.layers)


def test_what_the_probe_cannot_do_is_refused(loaded: LoadedModel) -> None:
    model = tiny_model("bloom")
    bloom = LoadedModel(model, None, loaded.geometry, "bloom", None, "cpu", "float32")
    with pytest.raises(UsageError, match='no kernel can be called again; use engine="eager"'):
        choose(bloom, 10, "probe")
    with pytest.raises(UsageError, match='no logits, only weights; use engine="eager"'):
        choose(loaded, 10, "probe", request=Request(view=View(weights="scores")))
    with pytest.raises(UsageError, match="leaves the outputs to the model"):
        choose(loaded, 10, "probe", listen=True)
    with pytest.raises(UsageError, match="reads outputs and changes none"):
        listen(model, torch.tensor([[1, 2]]), print, engine=PROBE, change=lambda call: None)
    with pytest.raises(UsageError, match=r"no attention named nonsense; .* eager, .*flex_attention, sdpa"):
        load(LoadOptions(attention="nonsense"))
    with pytest.raises(UsageError, match="no attention named hub/kernel"):  # which is code from the hub
        load(LoadOptions(attention="hub/kernel"))


def test_the_probe_reads_the_attention_that_was_chosen(loaded: LoadedModel) -> None:
    """Where nobody chose, what transformers takes: sdpa, and eager of a family that has none."""
    words = [choose(load(LoadOptions(attention=name)), 10, "probe").words for name in (None, "eager", "sdpa")]
    assert words == ["probe (sdpa)", "probe (eager)", "probe (sdpa)"]
    capped = replace(loaded, model=tiny_model("gemma2"), options=LoadOptions())
    assert choose(capped, 10, "probe").words == "probe (eager)"


def test_layers_without_a_head_that_is_kept_are_not_probed(loaded: LoadedModel) -> None:
    how = {"request": Request(relations=True), "select": "L2H1"}
    seen, eager = (attnscope.capture(loaded, TEXT[:60], engine=engine, **how) for engine in ("probe", "eager"))
    assert [check.route for check in seen.calls] == ["unread", "unread", "interface", "unread"]
    assert {check.kernel for check in seen.calls} == {"flash"}
    assert seen.unmeasured == seen.failures == []
    probed, of_eager = (record.relations().to_pylist() for record in (seen, eager))
    assert [row["key"] for row in probed] == [row["key"] for row in of_eager]
    assert {(row["layer"], row["head"]) for row in probed} == {(2, 1)}


def test_the_probe_sees_the_arithmetic_of_the_caller_and_the_keys_of_the_cache() -> None:
    """Under autocast the kernel's weights are rounded; of a cache that rounds its keys they are those of these keys."""
    model, ids_BT = tiny_model("llama"), torch.randint(6, 100, (1, 30))
    with torch.autocast("cpu", torch.bfloat16):
        eager, probe = (read_all(model, ids_BT, engine) for engine in (ENGINES["eager"], PROBE))
    for expected, seen in zip(eager, probe, strict=True):
        assert torch.equal(seen.weights_BHQK, expected.weights_BHQK.bfloat16().float())

    class Rounded(DynamicCache):
        def update(self, key, value, *args, **kwargs):
            return super().update((4 * key).round() / 4, value, *args, **kwargs)

    calls = []
    model.set_attn_implementation("sdpa")
    with listening(model, lambda call: calls.append((call.spec.k_BGKD, call.P.dense())), engine=PROBE), torch.no_grad():
        model(ids_BT, past_key_values=Rounded(), use_cache=True)
    for k_BGKD, weights_BHQK in calls:
        assert torch.equal(4 * k_BGKD, (4 * k_BGKD).round())
        assert_close(weights_BHQK.sum(-1), torch.ones(1, 4, 30))
    assert not torch.equal(calls[0][1], probe[0].weights_BHQK)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "gemma2"))]
)
def test_the_probe_of_flex_attention_reads_the_compiled_kernel(family: str) -> None:
    """Windows are rules there, soft-cap is in the kernel; what is compiled is what the model itself runs."""
    ids_BT = torch.randint(6, 100, (1, 40))
    model = tiny_model(family, attention="flex_attention")
    plain = model.model(ids_BT, use_cache=False).last_hidden_state
    calls = read_all(model, ids_BT, PROBE)
    report = listen(model, ids_BT, lambda call: call.P.entropy(), engine=PROBE)
    assert torch.equal(report.output.last_hidden_state, plain)
    assert {seen.kernel for seen in calls} == {"flex (flex_attention)"}
    for seen, eager in zip(calls, read_all(model, ids_BT, ENGINES["eager"]), strict=True):
        assert_close(seen.weights_BHQK, from_call(seen).weights_BHQK.float(), atol=5e-7, rtol=0)
        assert torch.equal(seen.visible.rows(0, 40), eager.visible.rows(0, 40))
    window = model.config.get_text_config().sliding_window if family != "llama" else None
    assert (calls[0].weights_BHQK[0, 0, 39] > 0).sum() == (window or 40)


@pytest.mark.e2e
def test_sinks_that_flex_attention_refuses_are_told_in_its_words() -> None:
    model = tiny_model("gpt_oss", attention="flex_attention")
    with pytest.raises(ForwardError, match="Attention sinks cannot be run on CPU with flex attention"):
        listen(model, torch.tensor([[1, 2, 3]]), print, engine=PROBE)
