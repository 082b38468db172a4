"""Rows of attention computed again with keys cut, against transformers' own 4-D mask and attention as a plain loop."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import attnscope
from attnscope.attention.rows import RowsAgain, padded
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.errors import ModelError, UsageError
from attnscope.hooks.engines import ENGINES, UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.interventions.base import replacing, zeros
from attnscope.interventions.knockout import Knockout
from attnscope.interventions.spec import Cut
from attnscope.model.families import family_of
from attnscope.model.selection import CROSS, DECODER
from helpers.families import BYPASS, MODEL_TYPES, WITHOUT_ATTENTION, few, of_all_families, tiny_model
from helpers.induction import induction
from helpers.loops import looped
from helpers.parity_models import roused_model
from helpers.stack_families import tiny
from helpers.why_families import wrapped

PAGE = Path(__file__).parents[1] / "docs" / "knockout.md"
TOKENS, ROWS, KEYS = 14, (9, 13), (7, 8)
# Grouped heads, windows, soft-cap, sink logits, sink logits of the output, latent attention, hybrids, shared keys.
FAMILIES = (
    "llama",
    "mistral",
    "gemma2",
    "gpt_oss",
    "granite_swa",
    "deepseek_v3",
    "qwen3_next",
    "jamba",
    "gemma3n_text",
)
MOVED = {("llama", "mask"), ("gpt_oss", "zero")}  # by default, all else under `families`
ZEROED = ("llama", "gpt_oss", "granite_swa", "deepseek_v3")  # by default, as sinks and widths of their own are at stake
# Their layers choose keys by the mask that they are given: a cut key makes them choose others.
OWN_CHOICE = ("axk2", "deepseek_v32", "doge", "glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text")
# Their layers have windows, which a 4-D mask takes the place of.
OWN_WINDOWS = (
    "afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v4", "exaone4", "exaone_moe",
    "flint", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
    "gemma4_unified_text", "gpt_oss", "granite_swa", "granitemoe_swa", "inkling2_text", "inkling_text", "kolibri1",
    "lfm3", "llama4", "llama4_text", "mimo_v2_flash", "ministral", "mistral", "modernbert-decoder", "olmo3",
    "recurrent_gemma", "vaultgemma",
)  # fmt: skip
OF_PATCHES = ("blt",)  # a mask of bytes cuts nothing in the layers over patches
OUTSIDE = (*BYPASS, *WITHOUT_ATTENTION)
EQUAL = tuple(sorted(set(MODEL_TYPES) - {*OWN_CHOICE, *OWN_WINDOWS, *OF_PATCHES, *OUTSIDE}))
POSITIONS = {"opt"}  # counted in a mask of two dimensions, and given with one of four


def ids_of(seed=1):
    return torch.randint(10, 100, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def places(model):
    """(layer, heads, module) of every layer with attention."""
    found = {}
    listen(model, ids_of(), lambda call: found.setdefault((call.stack, call.layer), call), engine=UNCHECKED)
    return [(layer, call.P.heads, call.module) for (stack, layer), call in found.items() if stack == DECODER]


def cut_logits(model, heads, how="mask", engine=UNCHECKED, rows=ROWS, keys=KEYS):
    """Logits of the rows, intact and cut, of one pass."""
    layers = {layer: tuple(head for of, head in heads if of == layer) for layer, _ in heads}
    knockout = Knockout((rows,), layers, how)
    changed = knockout.over(engine, [Cut("one", tuple(heads), (keys,))], [TOKENS], [0])
    return listen(model, ids_of().repeat(2, 1), lambda call: None, engine=changed, logits_at=list(rows)).logits


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(family, how, marks=[] if how == "mask" or family in ZEROED else pytest.mark.families)
        for family in FAMILIES
        for how in ("mask", "zero")
    ],
)
def test_one_head_of_one_layer_equals_a_plain_loop(family, how):
    model = tiny_model(family)
    layer, heads, module = places(model)[-1]

    def cut(of, head, row):
        return KEYS if of is module and head == heads - 1 and row in ROWS else ()

    with torch.no_grad():
        intact = model(ids_of(), use_cache=False).logits[0, list(ROWS)]
        with looped(model, cut, how, family_of(model).sinks_scale_output):
            expected = model(ids_of(), use_cache=False).logits[0, list(ROWS)]
    found = cut_logits(model, [(layer, heads - 1)], how)
    assert_close(found[1], expected, atol=1e-5, rtol=0)
    assert_close(found[0], intact, atol=1e-5, rtol=0)
    assert (expected - intact).abs().max() > 1e-4  # the check can fail


MOVES = ((8, 3), (3, 11), (11, 8))  # where weights of a row go


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(family, how, marks=[] if (family, how) in MOVED else pytest.mark.families)
        for family in FAMILIES
        for how in ("mask", "zero")
    ],
)
@pytest.mark.parametrize("keys", [(), (8, 6)])
def test_weights_on_other_keys_equal_a_plain_loop(family, how, keys):
    """Two heads of one layer and one of another: the weights of a row go to other keys, and some are cut there."""
    model = tiny_model(family)
    (first, heads, one), (second, _, two) = places(model)[0], places(model)[-1]
    cut_heads = [(first, 0), (second, 0), (second, heads - 1)]
    of_module = {(one, 0), (two, 0), (two, heads - 1)}

    def cut(module, head, row):
        return keys if (module, head) in of_module and row == 13 else ()

    def moved(module, what, value):
        if not isinstance(what, tuple) or (module, what[1]) not in of_module or what[2] != 13:
            return value
        found = value.clone()
        for key, onto in MOVES:
            found[onto] = value[key]
        return found

    with torch.no_grad(), looped(model, cut, how, family_of(model).sinks_scale_output, moved):
        expected = model(ids_of(), use_cache=False).logits[0, [13]]
    onto = tuple(dict(MOVES).get(key, key) for key in keys)
    knockout = Knockout(((13,),), {first: (0,)} | {second: (0, heads - 1)}, how)
    sets = [Cut("one", tuple(cut_heads), (onto,), (MOVES,)), Cut("as it is", ((second, 0),), (keys,))]
    changed = knockout.over(UNCHECKED, sets, [TOKENS], [0])
    found = listen(model, ids_of().repeat(3, 1), lambda call: None, engine=changed, logits_at=[13]).logits
    assert_close(found[1], expected, atol=1e-5, rtol=0)
    assert (expected - found[2]).abs().max() > 1e-4  # the check can fail


@pytest.mark.parametrize("name", ["eager", "tiles"])
def test_whichever_engine_gives_the_outputs(name):
    model, one = tiny_model("gemma2"), [(1, 2)]
    assert_close(cut_logits(model, one, engine=ENGINES[name]), cut_logits(model, one), atol=1e-5, rtol=0)


def masked(model, rows=ROWS, keys=KEYS):
    """Logits of transformers' own forward with a 4-D mask of all layers, intact and cut."""
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=model.dtype).triu(1)
    cut = mask.clone()
    for row in rows:
        cut[row, list(keys)] = -torch.inf
    given = {"position_ids": torch.arange(TOKENS)[None]} if model.config.model_type in POSITIONS else {}
    with torch.no_grad():
        found = [
            model(ids_of(), attention_mask=one[None, None], use_cache=False, **given).logits[0] for one in (mask, cut)
        ]
    return [one[list(rows)] for one in found]


def own_logits(model):
    """Logits of the rows as the model gives them without a mask."""
    with torch.no_grad():
        return model(ids_of(), use_cache=False).logits[0, list(ROWS)]


def every_head(model):
    return [(layer, head) for layer, heads, _ in places(model) for head in range(heads)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "olmo2", "gpt2", "deepseek_v3"])
def test_all_heads_of_all_layers_equal_a_4d_mask(family):
    model = tiny_model(family)
    intact, expected = masked(model)
    found = cut_logits(model, every_head(model))
    assert_close(found[1], expected, atol=1e-5, rtol=0)
    assert_close(found[0], intact, atol=1e-5, rtol=0)
    assert (expected - intact).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", EQUAL)
def test_every_family_that_takes_a_4d_mask_equals_it(family):
    """A causal one changes nothing there, and one with keys cut is what cutting them in all heads of all layers is."""
    model = tiny_model(family)
    intact, expected = masked(model)
    assert_close(intact, own_logits(model), atol=1e-6, rtol=0)
    assert_close(cut_logits(model, every_head(model))[1], expected, atol=1e-5, rtol=0)
    assert (expected - intact).abs().max() > 2e-5  # the check can fail


@pytest.mark.parametrize("family", few(EQUAL))
def test_a_knockout_costs_what_a_4d_mask_of_every_family_does(family):
    """The nats that the answer loses, by the public call."""
    model, ids = roused_model(family), ids_of()[0].tolist()
    answer = ids[3]
    intact, expected = (one[-1].log_softmax(-1)[answer] for one in masked(model))
    asked = {"query": ",".join(map(str, ROWS)), "key": ",".join(map(str, KEYS)), "answer": [answer]}
    [row] = attnscope.knockout(wrapped(model), ids, **asked, random=0).table().to_pylist()
    rounding = 1e-5 * max(1.0, -float(intact))  # of float32, as a share of the nats
    assert row["effect"] == pytest.approx(float(intact - expected), abs=rounding)
    assert abs(row["effect"]) > 10 * rounding  # the check can fail


@pytest.mark.parametrize("family", few(sorted({*OUTSIDE, *OF_PATCHES} - {"mamba2", "xlstm"}), also=("rwkv",)))
def test_families_that_cannot_be_cut_or_patched_are_refused(family):
    ids = ids_of()[0].tolist()
    with pytest.raises(ModelError):
        attnscope.knockout(wrapped(tiny_model(family)), ids, key=3, answer=[4], random=0)
    with pytest.raises(ModelError):
        attnscope.patch(wrapped(tiny_model(family)), ids, [7, *ids[1:]], answer=[4], random=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN_WINDOWS)
def test_where_a_4d_mask_takes_the_place_of_windows(family):
    """A causal one changes the logits, and some layer shows fewer keys than that."""
    model, windowed = tiny_model(family), []

    def hear(call):
        seen = call.visible.rows(0, TOKENS)[..., :TOKENS]
        windowed.append(bool((~seen & torch.ones(TOKENS, TOKENS).tril().bool()).any()))

    listen(model, ids_of(), hear, engine=UNCHECKED)
    assert any(windowed)
    assert (masked(model)[0] - own_logits(model)).abs().max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", [*OWN_CHOICE, *OF_PATCHES])
def test_where_a_4d_mask_changes_more_than_the_cut(family):
    model = tiny_model(family)
    intact, expected = masked(model)
    assert_close(intact, own_logits(model), atol=1e-6, rtol=0)
    assert (cut_logits(model, every_head(model))[1] - expected).abs().max() > 1e-3


@of_all_families
def test_the_families_are_as_many_as_the_docs_say():
    """None goes from one list to another unseen: transformers' families are in one list each."""
    lists = {"equal": EQUAL, "windows": OWN_WINDOWS, "choice": OWN_CHOICE, "patches": OF_PATCHES, "outside": OUTSIDE}
    assert {name: len(found) for name, found in lists.items()} == {
        "equal": 114,
        "windows": 34,
        "choice": 7,
        "patches": 1,
        "outside": 26,
    }
    assert sorted(name for found in lists.values() for name in found) == MODEL_TYPES
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"in {len(EQUAL)} of the {len(MODEL_TYPES)} families" in page
    assert f"In {len(OWN_WINDOWS)} families" in page
    assert f"Seven choose keys by the mask that they are given: {', '.join(OWN_CHOICE)}." in page
    assert f"The {len(OUTSIDE)} families that attend outside the interface" in page


def by_closed_form(call, row, keys):
    """(o - sum p v) / (1 - sum p) in a row of a call, in float32."""
    cut_BHK = call.spec.weights(row, row + 1)[:, :, 0, keys]
    values_BHKV = call.spec.v_BGKV.repeat_interleave(call.spec.heads // call.spec.kv_heads, 1)[:, :, keys]
    found_BQHV, lost_BHV = call.output_BQHV.clone(), (cut_BHK[..., None] * values_BHKV).sum(2)
    found_BQHV[:, row] = (found_BQHV[:, row] - lost_BHV) / (1 - cut_BHK.sum(-1))[..., None]
    return found_BQHV


def test_the_closed_form_loses_digits_that_rows_computed_again_keep():
    """The last row of twelve random models keeps two of its keys; the logits compared with a forward in float64."""
    row, keys, closed, again = TOKENS - 1, list(range(TOKENS - 2)), [], []
    for seed in range(12):
        model = tiny_model("llama", seed, initializer_range=0.2)

        def change(call):
            return by_closed_form(call, row, keys)

        form = listen(model, ids_of(), lambda call: None, change=change, logits_at=[row]).logits[0]
        rows = cut_logits(model, every_head(model), rows=(row,), keys=keys)[1]
        _, exact = masked(model.double(), (row,), keys)
        closed.append(float((form - exact).abs().max()))
        again.append(float((rows - exact).abs().max()))
    assert max(again) < 4e-5
    assert max(closed) > 1e-2
    assert sum(error > 1e-4 for error in closed) >= 10


def test_cross_attention_is_cut_in_rows_of_the_target():
    model, target = tiny("bart"), torch.randint(6, 100, (1, 7), generator=torch.Generator().manual_seed(3))
    module = model.model.decoder.layers[1].encoder_attn

    def cut(of, head, row):
        return (2, 3) if of is module and head == 1 and row in (4, 6) else ()

    with torch.no_grad():
        intact = model(ids_of(), decoder_input_ids=target).logits
        with looped(model, cut):
            expected = model(ids_of(), decoder_input_ids=target).logits
    knockout = Knockout(((4, 6),), {1: (1,)}, stack=CROSS)
    engine = knockout.over(UNCHECKED, [Cut("one", ((1, 1),), ((2, 3),))], [TOKENS], [0])
    ids, both = ids_of().repeat(2, 1), target.repeat(2, 1)
    found = listen(model, ids, lambda call: None, engine=engine, decoder_input_ids=both, logits_at=[4, 6]).logits
    assert_close(found, torch.cat([intact, expected])[:, [4, 6]], atol=1e-5, rtol=0)
    assert (expected - intact).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_all_visible_keys_cut_equal_a_head_replaced_by_zero(family):
    """Of sink logits nothing reaches the output; a row that is left without keys gives 0 (a study reports it)."""
    model = tiny_model(family)
    layer, _, _ = places(model)[-1]
    changed = replacing([Cut("one", ((layer, 2),))], [TOKENS], zeros)
    replaced = listen(
        model, ids_of().repeat(2, 1), lambda call: None, engine=replace(UNCHECKED, change=changed), logits_at=[13]
    )
    knockout = Knockout((tuple(range(TOKENS)),), {layer: (2,)})
    engine = knockout.over(UNCHECKED, [Cut("one", ((layer, 2),), (tuple(range(TOKENS)),))], [TOKENS], [0])
    found = listen(model, ids_of().repeat(2, 1), lambda call: None, engine=engine, logits_at=[13])
    assert_close(found.logits, replaced.logits, atol=1e-5, rtol=0)
    assert (found.logits[1] - found.logits[0]).abs().max() > 1e-4


def test_one_edge_carries_everything_in_a_model_made_by_hand():
    """A B C D E A -> B: the edge of the second layer's head from the last A to B; no other key costs anything."""
    model, ids = induction(), torch.tensor([[0, 1, 2, 3, 4, 5, 1]])
    last, edge = 6, 2
    costs = {}
    for layer in (0, 1):
        for key in range(last + 1):
            knockout = Knockout(((last,),), {layer: (0,)})
            engine = knockout.over(UNCHECKED, [Cut("one", ((layer, 0),), ((key,),))], [7], [0])
            report = listen(model, ids.repeat(2, 1), lambda call: None, engine=engine, logits_at=[-1])
            log = report.logits[:, 0].log_softmax(-1)[:, 2]
            costs[layer, key] = float(log[0] - log[1])
    assert log[0] > -1e-6
    assert costs.pop((1, edge)) > 10
    assert max(map(abs, costs.values())) <= 1e-6


def test_a_row_that_sees_nothing_stays_as_it_was_and_padding_asks_for_none():
    q, k, v = (torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask[..., 3, :] = False
    spec = AttentionSpec(q, k, v, 0.5, Visibility(5, 5, mask))
    query_NR = padded([[2, 3], [4]], q.device)
    [block] = RowsAgain(spec, (1,)).blocks(query_NR)
    assert query_NR.tolist() == [[2, 3], [4, -1]]
    assert block.blind()[0].tolist() == [[False], [True]]
    weights = (0.5 * q[0, 1, 2] @ k[0, 1, :3].T).softmax(-1)
    assert_close(block.output(None, "mask")[0, 0, 0], weights @ v[0, 1, :3])


def test_a_change_sees_q_k_v_and_what_is_visible():
    model, heard = tiny_model("llama"), []

    def change(call):
        heard.append(call.layer)
        if call.layer != 2:
            return None
        weights = call.spec.weights(0, TOKENS)
        values = call.spec.v_BGKV.repeat_interleave(2, 1)
        return 0.5 * (weights @ values).transpose(1, 2)

    found = listen(model, ids_of(), lambda call: None, change=change, logits_at=[-1])
    halved = replace(ENGINES["eager"], change=lambda call, output: output / 2 if call.layer == 2 else output)
    expected = listen(model, ids_of(), lambda call: None, engine=halved, logits_at=[-1])
    assert heard == [0, 1, 2, 3]
    assert_close(found.logits, expected.logits, atol=1e-6, rtol=0)
    assert [check.altered for check in found.calls] == [False, False, True, False]
    with pytest.raises(UsageError, match="the engine changes outputs already"):
        listen(model, ids_of(), lambda call: None, engine=halved, change=change)


def test_rows_that_are_not_the_models_own_are_refused():
    """An attention function that does something else with q, k and v."""
    model = tiny_model("llama")
    engine = Knockout(((9,),), {1: (0,)}).over(UNCHECKED, [], [TOKENS], [0])

    def twice(call, output):
        return engine.change(call, 2 * output)

    with pytest.raises(ModelError, match=r"layer 1: rows computed again differ from the model's own by 0\.5"):
        listen(model, ids_of(), lambda call: None, engine=replace(UNCHECKED, change=twice))
