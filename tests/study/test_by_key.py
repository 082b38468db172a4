"""Effects on a logit key by key: against loops over weights, values and W_O, and summed over keys against `direct`.

Shapes: B text, T token, H head, G kv head, Q query, K key, V width of v, E model width.
"""

import pytest
import torch

from attnscope.corpus.folder import Job
from attnscope.errors import ModelError, UsageError
from attnscope.model.loading import wrap
from attnscope.observe.logit_path import path_to_logits
from attnscope.observe.request import CaptureSpec, Request, View
from attnscope.observe.run import read
from attnscope.studies.ablation import direct_effects
from helpers.command_line import call
from helpers.families import few
from helpers.parity_models import TYPES, ids_for, roused_model

TOKENS, ANSWERED = 12, 9  # the answer is what follows the first nine
# Gates beside heads and behind them, no way to the logits, shared keys, hybrids, sinks, two widths of keys.
OTHERS = ["afmoe", "bitnet", "cpmant", "gemma3n_text", "granite_swa", "jamba", "longcat_flash", "mimo_v2_flash"]
BANK = "the bank of the river, the bank of the"


def ids_of(model_type):
    return ids_for(model_type, tokens=TOKENS)[0].tolist()


def by_key(loaded, ids, view=None, **asked):
    """{(layer, head, query, key): effect} of every key of the rows that make the answer."""
    keep = Request(view=view or View("logit"), relations=True, top_k=None, metrics=())
    found = read(loaded, CaptureSpec(ids[:ANSWERED], answer=ids[ANSWERED:], keep=keep, **asked)).relation_numbers()
    places = zip(*(found[name].tolist() for name in ("layer", "head", "query", "key")), strict=True)
    return dict(zip(places, found["weight"].tolist(), strict=True))


@pytest.mark.parametrize("model_type", few(TYPES, also=OTHERS))
def test_over_all_keys_effects_sum_to_the_direct_effect(model_type, demo):
    loaded, ids = wrap(roused_model(model_type), demo.tokenizer), ids_of(model_type)
    way = path_to_logits(loaded, ids[:8])
    if isinstance(way, str):
        with pytest.raises((UsageError, ModelError), match=r"is not known|is for a"):
            by_key(loaded, ids)
        return
    found, heads = by_key(loaded, ids), loaded.geometry.heads_by_layer
    for row in range(ANSWERED - 1, TOKENS - 1):
        right_BT = torch.full((1, TOKENS), -1)
        right_BT[0, row] = ids[row + 1]
        expected = direct_effects(loaded, way, torch.tensor([ids]), right_BT)[0].tolist()
        sums = dict.fromkeys(((layer, head) for layer, count in heads.items() for head in range(count)), 0.0)
        for (layer, head, query, _), effect in found.items():
            sums[layer, head] += effect * (query == row)
        assert list(sums.values()) == pytest.approx(expected, abs=1e-5)
    assert {query for _, _, query, _ in found} == set(range(ANSWERED - 1, TOKENS - 1))
    assert min(found.values()) < 0 < max(found.values())


def rms(norm, x):
    """The scale of an RMSNorm, from what it was given."""
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return 1 / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "qwen3_next"])
def test_effects_by_key_are_those_of_a_loop(model_type, demo):
    """A vector as wide as the model at a time, every frozen scale and gate spelled; one answer token over a foil."""
    overrides = {"final_logit_softcapping": None} if model_type == "gemma2" else {}
    model, ids, foil = roused_model(model_type, **overrides), ids_of(model_type)[: ANSWERED + 1], 77
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: (args, out)}))
    attentions = iter(model(torch.tensor([ids]), output_attentions=True).attentions)
    inner, row, unembed_VE = model.model, ANSWERED - 1, model.lm_head.weight.double()
    beside_1 = model_type in ("gemma2", "qwen3_next")
    towards_E = (unembed_VE[ids[ANSWERED]] - unembed_VE[foil]) * (inner.norm.weight.double() + beside_1)
    towards_E = towards_E * rms(inner.norm, seen["model.norm"][0][0][0, row].double())
    config, expected = model.config, {}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for layer, block in enumerate(inner.layers):
        if not hasattr(block, "self_attn"):
            continue
        weights_HQK, path = next(attentions)[0].double(), f"model.layers.{layer}"
        v_TGV = seen[f"{path}.self_attn.v_proj"][1][0].double().unflatten(-1, (kv_heads, -1))
        W_O_HVE = block.self_attn.o_proj.weight.double().T.unflatten(0, (heads, -1))
        after_E, gate_HV = torch.ones_like(towards_E), torch.ones(W_O_HVE.shape[:2])
        if model_type in ("gemma2", "olmo2"):
            norm, given = block.post_attention_layernorm, seen[f"{path}.post_attention_layernorm"][0][0]
            after_E = (norm.weight.double() + beside_1) * rms(norm, given[0, row].double())
        if model_type == "qwen3_next":
            gate_HV = seen[f"{path}.self_attn.q_proj"][1][0, row].double().view(heads, -1).chunk(2, -1)[1].sigmoid()
        for head in range(heads):
            for key in range(row + 1):
                value_V = gate_HV[head] * v_TGV[key, head * kv_heads // heads]
                written_E = weights_HQK[head, row, key] * value_V @ W_O_HVE[head]
                expected[layer, head, row, key] = float((after_E * written_E) @ towards_E)
    loaded = wrap(model, demo.tokenizer)
    found = by_key(loaded, ids, View("logit", foil=demo.tokenizer.decode([foil])))
    assert found == pytest.approx({place: expected[place] for place in found}, abs=1e-5)
    left_out = [expected[place] for place in expected.keys() - found.keys()]
    assert left_out == pytest.approx([0] * len(left_out), abs=1e-12)


def test_the_strongest_keys_are_those_of_either_sign(demo):
    keep = Request(view=View("logit"), relations=True, top_k=2, metrics=())
    seen = read(demo, CaptureSpec(BANK, answer=" river", keep=keep))
    every = read(demo, CaptureSpec(BANK, answer=" river", keep=Request(view=View("logit"), relations=True, top_k=None)))
    effects = {}
    for line in every.relations().to_pylist():
        effects.setdefault((line["layer"], line["head"]), []).append(line["logit"])
    for (layer, head), of_head in effects.items():
        kept = [one["logit"] for one in seen.relations().to_pylist() if (one["layer"], one["head"]) == (layer, head)]
        assert kept == sorted(of_head, key=abs, reverse=True)[:2]
    ranked = seen.relations(over="heads", min_weight=0.1).column("logit").to_pylist()
    assert ranked == sorted(ranked, key=abs, reverse=True)
    assert min(ranked) < -0.1 < 0.1 < max(ranked)


def test_by_kv_is_the_mean_of_the_heads(demo):
    ids = ids_of("llama")
    alone, averaged = by_key(demo, ids), by_key(demo, ids, View("logit", by_kv=True))
    keep = Request(view=View("logit", by_kv=True), relations=True, top_k=None, metrics=())
    table = read(demo, CaptureSpec(ids[:ANSWERED], answer=ids[ANSWERED:], keep=keep)).relations()
    assert len(averaged) < len(alone)
    for line in table.to_pylist():
        pair = [alone[line["layer"], 2 * line["kv_head"] + one, line["query"], line["key"]] for one in (0, 1)]
        assert line["logit"] == pytest.approx(sum(pair) / 2, abs=1e-6)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_the_command_ranks_what_writes_the_answer(engine):
    done = call(
        "relations", BANK, "--answer", " river", "--foil", " bank", "--weights", "logit", "--over", "heads",
        "--engine", engine,
    ).ok()  # fmt: skip
    first, second = done.rows[:2]
    assert {first["head"], second["head"]} == {"0", "1"}
    assert {(one["layer"], one["query"], one["key_token"]) for one in (first, second)} == {("3", "10", " river")}
    assert float(first["logit"]) > 0.5
    assert "query 10" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weights", "logit"], "effects on a logit need an answer; add --answer TEXT"),
        (["--foil", " bank"], "a foil needs effects on a logit; add --weights logit, or leave out --foil"),
        (["--weights", "logit", "--answer", " river", "--foil", " river"], "begin with the same token"),
        (["--weights", "logit", "--answer", " river", "--foil", ""], "the foil is empty; give one"),
        (
            ["--weights", "logit", "--answer", " river", "--query", "2"],
            "the row of token 2 makes no token of the answer",
        ),
        (["--weights", "logit", "--answer", " river", "--group", "words"], "cannot be summed"),
    ],
)
def test_what_has_no_effect_on_a_logit_is_refused_in_a_line(options, said):
    done = call("relations", BANK, *options)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_corpus_and_maps_are_refused():
    with pytest.raises(UsageError, match="one text at a time"):
        Job(request=Request(view=View("logit"), relations=True))
    with pytest.raises(UsageError, match="no map"):
        Request(view=View("logit"), maps="all")
