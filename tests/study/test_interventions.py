"""One intervention, many kinds: keys hidden by a class of its own run through the passes of replaced outputs."""

import numpy as np
import pytest
import torch

from attnscope.hooks.engines import UNCHECKED
from attnscope.interventions.passes import measured, prepared
from attnscope.interventions.spec import HeadSet
from attnscope.studies.ablation import AblationStudy, HeadSets, copy
from helpers.hidden import Hidden

SETS = (HeadSet("induction", ((3, 0), (3, 1))), HeadSet("one", ((1, 5),)))


def test_shared_and_unshared_passes_lose_the_same(demo):
    task, cut = copy(demo, sequences=4), Hidden(range(60, 90), range(1, 40))
    shared, unshared = (prepared(demo, task, SETS, cut, shared=one) for one in (True, False))
    assert shared.layers is not None
    assert shared.measured(SETS) == pytest.approx(unshared.measured(SETS), abs=1e-5)


def test_the_loss_is_that_of_a_model_whose_weights_were_changed_by_hand(demo, monkeypatch):
    """Against transformers' own eager attention with minus infinity added at the hidden places."""
    from transformers.models.llama import modeling_llama

    task, cut = copy(demo, sequences=2), Hidden(range(60, 90), range(1, 40))
    found = measured(demo, task, SETS[:1], cut)
    own = modeling_llama.eager_attention_forward

    def hidden(module, query, key, value, attention_mask, *args, **kwargs):
        if module.layer_idx == 3:
            attention_mask = attention_mask.expand(-1, query.shape[1], -1, -1).clone()
            attention_mask[:, :2, 60:90, 1:40] = torch.finfo(attention_mask.dtype).min
        return own(module, query, key, value, attention_mask, *args, **kwargs)

    with torch.no_grad():
        for number, ids in enumerate(task.ids):
            monkeypatch.setattr(modeling_llama, "eager_attention_forward", hidden)
            log = demo.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            monkeypatch.setattr(modeling_llama, "eager_attention_forward", own)
            rows = task.rows[number]
            expected = -np.mean([float(log[row, ids[row + 1]]) for row in rows])
            assert found[number, 1] == pytest.approx(expected, abs=1e-5)
            assert found[number, 0] != pytest.approx(expected, abs=1e-3)


def test_statistics_controls_and_parts_take_it_too(demo, tmp_path):
    task, cut = copy(demo, sequences=4), Hidden(range(60, 90), range(1, 40))
    asked = HeadSets.of(SETS, demo.geometry, random=3)
    found = AblationStudy(demo, task, asked, cut).run(tmp_path)
    assert found.facts["replacement"] == "hidden"
    assert found.effect(SETS[0]).mean() > 0.1
    assert found.table().num_rows == len(SETS) + 3 + 3 * len(SETS)
    steps = []
    again = AblationStudy(demo, task, asked, cut).run(tmp_path, advance=steps.append)
    assert again.table().equals(found.table())


def test_what_hides_nothing_changes_nothing(demo):
    task = copy(demo, sequences=2)
    found = measured(demo, task, [HeadSet("nothing", ())], Hidden((5,), (1,)))
    assert found[:, 0] == pytest.approx(found[:, 1], abs=1e-7)
    assert prepared(demo, task, SETS, Hidden((5,), (1,))).engine is UNCHECKED
