"""Sets of heads: read, cut to kv groups, and random ones beside them; tasks: what counts of a sequence."""

import json
from dataclasses import replace

import numpy as np
import pytest

from attnscope.errors import InputError, UsageError
from attnscope.interventions.spec import HeadSet
from attnscope.model.selection import LINEAR, StackLayer
from attnscope.studies.ablation import HeadSets, copy, targets, texts
from attnscope.studies.ablation_search import controls_of, of_roles, parts, read_sets, selected, whole_groups
from attnscope.studies.atlas import plan

INDUCTION, PREVIOUS = HeadSet("induction", ((3, 0), (3, 1))), HeadSet("previous-token", ((1, 5), (2, 1)))


def test_sets_are_read_as_they_are_written(demo, tmp_path):
    path = tmp_path / "sets.jsonl"
    path.write_text('{"set": "induction", "heads": ["L3H0", "3.1"]}\n\n{"set": "first", "heads": ["0"]}\n')
    induction, first = read_sets(path, demo.geometry)
    assert induction == INDUCTION
    assert (first.name, len(first.heads)) == ("first", 6)
    path.write_text('{"set": "induction", "heads": [[3, 0], "a3.1"]}\n')
    assert read_sets(path, demo.geometry) == [INDUCTION]
    assert selected("L3H0-1", demo.geometry) == HeadSet("L3H0-1", INDUCTION.heads)
    assert selected("@a", demo.geometry, {"a": {3: (0, 1)}}) == HeadSet("@a", INDUCTION.heads)
    with pytest.raises(UsageError, match="names head 9"):
        selected("L3H9", demo.geometry)


def test_heads_of_linear_layers_are_named_with_their_stack_and_have_controls_of_their_own(demo, tmp_path):
    linear = tuple(replace(layer, heads=3) for layer in demo.geometry.layers[2:])  # layers 2 and 3 have both
    hybrid = replace(demo.geometry, views={LINEAR: linear})
    two, three = (StackLayer(index, LINEAR) for index in (2, 3))
    both = selected("linear.3.1,3.1,linear.2", hybrid)
    assert both.heads == ((two, 0), (two, 1), (two, 2), (3, 1), (three, 1))
    assert str(both) == "linear L2H0 linear L2H1 linear L2H2 L3H1 linear L3H1"
    assert selected("*", hybrid).heads == selected("*", demo.geometry).heads  # of attention alone
    path = tmp_path / "sets.jsonl"
    path.write_text('{"set": "mixed", "heads": ["linear L3H1", "L3H1"]}\n')
    assert read_sets(path, hybrid) == [HeadSet("mixed", ((3, 1), (three, 1)))]
    assert [part.name for part in parts(both, hybrid, by_kv=True)[3:]] == ["L3H0 L3H1", "linear L3H1"]

    # A random set has as many heads of attention, and as many of each linear layer.
    drawn = controls_of(read_sets(path, hybrid)[0], [], hybrid, count=100)
    assert {heads.heads for heads in drawn} == {
        ((3, head), (three, other)) for head in range(6) for other in range(3) if (head, other) != (1, 1)
    }
    with pytest.raises(UsageError, match="names linear layers, and a study changes decoder layers"):
        selected("linear.3.1", demo.geometry)
    with pytest.raises(UsageError, match=r"names layer 9.*of linear layers write `linear.0.3`"):
        selected("9.1", hybrid)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("L3H0", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        (r'{"set": "\ud800", "heads": ["L3H0"]}', "line 2 holds half of a surrogate pair"),
        ('["L3H0"]', "line 2 is not a set of heads"),
        ('{"set": "a"}', "line 2 is not a set of heads"),
        ('{"set": "a", "heads": []}', "line 2: the set 'a' has no heads"),
        ('{"set": "a", "heads": ["L9H0"]}', "line 2: 'L9H0' names layer 9"),
        ('{"set": "one", "heads": ["L0H0"]}', "has two sets called 'one'"),
    ],
)
def test_a_line_that_is_no_set_is_named(demo, tmp_path, line, said):
    path = tmp_path / "sets.jsonl"
    path.write_text(f'{{"set": "one", "heads": ["L3H0"]}}\n{line}\n')
    with pytest.raises(InputError) as error:
        read_sets(path, demo.geometry)
    assert said in str(error.value)


def test_roles_are_sets_and_a_role_without_heads_is_none():
    roles = {(3, 1): ("induction", "sink"), (3, 0): ("induction",), (0, 0): ()}
    assert of_roles(roles, ("long-range-copying", "induction")) == [INDUCTION]


def test_heads_that_share_a_kv_head_go_together(demo):
    assert whole_groups(PREVIOUS, demo.geometry).heads == ((1, 4), (1, 5), (2, 0), (2, 1))
    assert [one.name for one in parts(INDUCTION, demo.geometry)] == ["L3H0", "L3H1"]
    assert [one.name for one in parts(INDUCTION, demo.geometry, by_kv=True)] == ["L3H0 L3H1"]


def test_controls_have_as_many_heads_per_layer_and_none_that_is_named(demo):
    named = [INDUCTION, PREVIOUS]
    few = controls_of(INDUCTION, named, demo.geometry)
    assert {one.heads for one in few} == {((3, a), (3, b)) for a in range(2, 6) for b in range(a + 1, 6)}
    assert len(controls_of(PREVIOUS, named, demo.geometry)) == 25
    wide = HeadSet("wide", ((0, 1), (1, 2), (2, 2), (3, 2)))
    many = controls_of(wide, [*named, wide], demo.geometry)
    assert len({one.heads for one in many}) == len(many) == 100
    assert all(one.per_layer == wide.per_layer for one in many)
    assert not {head for one in many for head in one.heads} & {head for one in (*named, wide) for head in one.heads}
    assert many == controls_of(wide, [*named, wide], demo.geometry)
    assert many != controls_of(wide, [*named, wide], demo.geometry, seed=1)
    groups = controls_of(whole_groups(PREVIOUS, demo.geometry), named, demo.geometry, by_kv=True)
    assert {one.heads for one in groups} == {((1, a), (1, a + 1), (2, b), (2, b + 1)) for a in (0, 2) for b in (2, 4)}
    everything = HeadSet("all", tuple((3, head) for head in range(6)))
    assert controls_of(everything, [everything], demo.geometry) == []


def test_controls_of_all_heads_are_every_choice_but_the_set_itself(demo):
    """Where no head is left out: enumerated, and one fewer asked for than there are, so that they are drawn."""
    every = {((3, a), (3, b)) for a in range(6) for b in range(a + 1, 6)} - {INDUCTION.heads}
    assert {one.heads for one in controls_of(INDUCTION, (), demo.geometry)} == every
    drawn = controls_of(INDUCTION, (), demo.geometry, count=14)
    assert {one.heads for one in drawn} == every
    asked = [HeadSets.of([INDUCTION, PREVIOUS], demo.geometry, random=5, controls=one) for one in ("unnamed", "all")]
    named = {*INDUCTION.heads, *PREVIOUS.heads}
    taken = [{head for sets in one.random.values() for other in sets for head in other.heads} for one in asked]
    assert [bool(heads & named) for heads in taken] == [False, True]


def test_copy_counts_what_can_be_read_off_the_first_half(demo):
    task = copy(demo, sequences=3)
    assert task.facts["period"] == 50
    for ids, rows in zip(task.ids, task.rows, strict=True):
        assert ids[1:51] == ids[51:]
        assert rows == tuple(range(51, 100))
        assert all(ids[row + 1] == ids[row - 49] for row in rows)
    assert task.sha256 == copy(demo, sequences=3).sha256 != copy(demo, sequences=3, seed=1).sha256


def test_roles_are_ablated_on_other_sequences_than_those_that_named_them(demo):
    """Of the same seed; those that named them are still repeated tokens of the same pool and length."""
    [probed] = [one for one in plan(demo, sequences=3).trials if one.name == "repeated p50"]
    named_on = {tuple(ids) for ids in probed.arms["repeated"].ids_ST.tolist()}
    task = copy(demo, sequences=3)
    assert {len(ids) for ids in named_on} == set(task.lengths)
    assert not named_on & set(task.ids)


def test_texts_count_every_token_but_the_first(demo):
    task = texts(demo, ["the old boat lies still", "the river"], 4)
    assert task.lengths == [4, 3]
    assert task.rows == ((0, 1, 2), (0, 1))


def test_targets_are_characters(demo, tmp_path):
    path, text = tmp_path / "tasks.jsonl", "Mary had a lamb. Mary had a lamb."
    path.write_text(json.dumps({"text": text, "targets": [[28, 32]]}))
    task = targets(demo, path)
    [ids], [rows] = task.ids, task.rows
    said = demo.tokenizer.decode([ids[row + 1] for row in rows])
    assert said.strip() == "lamb"
    assert rows[-1] == len(ids) - 3
    assert np.all(np.diff(rows) == 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Mary", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"text": "Mary"}', "line 1 is not a text with targets"),
        ('{"text": "Mary", "targets": []}', "line 1 is not a text with targets"),
        ('{"text": "Mary", "targets": [[0, 9]]}', "[0, 9] is not a range of its 4 characters"),
        ('{"text": "Mary", "targets": [3, 4]}', "3 is not a range"),
        ('{"text": "Mary", "targets": [[true, 2]]}', "is not a range"),
    ],
)
def test_a_line_that_is_no_task_is_named(demo, tmp_path, line, said):
    path = tmp_path / "tasks.jsonl"
    path.write_text(line)
    with pytest.raises(InputError) as error:
        targets(demo, path)
    assert said in str(error.value)
