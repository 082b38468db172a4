"""`parity --whole`: faults outside the attention modules, which the oracle takes on trust, and models as they come.

Every fault is planted on the loaded instance, or on a class of this process; the second instance is made of the files.

Shapes: B text, T token.
"""

import ast
import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from attnscope.certificate import second_instance, whole_model
from attnscope.certificate.check import certificate, check_parity
from attnscope.errors import AttnscopeError, MemoryLimitError, ModelError, UsageError
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare
from helpers.brought import a_gguf, an_adapter
from helpers.command_line import call
from helpers.folders import saved, with_tokenizer
from helpers.forks import forked
from helpers.parity_models import as_loaded, ids_for, roused_model
from helpers.parity_stacks import stack_model

TEXT = "the financial bank is located on river bank"
IDS = ids_for("llama")
NAMES = {"llama": roused_model, "bert": stack_model, "t5": stack_model}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny model of a family with every parameter drawn at random."""
    made: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in made:
            model = NAMES[family](family, vocab_size=2000)
            made[family] = str(with_tokenizer(model, tmp_path_factory.mktemp("models") / family))
        return made[family]

    return folder


@pytest.fixture(scope="module")
def kept_outputs() -> dict[str, Any]:
    return {}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, kept_outputs: dict[str, Any]) -> None:
    """A second instance of the same files and inputs is made once in this module, in a fork: a start takes seconds."""
    made = whole_model._second_states

    def run(command: list[str], env: dict[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, "-P"]
        return forked(*command[2:], env=env)

    monkeypatch.setattr(whole_model.subprocess, "run", run)

    def second(loaded: LoadedModel, options: LoadOptions, inputs: dict[str, torch.Tensor], modules: list[str]) -> Any:
        given = {name: one.tolist() for name, one in inputs.items()}
        key = hashlib.sha256(repr((options, given, modules)).encode()).hexdigest()
        if key not in kept_outputs:
            kept_outputs[key] = made(loaded, options, inputs, modules)
        return kept_outputs[key]

    monkeypatch.setattr(whole_model, "_second_states", second)


# The six faults: each moves the weights, and every layer still agrees with the oracle.


def reorder_layers(model: Any) -> None:
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    layers[1].self_attn.layer_idx, layers[2].self_attn.layer_idx = 1, 2


def leave_out_a_norm(model: Any) -> None:
    model.model.layers[2].input_layernorm = nn.Identity()


def silence_an_mlp(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 0)


def grow_embeddings(model: Any) -> None:
    """Which the first layer's norm takes back."""
    model.model.embed_tokens.weight.data *= 1.1


def move_positions(model: Any) -> None:
    """BERT's position embeddings, one ahead."""
    table = model.base_model.embeddings.position_embeddings.weight
    table.data = table.data.roll(-1, 0)


def reverse_the_encoder(model: Any) -> None:
    """T5's decoder is handed the encoder's states in reverse."""

    def reversed_states(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"encoder_hidden_states": kwargs["encoder_hidden_states"].flip(1)}

    model.decoder.register_forward_pre_hook(reversed_states, with_kwargs=True)


FAULTS = {
    "layers in another order": ("llama", reorder_layers, "model.layers.1.self_attn"),
    "an input norm left out": ("llama", leave_out_a_norm, "model.layers.2.self_attn"),
    "an MLP that gives nothing": ("llama", silence_an_mlp, "model.layers.2.self_attn"),
    "embeddings x 1.1": ("llama", grow_embeddings, "model.layers.1.self_attn"),
    "position embeddings one ahead": ("bert", move_positions, "encoder.layer.0.attention.self"),
    "encoder states in reverse": ("t5", reverse_the_encoder, "decoder.block.0.layer.1.EncDecAttention 1"),
}


def texts_of(family: str) -> dict[str, torch.Tensor]:
    return {"prompt": IDS[:, :20], "source": IDS} if family == "t5" else {"prompt": IDS}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_outside_attention_fails_the_whole_alone(fault: str, folders: Callable[[str], str]) -> None:
    family, plant, named = FAULTS[fault]
    loaded, texts = load(LoadOptions(folders(family))), texts_of(family)
    honest = check_parity(loaded, **texts, whole=True)
    assert honest.holds
    assert honest.whole.allowed == 1e-5
    plant(loaded.model)
    assert check_parity(loaded, **texts).holds  # the oracle takes the hidden states on trust
    report = check_parity(loaded, **texts, whole=True)
    assert (report.verdict, report.failures) == (False, [])
    assert list(report.whole.differences)[-1] == ("last_hidden_state" if family == "bert" else "logits")
    assert report.whole.worst == (named, pytest.approx(report.whole.differences[named]))
    assert report.whole.differences[named] > 1e-3


@pytest.mark.usefixtures("kept")
def test_a_class_that_is_patched_here_is_not_in_the_second_instance(
    folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(LoadOptions(folders("llama")))
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 1.01 * forward(self, x))
    assert check_parity(loaded, IDS).holds
    assert not check_parity(loaded, IDS, whole=True).holds


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.families)])
def test_half_precision_is_allowed_its_rounding(dtype: str, folders: Callable[[str], str]) -> None:
    loaded = load(LoadOptions(folders("llama"), dtype=dtype))
    honest = check_parity(loaded, IDS, whole=True)
    assert honest.holds
    assert 1e-5 < honest.whole.allowed < 0.1
    reorder_layers(loaded.model)
    assert not check_parity(loaded, IDS, whole=True).holds


# Models as they come.


def lora(folder: Path) -> LoadOptions:
    return LoadOptions(str(an_adapter(folder / "lora")), adapter="beside")


def prefix(folder: Path) -> LoadOptions:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return LoadOptions(str(an_adapter(folder / "prefix", config=config)))


def soft_prompt(folder: Path) -> LoadOptions:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return LoadOptions(str(an_adapter(folder / "prompt", config=config)))


def gguf(folder: Path) -> LoadOptions:
    return LoadOptions(str(a_gguf(folder / "model.gguf", load(LoadOptions()).model)))


def stretched(folder: Path) -> LoadOptions:
    return LoadOptions(str(DEMO_FOLDER), positions=1024)


def an_encoder_of_two(folder: Path) -> LoadOptions:
    return LoadOptions(str(with_tokenizer(stack_model("t5", vocab_size=2000), folder / "t5")), task="encoder")


def big_bird(folder: Path) -> LoadOptions:
    """Its config is changed before it is made: its default gives no matrix."""
    return LoadOptions(str(with_tokenizer(stack_model("big_bird", vocab_size=2000), folder / "bird")))


@pytest.fixture
def in_this_process(kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second instance is made here, of the files and of what was written for it."""

    def run(command: list[str], **how: Any) -> SimpleNamespace:
        second_instance.main(Path(command[-1]))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(whole_model.subprocess, "run", run)


WAYS = [lora, prefix, gguf]
SLOWLY = [soft_prompt, stretched, an_encoder_of_two, big_bird]


@pytest.mark.parametrize("where", ["in_this_process", pytest.param("kept", marks=pytest.mark.e2e)])
@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOWLY)])
def test_however_a_model_comes_the_second_comes_too(
    way: Callable[[Path], LoadOptions], where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue(where)
    loaded = load(way(tmp_path))
    report = check_parity(loaded, prepare(loaded, CaptureSpec(TEXT, engine="eager")).prompt, whole=True)
    assert report.whole.holds, report.whole
    loaded.model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 1.01)
    assert not check_parity(loaded, prepare(loaded, CaptureSpec(TEXT, engine="eager")).prompt, whole=True).holds


# What cannot be compared.


def test_what_is_taken_on_trust_is_in_the_certificate(demo: LoadedModel) -> None:
    ids = [5, 6, 7, 8]
    said = certificate(check_parity(demo, ids), demo, ids)["not_shown"]
    assert said == ["taken on trust: order of layers, norms, MLPs, embeddings"]
    t5 = as_loaded(stack_model("t5"))
    said = check_parity(t5, IDS, source=IDS).on_trust
    assert "embeddings, encoder states handed over (made in memory: no files" in said


def test_a_model_made_in_memory_has_no_second_instance() -> None:
    loaded = as_loaded(roused_model("llama"))
    with pytest.raises(UsageError, match=r"^llama .*in memory"):
        check_parity(loaded, IDS, whole=True)


def test_no_room_for_two_is_said_before_the_second_is_made(monkeypatch: pytest.MonkeyPatch, demo: LoadedModel) -> None:
    monkeypatch.setattr(whole_model, "free_memory", lambda device: 1000)
    monkeypatch.setattr(whole_model, "_second_states", lambda *given: pytest.fail("it was made"))
    with pytest.raises(MemoryLimitError, match=r"second instance.* 7\.7 MiB"):
        check_parity(demo, [5, 6, 7], whole=True)


@pytest.mark.parametrize(
    ("ended", "said", "error", "message"),
    [
        (-signal.SIGKILL, "", MemoryLimitError, "there is no room for a second instance: memory ran out"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", MemoryLimitError, "there is no room"),
        (1, "Traceback\nOSError: no file named x", ModelError, "no second instance of demo could be run: OSError: no"),
    ],
)
def test_a_second_instance_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, demo: LoadedModel, ended: int, said: str, error: type[AttnscopeError], message: str
) -> None:
    asked: list[dict[str, Any]] = []

    def run(command: list[str], **how: Any) -> SimpleNamespace:
        asked.append(how)
        return SimpleNamespace(returncode=ended, stderr=said)

    monkeypatch.setattr(whole_model.subprocess, "run", run)
    with pytest.raises(error) as raised:
        check_parity(demo, [5, 6, 7], whole=True)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert asked[0]["stdin"] == subprocess.DEVNULL  # a question finds no answer
    assert asked[0]["env"]["HF_HUB_OFFLINE"] == "1"


def test_files_that_are_gone_are_one_line(tmp_path: Path) -> None:
    loaded = load(LoadOptions(str(saved(tmp_path / "llama"))))
    shutil.rmtree(tmp_path / "llama")
    with pytest.raises(AttnscopeError) as raised:
        check_parity(loaded, IDS, whole=True)
    assert "\n" not in str(raised.value)


def test_logits_that_a_family_never_gives_hide_no_difference() -> None:
    own = torch.tensor([[[1.0, 2.0, -torch.inf, torch.finfo(torch.float32).min]]])
    assert whole_model.state_difference(own, own) == 0
    assert whole_model.state_difference(own, own * torch.tensor([1.1, 1, 1, 1])) == pytest.approx(
        0.1 / 5**0.5 / 1.01, rel=0.05
    )
    for other in (torch.zeros_like(own), own[..., :3], None):
        assert whole_model.state_difference(own, other) == math.inf
    assert not whole_model.WholeParity({"logits": math.nan, "x": 0.0}, 1e-5).holds


def test_what_runs_alone_imports_nothing_of_ours() -> None:
    found = list(ast.walk(ast.parse(Path(second_instance.__file__).read_text("utf-8"))))
    names = [one.name for node in found if isinstance(node, ast.Import) for one in node.names]
    names += [node.module or "." for node in found if isinstance(node, ast.ImportFrom)]
    assert {"torch", "transformers"} <= set(names)
    assert not [name for name in names if name.startswith(("attnscope", "."))]


# The command.


@pytest.mark.parametrize("start", ["kept", pytest.param("none", marks=pytest.mark.e2e)])
def test_the_command_says_both_verdicts(start: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if start == "kept":  # else the second instance has a start of its own
        request.getfixturevalue("kept")
    done = call("parity", "--whole", "--text", TEXT, "--out", str(tmp_path / "c.json")).ok()
    assert "taken on trust: transformers' own code, the config and the files" in done.err
    assert "differs from a second instance by 0 of the norm" in done.err.splitlines()[-1]
    assert list(json.loads((tmp_path / "c.json").read_text())["whole"]["differences"])[-1] == "logits"


def test_the_command_leaves_with_1_where_the_whole_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "_second_states", lambda *given: {"logits": torch.ones(1, 9, 2000)})
    done = call("parity", "--whole", "-q", "--text", TEXT)
    assert done.code == 1
    assert done.err.startswith("check failed: the whole model differs from a second instance by inf of the norm")


def test_a_second_instance_has_the_positions_that_were_set() -> None:
    loaded = load(LoadOptions(positions=1024))
    assert (
        second_instance.make_model(whole_model.recipe(loaded, loaded.options)).config.rope_parameters
        == loaded.model.config.rope_parameters
    )
