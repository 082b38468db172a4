"""One intervention, many kinds: keys hidden before the softmax run through the passes that replace outputs."""

import numpy as np
import pytest
import torch

from attnscope.errors import UsageError
from attnscope.intervene.hiding import Hiding
from attnscope.intervene.passes import measured, prepared
from attnscope.intervene.sets import HeadSet
from attnscope.seam.engines import ENGINES, UNCHECKED
from attnscope.seam.listen import listen
from attnscope.study.ablation.effects import HeadSets, ablate_sets
from attnscope.study.ablation.tasks import copy

IDS = list(range(5, 17))
SETS = (HeadSet("induction", ((3, 0), (3, 1))), HeadSet("one", ((1, 5),)))
QUERIES, KEYS = (7, 8, 11), (2, 3, 5)


def weights(demo, engine):
    found = {}

    def keep(call):
        found[call.layer] = call.P.rows(0, call.P.queries).double()

    report = listen(demo.model, torch.tensor([IDS] * 2), keep, engine=engine, logits_at=[11])
    return found, report


@pytest.mark.parametrize("name", ["eager", "fused", "tiles"])
def test_hidden_keys_get_nothing_and_the_others_their_mass(demo, name):
    engine = ENGINES[name]
    whole, before = weights(demo, engine)
    hidden, after = weights(demo, Hiding(QUERIES, KEYS).over(engine, [HeadSet("one", ((2, 1),))], [len(IDS)]))
    expected = whole[2][1, 1].clone()
    for query in QUERIES:
        left = [key for key in range(query + 1) if key not in KEYS]
        row = torch.zeros(len(IDS), dtype=torch.float64)
        row[left] = expected[query, left] / expected[query, left].sum()
        expected[query] = row
    torch.testing.assert_close(hidden[2][1, 1], expected, atol=1e-6, rtol=0)
    others = [head for head in range(6) if head != 1]
    torch.testing.assert_close(hidden[2][1, others], whole[2][1, others], atol=1e-6, rtol=0)
    torch.testing.assert_close(hidden[2][0], whole[2][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(hidden[1], whole[1], atol=1e-6, rtol=0)
    assert (hidden[3][1] - whole[3][1]).abs().max() > 1e-5
    assert (after.logits[1] - before.logits[1]).abs().max() > 1e-4
    torch.testing.assert_close(after.logits[0], before.logits[0], atol=1e-5, rtol=0)
    assert [check.layer for check in after.calls if check.altered] == [2]
    assert not [line for check in after.calls for line in check.failures(torch.float32)]


def test_a_query_without_a_key_is_refused(demo):
    engine = Hiding((3,), (0, 1, 2, 3)).over(ENGINES["eager"], [HeadSet("one", ((0, 0),))], [len(IDS)])
    with pytest.raises(UsageError, match="layer 0: a query would see no key; hide fewer keys"):
        weights(demo, engine)


def test_shared_and_unshared_passes_lose_the_same(demo):
    task, cut = copy(demo, sequences=4), Hiding(range(60, 90), range(1, 40))
    shared, unshared = (prepared(demo, task, SETS, cut, shared=one) for one in (True, False))
    assert shared.layers is not None
    assert shared.measured(SETS) == pytest.approx(unshared.measured(SETS), abs=1e-5)


def test_the_loss_is_that_of_a_model_whose_weights_were_changed_by_hand(demo, monkeypatch):
    """Against transformers' own eager attention with minus infinity added at the hidden places."""
    from transformers.models.llama import modeling_llama

    task, cut = copy(demo, sequences=2), Hiding(range(60, 90), range(1, 40))
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
    task, cut = copy(demo, sequences=4), Hiding(range(60, 90), range(1, 40))
    asked = HeadSets.of(SETS, demo.geometry, random=3)
    found = ablate_sets(demo, task, asked, cut, tmp_path)
    assert found.facts["replacement"] == "hidden"
    assert found.effect(SETS[0]).mean() > 0.1
    assert found.table().num_rows == len(SETS) + 3 + 3 * len(SETS)
    steps = []
    again = ablate_sets(demo, task, asked, cut, tmp_path, advance=steps.append)
    assert again.table().equals(found.table())


def test_what_hides_nothing_changes_nothing(demo):
    task = copy(demo, sequences=2)
    found = measured(demo, task, [HeadSet("nothing", ())], Hiding((5,), (1,)))
    assert found[:, 0] == pytest.approx(found[:, 1], abs=1e-7)
    assert prepared(demo, task, SETS, Hiding((5,), (1,))).engine is UNCHECKED
