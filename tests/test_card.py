"""What attnscope does on a card alone, on one that is pretended: masks by place, larger blocks, rows alone, memory."""

from __future__ import annotations

import logging
import subprocess
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from attnscope import Request
from attnscope.attention import rows
from attnscope.attention.kernels_cuda import operator as driver
from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import Entropy, GroupMass, MaxWeight, Strongest, TopK
from attnscope.attention.spec import AttentionSpec, Visibility, _whole, by_place, row_blocks
from attnscope.attention.tiles import Tiling
from attnscope.attention.tiling import TiledAttention
from attnscope.certificate.check import check_parity
from attnscope.hooks.calls import sdpa_kernel
from attnscope.hooks.engines import ENGINES, full_precision
from attnscope.hooks.listen import listen
from attnscope.metrics.texts import Texts
from attnscope.model import loading
from attnscope.model.loaded import LoadedModel
from attnscope.model.options import LoadOptions
from attnscope.model.selection import DECODER
from attnscope.observe import engine_choice
from attnscope.observe.collectors.heads import TopRelation
from attnscope.observe.engine_choice import FASTER_TOKENS, Case, automatic, kernel_reads
from attnscope.observe.request import Layer, LayerKey
from attnscope.utils.memory import free_memory
from helpers.parity_models import roused_model
from helpers.pretend import devices_of, place, pretend

CARD = "cuda:0"
PRODUCTS: Any = torch.backends.cuda.matmul


def spec(queries: int = 40, keys: int = 40, device: str = "cpu", **more: Any) -> AttentionSpec:
    numbers = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, heads, n, 8, generator=numbers).to(device) for heads, n in ((4, queries), (2, keys)))
    visible = more.pop("visible", None) or Visibility(queries, keys, device=torch.device(device))
    return AttentionSpec(q, k, k, 0.8, visible, **more)


def masks(device: str = "cpu") -> dict[str, torch.Tensor]:
    seen = Visibility(40, 40, window=7).rows(0, 40).to(device)
    hidden = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"boolean": seen, "additive": hidden}


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_that_says_a_window_is_read_as_one(kind: str) -> None:
    mask = masks()[kind]
    assert by_place(Visibility(40, 40, mask), [7, None]).window == 7
    assert by_place(Visibility(40, 40, mask), [8, None]).mask is mask
    holed = mask.clone()
    holed[..., 20, 15] = holed[..., 0, 1]  # a key that the window has and the mask hides
    assert by_place(Visibility(40, 40, holed), [7]).mask is holed
    more = masks()["additive"]
    more[..., 20, 15] = -0.5  # a bias of positions in it
    assert by_place(Visibility(40, 40, more), [7]).mask is more
    whole = Visibility(40, 40).rows(0, 40)
    assert by_place(Visibility(40, 40, whole), [None]).by_position


def test_a_sliding_window_model_is_read_by_its_window_on_a_card_alone() -> None:
    """The numbers are those of the masks; a CPU reads the masks as ever."""
    model = roused_model("mistral")
    ids_BT = torch.arange(2, 42)[None]
    answers: dict[str, list[Any]] = {"cpu": [], "card": []}

    def read(where: str, ids: torch.Tensor) -> list[int | None]:
        seen = []
        listen(
            *(model, ids, lambda call: (seen.append(call.visible), answers[where].append(call.P.entropy().cpu()))),
            engine=ENGINES["tiles"],
        )
        return [one.window if one.by_position else -1 for one in seen]

    assert set(read("cpu", ids_BT)) == {-1}
    with pretend():
        place(model, devices_of(model, 1))
        assert set(read("card", ids_BT.to(CARD))) == {model.config.sliding_window}
    assert_close(answers["card"], answers["cpu"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"bias": True}, *({"mask": kind} for kind in masks())])
def test_the_logits_of_one_query_a_head_are_those_of_its_row(options: dict[str, Any]) -> None:
    options = dict(options)
    if kind := options.pop("mask", None):
        options["visible"] = Visibility(40, 40, masks()[kind])
    if options.pop("bias", None):
        options["bias"] = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(1))
    call, query_BH = spec(**options), torch.tensor([[0, 3, 39, 20], [1, 39, 17, 17]])
    expected = [[call.logits(at, at + 1)[text, head, 0] for head, at in enumerate(of)] for text, of in
                enumerate(query_BH.tolist())]  # fmt: skip
    assert_close(call.logits_of(query_BH), torch.stack([torch.stack(row) for row in expected]))


@pytest.mark.parametrize("key_zero", [False, True])
def test_the_strongest_relation_without_a_walk_for_keys_is_the_same(key_zero: bool) -> None:
    """Where the largest of every row is known, its key is looked up in the one row that wins."""
    call, found = spec(), []
    for finds in (False, True):
        P = DenseAttention(call.weights(0, 40), call.visible, call)
        P.finds_largest = finds
        texts = Texts(torch.zeros(2, 40, dtype=torch.long), torch.tensor([40, 30]))
        layer, probe = Layer(LayerKey(DECODER, 0), P, 2, texts), TopRelation(key_zero)
        assert isinstance(probe.questions(layer)[0], MaxWeight if finds else TopK)
        found.append(probe.collect(layer, P.together(probe.questions(layer))))
    assert_close(found[1], found[0])


def test_a_row_without_another_key_has_no_largest_beside_key_0() -> None:
    for P in (TiledAttention(spec()), DenseAttention(spec().weights(0, 40), spec().visible)):
        rest = P.ask(MaxWeight(skip_key0=True))
        assert bool(rest[:, :, 0].isnan().all())
        assert_close(rest, P.topk(1, skip_key0=True)[0][..., 0], equal_nan=True)


def asked_rows(call: AttentionSpec) -> Strongest:
    return Strongest(2, (1, 3), ((3, 4, 39), (5,)), (tuple(range(40)),) * 2)


def test_named_rows_are_made_alone_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tile; a CPU reads them from the tiles of the pass, and so does whoever asks for more."""
    expected = TiledAttention(spec()).ask(asked_rows(spec()))
    made: list[tuple[int, int]] = []
    own, weights = Tiling.each, AttentionSpec.weights
    monkeypatch.setattr(Tiling, "each", lambda self, visit: made.append((-1, -1)) or own(self, visit))
    monkeypatch.setattr(AttentionSpec, "weights", lambda self, a, b: made.append((a, b)) or weights(self, a, b))
    with pretend():
        P = TiledAttention(spec(device=CARD))
        found = P.ask(asked_rows(P.spec))
        assert (made, P.answered_by) == ([(3, 6), (39, 40)], {"Strongest": "rows"})
        made.clear()
        P.together([asked_rows(P.spec), Entropy()])
        assert made == [(-1, -1)]
        found = [tuple(part.cpu() for part in text) for text in found]
    assert_close(found, [tuple(text) for text in expected])
    made.clear()
    TiledAttention(spec()).ask(asked_rows(spec()))
    assert made == [(-1, -1)]


def test_blocks_of_rows_are_larger_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is many launches, and so is each piece of it that is sorted."""
    sorted_: list[int] = []
    own = rows._largest
    monkeypatch.setattr(
        rows, "_largest", lambda entries, asked: sorted_.append(entries.shape[2]) or own(entries, asked)
    )
    _whole.cache_clear()
    with pretend():
        many, few = (len(list(row_blocks(8192, 24 * 8192, torch.device(one)))) for one in ("cpu", CARD))
        call = spec(80, 80, CARD)
        DenseAttention(call.weights(0, 80), call.visible, call).topk(2)
    _whole.cache_clear()
    assert (many, few) == (97, 7)
    assert sorted_ == [80]
    sorted_.clear()
    DenseAttention(spec(80, 80).weights(0, 80), spec(80, 80).visible).topk(2)
    assert sorted_ == [32, 32, 16]


def test_what_pytorch_holds_for_the_next_tensors_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend(memory=1000):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 300)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 100)
        assert free_memory(CARD) == 1200


def test_all_devices_of_a_map_are_asked(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.devices == demo.device
    loaded = SimpleNamespace(device="cuda:0", model=SimpleNamespace(hf_device_map={"a": 0, "b": 1, "c": "disk"}))
    assert LoadedModel.devices.fget(loaded) == "cuda:0,cuda:1"  # type: ignore[attr-defined]
    free = {"cuda:0": 5000, "cuda:1": 20}
    with pretend():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[str(device)], 9000))
        assert free_memory("cuda:0,cuda:1") == 20


@pytest.mark.parametrize("name", ["allow_tf32", "fp32_precision"])
def test_no_product_of_a_question_is_rounded_to_tf32(name: str) -> None:
    setattr(PRODUCTS, name, {"allow_tf32": True, "fp32_precision": "tf32"}[name])
    try:
        with full_precision(torch.device("cuda")):
            assert PRODUCTS.fp32_precision == "ieee"
        assert PRODUCTS.fp32_precision == "tf32"
        with full_precision(torch.device("cpu")):
            assert PRODUCTS.fp32_precision == "tf32"
    finally:
        PRODUCTS.allow_tf32 = False


def test_parity_compares_without_tf32(demo: LoadedModel) -> None:
    heard: list[str] = []
    hook = demo.model.model.register_forward_hook(lambda *_: heard.append(PRODUCTS.fp32_precision))
    PRODUCTS.allow_tf32 = True
    try:
        assert check_parity(demo, [1, 2, 3]).holds
    finally:
        PRODUCTS.allow_tf32 = False
        hook.remove()
    assert heard == ["ieee"]


def test_the_kernel_of_a_masked_call_is_asked_for_repeated_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers makes the call; grouped heads with a mask would read as math."""
    asked: list[tuple[int, bool]] = []

    def choice_of(q: Any, k: Any, v: Any, *_: Any, enable_gqa: bool, **__: Any) -> int:
        asked.append((k.shape[1], enable_gqa))
        return 2

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice_of)
    assert sdpa_kernel(spec(visible=Visibility(40, 40, masks()["boolean"]))) == "efficient"
    assert sdpa_kernel(spec()) == "efficient"
    assert asked == [(4, False), (2, True)]


def test_auto_takes_the_kernels_on_a_card_in_half_precision(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(demo.geometry, CARD, "bfloat16", can_fuse=True)
    kept = "eager: fused was not timed on cuda in bfloat16"
    assert automatic(case, FASTER_TOKENS, Request(), fits=True).words == kept
    monkeypatch.setattr(engine_choice, "device_can", lambda device: True)
    assert (
        automatic(case, FASTER_TOKENS, Request(), fits=True).words == "fused: expected to be faster from 1,000 tokens"
    )
    assert automatic(case, FASTER_TOKENS - 1, Request(), fits=True).engine.name == "eager"
    assert automatic(case._replace(dtype="float32"), FASTER_TOKENS, Request(), fits=True).engine.name == "eager"
    loaded: Any = SimpleNamespace(geometry=demo.geometry, device=CARD, dtype="bfloat16", model=demo.model)
    assert not kernel_reads(loaded, Request())  # that of the CPU


def test_groups_that_are_counted_make_nobody_wait() -> None:
    with pretend() as seen:
        groups = torch.tensor([[0, 1, 1, -1]]).to(CARD)
        call = spec(4, 4, CARD)
        P = DenseAttention(call.weights(0, 4)[:1], call.visible, call)
        seen.waits.clear()
        P.ask(GroupMass(groups, groups, (2, 2)))
        assert not seen.waits
        P.ask(GroupMass(groups, groups))
        assert seen.waits


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose Triton cannot build its driver: what the compiler, or the look for it, says."""
    said: dict[str, Any] = {"error": subprocess.CalledProcessError(1, ["gcc"])}

    class Active:
        @property
        def utils(self) -> None:
            raise said["error"]

    monkeypatch.setattr("triton.runtime.driver._active", Active())
    driver.missing.cache_clear()
    yield said
    driver.missing.cache_clear()


def test_what_triton_misses_of_a_machine_is_named(unbuilt: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(driver.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(driver, "python_header", lambda: SimpleNamespace(is_file=lambda: False))
    assert driver.missing() == "needs Python's headers, and there are none: install python3-dev"
    driver.missing.cache_clear()
    monkeypatch.setattr(driver, "python_header", lambda: SimpleNamespace(is_file=lambda: True))
    unbuilt["error"] = AssertionError("libcuda.so cannot found!\nPlease make sure")
    assert driver.missing() == "has no driver here: AssertionError: libcuda.so cannot found!"
    driver.missing.cache_clear()
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    assert driver.missing() == "needs a C compiler, and there is none: install gcc"


def test_a_driver_that_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def old() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).", stacklevel=2
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old)
    with caplog.at_level(logging.WARNING, "attnscope"):
        assert loading.chosen_device(LoadOptions(device="auto")) in ("cpu", "mps")
    assert [one.message for one in caplog.records] == [
        "no CUDA device is used: The NVIDIA driver on your system is too old (found version 11040)"
    ]
