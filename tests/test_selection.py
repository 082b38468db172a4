"""The selection grammar."""

import copy
from typing import Any

import pytest

from attnscope.errors import UsageError
from attnscope.model.selection import LINEAR, StackLayer, as_ranges, everything, pairs, select, select_stacks
from attnscope.utils.display import head_name

MODEL = {0: 4, 1: 4, 2: 4, 3: 4}
HYBRID = {1: 4, 3: 8}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("3", {3: (0, 1, 2, 3)}),
        ("3.2", {3: (2,)}),
        ("L3H2", {3: (2,)}),
        ("l3h2", {3: (2,)}),
        ("L3", {3: (0, 1, 2, 3)}),
        ("0-1.*", {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}),
        ("1-2.1-2", {1: (1, 2), 2: (1, 2)}),
        ("last", {3: (0, 1, 2, 3)}),
        ("last.last", {3: (3,)}),
        ("L-1", {3: (0, 1, 2, 3)}),
        ("l-4h-2", {0: (2,)}),
        ("*.H-1", {0: (3,), 1: (3,), 2: (3,), 3: (3,)}),
        ("*.0", {0: (0,), 1: (0,), 2: (0,), 3: (0,)}),
        ("2.1, 0.3 ,2.0", {0: (3,), 2: (0, 1)}),
        ("[[2,2],[3,0]]", {2: (2,), 3: (0,)}),  # Whisper's alignment_heads
        ("[[2, 2]]", {2: (2,)}),
        ("(3,1)", {3: (1,)}),
        ("[(3, 1), (0, 2)]", {0: (2,), 3: (1,)}),
        ("(3,1),0", {0: (0, 1, 2, 3), 3: (1,)}),
        ("a3.1,a0.h2", {0: (2,), 3: (1,)}),
        ('["L3H1", "0.2"]', {0: (2,), 3: (1,)}),
        ("0-1,2-3", {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0, 1, 2, 3), 3: (0, 1, 2, 3)}),
    ],
)
def test_what_an_expression_names(expression: str, expected: dict) -> None:
    assert select(expression, MODEL) == expected


def test_layers_of_different_width() -> None:
    assert select("*.5", HYBRID) == {3: (5,)}
    assert select("last", HYBRID) == select("L-1", HYBRID) == {3: tuple(range(8))}
    assert select("*.H-1", HYBRID) == {1: (3,), 3: (7,)}


@pytest.mark.parametrize(
    ("expression", "layers", "message"),
    [
        ("", MODEL, "cannot read the selection ''"),
        ("1,,2", MODEL, "cannot read the selection ''"),
        ("first", MODEL, "cannot read the selection 'first'; write `0` for the first layer"),
        ("all", MODEL, "cannot read the selection 'all'; write `.` for all heads"),
        ("0,H1", MODEL, r"cannot read the selection 'H1'; write `.\.1` for that head of every layer"),
        ("layer 1", MODEL, "cannot read the selection 'layer 1'; write `1` for all heads of a layer"),
        ("L1H0-L1H2", MODEL, "cannot read the selection 'L1H0-L1H2'; write `1.0-2` for these heads of a layer"),
        ("1/2", MODEL, "cannot read the selection '1/2'; write `1.2` for a head of a layer"),
        ("1.2.3", MODEL, "cannot read"),
        ("-1", MODEL, "cannot read"),
        ("0.-1", MODEL, "cannot read"),
        ("L-5", MODEL, "'L-5' names layer -5, but this model has 4 layers; -1 is the last"),
        ("L0H-9", MODEL, "'L0H-9' names head -9, but layer 0 has 4 heads; -1 is the last"),
        ("4", MODEL, "layer 4, but this model has layers 0 to 3; counting starts at 0"),
        ("1.4", MODEL, "head 4, but layer 1 has heads 0 to 3"),
        ("*.9", MODEL, "head 9"),
        ("3-1", MODEL, "runs backwards; write 1-3, or 3.1 for one head"),
        ("3-1.*", MODEL, "runs backwards; write 1-3$"),
        ("0-2,1-3", MODEL, "0-2 and 1-3 are layers, .*; write heads 0.2,1.3, or"),  # as Retrieval_Head lists heads
        ("2-3,0-1", MODEL, "2-3 and 0-1 are layers, .*; write heads 2.3,0.1, or"),
        ("[3,1]", MODEL, r"\[3,1\] may be one head or two layers; write 3.1 or 3,1"),
        ("[[3,1]", MODEL, "cannot read"),
        ("a3", MODEL, "cannot read"),
        ("0-99999999999", MODEL, "longer than any model"),
        ("0", HYBRID, "layer 0, which has no attention over the text; layers with attention: 1, 3"),
        ("0.1", {1: 4, 2: 4}, "layer 0, which has no attention over the text; layers with attention: 1 to 2"),
        ("4", HYBRID, "layer 4, but this model has layers with attention 1, 3"),
    ],
)
def test_what_cannot_be_meant(expression: str, layers: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        select(expression, layers)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("linear.3.2", "'linear.3.2' names layer 3, but this model has linear layers 0, 4; counting starts at 0"),
        ("linear.9", "'linear.9' names layer 9, but this model has linear layers 0, 4; counting starts at 0"),
        ("linear.L-3", "'linear.L-3' names layer -3, but this model has 2 linear layers; -1 is the last of them"),
        ("linear.0.9", "'linear.0.9' names head 9, but layer 0 has heads 0 to 3; counting starts at 0"),
        ("channels.0", "'channels.0' names layer 0, but this model has one channels layer, 2; counting starts at 0"),
        ("channels.2.5", "'channels.2.5' names head 5, but layer 2 has one head, 0; choose a channel with {channel=5}"),
        (
            "0",
            "'0' names layer 0, which has no attention over the text; layers with attention: 3, 5; its map is linear.0",
        ),
        (
            "2.5",
            "'2.5' names layer 2, which has no attention over the text; "
            "layers with attention: 3, 5; its map is channels.2",
        ),
        ("9", "'9' names layer 9, but this model has layers with attention 3, 5; counting starts at 0"),
    ],
)
def test_a_refusal_names_the_layers_of_the_stack_that_was_named(expression: str, message: str) -> None:
    heads = {"decoder": {3: 4, 5: 4}, "linear": {0: 4, 4: 4}, "channels": {2: 1}}
    with pytest.raises(UsageError) as refused:
        select_stacks(expression, heads, "decoder")
    assert f"{refused.value.message}; {refused.value.hint}" == message


def test_where_channels_are_all_that_a_model_shows_a_head_that_is_not_there_is_one_of_them() -> None:
    with pytest.raises(UsageError, match="head 5, but layer 0 has one head, 0") as refused:
        select_stacks("0.5", {"decoder": {}, "channels": {0: 1}}, "decoder")
    assert refused.value.hint == "choose a channel with {channel=5}"
    with pytest.raises(UsageError, match="has one head, 0") as refused:  # its channels are not in a dataset
        select_stacks("0.5", {"channels": {0: 1}}, "channels", of="this dataset")
    assert refused.value.hint == "counting starts at 0"


@pytest.mark.parametrize("none", [3, (2, 1), [[2, 1]]])
def test_heads_that_are_no_text_are_refused(none: Any) -> None:
    with pytest.raises(UsageError, match="expected heads as a text, got"):
        select_stacks(none, {"decoder": {0: 2}}, "decoder")


def test_a_layer_of_another_stack_is_not_the_layer_of_its_number() -> None:
    linear = StackLayer(3, LINEAR)
    assert linear != 3
    assert 3 not in (linear,)
    assert linear not in {3: 0}
    assert sorted([4, linear, 3, 2]) == [2, 3, linear, 4]
    assert sorted([(linear, 0), (3, 1)]) == [(3, 1), (linear, 0)]
    assert int(linear) == 3
    assert {linear, 3} == {3, copy.deepcopy(linear)}
    assert copy.deepcopy(linear).stack == LINEAR
    assert head_name(linear, 1) == "linear L3H1"
    assert linear != "linear 3"


def test_everything_and_pairs() -> None:
    assert pairs(everything({0: 2, 2: 1})) == [(0, 0), (0, 1), (2, 0)]


def test_numbers_are_spelled_as_they_are_selected() -> None:
    numbers = [0, 1, 2, 5, 7, 8]
    assert as_ranges(numbers) == "0-2,5,7-8"
    assert sorted(select(as_ranges(numbers), dict.fromkeys(range(9), 1))) == numbers
