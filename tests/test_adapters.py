"""Adapters of PEFT: found with their base, read as PEFT runs them, merged or beside, and held against the oracle."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptLearningConfig,
    PromptTuningConfig,
    auto,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

import attnscope
from attnscope.certificate.check import certificate, check_parity
from attnscope.errors import AttnscopeError, ModelError, UsageError
from attnscope.hooks.projections import output_projections, projection
from attnscope.model import adapters
from attnscope.model import sources as hub
from attnscope.model.checkpoint import ADAPTER_CONFIG
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, identify, load, wrap
from attnscope.model.options import LoadOptions
from helpers.brought import an_adapter, in_peft
from helpers.command_line import call
from helpers.folders import saved, with_tokenizer

TEXT = "the financial bank is located on river bank"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded model."""
    return an_adapter(tmp_path_factory.mktemp("adapters") / "lora")


@pytest.fixture(scope="module")
def merged(folder: Path) -> LoadedModel:
    return load(LoadOptions(model=str(folder)))


@pytest.fixture(scope="module")
def beside(folder: Path) -> LoadedModel:
    return load(LoadOptions(model=str(folder), adapter="beside"))


def weights(loaded: LoadedModel) -> torch.Tensor:
    """(layers, H, Q, K)"""
    return torch.stack(list(attnscope.capture(loaded, TEXT).weights.values()))


def refusal(error: type[AttnscopeError], **options: object) -> str:
    with pytest.raises(error) as caught:
        load(LoadOptions(**options))
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value.for_shell()


# What is read


def test_weights_are_those_of_peft(folder: Path, merged: LoadedModel, beside: LoadedModel, demo: LoadedModel) -> None:
    ids = attnscope.capture(beside, TEXT).prompt.ids
    expected = in_peft(folder, ids)
    torch.testing.assert_close(weights(beside), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights(merged), weights(beside), rtol=0, atol=1e-5)
    assert (weights(merged) - weights(demo)).abs().max() > 0.1


def test_merged_is_a_plain_model_and_beside_keeps_the_layers(merged: LoadedModel, beside: LoadedModel) -> None:
    assert type(merged.model) is type(beside.model)
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    assert beside.geometry.parameters > merged.geometry.parameters
    assert not any(parameter.requires_grad for parameter in beside.model.parameters())


@pytest.mark.parametrize(
    "config", [LoraConfig(r=4, use_rslora=True), LoraConfig(r=2, lora_alpha=6)], ids=["rs", "plain"]
)
def test_the_oracle_sees_what_the_adapter_changes(tmp_path: Path, config: LoraConfig) -> None:
    config.target_modules, config.init_lora_weights = set(ALL), False
    loaded = load(LoadOptions(model=str(an_adapter(tmp_path / "a", config=config)), adapter="beside"))
    ids = torch.arange(5, 29)
    report = check_parity(loaded, ids)
    assert (report.level, report.holds) == ("full", True)
    loaded.model.model.layers[1].self_attn.k_proj.lora_A["default"].register_forward_hook(lambda *run: run[2] * 1.01)
    assert [layer.layer for layer in check_parity(loaded, ids).failures] == [1]


def test_parity_of_a_merged_adapter(merged: LoadedModel) -> None:
    report = check_parity(merged, torch.arange(5, 29))
    assert (report.level, report.holds) == ("full", True)


def test_two_adapters_at_once_and_none(folder: Path, tmp_path: Path, demo: LoadedModel) -> None:
    """Both are added; a disabled one changes nothing."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:  # 5.24 asks for a release that may not be there yet; attnscope calls peft itself
        pytest.skip(f"transformers {transformers.__version__} puts no adapters together with this peft: {error}")
    loaded = load(LoadOptions(model=str(folder), adapter="beside"))
    other = an_adapter(tmp_path / "b", config=LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    loaded.model.load_adapter(str(other), "other")
    loaded.model.set_adapter(["default", "other"])
    assert check_parity(loaded, torch.arange(5, 29)).level == "full"
    assert check_parity(loaded, torch.arange(5, 29)).holds
    loaded.model.disable_adapters()
    assert check_parity(loaded, torch.arange(5, 29)).level == "full"
    torch.testing.assert_close(weights(loaded), weights(demo), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], use_dora=True, init_lora_weights=False),
        IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
    ],
    ids=["dora", "ia3"],
)
def test_other_adapters_are_compared_by_scores_and_say_so(tmp_path: Path, config: LoraConfig) -> None:
    loaded = load(LoadOptions(model=str(an_adapter(tmp_path / "a", config=config)), adapter="beside"))
    report = check_parity(loaded, torch.arange(5, 29))
    assert (report.level, report.holds) == ("scores", True)
    assert all("not a plain LoRA" in layer.why for layer in report.layers)


def test_a_projection_that_is_kept_transposed(tmp_path: Path) -> None:
    base = saved(tmp_path / "gpt2", "gpt2", vocab_size=2000)
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    loaded = load(LoadOptions(model=str(an_adapter(tmp_path / "a", base, config)), adapter="beside"))
    report = check_parity(loaded, torch.arange(5, 29))
    assert (report.level, report.holds) == ("full", True)


def test_the_output_projection_has_its_adapter(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=ALL, r=4, init_lora_weights=False)
    adapter = str(an_adapter(tmp_path / "a", config=config))
    found = []
    for kept in ("merged", "beside"):
        loaded = load(LoadOptions(model=adapter, adapter=kept))
        attention = loaded.model.model.layers[2].self_attn
        out = output_projections(loaded, [5, 6, 7])[attention]
        found.append(projection(out, 6, torch.zeros(1, 32)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


def test_more_tokens_than_the_base_has(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapter = an_adapter(tmp_path / "a", config=config)
    path, name = adapter / adapters.SAFETENSORS, "base_model.model.model.embed_tokens.weight"
    rows = torch.cat([load(LoadOptions()).model.get_input_embeddings().weight, torch.ones(3, 192)])
    save_file(load_file(path) | {name: rows}, path, {"format": "pt"})
    loaded = load(LoadOptions(model=str(adapter)))
    torch.testing.assert_close(loaded.model.get_input_embeddings().weight, rows)


# Where the base is


KINDS = [
    ("SEQ_CLS", "AutoModelForSequenceClassification", {"num_labels": 5}),
    ("FEATURE_EXTRACTION", "AutoModel", {}),
    pytest.param("TOKEN_CLS", "AutoModelForTokenClassification", {"num_labels": 3}, marks=pytest.mark.families),
    pytest.param("QUESTION_ANS", "AutoModelForQuestionAnswering", {}, marks=pytest.mark.families),
    pytest.param(None, "AutoModel", {}, marks=pytest.mark.families),
    pytest.param(None, "AutoModelForSequenceClassification", {"num_labels": 1}, marks=pytest.mark.families),
]


@pytest.mark.parametrize(("task", "kind", "head"), KINDS)
def test_an_adapter_goes_around_the_class_it_was_trained_on(
    tmp_path: Path, task: str | None, kind: str, head: dict[str, int]
) -> None:
    """The base is a language model, but for questions, whose class has another name for the body."""
    base = saved(tmp_path / "base", vocab_size=2000, num_hidden_layers=2)
    if task == "QUESTION_ANS":
        with_tokenizer(AutoModel.from_pretrained(base), base)
    model = getattr(transformers, kind).from_pretrained(base, attn_implementation="eager", **head)
    also = ["score"] if head and task is None else None
    config = LoraConfig(task_type=task, target_modules=ALL, init_lora_weights=False, modules_to_save=also)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter", base_model_name_or_path=str(base))
    loaded = load(LoadOptions(model=str(tmp_path / "adapter")))
    ids = torch.tensor([loaded.tokenizer(TEXT).input_ids])
    with torch.no_grad():
        expected = adapted.double().get_base_model().base_model(ids, output_attentions=True).attentions
    torch.testing.assert_close(weights(loaded).double(), torch.cat(expected), rtol=0, atol=1e-5)
    assert not loaded.has_logits
    without_one(tmp_path / "adapter")
    assert "does not fit its base: 1 of its weights" in refusal(ModelError, model=str(tmp_path / "adapter"))


def test_tasks_are_the_classes_that_peft_means() -> None:
    kinds = {one for one in vars(auto).values() if getattr(one, "_target_class", None)}
    peft = {one._target_peft_class: one._target_class._model_mapping for one in kinds}
    mappings = {task: peft[kind] for task, kind in auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.items()}
    assert {task: getattr(transformers, name) for task, name in adapters.TRAINED_ON.items()} == mappings


def test_embeddings_that_were_resized_and_trained(tmp_path: Path) -> None:
    """PEFT 0.21.2 writes them twice, and the embeddings as they were before."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32", attn_implementation="eager")
    model.resize_token_embeddings(2003, mean_resizing=False)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=ALL, init_lora_weights=False, modules_to_save=["embed_tokens", "lm_head"]
    )
    adapted = get_peft_model(model, config).eval()
    torch.nn.init.normal_(adapted.get_input_embeddings().weight)
    adapted.save_pretrained(tmp_path)
    edit(tmp_path, base_model_name_or_path=str(DEMO_FOLDER))
    loaded, ids = load(LoadOptions(model=str(tmp_path))), torch.tensor([[2002, 2001, 300, 2000]])
    with torch.no_grad():
        expected, logits = (one(ids).logits for one in (adapted, loaded.model))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    weights = load_file(tmp_path / adapters.SAFETENSORS)
    weights["base_model.model.lm_head.modules_to_save.weight"] += 1
    save_file(weights, tmp_path / adapters.SAFETENSORS, {"format": "pt"})
    assert "1 of its weights" in refusal(ModelError, model=str(tmp_path))


def test_a_base_beside_the_adapter(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", vocab_size=2000)
    adapter = an_adapter(tmp_path / "adapter", base, base_model_name_or_path="../base")
    loaded = load(LoadOptions(model=str(adapter)))
    assert (loaded.source_folder, loaded.base_folder.resolve()) == (adapter, base)
    assert loaded.name == str(adapter)
    facts = certificate(check_parity(loaded, [5, 6, 7]), loaded, [5, 6, 7])["model"]["weights_sha256"]
    assert set(facts) == {"adapter_model.safetensors", "model.safetensors"}


def test_a_base_that_was_asked_for(folder: Path, tmp_path: Path) -> None:
    adapter = an_adapter(tmp_path / "adapter", base_model_name_or_path="/nowhere/to/be/found")
    message = refusal(ModelError, model=str(adapter))
    assert message.endswith(
        "holds an adapter of /nowhere/to/be/found, which is not there; say where that model is: --base FOLDER"
    )
    loaded, expected = load(LoadOptions(model=str(adapter), base="demo")), load(LoadOptions(model=str(folder)))
    torch.testing.assert_close(weights(loaded), weights(expected), rtol=0, atol=0)


def test_a_base_of_the_hub_that_is_not_here(tmp_path: Path) -> None:
    adapter = an_adapter(tmp_path / "adapter", base_model_name_or_path="owner/none")
    assert "owner/none is neither a folder nor in the local cache" in refusal(ModelError, model=str(adapter))


def test_an_adapter_of_the_hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config first, then the weights that there are to download; the base is looked up as any model is."""
    adapter, names, fetched = an_adapter(tmp_path / "a"), frozenset(path.name for path in folder.iterdir()), []
    weights_there = (adapter / adapters.SAFETENSORS).rename(tmp_path / "weights")

    def fetch_weights(snapshot: hub.Snapshot, files: list[str]) -> None:
        fetched.append((snapshot.name, files))
        shutil.copy(weights_there, adapter / adapters.SAFETENSORS)

    monkeypatch.setattr(hub, "fetch", lambda name, *asked: hub.Snapshot(name, adapter, "0" * 40, names))
    monkeypatch.setattr(hub, "fetch_weights", fetch_weights)
    loaded = load(LoadOptions(model="owner/lora"))
    assert fetched == [("owner/lora", [adapters.SAFETENSORS])]
    assert (loaded.name, loaded.revision, loaded.base_folder) == ("owner/lora", "0" * 40, DEMO_FOLDER)
    torch.testing.assert_close(weights(loaded), weights(load(LoadOptions(model=str(folder)))), rtol=0, atol=0)


def test_what_a_run_is_of_knows_both(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", vocab_size=2000)
    adapter = an_adapter(tmp_path / "adapter", base)
    before, options = identify(LoadOptions(model=str(adapter)))
    path = adapter / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 9}))
    changed, _ = identify(options)
    saved(base, vocab_size=2000, tie_word_embeddings=True)
    assert len({before, changed, identify(options)[0]}) == 3


# What cannot be read


def whole(folder: Path) -> None:
    saved(folder, vocab_size=2000)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / adapters.SAFETENSORS), folder / adapters.PICKLE)
    (folder / adapters.SAFETENSORS).unlink()


def cut(folder: Path) -> None:
    path = folder / adapters.SAFETENSORS
    path.write_bytes(path.read_bytes()[:-100])


def without_weights(folder: Path) -> None:
    (folder / adapters.SAFETENSORS).unlink()


def without_one(folder: Path) -> None:
    tensors = load_file(folder / adapters.SAFETENSORS)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / adapters.SAFETENSORS, {"format": "pt"})


def of_another(folder: Path) -> None:
    edit(folder, base_model_name_or_path=str(saved(folder.parent / "other", vocab_size=2000)))


def of_itself(folder: Path) -> None:
    edit(folder, base_model_name_or_path=str(folder))


def nameless(folder: Path) -> None:
    edit(folder, base_model_name_or_path=None)


def edit(folder: Path, **changes: object) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (whole, "holds a whole model and an adapter, and either could be meant; leave one of them there"),
        (pickled, "has its weights as pickle only, which can run any code when it is read; convert them"),
        (cut, "adapter_model.safetensors is cut short or damaged"),
        (without_weights, "has no weights of the adapter (no adapter_model.safetensors); download"),
        (without_one, "does not fit its base: 1 of its weights are missing or unexpected"),
        (of_another, "cannot be loaded: Error(s) in loading state_dict"),
        (of_itself, "is an adapter too; name a whole model: --base FOLDER"),
        (nameless, "holds an adapter and does not say of which model; name it: --base FOLDER"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said_in_one_line(tmp_path: Path, damage, says: str) -> None:
    adapter = an_adapter(tmp_path / "a")
    damage(adapter)
    assert says in refusal(ModelError, model=str(adapter))


def test_a_pickled_adapter_is_read_when_a_flag_asks(tmp_path: Path, merged: LoadedModel) -> None:
    adapter = an_adapter(tmp_path / "a")
    pickled(adapter)
    loaded = load(LoadOptions(model=str(adapter), allow_pickle=True))
    torch.testing.assert_close(weights(loaded), weights(merged), rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes", [{"megatron_config": {"a": 1}, "megatron_core": "this"}, {"alora_invocation_tokens": [1]}]
)
def test_what_is_not_a_change_of_weights_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Of these the first would import a module by the name that it gives."""
    adapter = an_adapter(tmp_path / "a", **changes)
    for kept in ("merged", "beside"):
        assert "(LORA) is more than" in refusal(ModelError, model=str(adapter), adapter=kept)
    assert "this" not in sys.modules


def test_an_adapter_without_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    assert refusal(ModelError, model=str(folder)).endswith('; pip install "attnscope[peft]"')


def test_a_base_of_a_model(tmp_path: Path) -> None:
    assert "; leave out --base" in refusal(UsageError, base="gpt2")


# In Python, and on the command line


@pytest.mark.parametrize("how", ["peft", "compiled", "both"])
def test_a_wrapped_model_is_read_inside_its_wrapper(
    folder: Path, demo: LoadedModel, beside: LoadedModel, how: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32", attn_implementation="eager").eval()
    model = model if how == "compiled" else PeftModel.from_pretrained(model, str(folder))
    model = model if how == "peft" else torch.compile(model, backend="eager")
    expected = demo if how == "compiled" else beside
    torch.testing.assert_close(weights(wrap(model, demo.tokenizer)), weights(expected), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_a_wrapper_that_adds_tokens_is_read_as_its_folder_is(
    tmp_path: Path, demo: LoadedModel, kind: type[PromptLearningConfig]
) -> None:
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    folder = an_adapter(tmp_path / "a", config=config)
    base = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32", attn_implementation="eager")
    before = [type(module) for module in base.modules()]
    prompted = PeftModel.from_pretrained(base, str(folder)).eval()
    seen = weights(wrap(prompted, demo.tokenizer))
    torch.testing.assert_close(seen, weights(load(LoadOptions(model=str(folder)))), rtol=0, atol=0)
    expected = in_peft(folder, demo.tokenizer(TEXT).input_ids)
    torch.testing.assert_close(seen[:, :, -expected.shape[2] :], expected, rtol=0, atol=2e-6)
    assert [type(module) for module in base.modules()] == before
    with pytest.raises(UsageError, match=r"the adapter 'default' is in training mode.*call model\.eval\(\) first"):
        wrap(prompted.train(), demo.tokenizer)


def test_virtual_tokens_that_were_just_trained_are_read_as_they_are_saved(tmp_path: Path, demo: LoadedModel) -> None:
    """Before they are saved a network stands around their embeddings."""
    base = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32", attn_implementation="eager")
    prompted = get_peft_model(base, PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    prompted.save_pretrained(tmp_path)
    saved = weights(load(LoadOptions(model=str(tmp_path), base="demo")))
    torch.testing.assert_close(weights(wrap(prompted, demo.tokenizer)), saved, rtol=0, atol=0)


def test_a_wrapper_that_is_more_than_weights_names_its_adapter(demo: LoadedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32")
    lora = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    two = get_peft_model(model, LoraConfig(**lora), adapter_name="plain").eval()
    two.add_adapter("other", LoraConfig(**lora, alora_invocation_tokens=[5]))
    wrap(two, demo.tokenizer)
    two.base_model.set_adapter(["plain", "other"])
    with pytest.raises(ModelError, match=r"the adapter 'other' \(LORA\) is more than a change of weights"):
        wrap(two, demo.tokenizer)


def test_the_command_line(folder: Path) -> None:
    done = call("parity", "--model", str(folder), "--set", "adapter=beside", "--format", "jsonl").ok()
    rows = done.records
    assert {row["level"] for row in rows} == {"full"}
    call("info", str(folder), "--set", "base=demo").ok()
    assert call("heads", TEXT, "--model", str(folder), "--set", "base=/no/such/folder").code == 3
