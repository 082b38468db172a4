"""One intervention, many kinds: keys hidden by a class of its own run through the passes of replaced outputs.

And heads of linear layers, replaced beside those of attention.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnscope.errors import ModelError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.interventions.passes import ignore_call, measured, prepared
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.loading import wrap
from attnscope.model.selection import LINEAR, StackLayer
from attnscope.studies.ablation import AblationStudy, HeadSets, copy
from helpers.hidden import Hidden
from helpers.parity_models import roused_model

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


# Heads of linear layers: replaced before gate and norm.


def task_of(model, texts=3, tokens=70):
    """Random sequences, longer than a chunk of 64 tokens, with rows on both sides of its end."""
    draw = np.random.default_rng(0).integers(0, model.config.vocab_size, (texts, tokens))
    return Task("random", tuple(map(tuple, draw.tolist())), ((2, 40, 63, 64, 68),) * texts)


def losses(model, task):
    """The loss of each sequence, from transformers alone."""
    with torch.no_grad():
        log_STV = model(torch.tensor(task.ids)).logits.log_softmax(-1)
    rows = zip(log_STV, task.ids, task.rows, strict=True)
    return [-np.mean([float(log_TV[row, ids[row + 1]]) for row in own]) for log_TV, ids, own in rows]


@pytest.mark.parametrize(
    ("family", "layer", "out"),
    [
        ("qwen3_next", 1, "model.layers.1.linear_attn.out_proj"),
        ("falcon_h1", 2, "model.layers.2.mamba.out_proj"),  # whose layer 2 has heads of attention, too
    ],
)
def test_a_linear_head_that_gives_nothing_is_missed_as_its_columns_of_the_projection_are(demo, family, layer, out):
    model = roused_model(family)
    loaded, task = wrap(model, demo.tokenizer), task_of(model)
    heads = loaded.geometry.linear_heads[StackLayer(layer, LINEAR)]
    one, whole = HeadSet("one", ((StackLayer(layer, LINEAR), 1),)), HeadSet("same number", ((3, 1),))
    found_SK = measured(loaded, task, [one, whole], "zero")
    assert found_SK[:, 0] == pytest.approx(losses(model, task), abs=1e-5)
    weight = model.get_submodule(out).weight
    with torch.no_grad():
        weight.view(len(weight), heads, -1)[:, 1] = 0
    expected_S = losses(model, task)
    assert found_SK[:, 1] == pytest.approx(expected_S, abs=1e-5)
    assert np.abs(found_SK[:, 1] - found_SK[:, 0]).min() > 1e-3
    assert np.abs(found_SK[:, 2] - expected_S).min() > 1e-3


@pytest.mark.parametrize("replacement", ["mean", "resample", "zero"])
def test_linear_and_softmax_heads_share_layers_and_are_replaced_in_one_set(demo, replacement):
    model = roused_model("qwen3_next")
    loaded, task = wrap(model, demo.tokenizer), task_of(model, tokens=12)
    task = replace(task, rows=((3, 8, 10),) * 3)
    linear, softmax = (StackLayer(2, LINEAR), 0), (3, 1)
    sets = [HeadSet(str(heads), heads) for heads in ((linear,), (softmax,), (linear, softmax))]
    shared, unshared = (prepared(loaded, task, sets, replacement, shared=one) for one in (True, False))
    assert shared.layers is not None
    found_SK = shared.measured(sets)
    assert found_SK == pytest.approx(unshared.measured(sets), abs=1e-5)
    assert np.abs(np.diff(found_SK)).min() > 1e-5  # every set costs something of its own


def test_the_mean_of_a_linear_head_is_that_of_the_other_sequences(demo):
    model = roused_model("qwen3_next")
    loaded, task = wrap(model, demo.tokenizer), task_of(model, tokens=9)
    task, layer = replace(task, rows=((7,),) * 3), StackLayer(1, LINEAR)
    found_SK = measured(loaded, task, [HeadSet("one", ((layer, 2),))], "mean")
    outputs = []

    def keep(call):
        if call.index == layer:
            outputs.append(call.output_BQHV)

    listen(model, torch.tensor(task.ids), keep, mixers=True)
    for place, ids in enumerate(task.ids):
        mean_1TV = outputs[0][[other for other in range(3) if other != place], :, 2].mean(0)

        def exchanged(call, mean_1TV=mean_1TV):
            if call.index != layer:
                return None
            output = call.output_BQHV.clone()
            output[:, :, 2] = mean_1TV
            return output

        report = listen(model, torch.tensor([ids]), keep, mixers=True, change=exchanged, logits_at=[7])
        expected = -float(report.logits[0, 0].log_softmax(-1)[ids[8]])
        assert found_SK[place, 1] == pytest.approx(expected, abs=1e-5)
        assert [check.altered for check in report.calls if check.stack == LINEAR] == [False, True, False]


def test_an_output_of_another_shape_is_refused_of_a_linear_layer(demo):
    model = roused_model("qwen3_next")
    with pytest.raises(ModelError, match=r"linear layer 0: expected an output of shape \(1, 4, 4, "):
        listen(
            model, torch.tensor([[1, 2, 3, 4]]), ignore_call, mixers=True, change=lambda call: call.output_BQHV[:, :1]
        )
