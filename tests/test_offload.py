"""A model whose weights accelerate keeps on the CPU or on the disk between passes gives the numbers of one in place."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.corpus.folder import Job
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.hooks import modules
from attnscope.interventions.passes import prepared
from attnscope.interventions.spec import HeadSet
from attnscope.model.loaded import LoadedModel, weights_of
from attnscope.model.loading import wrap
from attnscope.observe.logit_path import LogitPath, path_to_logits
from attnscope.observe.request import View
from attnscope.steps.traced import explain_head
from attnscope.studies import ablation as tasks
from attnscope.studies.ablation import AblationStudy, HeadSets
from attnscope.studies.ablation_search import screened
from attnscope.studies.atlas import ScanStudy, plan
from attnscope.studies.copying import copying_of
from helpers.command_line import SENTENCE
from helpers.corpora import jsonl, rows
from helpers.parity_models import in_half


def to_the_cpu(model: Any, folder: Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))


def to_the_disk(model: Any, folder: Path) -> None:
    disk_offload(model, folder, execution_device=torch.device("cpu"))


def half_to_the_disk(model: Any, folder: Path) -> None:
    """As `device_map` does it: whole layers, some in place."""
    places = dict.fromkeys((f"model.{name}" for name in ("embed_tokens", "norm", "rotary_emb")), "cpu")
    places |= {f"model.layers.{layer}": "cpu" if layer % 2 else "disk" for layer in range(4)} | {"lm_head": "cpu"}
    dispatch_model(model, places, main_device="cpu", offload_dir=folder)


WAYS = (to_the_cpu, to_the_disk, half_to_the_disk)
DEFAULT = {(to_the_cpu, torch.bfloat16), (half_to_the_disk, torch.float32)}
EITHER_DTYPE = pytest.mark.parametrize(
    ("both", "dtype"),
    [
        pytest.param(way, dtype, marks=[] if (way, dtype) in DEFAULT else [pytest.mark.families])
        for way in WAYS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    indirect=["both"],
    ids=lambda value: getattr(value, "__name__", None),
)


def demo_in(demo: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    model = copy.deepcopy(demo.model)
    return wrap(model if dtype == torch.float32 else in_half(model, dtype), demo.tokenizer)


@pytest.fixture(
    params=[to_the_disk, *(pytest.param(way, marks=pytest.mark.families) for way in (to_the_cpu, half_to_the_disk))],
    ids=lambda offload: offload.__name__,
)
def both(request: Any, demo: LoadedModel, tmp_path: Path, dtype: torch.dtype) -> tuple[LoadedModel, LoadedModel]:
    """The demo model in place, and offloaded."""
    there, away = demo_in(demo, dtype), demo_in(demo, dtype).model
    request.param(away, tmp_path)
    assert any(parameter.is_meta for parameter in away.parameters())
    return there, wrap(away, demo.tokenizer)


@EITHER_DTYPE
def test_parity_is_as_full_and_as_close(both: tuple[LoadedModel, LoadedModel]) -> None:
    there, away = (check_parity(one, one.tokenizer(SENTENCE)["input_ids"]) for one in both)
    assert (away.level, away.holds) == ("full", True)
    assert away.layers == there.layers


@EITHER_DTYPE
def test_heads_relations_and_value_norms_are_the_same(both: tuple[LoadedModel, LoadedModel]) -> None:
    assert both[1].device == "cpu"
    for request in (attnscope.Request(relations=True, weights=True), attnscope.Request(view=View(weights="value"))):
        there, away = (attnscope.capture(one, SENTENCE, request=request) for one in both)
        for name, score in there.columns.scores.items():
            torch.testing.assert_close(away.columns.scores[name].value, score.value, rtol=0, atol=0, equal_nan=True)
        assert (away.columns.relation_weight == there.columns.relation_weight).all()
        assert (away.columns.top_key_mass == there.columns.top_key_mass).all()


@EITHER_DTYPE
def test_a_head_is_explained_from_its_raw_weights(both: tuple[LoadedModel, LoadedModel]) -> None:
    there, away = (explain_head(one, attnscope.capture(one, SENTENCE).prompt, 2, 3) for one in both)
    assert away.failures == []
    assert not any(step.missing for step in away.steps)
    assert [step.checks for step in away.steps] == [step.checks for step in there.steps]


@pytest.mark.parametrize("dtype", [torch.float32])
def test_the_way_to_the_logits_and_copying_are_found(both: tuple[LoadedModel, LoadedModel]) -> None:
    there, away = (path_to_logits(one, [5, 6, 7, 8]) for one in both)
    assert isinstance(there, LogitPath)
    assert isinstance(away, LogitPath)
    token_BT = torch.tensor([[7]])
    torch.testing.assert_close(away.towards(token_BT), there.towards(token_BT), rtol=0, atol=0)
    written_BRE = torch.randn(2, 3, both[0].model.config.hidden_size)
    raised = [copying_of(one, [5, 6, 7])._raised(written_BRE, torch.full((2, 3), 7)) for one in both]
    assert torch.equal(*raised)


def batch(loaded: LoadedModel, folder: Path) -> Any:
    folder.mkdir()
    corpus = jsonl(folder / "corpus.jsonl", [SENTENCE, "the mill", "the river bank"])
    run_folder(Job(), Corpus((str(corpus),)), folder / "batch", {}, loaded=loaded)
    return rows(folder / "batch", "heads") + rows(folder / "batch", "relations")


def ablation(loaded: LoadedModel, folder: Path) -> Any:
    task = tasks.texts(loaded, [SENTENCE, "the river bank is located on the mill"])
    asked = HeadSets.of([HeadSet("two", ((1, 0), (3, 1)))], loaded.geometry, random=1)
    return [
        AblationStudy(loaded, task, asked, replacement).run().table().to_pylist() for replacement in ("mean", "zero")
    ]


def gradient(loaded: LoadedModel, folder: Path) -> Any:
    found = screened(prepared(loaded, tasks.texts(loaded, [SENTENCE]), [], "zero"))
    return [found.signed_N.tolist(), found.ablated_N.tolist()]


def scanned(loaded: LoadedModel, folder: Path) -> Any:
    return ScanStudy(loaded, plan(loaded, sequences=2, pool=range(10, 30))).run().table().to_pylist()


def seen(loaded: LoadedModel, folder: Path) -> Any:
    request = attnscope.Request(relations=True, rollout="words", per_token=True, query="bank", maps="all")
    one = attnscope.capture(loaded, SENTENCE, request=request, engine="fused")
    return [one.table().to_pylist(), one.relations().to_pylist(), one.rollout.table().to_pylist()]


def generated(loaded: LoadedModel, folder: Path) -> Any:
    return attnscope.capture(loaded, SENTENCE, generate=3, listen=True, engine="fused").prompt.ids


COMMANDS = (batch, ablation, gradient, scanned, seen, generated)


QUICK = {*((half_to_the_disk, command) for command in COMMANDS if command not in (batch, scanned)), (to_the_cpu, seen)}


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize(
    ("both", "command"),
    [
        pytest.param(way, command, marks=[] if (way, command) in QUICK else [pytest.mark.families])
        for way in WAYS
        for command in COMMANDS
    ],
    indirect=["both"],
    ids=lambda value: value.__name__,
)
def test_a_command_gives_the_same(
    command: Callable[[LoadedModel, Path], Any], both: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    there, away = (command(one, tmp_path / name) for one, name in zip(both, ("there", "away"), strict=True))
    assert there
    if command is gradient:  # a backward pass rounds by where in memory weights begin, on some processors
        torch.testing.assert_close(away, there, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert json.dumps(away) == json.dumps(there)  # as text a number that is none equals itself


def test_a_wrong_layer_fails_though_it_is_offloaded(demo: LoadedModel, tmp_path: Path) -> None:
    model = demo_in(demo, torch.bfloat16).model
    model.model.layers[2].self_attn.scaling *= 1.01
    to_the_disk(model, tmp_path)
    report = check_parity(wrap(model, demo.tokenizer), demo.tokenizer(SENTENCE)["input_ids"])
    assert [one.layer for one in report.failures] == [2]


def test_a_layer_is_copied_without_the_weights_of_the_whole_model(demo: LoadedModel) -> None:
    """Accelerate's hooks know them all: copied with them, every layer took the memory of the model."""
    model = demo_in(demo, torch.bfloat16).model
    to_the_cpu(model, Path())
    q_proj = model.model.layers[0].self_attn.q_proj
    copied = modules._float32_copy(model.model.layers[0].self_attn)
    assert copied.q_proj._hf_hook is q_proj._hf_hook
    assert copied.q_proj.weight.dtype == torch.float32


def test_weights_are_found_by_the_names_that_they_have_in_place(demo: LoadedModel, tmp_path: Path) -> None:
    model = demo_in(demo, torch.float32).model
    to_the_disk(model, tmp_path)
    found = weights_of(model.model.layers[1])
    expected = dict(demo.model.model.layers[1].named_parameters())
    assert found.keys() >= expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_weights_that_nobody_knows_stay_on_meta() -> None:
    assert weights_of(torch.nn.Linear(2, 3, device="meta"))["weight"].is_meta
