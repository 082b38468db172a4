"""Records on the wire come back as they were, and what is none is refused in one way."""

import json
import random
import socket

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.inputs.tokens import TokenSelection
from attnscope.model.selection import LINEAR, StackLayer
from attnscope.observe.atlas import HeadNames
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import run_and_report
from attnscope.serve import wire
from attnscope.serve.page import MOST_PICTURE, LiveQuestion
from attnscope.serve.records import HOMES, packed, unpacked
from attnscope.serve.wire import UnansweredError, WireError
from attnscope.serve.worker import Link
from helpers.command_line import SENTENCE


@pytest.fixture(scope="module")
def seen(demo):
    request = attnscope.Request(
        relations=True, maps="kept", weights=True, operands=True, per_token=True, rollout="tokens", query="last"
    )
    return attnscope.capture(demo, SENTENCE, request=request, generate=3)


def again(value, tensor=torch.from_numpy):
    """A value as it comes out at the other end of a socket."""
    said, blobs = packed(value)
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)
        wire.send(left, said, blobs)
        frame = wire.receive(right)
    return unpacked(frame.header, frame.blobs, tensor)


def test_a_linear_head_is_no_head_of_attention_at_the_other_end():
    names = HeadNames({(3, 0): ("sink",), (StackLayer(3, LINEAR), 0): ("self",)}, {"model": {"name": "hybrid"}})
    assert again(names).roles == names.roles


def test_an_observation_comes_back_as_it_was(seen):
    found = again(attnscope.Observation(**{name: getattr(seen, name) for name in seen.__dataclass_fields__}))
    assert type(found) is attnscope.Observation
    assert found.queries == seen.queries
    assert found.keys is found.queries
    assert found.table().equals(seen.table())
    assert found.relations().equals(seen.relations())
    assert found.key_table().equals(seen.key_table())
    assert found.rollout_table().equals(seen.rollout_table())
    assert found.facts == json.loads(json.dumps(seen.facts))
    assert isinstance(found.atlas, HeadNames)
    for key, weights in seen.weights.items():
        torch.testing.assert_close(found.weights[key], weights, rtol=0, atol=0)
        torch.testing.assert_close(found.operands[key].q_BHTD, seen.operands[key].q_BHTD, rtol=0, atol=0)
        np.testing.assert_array_equal(found.maps.values[key], seen.maps.values[key])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -0.5,
        float("inf"),
        "a\ud800" * 0 + "é\n",
        [1, [2, (3, {"a": None, (1, 2): [4]})]],
        range(3, 9, 2),
        np.array([True, None, False], object),
        np.array(["a", "bcd"]),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=np.int8).reshape(2, 3).T,
    ],
)
def test_values_come_back_as_they_were(value):
    found = again(value)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(found, value)
        assert found.dtype == value.dtype
    else:
        assert found == value
        assert type(found) is type(value)


def test_what_is_there_twice_is_sent_once_and_is_one_again():
    prompt = TokenSelection(), tuple(range(1000))
    value = {"first": prompt, "second": [prompt, (*prompt,)]}
    found = again(value)
    assert found == value
    assert found["second"][0] is found["first"]
    assert found["second"][1][1] is found["first"][1]
    assert len(json.dumps(packed(value)[0])) < 1.1 * len(json.dumps(packed(prompt)[0]))


def test_a_tensor_is_an_array_where_nobody_says_else():
    assert type(again(torch.ones(2), lambda array: array)) is np.ndarray


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", np.zeros(1, "datetime64[s]"), lambda: 0])
def test_what_has_no_form_is_not_sent(value):
    with pytest.raises(TypeError, match="has no form on the wire"):
        packed(value)


@pytest.mark.parametrize(
    "said",
    [
        {"~": "os.system", "fields": {}},
        {"~": "Observation", "fields": {}},
        {"~": "Prompt", "fields": {"__class__": 1}},
        {"~": "array", "dtype": "O", "shape": [1], "at": 0},
        {"~": "array", "dtype": "<f4", "shape": [2], "at": 0},
        {"~": "array", "dtype": "<f4", "shape": [-1], "at": 0},
        {"~": "array", "dtype": "<f4", "shape": [2**40], "at": 0},
        {"~": "array", "dtype": "<f4", "shape": [1], "at": 9},
        {"~": "range", "of": [0, 1, 0]},
        {"~": "mapping", "of": [[[1], 2]]},
        {"~": []},
        {"~": "again", "of": 0},
        {"~": "again", "of": "0"},
        {},
    ],
)
def test_what_is_no_record_is_refused(said):
    with pytest.raises(WireError):
        unpacked(said, [b"1234"])


def test_any_damage_is_refused_or_harmless(seen):
    said, blobs = packed(seen.columns)
    text, rng = json.dumps(said), random.Random(0)
    refused = 0
    for _ in range(500):
        at = rng.randrange(len(text))
        damaged = text[:at] + rng.choice(('"', "[", "]", "9", "null", "~", "")) + text[at + rng.randint(0, 3) :]
        try:
            unpacked(json.loads(damaged), [bytes(one) for one in blobs])
        except (WireError, json.JSONDecodeError):
            refused += 1
    assert refused > 250


def test_every_record_is_where_the_list_says_and_needs_no_torch():
    from attnscope.serve.records import type_of

    assert all(type_of(name).__name__ == name for name in HOMES)


def test_an_engine_that_free_memory_chose_is_for_a_process_of_its_own(demo, monkeypatch):
    found = []
    run_and_report(demo, CaptureSpec(SENTENCE), check=found.append)
    monkeypatch.setattr("attnscope.observe.engine_choice.SURELY_FITS", 0)
    monkeypatch.setattr("attnscope.observe.engine_choice.free_memory", lambda device: 1)
    run_and_report(demo, CaptureSpec(SENTENCE), check=found.append)
    assert [one.by_memory for one in found] == [False, True]
    with pytest.raises(UnansweredError, match="depends on the memory that is free"):
        Link(None).prepared(found[1])


@pytest.mark.parametrize(("over", "taken"), [(0, True), (1, False)])
def test_a_picture_of_a_question_may_be_as_large_as_is_said(over, taken):
    picture = "A" * (MOST_PICTURE * 4 // 3 + 4 + over)
    if taken:
        assert LiveQuestion("view", "demo", "x", picture=picture).picture == picture
        return
    with pytest.raises(InputError):
        LiveQuestion("view", "demo", "x", picture=picture)
