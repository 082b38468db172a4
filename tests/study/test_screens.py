"""Gradients against small changes of the gate, synergies and the pruning curve against single passes, on the demo."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.interventions.passes import measured, prepared
from attnscope.interventions.patching import first_order
from attnscope.interventions.spec import HeadSet, Task
from attnscope.observe.logit_path import path_to_logits
from attnscope.studies.ablation import copy, direct
from attnscope.studies.ablation_search import curve, pair_sets, prune_cost, pruned, synergies, tried_of
from attnscope.studies.statistics import rank_correlation
from attnscope.studies.study_folder import Parts

INDUCTION = ((3, 0), (3, 1))


@pytest.fixture(scope="module")
def task(demo):
    return copy(demo, sequences=3)


@pytest.fixture(scope="module")
def of_two_lengths(demo, task):
    return Task("two", (task.ids[0][:40], task.ids[1][:70]), ((5, 30, 38), (2, 60)))


def loss_of(demo, task, number, change):
    """The mean loss of one sequence's rows, in float64, its heads' outputs changed; by a pass of its own."""
    ids, rows = task.ids[number], task.rows[number]
    engine = replace(ENGINES["eager"], change=change)
    report = listen(demo.model, torch.tensor([ids]), lambda call: None, engine=engine, logits_at=rows)
    log = report.logits[0].double().log_softmax(-1)
    return -np.mean([float(log[at, ids[row + 1]]) for at, row in enumerate(rows)])


@pytest.mark.parametrize("head", [(0, 1), (2, 1), (3, 1)])
def test_the_screen_is_the_derivative_of_the_loss_by_a_gate(demo, of_two_lengths, head):
    """Zero is put in a head's place: both measures are the derivative by the gate, one with its sign turned."""
    found = first_order(prepared(demo, of_two_lengths, [], "zero"))
    assert found.heads == tuple((layer, one) for layer in range(4) for one in range(6))
    step = 0.02

    def gated(gate):
        def change(place, output):
            factor = torch.ones(output.shape[2])
            factor[head[1]] = gate
            return output * factor[None, None, :, None] if place.layer == head[0] else output

        return change

    for number in range(2):
        up, down = (loss_of(demo, of_two_lengths, number, gated(1 + sign * step)) for sign in (1, -1))
        slope, at = (up - down) / (2 * step), found.heads.index(head)
        assert found.signed_SN[number, at] == pytest.approx(-slope, rel=2e-2, abs=2e-5)
        assert found.size_SN[number, at] == pytest.approx(abs(slope), rel=2e-2, abs=2e-5)


def test_the_screen_goes_towards_what_is_put_in_a_heads_place(demo, task):
    """A hundredth of the way to the other sequences' mean, made by hand, changes the loss by a hundredth of it."""
    found = first_order(prepared(demo, task, [], "mean"))
    given = {}

    def note(place, output):
        given[place.layer] = output
        return output

    listen(demo.model, torch.tensor(task.ids), lambda call: None, engine=replace(ENGINES["eager"], change=note))
    layer, head = 2, 1
    towards = given[layer][1:, :, head].mean(0) - given[layer][0, :, head]

    def nudged(share):
        def change(place, output):
            if place.layer != layer:
                return output
            changed = output.clone()
            changed[0, :, head] += share * towards
            return changed

        return change

    up, down = (loss_of(demo, task, 0, nudged(share)) for share in (0.01, -0.01))
    assert found.signed_SN[0, found.heads.index((layer, head))] == pytest.approx((up - down) / 0.02, rel=2e-2)


def test_the_model_keeps_no_gradients(demo, task):
    first_order(prepared(demo, task, [], "zero"))
    assert not any(one.requires_grad or one.grad is not None for one in demo.model.parameters())
    assert torch.is_grad_enabled()
    assert listen(demo.model, torch.tensor([[1, 2]]), lambda call: None, logits_at=[0]).logits.grad_fn is None


def test_tried_heads_are_spread_over_the_screen(demo, task):
    found = first_order(prepared(demo, task, [], "zero"))
    tried = [found.heads[place] for place in tried_of(found.signed_SN.mean(0))]
    order = [found.heads[place] for place in np.argsort(-found.signed_SN.mean(0))]
    assert len(set(tried)) == 8
    assert (tried[0], tried[-1]) == (order[0], order[-1])
    assert [order.index(head) for head in tried] == sorted(order.index(head) for head in tried)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 25, 90], 1.0),
        ([1, 2, 3, 4], [9, 8, 1, 0], -1.0),
        ([1, 2, 3], [2, 30, 10], 0.5),
        ([1, 1, 2], [1, 2, 3], 3**0.5 / 2),  # equal values share the mean of their ranks
    ],
)
def test_spearman_by_hand(first, second, expected):
    assert rank_correlation(np.array(first), np.array(second)) == pytest.approx(expected)


def test_the_rank_correlation_of_what_does_not_vary_is_null():
    assert np.isnan(rank_correlation(np.ones(4), np.arange(4)))


def test_direct_effects_single_out_the_induction_heads(demo):
    """What it must show: on the copy task L3H0 and L3H1 write the right token, 100 times what any other head does."""
    task = copy(demo, sequences=16)
    effect = direct(prepared(demo, task, [], "zero"), path_to_logits(demo, task.ids[0][:8])).mean(0).reshape(4, 6)
    assert effect[3, 0] > 1.8
    assert effect[3, 1] > 3.0
    others = np.delete(effect.ravel(), [18, 19])
    assert effect[3, :2].min() >= 100 * np.abs(others).max()


def test_texts_of_two_lengths_have_the_direct_effects_of_each_alone(demo, of_two_lengths):
    way = path_to_logits(demo, of_two_lengths.ids[0][:8])
    found = direct(prepared(demo, of_two_lengths, [], "zero"), way)
    for number in range(2):
        alone = Task("one", of_two_lengths.ids[number : number + 1], of_two_lengths.rows[number : number + 1])
        np.testing.assert_allclose(found[number], direct(prepared(demo, alone, [], "zero"), way)[0], atol=1e-5)


def test_synergy_is_what_a_pair_costs_beyond_its_heads(demo, task):
    heads = [(3, 1), (1, 0), (3, 0)]
    loss_SK = measured(demo, task, pair_sets(heads))
    found = synergies(heads, loss_SK[:, 1:] - loss_SK[:, :1])
    assert found.pairs == (((1, 0), (3, 0)), ((1, 0), (3, 1)), ((3, 0), (3, 1)))
    alone = measured(demo, task, [HeadSet("a", ((3, 0),)), HeadSet("b", ((3, 1),)), HeadSet("both", INDUCTION)])
    cost = (alone[:, 1:] - alone[:, :1]).mean(0)
    synergy = found.statistics["effect"]
    assert found.pair_SN[:, 2].mean() == pytest.approx(cost[2], abs=1e-5)
    assert synergy[2] == pytest.approx(cost[2] - cost[0] - cost[1], abs=1e-5)
    assert synergy[2] > 5  # they back each other up
    assert abs(synergy[0]) < 0.2


def test_the_curve_takes_the_head_that_is_missed_least(demo, task):
    heads = [(3, 0), (3, 1), (3, 4)]
    passes = prepared(demo, task, [], "zero")
    steps = list(pruned(passes, heads))
    assert [(one.layer, one.head) for one in steps] == [(3, 4), (3, 0), (3, 1)]
    gone = [HeadSet(str(count), tuple(sorted([(3, 4), (3, 0), (3, 1)][:count]))) for count in (1, 2, 3)]
    expected = measured(demo, task, gone, "zero")[:, 1:].mean(0)
    np.testing.assert_allclose([one.value for one in steps], expected, atol=1e-5)


def test_a_pruning_goes_on_where_it_was_cut_off(demo, task, tmp_path):
    passes, heads = prepared(demo, task, [], "zero"), [(3, 4), (3, 0)]
    first = next(iter(pruned(passes, heads, Parts(tmp_path))))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00001.npz"]
    with np.load(tmp_path / "step-00001.npz") as kept:
        told = dict(kept)
    np.savez(tmp_path / "step-00001.npz", **{**told, "value": 99.0})  # what only the file can have said
    told = []
    steps = list(pruned(passes, heads, Parts(tmp_path), told.append))
    assert steps[0] == replace(first, value=99.0)
    assert (steps[1].layer, steps[1].head) == (3, 0)
    assert sum(told) == prune_cost(passes, 2) == task.tokens * 4 * (3 + 2)
    assert curve(steps, 9.0).to_pydict()["effect"][0] == 90.0
