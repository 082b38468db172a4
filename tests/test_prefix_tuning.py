"""Prefix tuning: keys and values of every layer that no token has made, read as PEFT's own model reads them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PrefixTuningConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaModel

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.errors import InputError, ModelError
from attnscope.model import adapters
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from helpers.brought import an_adapter, in_peft
from helpers.command_line import call
from helpers.folders import saved

TEXT, COUNT = "the financial bank is located on river bank", 3
NAMES = tuple(f"virtual {number}" for number in range(COUNT))


def tuned(folder: Path, base: Path = DEMO_FOLDER, **more: object) -> Path:
    return an_adapter(folder, base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, **more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("adapters") / "prefix")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(LoadOptions(model=str(folder)))


@pytest.fixture(scope="module")
def expected(folder: Path, loaded: LoadedModel) -> torch.Tensor:
    return in_peft(folder, loaded.tokenizer(TEXT).input_ids)


def weights(seen: attnscope.Observation) -> torch.Tensor:
    """Those of the text's own tokens, (layers, H, T, v + T)."""
    found = torch.stack(list(seen.weights.values()))
    assert not found[:, :, :COUNT].any()
    assert not seen.failures
    return found[:, :, COUNT:]


@pytest.mark.parametrize("engine", ["eager", "fused", "tiles"])
def test_weights_are_pefts_own(loaded: LoadedModel, expected: torch.Tensor, engine: str) -> None:
    seen = attnscope.capture(loaded, TEXT, engine=engine)
    assert seen.prompt.labels[: COUNT + 1] == (*NAMES, "<s>")
    torch.testing.assert_close(weights(seen), expected, rtol=0, atol=1e-6)


def with_cache_named(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward, which takes its cache by this name and no other."""
    given = inspect.signature(forward).parameters
    [old] = {"cache", "past_key_values"} & given.keys()

    def renamed(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        assert old == name or old not in kwargs
        return forward(self, *args, **{old if key == name else key: value for key, value in kwargs.items()})

    as_it_says = [one.replace(name=name) if one.name == old else one for one in given.values()]
    renamed.__signature__ = inspect.Signature(as_it_says)  # type: ignore[attr-defined]
    return renamed


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_given_by_the_name_that_the_forward_has_for_it(
    folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`cache` from transformers 5.24 on."""
    monkeypatch.setattr(LlamaModel, "forward", with_cache_named(name, LlamaModel.forward))
    seen = attnscope.capture(load(LoadOptions(model=str(folder))), TEXT)
    torch.testing.assert_close(weights(seen), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "more"),
    [("gpt2", {}), ("mistral", {"prefix_projection": True, "encoder_hidden_size": 16})],
)
def test_other_families_and_a_prefix_that_was_projected(tmp_path: Path, family: str, more: dict[str, object]) -> None:
    base = saved(tmp_path / "base", family, vocab_size=2000)
    folder = tuned(tmp_path / "a", base, **more)
    loaded = load(LoadOptions(model=str(folder)))
    seen = attnscope.capture(loaded, TEXT, engine="fused")
    expected = in_peft(folder, loaded.tokenizer(TEXT).input_ids, base)
    torch.testing.assert_close(weights(seen), expected, rtol=0, atol=1e-6)
    report = check_parity(loaded, seen.prompt)
    assert (report.level, report.holds) == ("scores", True)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_metrics_are_of_the_texts_own_queries(loaded: LoadedModel, expected: torch.Tensor, engine: str) -> None:
    """Distances count the places; what is said of an earlier token is said of one of the text."""
    seen, A = attnscope.capture(loaded, TEXT, engine=engine), expected.double()
    ids = seen.prompt.ids[COUNT:]
    T, again = len(ids), [at for at in range(len(ids)) if ids[at] in ids[:at]]
    rows = range(T)
    by_hand = {
        "sink": sum(A[:, :, i, 0] for i in rows) / T,
        "self": sum(A[:, :, i, COUNT + i] for i in rows) / T,
        "previous_token": sum(A[:, :, i, COUNT + i - 1] for i in range(1, T)) / (T - 1),
        "distance": sum(A[:, :, i, j] * (COUNT + i - j) for i in rows for j in range(COUNT + i)) / T,
        "duplicate_token": sum(A[:, :, i, COUNT + ids.index(ids[i])] for i in again) / len(again),
        "induction": sum(A[:, :, i, COUNT + ids.index(ids[i]) + 1] for i in again) / len(again),
        "confidence": sum(A[:, :, i].amax(-1) for i in rows) / T,
        "entropy": sum(torch.special.entr(A[:, :, i]).sum(-1) for i in rows) / T,
    }
    assert len(again) == 1
    for name, value in by_hand.items():
        found = torch.tensor(seen.columns.scores[name].value).view(A.shape[:2])
        torch.testing.assert_close(found, value, rtol=0, atol=1e-5, check_dtype=False, msg=name)
    top = torch.tensor(seen.columns.top_key_mass).view(A.shape[:2])
    torch.testing.assert_close(top, A.mean(2).amax(-1), rtol=0, atol=1e-5, check_dtype=False)
    assert min(seen.columns.relation_query) >= COUNT


def test_relations_and_maps_have_no_rows_of_theirs(loaded: LoadedModel, expected: torch.Tensor) -> None:
    asked = attnscope.Request(relations=True, top_k=None, maps="all", per_token=True)
    seen = attnscope.capture(loaded, TEXT, request=asked)
    assert seen.maps is not None
    maps = torch.from_numpy(np.stack(list(seen.maps.values.values()))).nan_to_num(0)
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-6)
    found = seen.relation_numbers()
    assert sorted(set(found["query"])) == list(range(COUNT, len(seen.prompt)))
    rows = (found["layer"], found["head"], found["query"] - COUNT, found["key"])
    torch.testing.assert_close(torch.from_numpy(found["weight"]), expected[rows], rtol=0, atol=1e-6)
    assert len(found["key"]) == len(seen.heads) * sum(range(COUNT + 1, len(seen.prompt) + 1))
    received = torch.stack([one.weight for one in seen.per_token.values()])
    torch.testing.assert_close(received, expected.mean(2), rtol=0, atol=1e-6)


def test_a_query_is_one_of_the_text(loaded: LoadedModel, expected: torch.Tensor) -> None:
    seen = attnscope.capture(loaded, TEXT, query="0:", key="0", request=attnscope.Request(per_token=True))
    mass = torch.tensor(seen.columns.scores["mass"].value).view(expected.shape[:2])
    torch.testing.assert_close(mass, expected[..., 0].mean(-1), rtol=0, atol=1e-6, check_dtype=False)
    given = attnscope.capture(loaded, TEXT, key="0", request=attnscope.Request(per_token=True)).per_token
    found = torch.stack([one.weight for one in given.values()])
    assert found[..., :COUNT].isnan().all()
    torch.testing.assert_close(found[..., COUNT:], expected[..., 0], rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="keys and have no queries"):
        attnscope.capture(loaded, TEXT, query="1")


def test_parity_of_what_each_layer_was_given(loaded: LoadedModel) -> None:
    report = check_parity(loaded, attnscope.capture(loaded, TEXT).prompt)
    assert (report.level, report.holds) == ("scores", True)
    assert all("no hidden states have made" in layer.why for layer in report.layers)


def test_parity_in_half_precision(folder: Path) -> None:
    half = load(LoadOptions(model=str(folder), dtype="bfloat16"))
    report = check_parity(half, attnscope.capture(half, TEXT).prompt)
    assert (report.level, report.holds) == ("scores", True)


def test_the_model_itself_is_as_it_was(loaded: LoadedModel) -> None:
    base = load(LoadOptions())
    ids = torch.tensor([base.tokenizer(TEXT).input_ids])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, base.model(ids).logits, rtol=0, atol=0)
    prompt = attnscope.capture(loaded, TEXT).prompt
    assert attnscope.capture(loaded, list(prompt.ids)).prompt.medium.unasked == COUNT


def test_the_command_line(folder: Path) -> None:
    done = call("relations", TEXT, "-m", str(folder), "--key", "0", "--format", "csv").ok()
    rows = done.rows
    assert {row["key_token"] for row in rows} == {"virtual 0"}
    assert min(int(row["query"]) for row in rows) == COUNT


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("heads", TEXT, "--generate", "2"), "an answer reads texts as they are"),
        (("batch", "{texts}", "--out", "{out}"), "a corpus run reads texts as they are"),
        (("scan", "{model}", "--out", "{out}"), "a scan reads texts as they are"),
        (("ablate", "{model}", "--select", "1.2", "--texts", "{texts}"), "an ablation reads texts as they are"),
        (("view", TEXT, "--out", "{out}.html"), "a page needs the query of every token"),
        (("rollout", TEXT), "a rollout needs the query of every token"),
        (("explain", TEXT, "--head", "1.2"), "an explanation needs the query of every token"),
        (("compare", "--compare-model", "demo", "--text", TEXT), "a comparison needs the query of every token"),
    ],
)
def test_what_is_refused(folder: Path, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "texts.txt").write_text(TEXT)
    names = {"texts": tmp_path / "texts.txt", "out": tmp_path / "out", "model": folder}
    given = tuple(flag.format(**names) for flag in flags)
    result = call(*given, *(() if "{model}" in flags else ("-m", str(folder))), "-q")
    assert result.code == 3, result.err
    assert said in result.err


def test_of_another_model(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "a")
    path = folder / adapters.SAFETENSORS
    save_file({name: one[:, :-1].contiguous() for name, one in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"base: .* \d+ numbers"):
        load(LoadOptions(model=str(folder)))


def test_layers_that_are_not_alike(folder: Path, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "jamba", vocab_size=2000)
    with pytest.raises(ModelError, match="of one size"):
        load(LoadOptions(model=str(folder), base=str(base)))
