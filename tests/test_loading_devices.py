"""Weights go straight to the device, and what happens where it has no room, on devices that are pretended."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.attention import tiles
from attnscope.attention.tiling import TILE_BYTES
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.utils.memory import human_bytes
from helpers.command_line import SENTENCE, call
from helpers.pretend import Pretended, place, pretend

OUT_OF_MEMORY = 5


@pytest.fixture(autouse=True)
def cuda(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two devices; the demo model was loaded before, and its code with it.

    The library's own loading threads would not know of the devices.
    """
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with pretend():
        yield


@contextmanager
def host_peak() -> Iterator[list[int]]:
    """[the most bytes of new tensors that the host held whenever one went to a device]."""
    peak, make = [0], Pretended.__new__

    def watched(cls: Any, held: Tensor, *rest: Any, **named: Any) -> Any:
        made = make(cls, held, *rest, **named)
        new = [one for one in gc.get_objects() if isinstance(one, Tensor)]
        away = {id(one.held) for one in new if type(one) is Pretended and hasattr(one, "held")} | {id(held)}
        there = [one for one in new if one.device.type == "cpu" and id(one) not in away]
        peak[0] = max(peak[0], sum(one.numel() * one.element_size() for one in there))
        return made

    gc.collect()
    gc.freeze()  # what was there before is not looked at, and stays frozen as conftest has it
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pretended, "__new__", watched)
        yield peak


@pytest.fixture
def largest(demo: LoadedModel) -> int:
    """Bytes of the demo model's largest weight."""
    return max(4 * one.numel() for one in demo.model.parameters())


@pytest.mark.parametrize("how", [{"device": "cuda:1"}, {"device_map": "auto"}], ids=str)
def test_no_more_than_a_weight_is_on_the_host_at_once(how: dict[str, Any], largest: int) -> None:
    with host_peak() as peak:
        loaded = load(LoadOptions(**how))
    assert peak[0] <= 2 * largest, "as the file has it, and on its way"
    places = {str(one.device) for one in (*loaded.model.parameters(), *loaded.model.buffers())}
    assert places == ({"cuda:1"} if "device" in how else {"cuda:0", "cuda:1"})


def test_a_copy_on_the_host_first_is_found(largest: int) -> None:
    with host_peak() as peak:
        place(load(LoadOptions(device="cpu")).model, {"model": "cuda:0", "lm_head": "cuda:0"})
    assert peak[0] > 3 * largest


def test_a_model_on_two_devices_gives_the_numbers_of_one_on_the_cpu(demo: LoadedModel) -> None:
    there, away = (
        attnscope.capture(one, SENTENCE) for one in (demo, load(LoadOptions(device_map="auto", dtype="float32")))
    )
    for name, score in there.columns.scores.items():
        found = away.columns.scores[name].value
        torch.testing.assert_close(found, score.value, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("where", [{"device": "cuda:1"}, {"device_map": "auto"}, {"device": "cpu"}], ids=str)
def test_a_quantized_model_is_loaded_as_any_other(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call, but for what bitsandbytes is told."""
    asked: list[dict[str, Any]] = []
    original = AutoModelForCausalLM.from_pretrained
    told = SimpleNamespace(load_in_8bit=True)

    def plain(*args: Any, quantization_config: Any, **named: Any) -> Any:
        asked.append({**named, "quantization_config": quantization_config, "config": None})
        return original(*args, **named)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", plain)
    find = importlib.util.find_spec  # what else is asked for is there or not: libraries keep the answer
    there = {"bitsandbytes"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: object() if name in there else find(name, *of))
    monkeypatch.setattr("transformers.BitsAndBytesConfig", lambda load_in_8bit: told)
    quantized, full = (load(LoadOptions(quantize=how, **where)) for how in ("8bit", None))
    assert [one.pop("quantization_config") for one in asked] == [told, None]
    assert asked[0] == asked[1]
    assert quantized.geometry == full.geometry


# Where there is no room


def out_of_memory(*args: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


def allocator_has_none(*args: Any, **named: Any) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.parametrize("fault", [out_of_memory, allocator_has_none])
@pytest.mark.parametrize(
    ("options", "where", "takes", "hint"),
    [
        (
            "--device cuda:0 --dtype float32",
            "cuda:0",
            4,
            "--device-map auto or --quantize 4bit or --dtype bfloat16",
        ),
        ("--set device_map=auto --dtype bfloat16", "cuda", 2, "--quantize 4bit"),
    ],
)
def test_weights_that_do_not_fit_are_told_with_what_they_take(
    demo: LoadedModel, fault: Callable[..., Any], options: str, where: str, takes: int, hint: str
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", fault)
        done = call("heads", SENTENCE, *options.split())
    assert (done.code, done.out) == (OUT_OF_MEMORY, b"")
    needed = human_bytes(takes * (demo.geometry.parameters or 0))
    said = f"demo does not fit on {where}: its weights take {needed}, and 80.0 GiB was free; use {hint}"
    assert said in " ".join(done.err.split())


def test_tiles_become_smaller_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, taken = load(LoadOptions(device="cuda:0", dtype="float32")), list[int]()
    expected, make = attnscope.capture(loaded, SENTENCE, engine="fused"), tiles.Tiling.tile

    def tight(tiling: tiles.Tiling, *rest: Any) -> Any:
        taken.append(tiling.tile_bytes)
        return make(tiling, *rest) if tiling.tile_bytes <= 2**20 else out_of_memory()

    monkeypatch.setattr(tiles.Tiling, "tile", tight)
    found = attnscope.capture(loaded, SENTENCE, engine="fused")
    assert taken[0] == TILE_BYTES["cuda"]
    assert min(taken) == 2**20
    for name, score in expected.columns.scores.items():
        torch.testing.assert_close(found.columns.scores[name].value, score.value, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_text_that_does_not_fit_ends_with_what_fits(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "eager":
        monkeypatch.setattr(torch.nn.functional, "softmax", out_of_memory)
    else:
        monkeypatch.setattr(tiles.Tiling, "tile", out_of_memory)
    done = call("heads", SENTENCE, "--device", "cuda:0", "--engine", engine)
    said = " ".join(done.err.split())
    assert (done.code, done.out) == (OUT_OF_MEMORY, b"")
    assert ("4 tokens fit" if engine == "eager" else "cuda:0 has 80.0 GiB left") in said
