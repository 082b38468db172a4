"""What runs on CUDA, on devices that are pretended: nothing mixes devices, and the host waits a few times per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import attnscope
from attnscope import Request
from attnscope.attention import spec
from attnscope.attention.spec import Visibility
from attnscope.attention.tiling import TILE_BYTES
from attnscope.certificate.check import check_parity
from attnscope.corpus.folder import Job, Shard
from attnscope.corpus.items import Item
from attnscope.corpus.worker import Worker
from attnscope.hooks import listen as seam
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.prompt import from_ids, from_text
from attnscope.interventions.passes import prepared
from attnscope.interventions.spec import HeadSet
from attnscope.metrics.texts import Texts
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import wrap
from attnscope.observe.collect import observe
from attnscope.observe.collectors import heads
from attnscope.observe.request import View
from attnscope.steps.traced import explain_head
from attnscope.studies import ablation as tasks
from attnscope.studies.ablation import AblationStudy, HeadSets, direct_means
from attnscope.studies.ablation_search import screened
from attnscope.studies.atlas import ScanStudy, plan
from helpers.parity_models import in_half, roused_model
from helpers.pretend import MixedDevicesError, Pretended, Seen, devices_of, place, pretend

TEXT = "the financial bank is located on river bank"
TEXTS = ("the mill", "the financial bank is located on river bank", "the river bank")
FAMILIES = ("llama", "gpt2", "gemma3_text", "gpt_oss", "jamba", "deepseek_v3")  # a hybrid and latent attention last
DTYPES = (torch.float32, torch.bfloat16)
Command = Callable[[LoadedModel], object]


def placed(tokenizer: Any, family: str, count: int, dtype: torch.dtype, **sizes: int) -> LoadedModel:
    model = roused_model(family, vocab_size=len(tokenizer), **sizes)
    place(in_half(model, dtype) if dtype != torch.float32 else model, devices_of(model, count))
    loaded = wrap(model, tokenizer)
    assert loaded.device == "cuda:0"
    assert {str(parameter.device) for parameter in model.parameters()} == {f"cuda:{index}" for index in range(count)}
    return loaded


GROUPS = {"money": "bank", "water": "river"}
REQUESTS = {
    "all": Request(relations=True, maps="all", weights=True, operands=True, rollout="words"),
    "tokens": Request(
        relations=True, per_token=True, query="bank", key="the", maps="all", spans=("money", "water"), define=GROUPS
    ),
    "key": Request(per_token=True, key="bank"),
    "groups": Request(relations=True, group="words", rollout="bins"),
    "kv": Request(view=View(by_kv=True), relations=True, weights=True),
    "scores": Request(view=View(weights="scores"), relations=True, maps="all", bin_rule="max", split_sink=True),
    "value": Request(view=View(weights="value"), relations=True, maps="all"),
}


def capture(name: str, engine: str, listen: bool = False) -> Command:
    def run(loaded: LoadedModel) -> object:
        return attnscope.capture(loaded, TEXT, request=REQUESTS[name], engine=engine, listen=listen)

    return run


def parity(loaded: LoadedModel) -> None:
    assert check_parity(loaded, from_text(loaded.tokenizer, TEXT)).holds


def explain(loaded: LoadedModel) -> None:
    assert explain_head(loaded, from_text(loaded.tokenizer, TEXT), 3, 1).failures == []


def padded(engine: str) -> Command:
    return lambda loaded: observe(
        loaded, [from_text(loaded.tokenizer, text) for text in TEXTS], REQUESTS["groups"], engine=ENGINES[engine]
    )


def verified(loaded: LoadedModel) -> None:
    attnscope.capture(loaded, TEXT, verify=True)


def answered(loaded: LoadedModel) -> None:
    attnscope.capture(loaded, TEXT, generate=2)


def batch(loaded: LoadedModel) -> None:
    worker = Worker(Job(), loaded)
    items = tuple(Item(number, "file", number, str(number), text) for number, text in enumerate(TEXTS))
    for window in worker.windows(Shard(items)):
        measured = worker.measure(window)
        assert measured is not None
        assert not measured.failures


def ablation(loaded: LoadedModel) -> None:
    task = tasks.texts(loaded, TEXTS[:2])
    for replacement in ("zero", "mean"):
        asked = HeadSets.of([HeadSet("two", ((1, 0), (3, 1)))], loaded.geometry, random=1)
        AblationStudy(loaded, task, asked, replacement).run()


def gradients(loaded: LoadedModel) -> None:
    screened(prepared(loaded, tasks.texts(loaded, TEXTS[:2]), [], "zero"))


def direct(loaded: LoadedModel) -> None:
    direct_means(prepared(loaded, tasks.texts(loaded, TEXTS[:1]), [], "zero"))


def scanned(loaded: LoadedModel) -> None:
    ScanStudy(loaded, plan(loaded, sequences=4, pool=range(10, 60))).run()


QUICK: dict[str, Command] = {  # the others take minutes: slow
    "all, eager": capture("all", "eager"),
    "value, eager": capture("value", "eager"),
    "parity": parity,
}
CAPTURES = {f"{name}, {engine}": capture(name, engine) for name in REQUESTS for engine in ("eager", "fused")}
COMMANDS: dict[str, Command] = {
    **QUICK,
    **CAPTURES,
    "numba": capture("all", "numba"),
    "listen": capture("all", "fused", listen=True),
    "padded, eager": padded("eager"),
    "padded, fused": padded("fused"),
    "explain": explain,
    "ablate": ablation,
    "gradients": gradients,
    "batch": batch,
    "verify": verified,
    "generate": answered,
    "direct": direct,
    "why": lambda loaded: attnscope.why(loaded, TEXT, "L3H1", key="bank#2"),
    "scan": scanned,
}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.families), "gpt_oss"])
def test_no_command_mixes_two_devices(demo: LoadedModel, family: str) -> None:
    run_all(demo, family, torch.bfloat16, 2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_command_mixes_devices(demo: LoadedModel, family: str, dtype: torch.dtype, count: int) -> None:
    run_all(demo, family, dtype, count, COMMANDS)


def run_all(demo: LoadedModel, family: str, dtype: torch.dtype, count: int, commands: Mapping[str, Command]) -> None:
    failed = {}
    with pretend():
        loaded = placed(demo.tokenizer, family, count, dtype)
        for name, command in commands.items():
            try:
                command(loaded)
            except MixedDevicesError as error:
                failed[name] = str(error)
    if failed:
        raise MixedDevicesError(str(failed))


# How often the host may wait for the device per layer, of four tiny ones, with all metrics and relations asked for.
WAITS_PER_LAYER = {"eager": 2, "fused": 3.5}


def waits(tokenizer: Any, engine: str) -> float:
    """How often per layer the host waits in one pass."""
    with pretend() as seen:
        loaded = placed(tokenizer, "llama", 1, torch.bfloat16)
        seen.waits.clear()
        observe(loaded, [from_text(tokenizer, TEXT)], Request(relations=True), engine=ENGINES[engine])
    return seen.waits.total() / len(loaded.geometry.layers)


@pytest.mark.parametrize("engine", WAITS_PER_LAYER)
def test_the_host_waits_a_few_times_per_layer(demo: LoadedModel, engine: str) -> None:
    assert 0 < waits(demo.tokenizer, engine) <= WAITS_PER_LAYER[engine]


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        (seam.__file__, True),
        ("/home/attnscope/tests/helpers/pretend.py", False),  # a clone is called so, too
        (torch.__file__, False),
        (transformers.modeling_utils.__file__, False),
    ],
)
def test_a_wait_is_the_package_s_where_its_own_code_asked(file: str, counts: bool) -> None:
    seen = Seen()
    exec(compile("seen.wait('item')", file, "exec"), {"seen": seen})
    assert bool(seen.waits) == counts


LONG = 300  # tokens; a block of memory is large from one head's N x N numbers on
LARGE_AT_ONCE = {"eager": 3, "fused": 0}  # that live at once, however many layers there are


def large_blocks(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, engine: str) -> int:
    """How many blocks as large as N x N live at once, where tiles and blocks of rows are smaller than that."""
    smaller = int(1.9 * LONG**2)  # where a tile is sorted, places take twice the bytes
    monkeypatch.setitem(TILE_BYTES, "cuda", smaller)
    for name in ("BLOCK_BYTES", "CUDA_BLOCK_BYTES"):
        monkeypatch.setattr(spec, name, smaller)
    prompt = from_ids(demo.tokenizer, [5 + place % 90 for place in range(LONG)])
    with pretend() as seen:
        layers = {} if engine == "eager" else {"num_hidden_layers": 2}  # of which none may have one
        loaded = placed(demo.tokenizer, "llama", 1, torch.float32, **layers)
        seen.large = 4 * LONG**2
        observe(loaded, [prompt], Request(relations=True), engine=ENGINES[engine])
    return seen.most


@pytest.mark.parametrize("engine", LARGE_AT_ONCE)
def test_no_more_of_n_by_n_lives_than_one_layers_own(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    most = large_blocks(demo, monkeypatch, engine)
    assert most <= LARGE_AT_ONCE[engine]
    assert (most > 0) == (engine == "eager")


def test_matrices_that_are_kept_from_layer_to_layer_are_found(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, keep = [], heads.HeadScores.collect
    monkeypatch.setattr(
        heads.HeadScores, "collect", lambda self, layer, answers: kept.append(layer.P) or keep(self, layer, answers)
    )
    assert large_blocks(demo, monkeypatch, "eager") > LARGE_AT_ONCE["eager"]


def test_an_item_per_head_is_found(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = heads.TopKey.collect

    def per_head(self: Any, layer: Any, answers: Any) -> Any:
        [asked] = self.questions(layer)
        [answers[asked][:, head].max().item() for head in range(layer.P.heads)]
        return keep(self, layer, answers)

    monkeypatch.setattr(heads.TopKey, "collect", _of_the_package(per_head))
    assert waits(demo.tokenizer, "fused") > WAITS_PER_LAYER["fused"]


def _of_the_package(function: Any) -> Any:
    """The function as if it stood in the package, where waits are counted."""
    return FunctionType(
        function.__code__.replace(co_filename=heads.__file__), globals(), None, None, function.__closure__
    )


def test_a_mask_made_on_the_host_is_found(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = seam._Listener._visibility

    def on_the_host(self: Any, module: Any, given: Any) -> Any:
        mask = made(self, module, given).rows(0, given["query"].shape[2])
        return Visibility(*mask.shape[-2:], torch.ones(mask.shape, dtype=torch.bool).tril())

    monkeypatch.setattr(seam._Listener, "_visibility", on_the_host)
    with pytest.raises(MixedDevicesError):
        run_all(demo, "llama", torch.bfloat16, 1, {"capture": capture("groups", "fused")})


def test_a_tensor_on_the_first_layers_device_is_found(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend():
        monkeypatch.setattr(Texts, "to", lambda self, device: _moved(self, torch.device("cuda:0")))
        loaded = placed(demo.tokenizer, "llama", 2, torch.bfloat16)
        with pytest.raises(MixedDevicesError):
            capture("groups", "fused")(loaded)


_moved = Texts.to


def test_gradients_are_those_of_the_numbers_that_are_held() -> None:
    """Through a view that is written to, an index, a fused kernel and another device."""

    def loss(x_ND: torch.Tensor, elsewhere: str) -> torch.Tensor:
        written = x_ND.new_zeros(6, 8)
        written[1:5] = x_ND.sigmoid()
        taken = written[torch.tensor([0, 2, 2, 4])].to(elsewhere).add_(1)
        return nn.functional.scaled_dot_product_attention(*[taken[None]] * 3).square().sum()

    x_ND = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    [expected] = torch.autograd.grad(loss(x_ND, "cpu"), [x_ND])
    with pretend():
        there = Pretended(x_ND, "cuda:0")
        [found] = torch.autograd.grad(loss(there, "cuda:1"), [there])
        assert str(found.device) == "cuda:0"
    torch.testing.assert_close(found.held, expected, rtol=0, atol=0)
    assert expected.any(1).tolist() == [False, True, False, True]


def test_what_cuda_refuses_is_refused() -> None:
    with pretend():
        a, b, here = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
        for mix in (lambda: a + b, lambda: a @ here, lambda: torch.cat([a, b]), lambda: a[b.long()]):
            with pytest.raises(MixedDevicesError):
                mix()
        with pytest.raises(TypeError, match="numpy"):
            a.numpy()
        assert (a + torch.tensor(1.0)).device == a.device
        assert a[torch.tensor([0, 1])].cpu().tolist() == [1, 1]
