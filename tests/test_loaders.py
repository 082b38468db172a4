"""Loading runs no code without a flag, asks no question, stays offline where that is asked, and ends within bounds."""

import ast
import io
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import dynamic_module_utils

import attnscope
from attnscope.errors import AttnscopeError, ModelError
from attnscope.inputs.processor import processor_of
from attnscope.inputs.sound import Sound, extractor_of
from attnscope.model.libraries import offline
from attnscope.model.loading import DEMO_FOLDER, load, load_config, load_tokenizer
from attnscope.model.options import LoadOptions
from helpers import picture_models
from helpers.alarms import short_seconds
from helpers.brought import a_gguf, an_adapter
from helpers.command_line import Result, call, spawn
from helpers.folders import edit_config
from helpers.forks import shim
from helpers.sounds import RATE, samples, saved_whisper, write_wav

PACKAGE = Path(attnscope.__file__).parent
TEXT = "the river bank"
GIVEN = {"trust_remote_code", "local_files_only"}
LOADERS = {  # functions of transformers and PEFT that read what somebody wrote, and what each is to be given
    "from_pretrained": GIVEN,
    "get_processor_dict": GIVEN,
    "get_image_processor_dict": GIVEN,
    "get_feature_extractor_dict": GIVEN,
    "get_config_dict": GIVEN,
    "load_peft_weights": GIVEN,
    "load_adapter": GIVEN,
    "load_custom_generate": GIVEN,
    "get_class_from_dynamic_module": GIVEN,
    "from_config": {"trust_remote_code"},
}


def ungiven(source: str) -> list[str]:
    """The loading calls of a source that leave open whether code may run, or the network be asked."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = getattr(getattr(node, "func", None), "attr", None) or getattr(getattr(node, "func", None), "id", None)
        if isinstance(node, ast.Call) and name in LOADERS:
            keywords = {one.arg for one in node.keywords if one.arg}
            spread = {ast.unparse(one.value).lower().rpartition(".")[::2] for one in node.keywords if one.arg is None}
            if any(part == "given" and whose.endswith("permits") for whose, part in spread):
                keywords |= GIVEN
            found += [] if LOADERS[name] <= keywords else [f"{name} in line {node.lineno}"]
    return found


def test_every_call_that_loads_says_what_it_may_do() -> None:
    sources = {str(path): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    open_calls = {path: ungiven(source) for path, source in sources.items() if any(name in source for name in LOADERS)}
    assert {path: calls for path, calls in open_calls.items() if calls} == {}


def test_the_walk_sees_a_call_that_does_not() -> None:
    assert ungiven("AutoModel.from_pretrained(folder)\nload_peft_weights(folder, local_files_only=True)") == [
        "from_pretrained in line 1",
        "load_peft_weights in line 2",
    ]
    assert ungiven("AutoModel.from_pretrained(folder, **options.permits.given, **source.given)") == []
    assert ungiven("AutoModel.from_pretrained(folder, **source.given)") == ["from_pretrained in line 1"]


# Code that folders bring


class Yes(io.RawIOBase):
    """A standard input that answers `y` for ever, and counts who asks."""

    def __init__(self) -> None:
        self.asked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.asked += 1
        buffer[:] = (b"y\n" * (len(buffer) // 2 + 1))[: len(buffer)]
        return len(buffer)


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Yes:
    """The code of folders is copied to where tests may write."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    found = Yes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(found)))
    return found


CODE = """
open({marker!r}, "w").close()
class Evil:
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        return cls()
    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        pass
def generate(*args, **kwargs):
    raise RuntimeError("it runs")
"""
MADE: dict[str, Callable[[Path], object]] = {
    "text": lambda folder: shutil.copytree(DEMO_FOLDER, folder),
    "sound": saved_whisper,
    "picture": lambda folder: Path(picture_models.saved("llava", folder.parent)).rename(folder),
}
READ: dict[str, Callable[[Any], object]] = {
    "text": lambda loaded: attnscope.capture(loaded, TEXT, generate=1),
    "sound": extractor_of,
    "picture": processor_of,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("made")
    for name, make in MADE.items():
        make(place / name)
    return {name: place / name for name in MADE}


@pytest.fixture
def bring(made: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a folder that brings code, whose running leaves `ran` beside it; one of its files is changed."""

    def brought(kind: str, file: str = "config.json", change: dict[str, Any] | None = None) -> Path:
        folder = Path(shutil.copytree(made[kind], tmp_path / "theirs"))
        code = CODE.format(marker=str(tmp_path / "ran"))
        (folder / "evil.py").write_text(code)
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(code)
        path = folder / file
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({name: one for name, one in {**before, **(change or {})}.items() if one != ...}))
        return folder

    return brought


LOADED: tuple[Callable[..., object], ...] = (load_config, load_tokenizer, load)


def everywhere(kind: str, folder: Path, loaders: Sequence[Callable[..., object]] = LOADED, **options: Any) -> list[str]:
    """Let every loader read the folder, and what is loaded be used; what each was refused with."""
    said = []
    options = {"model": str(folder), **options}
    for read in loaders:
        try:
            found = read(LoadOptions(**options))
            if read is load:
                READ[kind](found)
        except AttnscopeError as error:
            said.append(error.for_shell())
    return said


def auto(*names: str) -> dict[str, Any]:
    return {"auto_map": dict.fromkeys(names, "evil.Evil")}


MODELS = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoTokenizer")
MODELS += ("AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor", "AutoVideoProcessor")
TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
ELSEWHERE = {"audio_tokenizer_class": "AutoConfig", "audio_tokenizer_name_or_path": "{other}"}
PLACES = {
    "config": ("text", "config.json", auto(*MODELS)),
    "config of an unknown type": ("text", "config.json", {"model_type": "evil", **auto(*MODELS)}),
    "tokenizer": ("text", "tokenizer_config.json", TOKENIZER),
    "tokenizer of an unknown class": ("text", "tokenizer_config.json", {"tokenizer_class": "No", **TOKENIZER}),
    "generation": ("text", "generation_config.json", {"custom_generate": "custom_generate", **auto(*MODELS)}),
    "config of sound": ("sound", "config.json", auto(*MODELS)),
    "feature extractor": ("sound", "preprocessor_config.json", {"feature_extractor_type": "No", **auto(*MODELS)}),
    "feature extractor without a type": (
        "sound",
        "preprocessor_config.json",
        {"feature_extractor_type": ..., **auto("AutoFeatureExtractor")},
    ),
    "feature extractor of a processor": (
        "sound",
        "processor_config.json",
        {"feature_extractor": {"feature_extractor_type": "No", **auto(*MODELS)}},
    ),
    "image processor": ("picture", "preprocessor_config.json", {"image_processor_type": "No", **auto(*MODELS)}),
    "image processor without a type": (
        "picture",
        "preprocessor_config.json",
        {"image_processor_type": ..., **auto("AutoFeatureExtractor")},
    ),
    "image processor of a processor": (
        "picture",
        "processor_config.json",
        {"image_processor": {"image_processor_type": "No", **auto(*MODELS)}},
    ),
    "processor": ("picture", "processor_config.json", {"processor_class": "No", **auto(*MODELS)}),
    "video processor": ("picture", "video_preprocessor_config.json", {"video_processor_type": "No", **auto(*MODELS)}),
    "audio tokenizer": ("picture", "processor_config.json", {"audio_tokenizer": ELSEWHERE}),
    "file of an audio tokenizer": ("picture", "audio_tokenizer_config.json", ELSEWHERE),
    "a part of a model": (
        "picture",
        "config.json",
        {"vision_config": {"model_type": "whisper", "_name_or_path": "{theirs}", **auto("AutoModel")}},
    ),
    "a part without a class": (
        "picture",
        "config.json",
        {"vision_config": {"model_type": "blip_vision_model", "_name_or_path": "{theirs}", **auto("AutoModel")}},
    ),
}


ALIKE = (  # read by the same calls as the place above
    "config of sound",
    "feature extractor without a type",
    "image processor without a type",
    "a part without a class",
)


def filled(change: dict[str, Any], **paths: Path) -> dict[str, Any]:
    """A change with paths in it."""
    if isinstance(change, dict):
        return {name: filled(one, **paths) for name, one in change.items()}
    return change.format(**paths) if isinstance(change, str) else change


@pytest.mark.parametrize("offline", [False, pytest.param(True, marks=pytest.mark.e2e)])
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.e2e) if place in ALIKE else place for place in PLACES]
)
def test_code_runs_nowhere_without_the_flag_and_nobody_is_asked(
    place: str, offline: bool, bring: Callable[..., Path], yes: Yes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, file, change = PLACES[place]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "evil", **auto("AutoConfig")}))
    (other / "evil.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    folder = bring(kind, file, filled(change, other=other, theirs=tmp_path / "theirs"))
    said = everywhere(kind, folder, offline=offline)
    assert not (tmp_path / "ran").exists(), said
    assert yes.asked == 0, said
    assert not any("\n" in line for line in said)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "place", ["config of an unknown type", "tokenizer of an unknown class", "feature extractor", "image processor"]
)
def test_the_same_code_runs_with_the_flag(place: str, bring: Callable[..., Path], yes: Yes, tmp_path: Path) -> None:
    """So the test above can fail."""
    kind, file, change = PLACES[place]
    folder = bring(kind, file, change)
    with suppress(Exception):  # what it brings is no model
        everywhere(kind, folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert yes.asked == 0


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("feature extractor", "the feature extractor of {0} runs code from its own repository; read that code, then"),
        ("image processor", "the processor of {0} runs code from its own repository; read that code, then pass"),
        ("audio tokenizer", "{0}/processor_config.json has an audio_tokenizer loaded, which reads no picture; delete"),
        ("file of an audio tokenizer", "{0}/audio_tokenizer_config.json has an audio_tokenizer loaded, which reads"),
    ],
)
def test_what_is_refused_says_why_and_the_next_step(place: str, says: str, bring: Callable[..., Path]) -> None:
    kind, file, change = PLACES[place]
    folder = bring(kind, file, change)
    assert everywhere(kind, folder)[-1].startswith(says.format(folder))


def test_a_feature_extractor_of_their_own_that_says_no_rate_is_a_line(bring: Callable[..., Path], yes: Yes) -> None:
    folder = bring(*PLACES["feature extractor"])
    loaded = load(LoadOptions(model=str(folder), trust_remote_code=True))
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        attnscope.capture(loaded, Sound(samples(1), RATE), target="hi")


@pytest.mark.parametrize(
    "named",
    [
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
        {"megatron_config": {"a": 1}, "megatron_core": "evil"},
        {"base_model_name_or_path": "theirs"},
        {"peft_type": "SHADOW", "shadow_model": "theirs"},
    ],
    ids=["auto_mapping", "megatron", "base", "shadow"],
)
@pytest.mark.parametrize("kept", ["merged", pytest.param("beside", marks=pytest.mark.e2e)])
def test_an_adapter_runs_no_code(
    named: dict[str, Any],
    kept: str,
    bring: Callable[..., Path],
    yes: Yes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = bring("text", "config.json", {"model_type": "evil", **auto(*MODELS)})
    monkeypatch.syspath_prepend(str(theirs))
    paths = {name: str(theirs) if one == "theirs" else one for name, one in named.items()}
    adapter = an_adapter(tmp_path / "adapter", **paths)
    everywhere("text", adapter, adapter=kept)
    assert not (tmp_path / "ran").exists()
    assert yes.asked == 0


@pytest.mark.parametrize("loaders", [LOADED[-1:], pytest.param(LOADED, marks=pytest.mark.e2e)], ids=["one", "all"])
def test_a_gguf_file_runs_no_code(
    loaders: Sequence[Callable[..., object]], bring: Callable[..., Path], yes: Yes, tmp_path: Path, demo: Any
) -> None:
    folder = bring("text", "config.json", auto(*MODELS))
    gguf = a_gguf(folder / "m.gguf", demo.model)
    assert everywhere("text", gguf, loaders) == []
    assert not (tmp_path / "ran").exists()
    assert yes.asked == 0


def test_a_quantised_model_runs_no_code(bring: Callable[..., Path], yes: Yes, tmp_path: Path) -> None:
    folder = bring("text", "config.json", auto(*MODELS))
    edit_config(folder, quantization_config={"quant_method": "evil", **auto(*MODELS)})
    everywhere("text", folder)
    pytest.importorskip("bitsandbytes")
    edit_config(folder, quantization_config=None)
    assert everywhere("text", folder, quantize="8bit", device="cpu") == []
    assert not (tmp_path / "ran").exists()
    assert yes.asked == 0


def test_yes_to_a_command_runs_nothing(bring: Callable[..., Path], tmp_path: Path) -> None:
    """As `yes | attnscope`: standard input is a text's alone."""
    folder = bring(*PLACES["feature extractor"])
    wav = write_wav(tmp_path / "tone.wav", samples(1))
    done = call("heads", "-q", "-m", str(folder), "--audio", str(wav), "--target", "hi", stdin=b"y\n" * 1000)
    assert (done.code, done.out, done.err.count("\n")) == (3, b"", 1)
    assert not (tmp_path / "ran").exists()


# The network


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The hosts that were asked for, on a machine without a network where the libraries may ask."""
    hosts: list[str] = []

    def refuse(host: str, *more: Any, **named: Any) -> None:
        hosts.append(host)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_RETRIES", "0")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the Hub's library waits longer after each refusal
    return hosts


TRACKED = {"image_processor_type": "OneFormerImageProcessor", "class_info_file": "a.json", "repo_path": "owner/tracker"}
TRACKED |= {"num_text": 1, "ignore_index": 255, "do_reduce_labels": False}


def test_offline_asks_no_host_whatever_a_file_names(bring: Callable[..., Path], reached: list[str]) -> None:
    folder = bring("picture", "preprocessor_config.json", TRACKED)
    with pytest.raises(ModelError, match="processor"):
        processor_of(load(LoadOptions(model=str(folder), offline=True)))
    assert reached == []
    with pytest.raises(ModelError, match="processor"):  # so the test can fail
        processor_of(load(LoadOptions(model=str(folder))))
    assert reached != []


def test_an_adapter_of_a_path_like_a_hub_id_asks_no_host(
    reached: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    an_adapter(tmp_path / "owner" / "name")
    (tmp_path / "owner" / "name" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights of the adapter"):
        load(LoadOptions(model="owner/name"))
    assert reached == []


def test_a_switch_is_as_it_was_when_the_last_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    first, second = offline(), offline()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert huggingface_hub.constants.is_offline_mode()
    second.__exit__(None, None, None)
    assert not huggingface_hub.constants.is_offline_mode()


# Bounds

SLOW = r"((\w+\.?)+)+@"  # takes longer than anybody waits, and matches nothing


@pytest.fixture
def a_short_second(monkeypatch: pytest.MonkeyPatch) -> None:
    short_seconds(monkeypatch)


def refusal(**options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(LoadOptions(**options))
    assert "\n" not in str(caught.value)
    return caught.value.for_shell()


@pytest.mark.usefixtures("a_short_second")
@pytest.mark.parametrize(
    "named",
    [
        {"target_modules": SLOW},
        {"rank_pattern": {SLOW: 4}},
        *(
            pytest.param(named, marks=pytest.mark.e2e)  # found as those above are: any text is a pattern
            for named in (
                {"modules_to_save": [SLOW]},
                {"exclude_modules": SLOW},
                {"alpha_pattern": {SLOW: 4}},
                {"layers_to_transform": [0], "layers_pattern": SLOW},
            )
        ),
    ],
    ids=lambda named: [*named][-1],
)
def test_a_pattern_of_an_adapter_that_never_ends_is_given_up(named: dict[str, Any], tmp_path: Path) -> None:
    folder = an_adapter(tmp_path / "a", **named)
    said = refusal(model=str(folder))
    assert re.search(r"/adapter_config\.json has a pattern .*\b1 seconds", said)


def test_a_pattern_that_ends_is_taken(tmp_path: Path, demo: Any) -> None:
    config = LoraConfig(target_modules=r".*\.[0-2]\.self_attn\.(q|k)_proj", r=4, init_lora_weights=False)
    loaded = load(LoadOptions(model=str(an_adapter(tmp_path / "a", config=config)), adapter="beside"))
    assert sum("lora_A" in name for name, _ in loaded.model.named_parameters()) == 6


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"r": 10**12}, "rank 1000000000000"),
        ({"rank_pattern": {"q_proj": 10**6}}, "rank 1000000;"),
        ({"r": 100}, "size mismatch"),
        ({"init_lora_weights": "pissa_niter_1000000000"}, "'pissa_niter_1000000000'"),
        pytest.param(
            {"init_lora_weights": "pissa_niter_1e9"}, "changes its base by 'pissa_niter_1e9'", marks=pytest.mark.e2e
        ),
        pytest.param({"init_lora_weights": "pissa", "r": 10**12}, "rank 1000000000000", marks=pytest.mark.e2e),
        ({"layer_replication": [[0, 4]] * 20_000}, "more than a change of weights"),
    ],
    ids=["r", "pattern", "another r", "pissa_niter", "no number", "pissa", "layers"],
)
def test_sizes_of_an_adapter_are_those_of_its_weights(named: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(model=str(an_adapter(tmp_path / "a", **named)))


@pytest.mark.parametrize(
    "drawn",
    [
        "pissa",
        "olora",
        "gaussian",
        *(pytest.param(one, marks=pytest.mark.e2e) for one in ("pissa_niter_4", "orthogonal")),
    ],
)
def test_what_an_adapter_began_from_is_as_peft_has_it(drawn: str, tmp_path: Path) -> None:
    """PiSSA and OLoRA take a part of the base out of it."""
    from helpers.brought import in_peft

    config = LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=drawn)
    folder, ids = an_adapter(tmp_path / "a", config=config), [0, 423, 1165, 782, 295]
    torch.manual_seed(1)
    expected = in_peft(folder, ids)
    torch.manual_seed(1)
    loaded = load(LoadOptions(model=str(folder), adapter="beside"))
    seen = torch.stack(list(attnscope.capture(loaded, ids).weights.values()))
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)


def test_weights_behind_a_link_that_leads_nowhere_open_no_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = an_adapter(tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    torch.save(load_file(path), folder / "adapter_model.bin")
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    opened: list[object] = []
    own = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **named: opened.append(args[0]) or own(*args, **named))
    assert "has its weights as pickle only" in refusal(model=str(folder))
    assert opened == []
    assert load(LoadOptions(model=str(folder), allow_pickle=True)).model is not None
    assert opened != []


def test_a_gguf_file_beside_an_adapter_is_refused(tmp_path: Path, demo: Any) -> None:
    """transformers would put that adapter into it, and look for the base that it names."""
    folder = an_adapter(tmp_path / "a", base_model_name_or_path="owner/name")
    gguf = a_gguf(folder / "m.gguf", demo.model)
    for options in ({"model": gguf}, {"model": folder, "base": gguf}):
        said = refusal(**{name: str(path) for name, path in options.items()})
        assert f"{gguf} lies in the folder of an adapter" in said


@pytest.mark.usefixtures("a_short_second")
def test_a_pattern_of_a_quantised_model_that_never_ends_is_given_up(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "m"))
    method = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["((.*)*)*x"]}
    edit_config(folder, quantization_config=method)
    said = refusal(model=str(folder))
    assert re.search(r"/config\.json has a pattern .*\b1 seconds", said)


def test_how_tokens_are_generated_is_not_the_models_say(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "m"))
    said = {"assistant_early_exit": 10**12, "prompt_lookup_num_tokens": 10**9, "prefill_chunk_size": 1, "max_time": 0.0}
    said |= {"cache_implementation": "static", "penalty_alpha": 0.5, "top_k": 4, "num_beams": 9}
    said |= {"guidance_scale": 2.0, "eos_token_id": 1, "suppress_tokens": [265]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    loaded = load(LoadOptions(model=str(folder)))
    facts = attnscope.capture(loaded, TEXT, generate=3).facts["generated"]
    made, aside = facts["ids"], facts["ignored"]
    assert aside == ["guidance_scale", "max_time", "penalty_alpha"]
    plain = load(LoadOptions())
    plain.model.generation_config.suppress_tokens = [265]
    assert made == attnscope.capture(plain, TEXT, generate=3).facts["generated"]["ids"]
    assert loaded.model.generation_config.suppress_tokens == [265]


# The model's own errors


def broken(folder: Path) -> Path:
    """A copy of the demo whose forward pass fails, where a package that is there quantises it."""
    pytest.importorskip("bitsandbytes")
    path = Path(shutil.copytree(DEMO_FOLDER, folder))
    edit_config(path, quantization_config={"load_in_4bit": True, "quant_method": "bitsandbytes"})
    return path


def one_line(done: Result) -> str:
    assert done.code == 3, done.err
    assert done.err.count("\n") == 1, done.err
    return done.err


@pytest.mark.parametrize(
    "command",
    [
        ("heads", "-q", TEXT, "-m"),
        ("heads", "-q", TEXT, "--engine", "fused", "-m"),
        ("heads", "-q", TEXT, "--generate", "2", "-m"),
        ("parity", "-q", TEXT, "-m"),
        ("explain", "-q", TEXT, "--head", "L0H0", "-m"),
        ("scan", "-q", "--sequences", "2", "--out", "{out}"),
        ("ablate", "-q", "--sequences", "2", "--out", "{out}"),
        *(
            pytest.param(one, marks=pytest.mark.e2e)  # a pass as that of heads
            for one in (
                ("relations", "-q", TEXT, "-m"),
                ("view", "-q", TEXT, "--out", "{out}.html", "-m"),
                ("compare", "-q", "--text", TEXT, "--compare-text", "a bank", "-m"),
            )
        ),
    ],
    ids=lambda command: " ".join(command[:4]),
)
def test_an_error_of_the_forward_pass_is_a_line(command: tuple[str, ...], tmp_path: Path) -> None:
    folder = broken(tmp_path / "m")
    done = call(*(one.format(out=tmp_path / "out") for one in command), str(folder))
    assert ("the forward pass of llama failed: " in done.err) or ("cannot generate: " in done.err), done.err
    one_line(done)


def test_a_batch_says_of_each_text_why_it_failed(tmp_path: Path) -> None:
    folder, out = broken(tmp_path / "m"), tmp_path / "out"
    (tmp_path / "corpus.txt").write_text("a bank\nthe river\n")
    done = call("batch", "-q", str(tmp_path / "corpus.txt"), "--out", str(out), "-m", str(folder))
    assert done.code == 1, done.err
    said = (out / "failures.jsonl").read_text()
    assert said.count("forward pass") == 2


def test_pictures_that_the_processor_places_wrongly_are_a_line(bring: Callable[..., Path], tmp_path: Path) -> None:
    folder = bring("picture", "processor_config.json", {"num_additional_image_tokens": 4})
    field = picture_models.picture(tmp_path / "field.png")
    assert "llava failed: " in one_line(call("heads", "-q", TEXT, "--picture", field, "-m", str(folder)))


def test_verbose_shows_where_it_failed(tmp_path: Path) -> None:
    done = call("heads", TEXT, "--verbose", "-m", str(broken(tmp_path / "m")))
    assert "Traceback" in done.err
    assert "modeling_llama.py" in done.err


def test_errors_of_who_listens_are_raised_as_they_are(demo: Any) -> None:
    from attnscope.hooks.listen import listen

    def fail(called: object) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        listen(demo.model, torch.arange(5, 10)[None], fail)

    def multiply(called: Any) -> None:  # an error of PyTorch, in code that is not the model's
        called.P.dense() @ torch.ones(2)

    with pytest.raises(RuntimeError, match="size"):
        listen(demo.model, torch.arange(5, 10)[None], multiply)


def test_an_error_of_ours_is_an_internal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **named: object) -> None:
        torch.ones(2) @ torch.ones(3)

    monkeypatch.setattr("attnscope.observe.collect.StackCollector.on_call", wrong)
    done = call("heads", "-q", TEXT)
    assert done.code == 70, done.err


# What libraries say


def silent(*arguments: str) -> Result:
    """A command in a process of its own whose stderr is empty."""
    return spawn(*arguments).silent()


def heard(*arguments: str) -> Result:
    """The same in this process, without what libraries in other languages say."""
    return call(*arguments).silent()


@pytest.mark.parametrize("command", [heard, pytest.param(silent, marks=pytest.mark.e2e)])
def test_a_gguf_file_is_read_without_a_word(command: Callable[..., Result], tmp_path: Path, demo: Any) -> None:
    gguf = a_gguf(tmp_path / "m.gguf", demo.model)
    assert command("heads", "-q", "-m", str(gguf), "-t", "a").out


def test_a_config_with_odd_parts_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "m"))
    edit_config(folder, sub_configs={"a": {}})
    one_line(spawn("heads", "-q", "-m", str(folder), "-t", "a"))


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("mp3", 300),
        *(pytest.param(*one, marks=pytest.mark.e2e) for one in (("aiff", 30), ("aiff", 400), ("flac", 90))),
    ],
)
def test_a_sound_that_is_cut_short_says_a_line(kind: str, cut: int, tmp_path: Path, made: dict[str, Path]) -> None:
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / f"tone.{kind}"
    soundfile.write(path, samples(1), RATE)
    path.write_bytes(path.read_bytes()[:cut])
    done = spawn("heads", "-q", "-m", str(made["sound"]), "--audio", str(path), "--target", "hi")
    assert done.err.count("\n") == (done.code != 0), done.err
    command = f"{shim() / 'attnscope'} heads -q -m {made['sound']} --audio - --target hi"
    said = os.popen(f"{command} < {path} 2>&1 >/dev/null").read()
    assert len(said.splitlines()) <= 1, said
