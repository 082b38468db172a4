"""Patched heads against attention as a plain loop, family by family, and what has to hold of any pair."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from attnscope.errors import InputError
from attnscope.intervene.measure import AnswerLoss, LogitDifference
from attnscope.intervene.passes import prepared
from attnscope.intervene.patch_gradient import estimated
from attnscope.intervene.patching import Patch, Patching
from attnscope.intervene.task import Task
from attnscope.intervene.what import SHARED, WHAT
from attnscope.model.families import family_of
from attnscope.model.loading import DEMO_FOLDER, wrap
from attnscope.seam.engines import UNCHECKED
from attnscope.seam.listen import listen
from attnscope.stacks import DECODER
from helpers.families import few, tiny_model
from helpers.loops import looped

TOKENS, AT = 10, (4, 6)
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


def passed(model, what, sets, ids):
    """Logits of one pass: both texts, and both per set."""
    engine = Patching(what).over(UNCHECKED, sets, [TOKENS, TOKENS], (0, 1))
    rows = torch.cat(ids).repeat(1 + len(sets), 1)
    return listen(model, rows, lambda call: None, engine=engine, logits_at=list(range(TOKENS))).logits


FEWEST = ("llama", "gpt2")  # with all that may be patched by default; the others have their outputs


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("family", FEWEST)
def test_a_patch_equals_a_plain_loop(family, what):
    check_patch(family, what)


@pytest.mark.parametrize(
    "what", [one if one == "output" else pytest.param(one, marks=pytest.mark.families) for one in WHAT]
)
@pytest.mark.parametrize("family", few([one for one in FAMILIES if one not in FEWEST], also=("gemma3n_text",)))
def test_a_patch_equals_a_plain_loop_in_other_families(family, what):
    check_patch(family, what)


def check_patch(family, what):
    """A head, of keys and values a kv group; each text patched from the other."""
    model = tiny_model(family)
    layer, heads, kv_heads, module = places(model)[0]
    shared = heads // kv_heads
    chosen = tuple(range(heads - shared, heads)) if what in SHARED else (heads - 1,)
    ids = [ids_of(1), ids_of(2)]
    found = passed(model, what, [Patch("one", tuple((layer, head) for head in chosen), (AT, AT))], ids)
    for text in (0, 1):
        expected = logits(model, put(what, kept(model, ids[1 - text]), module, chosen, shared), ids[text])
        assert_close(found[2 + text], expected, atol=1e-5, rtol=0)
        intact = logits(model, ids=ids[text])
        assert_close(found[text], intact, atol=1e-5, rtol=0)
        assert (expected - intact).abs().max() > 1e-5 * 3  # the check can fail


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_heads_after_the_embeddings_give_the_other_text(family):
    """With the embeddings of the other text and all outputs of all heads, everything is the other text's."""
    model = tiny_model(family)
    every = tuple((layer, head) for layer, heads, *_ in places(model) for head in range(heads))
    whole = tuple(range(TOKENS))
    ids = [ids_of(1), ids_of(2)]
    engine = Patching("output").over(UNCHECKED, [Patch("all", every, (whole, whole))], [TOKENS, TOKENS], (0, 1))
    swap = model.get_input_embeddings().register_forward_hook(
        lambda module, given, embedded: torch.cat([embedded[:2], embedded[:2].flip(0)])
    )
    try:
        rows, at = torch.cat(ids).repeat(2, 1), list(range(TOKENS))
        found = listen(model, rows, lambda call: None, engine=engine, logits_at=at).logits
    finally:
        swap.remove()
    assert_close(found[2:], found[:2].flip(0), atol=1e-5, rtol=0)
    assert (found[0] - found[1]).abs().max() > 1e-2


@pytest.fixture(scope="module")
def tiny():
    return wrap(tiny_model("llama"), AutoTokenizer.from_pretrained(DEMO_FOLDER))


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


def test_pairs_of_two_lengths_stay_together(tiny):
    """A shorter text beside a longer one costs what the loop says, and pairs are never parted."""
    task = task_of(((1, 12), (2, 9)), ((3, 7), (4, 11)), ((5, 8), (6, 8)))
    sets = [Patch("one", ((1, 2),), ((3, 5), (2, 4), (1,), (2,), (6,), (6,)))]
    passes = prepared(tiny, task, sets, Patching("output"), measure=AnswerLoss())
    for batch in passes.batches(1):
        assert all(place ^ 1 in batch for place in batch)
    found = passes.effects(passes.measured(sets))[:, 0]
    model = tiny.model
    module = next(module for layer, *_, module in places(model) if layer == 1)
    for text in range(6):
        own, other = (torch.tensor([task.ids[place]]) for place in (text, text ^ 1))
        given = kept(model, other)[module, "output"]

        def patch(of, what, value, text=text, given=given):
            if of is module and what == "output":
                value = value.clone()
                value[0, list(sets[0].at[text]), 2] = given[0, list(sets[0].at[text ^ 1]), 2]
            return value

        row = len(task.ids[text]) - 2
        log = [logits(model, one, own)[row].log_softmax(-1)[task.ids[text][-1]] for one in (None, patch)]
        assert found[text] == pytest.approx(float(log[0] - log[1]), abs=1e-5)


def test_a_family_that_cannot_pad_takes_texts_of_one_length(monkeypatch):
    model = wrap(tiny_model("bamba"), AutoTokenizer.from_pretrained(DEMO_FOLDER))
    layer = model.geometry.attention_layers[0].index
    uneven, even = task_of(((1, 12), (2, 9))), task_of(((1, 9), (2, 9)))
    monkeypatch.setattr("attnscope.intervene.passes.pads", lambda model: False)
    with pytest.raises(InputError, match="bamba reads a text in another way where a longer one is in the same pass"):
        prepared(model, uneven, [Patch("one", ((layer, 0),), at_of(uneven, 3))], Patching("output"))
    prepared(model, even, [Patch("one", ((layer, 0),), at_of(even, 3))], Patching("output"))


def test_pairs_are_needed(tiny):
    alone = Task("one", ((1, 2, 3),), ((1,),))
    with pytest.raises(InputError, match="patching needs pairs of texts"):
        prepared(tiny, alone, [], Patching("output"))


@pytest.mark.parametrize("what", WHAT)
def test_the_estimate_is_the_slope(tiny, what):
    """A text that differs little: the effects of all heads, to first order, are those that were measured."""
    task = Task("pair", (tuple(range(10, 22)), tuple(range(30, 42))), ((10,), (10,)), together=2)
    measure = LogitDifference([50, 50], [60, 60])
    sets = [
        Patch(f"{layer} {group}", tuple((layer, 2 * group + one) for one in (0, 1)), at_of(task, 4, 6, 11))
        for layer in range(4)
        for group in (0, 1)
    ]
    with torch.no_grad():
        weight = tiny.model.get_input_embeddings().weight
        before = weight.clone()
        own, other = (torch.tensor(ids) for ids in task.ids)
        weight[other] = before[own] + 1e-2 * (before[other] - before[own])
    try:
        passes = prepared(tiny, task, sets, Patching(what), measure=measure)
        measured_SK = passes.effects(passes.measured(sets))
        found_SK = estimated(passes, sets)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert np.abs(measured_SK).max() > 1e-6
    assert np.abs(found_SK - measured_SK).max() < 0.1 * np.abs(measured_SK).max()
