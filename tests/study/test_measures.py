"""What an intervention costs by another measure than the loss, against passes with hooks made by hand, on the demo."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from attnscope.errors import InputError, UsageError
from attnscope.interventions.base import LogitDifference, Measure
from attnscope.interventions.passes import measured, prepared
from attnscope.interventions.patching import first_order
from attnscope.interventions.spec import HeadSet
from attnscope.studies.ablation import AblationStudy, HeadSets, copy
from attnscope.studies.ablation_search import curve, pruned
from attnscope.studies.study import task_facts
from attnscope.studies.study_folder import Parts, claim
from helpers.hidden import Hidden

BOTH = HeadSet("induction", ((3, 0), (3, 1)))
ONE = HeadSet("one", ((2, 1),))
HEADS = ((3, 0), (3, 1), (2, 1))
STEP = 0.02


@pytest.fixture(scope="module")
def task(demo):
    return copy(demo, sequences=3)


@pytest.fixture(scope="module")
def difference(task):
    """What followed the last token before, the first of the second copy, and another token of the sequence."""
    answers, foils = ([ids[rows[0] + at] for ids, rows in zip(task.ids, task.rows, strict=True)] for at in (0, 3))
    return LogitDifference(answers, foils)


@contextmanager
def gated(demo, heads, gate):
    """The outputs of some heads times a number, before the output projection."""
    width, hooks = demo.model.config.head_dim, []
    for layer, head in heads:

        def scale(module, args, head=head):
            z = args[0].clone()
            z[..., head * width : (head + 1) * width] *= gate
            return (z,)

        hooks.append(demo.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(scale))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def by_hand(demo, task, difference, heads=(), gate=0.0):
    """(S,): the answer's logit less the foil's at the last token, in a pass of its own."""
    with gated(demo, heads, gate), torch.no_grad():
        logits = [demo.model(torch.tensor([ids])).logits[0, -1] for ids in task.ids]
    pairs = zip(logits, difference.answers, difference.foils, strict=True)
    return np.array([float(one[answer]) - float(one[foil]) for one, answer, foil in pairs])


def test_the_logit_difference_is_that_of_passes_by_hand(demo, task, difference):
    found = prepared(demo, task, [BOTH, ONE], "zero", measure=difference).measured([BOTH, ONE])
    assert found[:, 0] == pytest.approx(by_hand(demo, task, difference), abs=1e-4)
    for column, one in ((1, BOTH), (2, ONE)):
        expected = by_hand(demo, task, difference, one.heads)
        assert found[:, column] == pytest.approx(expected, abs=1e-4)
        assert found[:, 0] != pytest.approx(expected, abs=1e-2)


def test_shared_and_unshared_passes_measure_the_same(demo, task, difference):
    shared, unshared = (prepared(demo, task, [BOTH, ONE], shared=one, measure=difference) for one in (True, False))
    assert shared.layers is not None
    assert shared.measured([BOTH, ONE]) == pytest.approx(unshared.measured([BOTH, ONE]), abs=1e-4)


def test_an_effect_is_what_is_lost(demo, task, difference):
    """Of a loss what is more, of a logit difference what is less."""
    asked = HeadSets.of([BOTH], demo.geometry, random=0)
    found = AblationStudy(demo, task, asked, "zero", difference).run()
    lost = by_hand(demo, task, difference) - by_hand(demo, task, difference, BOTH.heads)
    assert found.effect(BOTH) == pytest.approx(lost, abs=1e-4)
    assert found.facts["measure"]["unit"] == "logits"
    assert found.effect(BOTH).mean() > 1
    assert AblationStudy(demo, task, asked, "zero").run().effect(BOTH).mean() > 1


class Divergence(Measure):
    """How far the predictions are from the intact ones: KL(intact || changed), mean over rows."""

    name, unit, compares = "divergence", "nats per token", True

    def __call__(self, logits_KRV, task, text):
        log_KRV = logits_KRV.double().log_softmax(-1)
        return (log_KRV[0].exp() * (log_KRV[0] - log_KRV)).sum(-1).mean(-1)


def test_a_measure_that_compares_has_the_intact_rows_also_of_a_long_text(demo, task, monkeypatch):
    sets = [BOTH, ONE]
    whole = measured_by(demo, task, Divergence(), sets)
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", max(task.lengths))
    assert measured_by(demo, task, Divergence(), sets) == pytest.approx(whole, abs=1e-5)
    assert whole[:, 0] == pytest.approx(0, abs=1e-9)
    assert whole[:, 1:].min() > 1e-3
    assert prepared(demo, task, sets, "zero").apart, "another measure runs them apart"


def measured_by(demo, task, measure, sets):
    return prepared(demo, task, sets, "zero", measure=measure).measured(sets)


def test_parts_of_another_measure_are_not_taken(demo, task, difference, tmp_path):
    asked = HeadSets.of([BOTH], demo.geometry, random=0)
    AblationStudy(demo, task, asked, "zero", difference).run(tmp_path)
    for other in (LogitDifference(difference.foils, difference.answers), None):
        with pytest.raises(UsageError, match=r": (answers was|other measure|name was|measure was)"):
            AblationStudy(demo, task, asked, "zero", **({"metric": other} if other else {})).run(tmp_path)
    forced = AblationStudy(demo, task, asked, "zero").run(tmp_path, force=True)
    assert forced.intact_S == pytest.approx(measured(demo, task, [])[:, 0], abs=1e-9)
    assert forced.facts["measure"] == {"name": "loss", "unit": "nats per token"}


def test_parts_of_other_hidden_keys_are_not_taken(demo, task, tmp_path):
    asked = HeadSets.of([BOTH], demo.geometry, random=0)
    AblationStudy(demo, task, asked, Hidden((60,), (1, 2))).run(tmp_path)
    with pytest.raises(UsageError, match=r"keys was .1, 2., now .1, 3."):
        AblationStudy(demo, task, asked, Hidden((60,), (1, 3))).run(tmp_path)


def test_the_head_that_is_missed_least_goes_first(demo, task, difference, tmp_path):
    passes = prepared(demo, task, [HeadSet("", HEADS)], "zero", measure=difference)
    parts = claim(tmp_path, "prune", "prune", task_facts(demo, task, "zero", difference), force=False)
    steps = list(pruned(passes, HEADS, parts))
    left = {head: by_hand(demo, task, difference, [head]).mean() for head in HEADS}
    assert (steps[0].layer, steps[0].head) == max(HEADS, key=left.__getitem__)
    assert steps[0].value == pytest.approx(max(left.values()), abs=1e-4)
    assert steps[-1].value == pytest.approx(by_hand(demo, task, difference, HEADS).mean(), abs=1e-4)
    intact = float(by_hand(demo, task, difference).mean())
    last = curve(steps, intact, difference).to_pylist()[-1]
    assert last["logit_difference"] == steps[-1].value
    assert last["effect"] == intact - steps[-1].value
    assert list(pruned(passes, HEADS, Parts(tmp_path / "prune"))) == steps


@pytest.mark.parametrize("head", [(3, 1), (1, 5)])
def test_the_screen_is_the_derivative_by_a_gate(demo, task, difference, head):
    """Zero in a head's place takes away what the gate adds: the effect to first order is the derivative itself."""
    found = first_order(prepared(demo, task, [], "zero", measure=difference))
    up, down = (by_hand(demo, task, difference, [head], 1 + sign * STEP) for sign in (1, -1))
    expected, place = (up - down) / (2 * STEP), found.heads.index(head)
    assert found.signed_SN[:, place] == pytest.approx(expected, abs=2e-2, rel=1e-2)
    assert found.size_SN[:, place] == pytest.approx(np.abs(found.signed_SN[:, place]), abs=1e-9)


def test_a_text_without_an_answer_is_refused(demo, task, difference):
    short = LogitDifference(difference.answers[:2], difference.foils)
    with pytest.raises(InputError, match="expected an answer and a foil of each of 3 texts, got 2 and 3"):
        prepared(demo, task, [BOTH], measure=short).measured([BOTH])
