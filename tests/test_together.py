"""Layers of a short text are asked together: what is kept is what each layer would have given alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.overrides import TorchFunctionMode

from attnscope.api.capture import capture, load
from attnscope.model.loaded import LoadedModel
from attnscope.observe import collectors
from attnscope.observe.collect import observe
from attnscope.observe.collectors.entries import TopKeys
from attnscope.observe.observation import Observation
from attnscope.observe.records import LayerMaps
from attnscope.observe.request import Request, View

TEXT = "the financial bank is located on river bank"
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    "kv heads": {"request": Request(view=View(by_kv=True), relations=True, maps="kept", weights=True)},
    "some heads": {"request": Request(relations=True, weights=True), "select": "1.2,2.0-3,3.5"},
    "some kv heads": {"request": Request(view=View(by_kv=True), relations=True), "select": "0.1,2.4"},
    "scores": {"request": Request(view=View(weights="scores"), relations=True, maps="kept")},
    "values": {"request": Request(view=View(weights="value"), relations=True)},
    "words": {"request": Request(relations=True, group="words")},
    "tokens": {"query": "last", "key": "bank"},
    "maps of some heads": {"request": Request(maps="kept", per_token=True), "select": "1.2,2.0-3,3.5"},
    "binned maps": {"request": Request(maps="kept", map_side=4, split_sink=True, per_token=True)},
    "spans": {"request": Request(spans=("bank", "river")), "select": "0.1,2.4"},
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("demo", device="cpu")


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no layer waits for another."""
    monkeypatch.setattr(collectors, "TOGETHER_BYTES", 0)


def same(found: Observation, expected: Observation) -> None:
    assert found.table().schema == expected.table().schema
    for name in found.table().column_names:
        ours, theirs = (one.table()[name] for one in (found, expected))
        if pa.types.is_floating(ours.type):
            np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert ours.to_pylist() == theirs.to_pylist(), name
    np.testing.assert_allclose(found.received, expected.received, rtol=1e-5)
    assert (found.support, found.kv_of) == (expected.support, expected.kv_of)
    for key, one in (found.kept_keys or {}).items():
        assert expected.kept_keys is not None
        torch.testing.assert_close(one.weight, expected.kept_keys[key].weight, equal_nan=True)
        assert torch.equal(one.key[~one.weight.isnan()], expected.kept_keys[key].key[~one.weight.isnan()])
    for name in ("maps", "per_token", "spans", "weights"):
        ours, theirs = (list(leaves(one.kept.get(name))) for one in (found, expected))
        assert [type(leaf) for leaf in ours] == [type(leaf) for leaf in theirs], name
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6, err_msg=name)


def leaves(kept: Any) -> Iterator[Any]:
    """The numbers and arrays that something consists of."""
    if isinstance(kept, Mapping):
        kept = [*kept.values()]
    if isinstance(kept, LayerMaps):
        kept = [kept.values, kept.heads, kept.key0]
    if isinstance(kept, list | tuple):
        for part in kept:
            yield from leaves(part)
    elif kept is not None:
        yield kept


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_layers_asked_together_say_what_each_says_alone(
    model: LoadedModel, asked: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = capture(model, TEXT, **asked)
    alone(monkeypatch)
    same(found, capture(model, TEXT, **asked))


def test_heads_of_another_layer_would_be_seen(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison fails where the parts of what is kept of a block are given to the wrong layers."""
    expected = capture(model, TEXT)
    part = TopKeys.part
    monkeypatch.setattr(TopKeys, "part", lambda keys, kept, places, heads: part(keys, kept, slice(0, 6), heads))
    with pytest.raises(AssertionError):
        same(capture(model, TEXT), expected)


@pytest.mark.parametrize("bytes_", [0, 6_000, 2**20])
def test_how_many_layers_are_asked_at_once(model: LoadedModel, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()
    asked = collectors.collect_together
    monkeypatch.setattr(collectors, "TOGETHER_BYTES", bytes_)
    monkeypatch.setattr(
        collectors,
        "collect_together",
        lambda collectors, layers: counts.append(len(layers)) or asked(collectors, layers),
    )
    capture(model, TEXT)  # 4 layers of 6 heads over 9 tokens: 1,944 bytes each
    assert counts == {0: [], 6_000: [3, 1], 2**20: [4]}[bytes_]


def test_autocast_of_the_caller_rounds_nothing(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = capture(model, TEXT)
        alone(monkeypatch)
        same(found, capture(model, TEXT))


@pytest.mark.parametrize("bytes_", [0, 2**20])
def test_fused_reads_rows_of_a_short_text(model: LoadedModel, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "TOGETHER_BYTES", bytes_)
    found = capture(model, TEXT, engine="fused")
    assert {who for ways in found.report.answered_by.values() for who in ways} == {"rows"}
    assert {"Entropy", "TopK", "Received"} <= found.report.answered_by.keys()
    assert found.failures == []
    same(replace(found, kept={}), replace(capture(model, TEXT, engine="tiles"), kept={}))


def test_a_list_of_texts_is_read_by_the_kernel_for_what_the_whole_list_takes(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT, TEXT, "the bank", "the bank"]
    by_eager = capture(model, texts, request=Request(relations=True))
    scores = sum(len(seen.prompt) ** 2 for seen in by_eager) * len(by_eager[0].heads)
    monkeypatch.setattr("attnscope.api.capture.FASTER_SCORES", scores)
    monkeypatch.setattr("attnscope.api.capture.batch_limit", lambda loaded: 8)  # each text with its like
    by_kernel = capture(model, texts, request=Request(relations=True))
    assert [seen.facts["engine"] for seen in by_eager] == ["eager"] * 4
    assert [seen.facts["engine"] for seen in by_kernel] == ["numba"] * 4
    for ours, theirs in zip(by_kernel, by_eager, strict=True):
        columns = (seen.table()["focus"].to_numpy() for seen in (ours, theirs))
        np.testing.assert_allclose(*columns, atol=1e-5)
    monkeypatch.setattr("attnscope.api.capture.FASTER_SCORES", scores + 1)
    assert {seen.facts["engine"] for seen in capture(model, texts)} == {"eager"}


class Listening(TorchFunctionMode):
    """Hears what a thread calls, and changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_passes_of_a_list_run_side_by_side_unless_somebody_would_see_a_copy(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, request, used = [TEXT, TEXT, "the bank", "the bank"], Request(relations=True), set()
    monkeypatch.setattr("attnscope.api.capture.FASTER_SCORES", 0)
    monkeypatch.setattr("attnscope.api.capture.batch_limit", lambda loaded: 8)
    monkeypatch.setattr("attnscope.corpus.worker.cores", lambda: 2)
    monkeypatch.setattr(
        "attnscope.api.capture.observe",
        lambda loaded, *args, **more: (
            used.add((id(loaded.model), threading.get_ident())) or observe(loaded, *args, **more)
        ),
    )
    beside = capture(model, texts, request=request)
    assert len(used) == 2
    assert id(model.model) in {copied for copied, _ in used}
    # A hook may keep what it sees in an object of its own; casts and modes are those of the caller's thread.
    here = {(id(model.model), threading.get_ident())}
    hook = model.model.register_forward_pre_hook(lambda module, args: None)
    for own, where in (
        (model, nullcontext()),
        (replace(model, options=None), nullcontext()),
        (model, torch.autocast("cpu", torch.bfloat16)),
        (model, Listening()),
    ):
        used.clear()
        with where:
            seen = capture(own, texts, request=request)
        assert used == here
        if not isinstance(where, torch.autocast):
            for ours, theirs in zip(beside, seen, strict=True):
                same(ours, theirs)
        hook.remove()
