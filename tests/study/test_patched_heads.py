"""Patched heads against attention as a plain loop, family by family, and what has to hold of any pair."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.interventions.base import AnswerLoss
from attnscope.interventions.passes import agree, prepared
from attnscope.interventions.patching import Patch, Patching
from attnscope.interventions.spec import SHARED, WHAT, Task
from attnscope.model.families import family_of
from attnscope.model.selection import DECODER, LINEAR, StackLayer
from helpers.families import BYPASS, MODEL_TYPES, WITHOUT_ATTENTION, few, tiny_model
from helpers.loops import looped
from helpers.parity_models import roused_model
from helpers.why_families import wrapped

TOKENS, AT, ANSWER = 10, (4, 9), [33, 71, 52]
# Grouped heads, windows, soft-cap, sink logits, sink logits of the output, latent attention, hybrids, shared keys.
FAMILIES = (
    *("llama", "mistral", "gemma2", "gpt_oss", "granite_swa"),
    *("deepseek_v3", "qwen3_next", "jamba", "gemma3n_text", "gpt2"),
)


def ids_of(seed, tokens=TOKENS):
    return torch.randint(10, 100, (1, tokens), generator=torch.Generator().manual_seed(seed))


def places(model):
    """(layer, heads, kv heads, module) of every layer with attention."""
    found = {}
    listen(model, ids_of(1), lambda call: found.setdefault((call.stack, call.layer), call), engine=UNCHECKED)
    return [
        (layer, call.P.heads, call.spec.kv_heads, call.module)
        for (stack, layer), call in found.items()
        if stack == DECODER
    ]


def logits(model, patch=None, ids=None):
    """(T, V), with attention as a loop."""
    with torch.no_grad(), looped(model, scaled=family_of(model).sinks_scale_output, patch=patch):
        return model(ids_of(1) if ids is None else ids, use_cache=False).logits[0]


def kept(model, ids):
    """What every layer's keys, values, weights and outputs are, by module and what."""
    found = {}

    def keep(module, what, value):
        found[module, what] = value.clone()
        return value

    logits(model, keep, ids)
    return found


def put(what, other, module, heads, shared):
    """A patch of some heads of one module at AT, from what was kept of another text."""

    def patch(of, name, value):
        if of is not module:
            return value
        if what == name and what in SHARED:
            changed = value.clone()
            for group in {head // shared for head in heads}:
                changed[0, group, list(AT)] = other[of, what][0, group, list(AT)]
            return changed
        if what == name == "output":
            changed = value.clone()
            for head in heads:
                changed[0, list(AT), head] = other[of, what][0, list(AT), head]
            return changed
        if what == "pattern" and isinstance(name, tuple) and name[1] in heads and name[2] in AT:
            return other[of, name]
        return value

    return patch


def nats(model, ids, patch=None, answer=ANSWER):
    """What an answer behind some ids costs, with attention as a loop."""
    rows = logits(model, patch, torch.tensor([[*ids, *answer[:-1]]]))[len(ids) - 1 :]
    return -sum(float(row.log_softmax(-1)[token]) for row, token in zip(rows, answer, strict=True))


FEWEST = ("llama", "gpt2")  # with all that may be patched by default; the others have their outputs
READ = sorted(set(MODEL_TYPES) - {*BYPASS, *WITHOUT_ATTENTION, "blt"})  # by `patch`: test_rows_again.py has the others


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("family", FEWEST)
def test_a_patch_equals_a_plain_loop(family, what):
    check_patch(family, what)


@pytest.mark.parametrize("what", WHAT)
def test_where_each_row_has_a_pass_a_patch_equals_a_plain_loop(monkeypatch, what):
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 1)
    check_patch("llama", what)


@pytest.mark.e2e
def test_where_each_row_has_a_pass_many_patches_measure_the_same(monkeypatch):
    """Of several layers, heads and tokens, each in one pass with the others or alone."""
    tiny = wrapped(roused_model("llama"))
    task = task_of(((1, 12), (2, 12)), ((3, 7), (4, 7)))
    sets = [Patch("two layers", ((1, 2), (2, 0)), at_of(task, 1, 5)), Patch("one", ((1, 0),), at_of(task, 4))]
    sets += [Patch(str(head), (head,), at_of(task, head[1], 6)) for head in EVERY]
    for what in WHAT:
        how = {"measure": AnswerLoss(), "shared": False}
        monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 4096)
        together, rows = prepared(tiny, task, sets, Patching(what), **how), []
        monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 12)
        apart = prepared(tiny, task, sets, Patching(what), **how)
        values = together.run([0, 1, 2, 3], sets)
        hook = tiny.model.model.layers[0].register_forward_pre_hook(lambda module, args, rows=rows: rows.append(args))
        assert apart.measured(sets) == pytest.approx(values, rel=1e-5, abs=1e-5)
        hook.remove()
        assert {len(args[0]) for args in rows} == {1}
        assert np.abs(values[:, 1:3] - values[:, :1]).max(0).min() > 1e-3


def test_where_each_row_has_a_pass_rows_computed_again_are_held_to_the_intact_text(tiny):
    task = task_of(((1, 12), (2, 12)))
    for what in (what for what in WHAT if what != "output"):
        patches = [Patch("one", ((1, 2),), at_of(task, 3))]
        engine = Patching(what).keeping(patches, {}).over(UNCHECKED, [], [12], [0])

        def twice(call, output, engine=engine):
            return engine.change(call, 2 * output)

        with pytest.raises(ModelError, match=r"layer 1: rows computed again differ from the model's own by 0\.5"):
            listen(tiny.model, ids_of(1, 12), lambda call: None, engine=replace(UNCHECKED, change=twice))


@pytest.mark.parametrize(
    "what", [one if one == "output" else pytest.param(one, marks=pytest.mark.families) for one in WHAT]
)
@pytest.mark.parametrize("family", few([one for one in FAMILIES if one not in FEWEST], also=("gemma3n_text",)))
def test_a_patch_equals_a_plain_loop_in_other_families(family, what):
    check_patch(family, what)


def check_patch(family, what):
    """A head, of keys and values a kv group; each text patched from the other, by the public call."""
    model, both = roused_model(family), [ids_of(1)[0].tolist(), ids_of(2)[0].tolist()]
    layer, heads, kv_heads, module = places(model)[0]
    shared = heads // kv_heads
    chosen = tuple(range(heads - shared, heads)) if what in SHARED else (heads - 1,)
    asked = {"at": ",".join(map(str, AT)), "answer": ANSWER, "what": what, "select": f"L{layer}H{heads - 1}"}
    [row] = attnscope.patch(wrapped(model), *both, over="heads", **asked).table().to_pylist()
    for text, effect in enumerate((row["effect"], -row["restored"])):
        other = kept(model, torch.tensor([[*both[1 - text], *ANSWER[:-1]]]))
        intact = nats(model, both[text])
        expected = nats(model, both[text], put(what, other, module, chosen, shared)) - intact
        rounding = 1e-5 * max(1.0, intact)  # of float32, as a share of the nats
        assert effect == pytest.approx(expected, abs=rounding)
        assert abs(expected) > 3 * rounding  # the check can fail


@pytest.mark.parametrize(
    "family", [one if one in (*FEWEST, "jamba") else pytest.param(one, marks=pytest.mark.families) for one in READ]
)
def test_all_heads_at_the_last_token_give_the_other_text(family):
    """After its own embedding a token is what heads wrote at it; the last token is the same in both texts.

    Not so in a model whose tokens meet elsewhere too: then they do without any heads.
    """
    model, both = roused_model(family), [[*ids_of(seed)[0].tolist(), 7] for seed in (1, 2)]
    without = listen(
        model, torch.tensor(both), lambda call: None, change=lambda call: 0 * call.output_BQHV, logits_at=[-1]
    ).logits
    [row] = attnscope.patch(wrapped(model), *both, at="last", answer=[33], random=0).table().to_pylist()
    whole = pytest.approx((1, 1), abs=1e-3)
    alone = bool((without[0] - without[1]).abs().max() < 1e-4)
    assert ((row["normalised"], row["restored_normalised"]) == whole) == alone
    assert alone or family not in FEWEST


@pytest.fixture(scope="module")
def tiny():
    return wrapped(tiny_model("llama"))


def task_of(*pairs):
    texts = tuple(tuple(ids_of(seed, tokens)[0].tolist()) for pair in pairs for seed, tokens in pair)
    return Task("pairs", texts, tuple((len(one) - 2,) for one in texts), together=2)


EVERY = [(layer, head) for layer in range(4) for head in range(4)]


def at_of(task, *places):
    return (tuple(places),) * len(task)


def test_a_text_patched_from_itself_stays(tiny):
    task = task_of(((1, 12), (1, 12)))
    for what in WHAT:
        sets = [Patch(str(head), (head,), at_of(task, 3, 5)) for head in EVERY]
        passes = prepared(tiny, task, sets, Patching(what), measure=AnswerLoss())
        assert np.abs(passes.effects(passes.measured(sets))).max() < 1e-6


@pytest.mark.parametrize("room", [4096, 1])
def test_pairs_of_two_lengths_are_patched_as_a_loop_says(tiny, monkeypatch, room):
    """Pairs of other lengths, in one pass or each text in one: tokens belong to tokens elsewhere in the other text."""
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", room)
    first, second, third = (ids_of(seed, 12)[0].tolist() for seed in (1, 4, 5))
    texts = [(first, first[3:]), (second[4:], second), (third[:8], [9, *third[1:8]])]
    places = [((3, 5), (0, 2)), ((2, 4), (6, 8)), ((1,), (1,))]
    records = [
        {"text": one, "corrupted": other, "at": ",".join(map(str, at)), "answer": [33]}
        for (one, other), (at, _) in zip(texts, places, strict=True)
    ]
    found = attnscope.patch(tiny, records, over="heads", select="L1H2")
    [patch] = [one.patch for one in found.asked]
    assert patch.at == tuple(at for pair in places for at in pair)
    costs = [found.effect(patch), -found.restored(patch)]
    module = tiny.model.model.layers[1].self_attn
    for pair, (both, ats) in enumerate(zip(texts, places, strict=True)):
        for text in (0, 1):
            given = kept(tiny.model, torch.tensor([both[1 - text]]))[module, "output"]

            def put_in(of, what, value, given=given, at=ats[text], of_other=ats[1 - text]):
                if of is module and what == "output":
                    value = value.clone()
                    value[0, list(at), 2] = given[0, list(of_other), 2]
                return value

            cost = nats(tiny.model, both[text], put_in, [33]) - nats(tiny.model, both[text], answer=[33])
            assert costs[text][pair] == pytest.approx(cost, abs=1e-5)
            assert abs(cost) > 3e-5  # the check can fail


def test_pairs_are_never_parted(tiny):
    task = task_of(((1, 12), (2, 9)), ((3, 7), (4, 11)), ((5, 8), (6, 8)))
    passes = prepared(tiny, task, [Patch("one", ((1, 2),), at_of(task, 1))], Patching("output"))
    assert all(place ^ 1 in batch for batch in passes.batches(1) for place in batch)


def test_a_family_that_cannot_pad_takes_texts_of_one_length(monkeypatch):
    loaded = wrapped(tiny_model("bamba"))
    ids = ids_of(1, 12)[0].tolist()
    monkeypatch.setattr("attnscope.interventions.passes.pads", lambda model: False)
    asked = {"at": "last", "answer": [33], "random": 0}
    with pytest.raises(InputError, match="bamba reads a text in another way where a longer one is in the same pass"):
        attnscope.patch(loaded, ids, ids[3:], **asked)
    assert attnscope.patch(loaded, ids, [9, *ids[1:]], **asked).table().num_rows == 1


def test_rounding_of_an_improbable_answer_is_no_other_reading():
    """A float32 of 23 nats has steps of 2e-6, so two passes differ by some 1e-5: these texts differ by a token."""
    loaded = attnscope.load("demo")
    text, other = "the house of the ball, the house of the", "the house of the cup, the house of the"
    assert attnscope.patch(loaded, text, corrupted=other, answer=" ball", over="heads").table().num_rows == 24
    improbable = np.array([5.16518, 23.19291])
    assert agree(improbable + 1.2e-5, improbable, "float32")
    assert not agree(improbable + 1e-3, improbable, "float32")
    assert not agree(improbable + np.nan, improbable, "float32")


def test_pairs_are_needed(tiny):
    alone = Task("one", ((1, 2, 3),), ((1,),))
    with pytest.raises(InputError, match="patching needs pairs of texts"):
        prepared(tiny, alone, [], Patching("output"))


@pytest.mark.parametrize("what", WHAT)
def test_the_estimate_is_the_slope(tiny, what):
    """A text that differs little: the effects of all heads, to first order, are those that were measured."""
    both = [list(range(10, 21)), list(range(30, 41))]
    asked = {"at": "4,6,10", "answer": [50], "foil": [60], "what": what, "over": "kv"}
    with torch.no_grad():
        weight = tiny.model.get_input_embeddings().weight
        before = weight.clone()
        own, other = map(torch.tensor, both)
        weight[other] = before[own] + 1e-2 * (before[other] - before[own])
    try:
        measured, estimated = (
            attnscope.patch(tiny, *both, **asked, method=method).table() for method in ("measure", "gradient")
        )
    finally:
        with torch.no_grad():
            weight.copy_(before)
    for effect, estimate in (("effect", "estimate"), ("restored", "restored_estimate")):
        effect_N, estimate_N = (np.array(one[name]) for one, name in ((measured, effect), (estimated, estimate)))
        assert len(effect_N) == 8
        assert np.abs(effect_N).max() > 1e-6
        assert np.abs(estimate_N - effect_N).max() < 0.1 * np.abs(effect_N).max()


# Heads of linear layers: their outputs before gate and norm, and the values that they write.


def linear_change(ids, other, layer, head, what):
    """A change of one text by which a head has at AT what another text has there; by the map, not by its rule."""

    def kept(model):
        found = {}

        def keep(call):
            if call.index == layer:
                found["output"], found["value"] = call.output_BQHV.clone(), call.P.rule.values_BTHV.clone()

        listen(model, torch.tensor([other]), keep, mixers=True)
        return found[what]

    def change(call, of_other):
        if call.index != layer:
            return None
        output, at = call.output_BQHV.clone(), list(AT)
        if what == "output":
            output[0, at, head] = of_other[0, at, head]
        else:
            values_TV = call.P.rule.values_BTHV[0, :, head].clone()
            values_TV[at] = of_other[0, at, head]
            output[0, :, head] = call.P.rows(0, len(values_TV))[0, head] @ values_TV
        return output

    return kept, change


@pytest.mark.parametrize("room", [4096, 1])
@pytest.mark.parametrize("what", ["output", "value"])
def test_a_patched_linear_head_gives_what_its_map_says(hybrid, monkeypatch, what, room):
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", room)
    both, layer, head = [ids_of(seed)[0].tolist() for seed in (1, 2)], StackLayer(1, LINEAR), 2
    asked = {"at": ",".join(map(str, AT)), "answer": [33], "what": what, "select": "linear.1.2,3.1"}
    rows = attnscope.patch(hybrid, *both, over="heads", **asked).table().to_pylist()
    [row] = [row for row in rows if row["stack"] == "linear"]
    assert row["set"] == "linear L1H2"
    for text, effect in enumerate((row["effect"], -row["restored"])):
        kept, change = linear_change(both[text], both[1 - text], layer, head, what)
        of_other, nats = kept(hybrid.model), []
        for changed in (None, lambda call, of_other=of_other, change=change: change(call, of_other)):
            report = listen(
                hybrid.model, torch.tensor([both[text]]), lambda call: None, change=changed, mixers=True, logits_at=[-1]
            )
            nats.append(-float(report.logits[0, 0].log_softmax(-1)[33]))
        assert effect == pytest.approx(nats[1] - nats[0], abs=3e-5)
        assert abs(effect) > 1e-3


def test_all_heads_linear_ones_too_give_the_other_text_at_the_last_token(hybrid):
    both = [[*ids_of(seed)[0].tolist(), 7] for seed in (1, 2)]
    shares = {}
    for select in ("linear,*", "*"):
        asked = {"at": "last", "answer": [33], "random": 0, "select": select}
        [row] = attnscope.patch(hybrid, *both, **asked).table().to_pylist()
        shares[row["stack"]] = row["normalised"], row["restored_normalised"]
    assert shares["decoder, linear"] == pytest.approx((1, 1), abs=1e-3)
    assert shares["decoder"] != pytest.approx((1, 1), abs=1e-1)


@pytest.mark.parametrize("what", ["output", "value"])
def test_the_estimate_of_linear_heads_is_the_slope(hybrid, what):
    both = [list(range(10, 20)), list(range(30, 40))]
    weight = hybrid.model.get_input_embeddings().weight
    before, (own, other) = weight.detach().clone(), map(torch.tensor, both)
    asked = {"at": "4,6,9", "answer": [50], "foil": [60], "what": what, "over": "heads", "select": "linear"}
    with torch.no_grad():
        weight[other] = before[own] + 1e-3 * (before[other] - before[own])
    try:
        tables = [attnscope.patch(hybrid, *both, **asked, method=method).table() for method in ("measure", "gradient")]
    finally:
        with torch.no_grad():
            weight.copy_(before)
    effects, estimates = (
        {row["set"]: row[name] for row in table.to_pylist()}
        for name, table in zip(("effect", "estimate"), tables, strict=True)
    )
    largest = max(map(abs, effects.values()))
    assert len(effects) == 12
    assert largest > 1e-6
    assert effects == pytest.approx(estimates, abs=0.1 * largest)


@pytest.mark.parametrize("what", ["key", "pattern"])
def test_what_a_linear_layer_has_not_is_not_patched(hybrid, what):
    with pytest.raises(UsageError, match=f"a linear layer has no {what} that is patched"):
        attnscope.patch(hybrid, [1, 2, 3], [1, 4, 3], what=what, select="linear.1.0", answer=[5])
