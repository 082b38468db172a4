"""Loading: what is loaded, and what each thing that cannot be loaded is told."""

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from attnscope import batch, capture, parity, wrap
from attnscope.errors import AttnscopeError, InputError, ModelError, UsageError
from attnscope.model import sources as hub
from attnscope.model.checkpoint import digest
from attnscope.model.libraries import uncollected
from attnscope.model.loading import DEMO_FOLDER, load, load_config
from attnscope.model.options import LoadOptions
from helpers.families import tiny_model
from helpers.folders import TOKENIZER_FILES, edit_config, saved, with_tokenizer
from helpers.stack_families import tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder that can be loaded."""
    folder = saved(tmp_path_factory.mktemp("whole") / "model", vocab_size=2000)
    load(LoadOptions(model=str(folder)))
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def listing(folder):
    return sorted((path.name, path.stat().st_size) for path in folder.iterdir())


def refusal(error, **options):
    """The message with which `load` refuses, one line with a next step, in the words of the command line."""
    with pytest.raises(error) as caught:
        load(LoadOptions(**options))
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)
    return caught.value.for_shell()


# What is loaded


def test_the_embedded_model_is_the_default(demo):
    assert demo.name == "demo"
    assert (demo.device, demo.dtype, demo.attention, demo.revision) == ("cpu", "float32", "eager", None)
    assert not demo.model.training
    assert not any(parameter.requires_grad for parameter in demo.model.parameters())
    assert demo.geometry.parameters == sum(parameter.numel() for parameter in demo.model.parameters())
    assert demo.tokenizer.decode(demo.tokenizer("river bank", add_special_tokens=False).input_ids) == "river bank"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "gemma3_text", "jamba", "deepseek_v3", "bert"])
def test_a_folder_is_loaded_as_it_was_saved(tmp_path, model_type):
    torch.manual_seed(0)
    model = tiny_model(model_type)
    loaded = load(LoadOptions(model=str(saved(tmp_path / "m", model_type))))
    ids = torch.arange(8, 20)[None]
    with torch.no_grad():
        expected, got = model(ids, use_cache=False).logits, loaded.model(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert loaded.source_folder == tmp_path / "m"


def test_dtype_and_attention_are_as_asked(folder):
    loaded = load(LoadOptions(model=str(folder), dtype="bfloat16", attention="sdpa"))
    assert (loaded.dtype, loaded.attention) == ("bfloat16", "sdpa")
    assert loaded.model.lm_head.weight.dtype is torch.bfloat16


def test_auto_dtype_is_float32_on_the_cpu(tmp_path):
    saved(tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(LoadOptions(model=str(tmp_path / "half"), device="cpu")).dtype == "float32"


def test_a_device_map_is_left_to_accelerate(folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    asked = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: asked.append(k) or original(*a, **k))
    mapped, plain = load(LoadOptions(model=str(folder), device_map="auto")), load(LoadOptions(model=str(folder)))
    assert [arguments["device_map"] for arguments in asked] == ["auto", None]
    assert mapped.device == str(mapped.model.device)
    torch.testing.assert_close(mapped.model.lm_head.weight.cpu(), plain.model.lm_head.weight.cpu())


def test_big_bird_is_loaded_with_the_attention_that_has_matrices(tmp_path):
    saved(tmp_path / "m", "big_bird")
    edit_config(tmp_path / "m", attention_type="block_sparse")
    assert load(LoadOptions(model=str(tmp_path / "m"))).model.config.attention_type == "original_full"


@pytest.fixture(scope="module")
def big_bird(tmp_path_factory):
    """One whose own code is block-sparse from 29 tokens on."""
    folder = tmp_path_factory.mktemp("models") / "bird"
    with_tokenizer(tiny("big_bird", vocab_size=2000, block_size=4, num_random_blocks=1), folder)
    edit_config(folder, attention_type="block_sparse")
    return folder


@pytest.mark.parametrize(("tokens", "said"), [(28, False), (29, True)])
def test_big_bird_says_where_its_own_attention_would_be_block_sparse(big_bird, tokens, said):
    loaded = load(LoadOptions(model=str(big_bird)))
    with torch.no_grad():
        own = type(loaded.model).from_pretrained(big_bird)  # as transformers runs it
        far = (own(torch.tensor([[*range(tokens)]]))[0] - loaded.model(torch.tensor([[*range(tokens)]]))[0]).abs().max()
    assert (far > 1e-4) == said
    seen = capture(loaded, [*range(tokens)])
    lines = ["attention_type original_full in place of block_sparse, from 29 tokens on"] * said
    assert [one.partition(":")[0] for one in seen.facts.get("notes", [])] == [f"read with {one}" for one in lines]
    assert seen.facts["model"]["replaced"] == {"attention_type": "block_sparse"}
    assert all(line in parity(loaded, [*range(tokens)]).report.on_trust for line in lines)


def test_the_folder_of_a_corpus_says_what_big_bird_was_read_without(big_bird, tmp_path, caplog):
    batch(load(LoadOptions(model=str(big_bird))), ["the bank", "the river bank " * 12] * 2, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["replaced"] == {"attention_type": "block_sparse"}
    assert len([one for one in caplog.messages if "from 29 tokens on" in one]) == 1


def test_big_bird_that_reads_in_blocks_is_refused_with_that_reason(big_bird):
    own = wrap(AutoModel.from_pretrained(big_bird).eval(), load(LoadOptions(model=str(big_bird))).tokenizer)
    with pytest.raises(ModelError, match="from 29 tokens on in blocks"):
        capture(own, [*range(29)])
    assert not capture(own, [*range(28)]).failures


def test_sharded_weights(tmp_path):
    saved(tmp_path / "m", shard="100KB")
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    assert len(shards) > 1
    load(LoadOptions(model=str(tmp_path / "m")))
    shards[1].unlink()
    assert f"{shards[1].name} is missing" in refusal(ModelError, model=str(tmp_path / "m"))


def test_pickled_weights_are_read_only_when_a_flag_asks(folder):
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "pickle only" in refusal(ModelError, model=str(folder))
    loaded = load(LoadOptions(model=str(folder), allow_pickle=True))
    torch.testing.assert_close(loaded.model.lm_head.weight, weights["lm_head.weight"])


class Trap:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_executed(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    refusal(ModelError, model=str(folder))
    refusal(ModelError, model=str(folder), allow_pickle=True)
    assert not (tmp_path / "trapped").exists()


def test_remote_code_is_not_run(folder, tmp_path):
    code = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass C: pass\n"
    (folder / "custom.py").write_text(code)
    edit_config(folder, model_type="custom", auto_map={"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.C"})
    assert "--trust-remote-code" in refusal(ModelError, model=str(folder))
    assert not (tmp_path / "ran").exists()


# What cannot be loaded


def without(name):
    return lambda folder: (folder / name).unlink()


def truncated(name, keep):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:keep] if keep >= 0 else content[: len(content) + keep])

    return damage


def rewritten(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def configured(**changes):
    return lambda folder: edit_config(folder, **changes)


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_another_shape(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def no_tokenizer(folder):
    for name in TOKENIZER_FILES:
        (folder / name).unlink()


def an_image_model(folder):
    no_tokenizer(folder)
    edit_config(folder, model_type="vit")


def an_adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES = [
    (without("config.json"), "has no config.json"),
    (an_adapter, "holds a whole model and an adapter, and either could be meant"),
    (rewritten("config.json", b"{'a': 1}"), "config.json is not JSON"),
    (rewritten("config.json", b"[]"), "holds a list, expected an object"),
    (rewritten("config.json", b"\xff\xfe"), "config.json cannot be read"),
    (rewritten("config.json", b"{}"), "does not say its model_type"),
    (configured(model_type="llamma"), "does not know the model type 'llamma'"),
    (configured(num_attention_heads="many"), "the config of"),
    (no_tokenizer, "has no tokenizer"),
    (without("tokenizer.json"), "has no tokenizer"),
    (rewritten("tokenizer.json", b"{"), "the tokenizer of"),
    (without("model.safetensors"), "has no weights"),
    (pickle_only, "pickle only, which can run any code when it is read; convert them to safetensors, or pass --allow"),
    # of five damaged files in the words of safetensors
    (truncated("model.safetensors", -100), "damaged: Error while deserializing header: incomplete metadata"),
    (truncated("model.safetensors", 200), "invalid header length"),
    (truncated("model.safetensors", 0), "header too small"),
    (rewritten("model.safetensors", b"\x02" + bytes(7) + b"[]"), "invalid JSON in header"),
    (rewritten("model.safetensors", b"\x03" + bytes(7) + b"{a}"), "invalid JSON in header"),
    (without_a_tensor, "lacks 1 of its weights (first: model.layers.1.self_attn.q_proj.weight)"),
    (with_another_shape, "cannot be loaded"),
    (an_image_model, "of its weights"),
    (configured(model_type="pix2struct"), "(pix2struct) is not a model of text"),
    (configured(model_type="t5"), "of its weights"),  # those of a llama
    (configured(model_type="bart"), "of its weights"),
    (configured(model_type="bert"), "of its weights"),
    (configured(model_type="mamba"), "of its weights"),
    (configured(model_type="reformer"), "the attention of reformer cannot be read: it hashes its keys into buckets"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=lambda value: getattr(value, "__name__", value)[:40])
def test_a_damaged_folder_is_refused_in_one_line(folder, damage, says):
    damage(folder)
    before = listing(folder)
    assert says in refusal(ModelError, model=str(folder))
    assert listing(folder) == before


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_folder_with_the_model_below_names_that_folder(folder, file):
    below = folder / "0_Transformer"
    below.mkdir()
    (folder / "1_Pooling").mkdir()
    (folder / "config.json").rename(below / file)
    said = refusal(ModelError, model=str(folder))
    assert "has no config.json; the folder 0_Transformer in it has one" in said
    assert said.endswith(f"pass {below}")


def test_an_index_without_shards(folder):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    assert "has no weight_map" in refusal(ModelError, model=str(folder))
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}}))
    assert f"{index} has no metadata" in refusal(ModelError, model=str(folder))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"model": "./no/such/folder"}, ModelError, "there is no folder ./no/such/folder"),
        ({"model": "/no/such/folder"}, ModelError, "there is no folder /no/such/folder"),
        ({"model": "~/no-such-folder"}, ModelError, "there is no folder ~/no-such-folder"),
        ({"model": "a/b/c"}, ModelError, "there is no folder a/b/c"),
        ({"model": __file__}, ModelError, "is a file, expected a folder"),
        ({"model": "owner name"}, ModelError, "neither a folder nor a Hub id"),
        ({"model": "owner/none", "offline": True}, ModelError, "nor in the local cache, and the run is offline"),
        ({"model": " "}, UsageError, "the model has no name"),
        ({"device": "gpu"}, UsageError, "expected a device auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
        ({"device": "cuda:"}, UsageError, "got 'cuda:'"),
        ({"device": "cuda:99"}, UsageError, "there is no cuda:99 here"),
        ({"dtype": "float8"}, UsageError, "got 'float8'"),
        ({"device_map": "mine"}, UsageError, "got 'mine'"),
        ({"device_map": "auto", "device": "cpu"}, UsageError, "leave out --device cpu"),
        ({"revision": "main"}, UsageError, "demo is a folder and has no revisions; leave out --revision"),
        ({"quantize": "2bit"}, UsageError, "got '2bit'"),
        ({"adapter": "apart"}, UsageError, "got 'apart'"),
    ],
)
def test_what_cannot_be_meant(options, error, says):
    assert says in refusal(error, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_cuda_where_there_is_none():
    assert "there is no cuda here (0 CUDA devices)" in refusal(UsageError, device="cuda")


def test_quantize_without_bitsandbytes(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "attnscope[quantize]"' in refusal(UsageError, quantize="4bit")


def test_load_config_reads_no_weights_and_refuses_alike(folder):
    (folder / "model.safetensors").unlink()
    no_tokenizer(folder)
    assert load_config(LoadOptions(model=str(folder))).num_hidden_layers == 4
    edit_config(folder, model_type="reformer")
    with pytest.raises(ModelError, match="hashes its keys into buckets"):
        load_config(LoadOptions(model=str(folder)))


def test_every_refusal_is_an_error_of_ours():
    assert issubclass(hub.UnreachableError, AttnscopeError)
    assert hub.UnreachableError.exit_code == ModelError.exit_code == 3


def test_the_embedded_model_has_what_a_folder_needs():
    assert {"config.json", "model.safetensors", *TOKENIZER_FILES} <= {path.name for path in DEMO_FOLDER.iterdir()}


def test_garbage_is_collected_again_once_libraries_are_loaded():
    with suppress(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    first, second = uncollected(), uncollected()  # in two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


FROZEN = """
import gc, sys, types
from attnscope.model import libraries
libraries.WHOLE_LIBRARY = 2
counts = []
def imported(*names):
    before = gc.get_freeze_count()
    with libraries.uncollected():
        sys.modules |= {name: types.ModuleType(name) for name in names}
    counts.append(gc.get_freeze_count() > before)
imported("a", "b")
gc.freeze()
imported("c")
imported("d", "e")
sys.exit(counts != [False, False, True])
"""


def test_what_a_library_brings_is_frozen_where_the_process_has_frozen_objects():
    """As the command line has; a notebook has not, and garbage of its own must stay garbage."""
    assert subprocess.run([sys.executable, "-c", FROZEN]).returncode == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"])
def test_a_digest_changes_with_each_file_that_says_what_is_read(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{}")
    before = digest(tmp_path, weights=[])
    (tmp_path / name).write_text("[]")
    assert digest(tmp_path, weights=[]) != before


def test_a_text_of_the_least_tokens_is_read(demo):
    demo.check_length(demo.geometry.least_tokens)
    with pytest.raises(InputError, match=str(demo.geometry.least_tokens)):
        demo.check_length(demo.geometry.least_tokens - 1)
