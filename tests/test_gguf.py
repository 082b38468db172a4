"""What a GGUF file states of its attention: in the config, neutral, on trust, or refused with its key.

Right values are those of the model that was written, run by transformers; `helpers/gguf_files.py` writes it.
"""

import json
import struct
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import MODEL_ARCH_NAMES
from packaging.version import Version
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

import attnscope
from attnscope.certificate.check import certificate, check_parity
from attnscope.errors import ModelError
from attnscope.model import gguf
from attnscope.model.gguf import read_header
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from helpers.command_line import call
from helpers.families import EARLIER
from helpers.gguf_files import LAYOUTS, tiny, write
from helpers.gguf_table import BEGIN, COLUMNS, END, IDS, own, row

YARN = {"rope_type": "yarn", "rope_theta": 70000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module", autouse=True)
def llama() -> torch.nn.Module:
    """The first of the models; to import what they are made of takes seconds."""
    return tiny("llama")


def check_is_written(path: Path, model: torch.nn.Module) -> LoadedModel:
    """Assert that what attnscope reads of a file is the attention of the model that was written; the loaded model."""
    loaded = load(LoadOptions(str(path)))
    found = list(attnscope.capture(loaded, IDS, engine="eager").weights.values())
    expected = [layer[0] for layer in own(model)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    return loaded


def refusal(path: Path, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(LoadOptions(str(path), **options))
    return caught.value.for_shell()


# Set


def test_yarn_of_a_llama_file(tmp_path: Path) -> None:
    model = tiny("llama", rope_parameters=YARN | {"beta_fast": 16.0, "attention_factor": 1.3})
    check_is_written(write(tmp_path / "m.gguf", "llama", model), model)


def test_a_table_of_frequencies(tmp_path: Path) -> None:
    """As llama.cpp's converter makes it of Llama 3.1 (conversion/llama.py, generate_extra_tensors)."""
    model = tiny("llama", rope_parameters=LLAMA3)
    plain = 5000.0 ** (-np.arange(0, 8, 2) / 8)
    table = plain / model.model.rotary_emb.inv_freq.numpy()
    assert 1.0 < table[2] < table[3]
    path = write(tmp_path / "m.gguf", "llama", model, rope_freqs=table.astype(np.float32))
    loaded = check_is_written(path, model)
    assert check_parity(loaded, IDS).too_short == ()  # the table holds for any length


@pytest.mark.parametrize("original", [24, 64])  # 48 tokens: past the first, within the other
def test_phi_3_in_128k(tmp_path: Path, original: int) -> None:
    long, short = np.float32([2, 4, 8, 16]), np.float32([1, 1.5, 2, 3])
    rope = {"rope_type": "longrope", "rope_theta": 5000.0, "original_max_position_embeddings": original}
    rope |= {"short_factor": short.tolist(), "long_factor": long.tolist()}
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=original, sliding_window=30)
    path = write(tmp_path / "m.gguf", "phi3", model, rope_factors_long=long, rope_factors_short=short)
    loaded = check_is_written(path, model)
    assert {layer.window for layer in loaded.geometry.layers} == {30}


def test_caps_windows_and_scale_of_gemma_2(tmp_path: Path) -> None:
    changes = {"attn_logit_softcapping": 3.0, "sliding_window": 5, "query_pre_attn_scalar": 4}
    model = tiny("gemma2", **changes)
    loaded = check_is_written(write(tmp_path / "m.gguf", "gemma2", model, **{"attention.scale": 0.5}), model)
    assert [layer.window for layer in loaded.geometry.layers] == [5, None]


def test_the_epsilon_of_nemotron(tmp_path: Path) -> None:
    """transformers looks for it as that of RMS norms."""
    model = tiny("nemotron", norm_eps=0.5)
    check_is_written(write(tmp_path / "m.gguf", "nemotron", model), model)


def test_a_llama_that_is_named_mistral(tmp_path: Path) -> None:
    """transformers takes the name for the architecture, and then knows none of its tensors."""
    model = tiny("llama")
    check_is_written(write(tmp_path / "m.gguf", "llama", model, **{"general.name": "mistral"}), model)


def test_a_file_of_a_model_that_looks_both_ways(tmp_path: Path) -> None:
    model = tiny("llama", is_causal=False)
    loaded = check_is_written(write(tmp_path / "m.gguf", "llama", model, **{"attention.causal": False}), model)
    assert loaded.geometry.stack == "encoder"
    assert check_parity(loaded, IDS).holds


@pytest.mark.parametrize(
    ("arch", "key", "changes"),
    [
        ("qwen2", "attention.head_count_kv", {"num_key_value_heads": 4}),
        ("qwen3", "attention.key_length", {"head_dim": 8}),
        ("minimax-m2", "rope.freq_base", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("gemma2", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("gemma2", "attention.sliding_window", {"sliding_window": 4096}),
        pytest.param(
            *("gemma3", "attention.sliding_window", {"layer_types": ["full_attention"] * 7}), marks=pytest.mark.families
        ),
    ],
)
def test_an_absent_key_means_what_llama_cpp_takes_it_for(
    tmp_path: Path, arch: str, key: str, changes: dict[str, object]
) -> None:
    model = tiny(arch, **changes)
    without = (key, key.replace("key_length", "value_length"))
    check_is_written(write(tmp_path / "m.gguf", arch, model, without=without), model)


# Refused, and on trust


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.novelty", 3),
        ("attention.clamp_kqv", 8.0),
        ("attention.sliding_window", 8),
        ("attention.value_length", 4),
        ("rope.scaling.alpha", 2.0),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.dimension_count", 4),
        ("embedding_scale", 2.0),
        ("other_logit_softcapping", 2.0),
        ("blk.0.attn_q_norm", np.ones(8, np.float32)),  # a tensor, with .weight behind it
        ("rope_freqs_of_another", np.ones(4, np.float32)),
    ],
)
def test_what_nobody_has_use_for_is_refused_by_its_name(
    tmp_path: Path, llama: torch.nn.Module, key: str, value: object
) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama, **{key: value})
    name = f"{key}.weight" if isinstance(value, np.ndarray) else f"llama.{key} = {value:g}"
    said = refusal(path)
    assert name in said
    assert said.endswith("--gguf trust")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", 0.0),
        ("attention.sliding_window", 0),
        ("attention.scale", 8**-0.5),
        ("rope.scaling.finetuned", True),
        ("rope.scaling.type", "none"),
        ("embedding_scale", 1.0),
        ("expert_weights_scale", 0.0),
    ],
)
def test_what_states_what_is_so_anyway_is_neutral(
    tmp_path: Path, llama: torch.nn.Module, key: str, value: object
) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama, **{key: value})
    assert gguf.statement(path, LoadOptions().permits).left == {}


def test_the_older_key_of_a_factor_yields_to_the_newer_one(tmp_path: Path, llama: torch.nn.Module) -> None:
    keys = {"rope.scaling.factor": 3.0, "rope.scale_linear": 2.0}
    found = gguf.statement(write(tmp_path / "m.gguf", "llama", llama, **keys), LoadOptions().permits)
    assert (found.left, found.raw["rope_parameters"]["factor"]) == ({}, 3.0)


def test_what_is_left_out_can_be_taken_on_trust_and_the_certificate_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "m.gguf", "gemma2", tiny("gemma2"), **{"attention.novelty": 3})
    loaded = load(LoadOptions(str(path), gguf="trust"))
    assert "gemma2.attention.novelty = 3" in caplog.text
    report = check_parity(loaded, IDS)
    assert report.holds
    (trusted,) = (one for one in certificate(report, loaded, IDS)["not_shown"] if one.startswith("taken on trust"))
    assert "gemma2.attention.novelty = 3" in trusted
    assert "the scale of queries (a gemma2 file does not state it)" in trusted


def test_a_llama_file_without_a_number_of_key_heads_is_refused(tmp_path: Path) -> None:
    """transformers does not turn its queries and keys back then."""
    path = write(tmp_path / "m.gguf", "llama", tiny("llama"), without=("attention.head_count_kv",))
    assert "does not state llama.attention.head_count_kv" in refusal(path, gguf="trust")


@pytest.mark.parametrize("changes", [{"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_a_falcon_with_several_key_heads_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write(tmp_path / "m.gguf", "falcon", tiny("falcon", **changes))
    assert "falcon.attention.head_count_kv = " in refusal(path)


def test_an_architecture_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "deci, of which transformers has no model" in refusal(write(tmp_path / "m.gguf", "deci", tiny("deci")))


def test_a_part_of_a_model_is_refused(tmp_path: Path, llama: torch.nn.Module) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama, **{"split.count": 3})
    assert "is one of 3 parts of a model; merge them" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", "many"),
        ("attention.head_count", 0),
        ("attention.head_count_kv", [2, 4]),
        ("block_count", 2**32 - 1),
        ("rope.freq_base", "1e6"),
        ("rope.freq_base", float("nan")),
        ("rope.freq_base", -1.0),
        ("rope.scaling.factor", [1.0, 2.0]),
        ("rope.scaling.factor", float("inf")),
        ("attention.key_length", 1 << 22),
        ("attention.layer_norm_rms_epsilon", "small"),
        ("context_length", "long"),
    ],
)
def test_values_that_no_model_has_are_refused(tmp_path: Path, llama: torch.nn.Module, key: str, value: object) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama, **{key: value})
    assert "m.gguf" in refusal(path)
    assert refusal(path, gguf="trust")


def test_a_file_with_tensors_of_fewer_layers_than_it_states_is_refused_before_it_is_loaded(
    tmp_path: Path, llama: torch.nn.Module
) -> None:
    """transformers asks for the names of all layers once for each layer, and makes random weights of those missing."""
    said = refusal(write(tmp_path / "m.gguf", "llama", llama, block_count=900))
    assert "it states 900 layers, and has tensors of 2; convert the model again" in said


def test_more_experts_than_any_model_has_are_refused_before_the_model_is_made(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3moe", tiny("qwen3moe"), expert_count=2**31 - 1)
    assert "'num_experts' is 2147483647, and no model has more than 1,000,000" in refusal(path)


@pytest.mark.parametrize("key", ["block_count", "embedding_length"])
def test_a_file_without_a_size_is_refused(tmp_path: Path, llama: torch.nn.Module, key: str) -> None:
    """transformers takes that of Llama 7B then."""
    path = write(tmp_path / "m.gguf", "llama", llama, without=(key,))
    assert f"it does not state llama.{key}; convert the model again" in refusal(path)


# The header


def a_header(*keys: bytes, version: int = 3, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(keys) if count is None else count) + b"".join(keys)


def a_key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


ARCHITECTURE = a_key(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")


@pytest.mark.parametrize(
    "content",
    [
        a_header(),
        a_header(ARCHITECTURE, version=9),
        a_header(ARCHITECTURE, count=2**60),
        a_header(ARCHITECTURE, ARCHITECTURE),
        a_header(a_key(b"general.architecture", 8, struct.pack("<Q", 2**62))),
        a_header(ARCHITECTURE, a_key(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2**61))),
        a_header(ARCHITECTURE, a_key(b"llama.attention.x", 9, struct.pack("<IQ", 4, 2**61))),
        a_header(ARCHITECTURE, a_key(b"llama.attention.x", 9, struct.pack("<IQ", 9, 1))),
        a_header(ARCHITECTURE, a_key(b"llama.attention.x", 99, b"")),
        a_header(ARCHITECTURE, a_key(b"\xff\xfe", 4, struct.pack("<I", 1))),
        a_header(ARCHITECTURE, a_key(b"general.alignment", 4, struct.pack("<I", 0))),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is cut short or damaged"):
        read_header(path)


def test_a_header_is_read_without_its_tokens(tmp_path: Path) -> None:
    found = read_header(write(tmp_path / "m.gguf", "lfm2", tiny("lfm2")))
    assert found.architecture == "lfm2"
    assert found.keys["lfm2.attention.head_count_kv"] == (0, 2, 2)
    assert found.keys["tokenizer.ggml.tokens"] is None
    assert found.tensors["token_embd.weight"][0] == (32, 64)


# The whole matrix


def test_the_table_has_each_architecture_that_both_name() -> None:
    """Beside Mamba, which has no attention; `mistral` and `umt5` are names within llama and t5."""
    if EARLIER or Version(version("gguf")) < Version("0.19"):
        pytest.skip(f"earlier libraries name fewer: transformers {transformers.__version__}, gguf {version('gguf')}")
    theirs = {name.replace("_", "") for name in GGUF_CONFIG_MAPPING} - {
        "general",
        "tokenizer",
        "mamba",
        "mistral",
        "umt5",
    }
    both = {name for name in MODEL_ARCH_NAMES.values() if name.replace("-", "") in theirs}
    assert both == set(LAYOUTS)


@pytest.mark.families
@pytest.mark.parametrize("arch", LAYOUTS)
def test_a_file_is_read_as_the_table_says(arch: str) -> None:
    page = (Path(__file__).parents[1] / "docs/models.md").read_text("utf-8")
    written = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    found = row(arch)
    assert set(found.split(" | ")[1:]) <= {"equal", "refused", "refused |", "equal |"}
    assert found in written, "run scripts/gguf_doc.py"
    assert all(name in page for name in COLUMNS.values())


@pytest.mark.families
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("t5", {"feed_forward_proj": "relu"}),
        ("stablelm", {"use_parallel_residual": True}),
        ("stablelm", {"use_qkv_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
        ("gemma3", {"final_logit_softcapping": 7.0}),
    ],
)
def test_what_tensors_decide(tmp_path: Path, arch: str, changes: dict[str, object]) -> None:
    model = tiny(arch, **changes)
    loaded = load(LoadOptions(str(write(tmp_path / "m.gguf", arch, model))))
    torch.testing.assert_close(own(loaded.model), own(model), rtol=0, atol=1e-5)


@pytest.mark.e2e
def test_a_second_instance_has_the_same_positions(tmp_path: Path) -> None:
    model = tiny("llama", rope_parameters=YARN)
    path = write(tmp_path / "m.gguf", "llama", model)
    report = check_parity(load(LoadOptions(str(path))), IDS, whole=True)
    assert report.whole is not None
    assert report.whole.holds


@pytest.mark.e2e
def test_trust_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", tiny("llama"), **{"attention.novelty": 3})
    asked = ("info", str(path), "--format", "json")
    assert "llama.attention.novelty = 3" in call(*asked).err
    assert json.loads(call(*asked, "--set", "gguf=trust").ok().out)["layers"]
