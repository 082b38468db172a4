"""A logit taken apart: against the recipe of the demo, heads spelled by hand, a hand-built model, and other passes."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from attnscope.api.why import VERIFIED
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks.generation import start_token
from attnscope.hooks.listen import listen
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.studies import attribution as parts
from attnscope.studies import residual as vectors
from attnscope.studies import residual_places as factors
from attnscope.studies import residual_places as frozen
from attnscope.studies.attribution_records import LogitQuery
from attnscope.studies.residual import position_term, vectors_of
from helpers import stack_families
from helpers.induction import induction
from helpers.parity_models import ids_for, in_half, rouse, roused_model
from helpers.why_families import taken_apart, wrapped

DRAWN = 20  # tokens that are repeated
# family: its blocks, in each the projection of the heads, what else writes, and the norms of rows or of q and k
PLAIN = {
    "llama": ("model.layers", "self_attn.o_proj", "mlp", "norm"),
    "qwen3": ("model.layers", "self_attn.o_proj", "mlp", "norm"),  # norms of q and k
    "gemma2": ("model.layers", "self_attn.o_proj", "mlp", "norm"),  # norms after attention and MLP, a soft-cap
    "olmo2": ("model.layers", "self_attn.o_proj", "mlp", "norm"),  # norms after attention and MLP alone
    "granite": ("model.layers", "self_attn.o_proj", "mlp", "norm"),  # residual multipliers
    "deepseek_v3": ("model.layers", "self_attn.o_proj", "mlp", "norm"),  # latent attention
    "gpt2": ("transformer.h", "attn.c_proj", "mlp", "ln_"),
    "gpt_neox": ("gpt_neox.layers", "attention.dense", "mlp", "norm"),  # parallel blocks
    "bert": ("bert.encoder.layer", "attention.output.dense", "intermediate", "Norm"),  # norms on the way
}
OTHERWISE = {"granite": {"residual_multiplier": 0.22}, "gpt_neox": {"use_parallel_residual": True}}


def repeated(seed):
    """A first token, then twenty random tokens, twice."""
    drawn = torch.randint(100, 900, (DRAWN,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [1, *drawn, *drawn]


def copied(seed, **asked):
    """The induction head of the demo, which looks from the last token but one to what followed its first copy."""
    ids = repeated(seed)
    return ids, LogitQuery(3, 0, len(ids) - 2, len(ids) - 1 - DRAWN, **asked)


def contrasts(found):
    return {one.name: float(value) for one, value in zip(found.components, found.contrast_N, strict=True)}


def test_the_known_answer_of_the_demo(demo):
    found = taken_apart(demo, *copied(0))
    assert found.logit - found.base == pytest.approx(12.90, abs=0.005)
    assert [contrasts(found)[name] for name in ("L2H1", "L1H5")] == pytest.approx([8.87, 2.15], abs=0.005)
    order = sorted(contrasts(found), key=lambda name: -abs(contrasts(found)[name]))
    assert order[:2] == ["L2H1", "L1H5"]
    assert found.sum == pytest.approx(found.logit, abs=1e-4)
    assert found.contrast_N.sum() == pytest.approx(found.logit - found.base, abs=1e-4)
    assert found.share_N.sum() == pytest.approx(1)


@pytest.mark.parametrize("seed", range(1, 9))
def test_in_other_draws_the_previous_token_heads_come_first(demo, seed):
    found = contrasts(taken_apart(demo, *copied(seed)))
    assert max(found, key=lambda name: found[name]) == "L2H1"
    assert found["L2H1"] + found["L1H5"] > 0.5 * sum(found.values())


def test_what_replacing_changes_agrees_with_the_contrasts(demo):
    found = taken_apart(demo, *copied(0, verify=VERIFIED))
    true = {one.name: value for one, value in zip(found.components, found.true_N, strict=True) if value == value}
    assert len(true) == VERIFIED
    assert true["L2H1"] > 0 < true["L1H5"]
    assert max(true, key=lambda name: true[name]) == "L2H1"


def test_a_replaced_component_is_a_pass_of_the_layer_on_another_residual(demo):
    """The head's part of the residual spelled by hand, and the model's own layers run on what is left of it."""
    ids, asked = copied(0, verify=VERIFIED)
    model, heard = demo.model.model, {}
    with hooked(model.layers[2].self_attn.o_proj, lambda module, args: heard.update(z=args[0])):
        run(demo.model, ids)
    projection = model.layers[2].self_attn.o_proj.weight
    width = projection.shape[1] // 6
    own_TE = heard["z"][0, :, width : 2 * width] @ projection[:, width : 2 * width].T

    def without(module, args):
        residual = args[0].clone()
        residual[0, asked.key] += own_TE[: asked.query + 1].mean(0) - own_TE[asked.key]
        return (residual, *args[1:])

    intact = logits_of(demo.model, ids, asked)
    with hooked(model.layers[3], without):
        replaced = logits_of(demo.model, ids, asked)
    found = taken_apart(demo, ids, asked)
    place = [one.name for one in found.components].index("L2H1")
    assert found.true_N[place] == pytest.approx(intact - replaced, abs=1e-4)
    others = [one for one in np.argsort(-np.abs(found.contrast_N)) if found.components[one].name != "bias"]
    assert {*np.flatnonzero(~np.isnan(found.true_N))} == {*others[:VERIFIED]}


def test_in_a_hand_built_model_the_previous_token_head_is_all_of_it():
    ids = [2, 5, 1, 7, 3, 6, 2, 5, 1]
    found = taken_apart(wrapped(induction()), ids, LogitQuery(1, 0, len(ids) - 1, 3))
    shares = {one.name: share for one, share in zip(found.components, found.share_N, strict=True)}
    assert shares.pop("L0H0") == pytest.approx(1, abs=1e-5)
    assert all(abs(share) < 1e-5 for share in shares.values())


def test_of_that_head_the_token_before_is_all_of_it():
    ids = [2, 5, 1, 7, 3, 6, 2, 5, 1]
    found = taken_apart(wrapped(induction()), ids, LogitQuery(1, 0, len(ids) - 1, 3, by_tokens=True))
    shares = {(one.name, one.position): share for one, share in zip(found.components, found.share_N, strict=True)}
    # Another token 1 is at place 8, whose successor is not there: what follows it is compared with nothing.
    assert max(shares, key=lambda one: shares[one]) == ("L0H0", 2)


@pytest.mark.parametrize("model_type", PLAIN)
@pytest.mark.parametrize("side", ["key", "query"])
def test_a_head_twice_with_all_else_constant_moves_the_logit_by_its_contribution(model_type, side):
    """A second pass in which norms keep their scales, MLPs and earlier heads their outputs, but for one head."""
    model, ids = roused_model(model_type, **OTHERWISE.get(model_type, {})), ids_for(model_type)[0].tolist()
    asked, writer = LogitQuery(3, 1, 20, 17, side=side), (1, 2)
    found = taken_apart(wrapped(model), ids, asked)
    names = [(one.layer, one.head) for one in found.components]
    intact, doubled = doubled_head(PLAIN[model_type], model, ids, asked, writer)
    assert intact == pytest.approx(found.logit, rel=1e-4, abs=1e-5)
    assert abs(doubled - intact) > 1e-4
    assert doubled - intact == pytest.approx(found.contribution_N[names.index(writer)], rel=2e-3, abs=2e-5)


OUTSIDE = {  # families that attend outside the interface, where weights alone are heard
    "gptj": ("transformer.h", "attn.out_proj", "mlp", "ln_"),  # parallel blocks, rotary positions
    "gpt_neo": ("transformer.h", "attn.attention.out_proj", "mlp", "ln_"),  # windows, no scale
    "bloom": ("transformer.h", "self_attention.dense", "mlp.dense_4h_to_h", "layernorm"),  # ALiBi
    "mpt": ("transformer.blocks", "attn.out_proj", "ffn.down_proj", "norm_"),
    "roformer": ("roformer.encoder.layer", "attention.output.dense", "intermediate", "Norm"),  # norms on the way
}


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_where_weights_alone_are_heard_a_head_twice_at_the_key_moves_their_ratio_by_its_contribution(model_type):
    """Of two keys of one query, the logarithm of their weights' ratio is the difference of their logits."""
    model, ids = roused_model(model_type), ids_for(model_type)[0].tolist()
    asked, writer = LogitQuery(3, 1, 20, 17), (1, 2)
    found = taken_apart(wrapped(model), ids, asked)
    intact, doubled = intact_and_moved(OUTSIDE[model_type], model, asked, writer, ratio_of(model, ids), row=17)
    other = taken_apart(wrapped(model), ids, LogitQuery(3, 1, 20, 16))
    assert intact == pytest.approx(found.logit - other.logit, rel=1e-4, abs=1e-5)
    contribution = found.contribution_N[[(one.layer, one.head) for one in found.components].index(writer)]
    assert abs(contribution) > 1e-4
    assert doubled - intact == pytest.approx(contribution, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("model_type", ["bloom", pytest.param("gptj", marks=pytest.mark.families)])
def test_where_weights_alone_are_heard_a_token_read_twice_moves_the_ratio_by_its_part(model_type):
    """The value of the token is the family's own, from its cache."""
    model, ids = roused_model(model_type), ids_for(model_type)[0].tolist()
    (layer, head), key, read = (1, 2), 17, 9
    with torch.no_grad():
        own = model(torch.tensor([ids]), output_attentions=True, use_cache=True)
    v_V = own.past_key_values.layers[layer].values[0, head, read]
    added_V = own.attentions[layer][0, head, key, read] * v_V
    asked = LogitQuery(3, 1, 20, key, by_tokens=True)
    found = taken_apart(wrapped(model), ids, asked)
    where = (layer, head, read)
    intact, moved = intact_and_moved(
        OUTSIDE[model_type], model, asked, (layer, head), ratio_of(model, ids), key, added_V
    )
    contribution = found.contribution_N[[(one.layer, one.head, one.position) for one in found.components].index(where)]
    assert abs(contribution) > 1e-5
    assert moved - intact == pytest.approx(contribution, rel=2e-3, abs=2e-6)


ENCODED = {  # the same of encoders, whose last norm is among the norms
    "bart": ("model.encoder.layers", "self_attn.out_proj", "fc2", "norm"),
    "t5": ("encoder.block", "layer.0.SelfAttention.o", "layer.1.DenseReluDense", "layer_norm"),
    "marian": ("model.encoder.layers", "self_attn.out_proj", "fc2", "norm"),
}


@pytest.mark.parametrize("model_type", ENCODED)
def test_a_head_of_an_encoder_twice_moves_the_logit_of_a_cross_layer_by_its_contribution(model_type):
    model, ids = stack_families.tiny(model_type), stack_families.ids(16, texts=1)
    loaded, target = wrapped(model), stack_families.ids(11, 1, texts=1)[0].tolist()
    start = start_token(loaded)
    inputs = {"decoder_input_ids": torch.tensor([[start] * (start is not None) + target])}
    asked, writer = LogitQuery(2, 1, 7, 12, stack="cross"), (1, 2)
    found = taken_apart(loaded, ids, asked, **inputs)
    names = [(one.stack, one.layer, one.head) for one in found.components]
    intact, doubled = doubled_head(ENCODED[model_type], model, ids[0].tolist(), asked, writer, **inputs)
    assert intact == pytest.approx(found.logit, rel=1e-4, abs=1e-5)
    assert abs(doubled - intact) > 1e-4
    assert doubled - intact == pytest.approx(found.contribution_N[names.index(("encoder", *writer))], rel=2e-3)


def test_a_head_twice_where_streams_are_mixed_by_constants_moves_the_logit_by_its_contribution(monkeypatch):
    """HY-V4's connections written out, with the weights of the intact pass the second time."""
    model, ids = roused_model("hy_v4"), ids_for("hy_v4")[0].tolist()
    layers, kept = model.model.layers, {}
    found, writer = taken_apart(wrapped(model), ids, LogitQuery(3, 1, 20)), (1, 2)
    asked = found.asked

    def mixed(self, streams_BTNE):
        if self not in kept:
            flat = streams_BTNE.flatten(2)
            size = (flat.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
            before, after = (flat @ self.fn.T * size).chunk(2, -1)
            before = torch.sigmoid(before * self.scale[0] + self.base[: self.hc_mult]) + self.hc_eps
            after = torch.sigmoid(after * self.scale[1] + self.base[self.hc_mult :])
            kept[self] = before, self.hc_post_magnitude * after + self.hc_eps
        before, after = kept[self]
        return after, torch.einsum("btn,btne->bte", before, streams_BTNE)

    monkeypatch.setattr(type(layers[0].attn_hc), "forward", mixed)
    where = ("model.layers", "self_attn.o_proj", "mlp", "layernorm")
    intact, doubled = doubled_head(where, model, ids, asked, writer)
    names = [(one.layer, one.head) for one in found.components]
    assert intact == pytest.approx(found.logit, rel=1e-4, abs=1e-5)
    assert abs(doubled - intact) > 1e-4
    assert doubled - intact == pytest.approx(found.contribution_N[names.index(writer)], rel=2e-3)


def ratio_of(model, ids):
    """What reads the logarithm of the ratio of two weights of a row of L3H1."""

    def ratio():
        weights = {}
        listen(model, torch.tensor([ids]), lambda call: weights.setdefault(call.layer, call.P.rows(20, 21)))
        return float((weights[3][0, 1, 0, 17] / weights[3][0, 1, 0, 16]).log())

    return ratio


def doubled_head(where, model, ids, asked, writer, **inputs):
    """The logit of a pass, and that of one where a head writes twice as much and nothing else reacts."""
    before, after = intact_and_moved(where, model, asked, writer, lambda: spec_of(model, ids, asked, **inputs))
    moved = (before, after) if asked.side == "key" else (after, before)
    return product(before, before, asked), product(*moved, asked)


def intact_and_moved(where, model, asked, writer, read, row=slice(None), added_V=None):
    """What is read of both passes; row: where the head writes so much more, twice as much without `added_V`."""
    path, out, rest, norms = where
    blocks = list(model.get_submodule(path))
    blocks = blocks if asked.stack == "cross" else blocks[: asked.layer]
    kept, heads = {}, getattr(model.config, "num_attention_heads", None)
    constant = {block.get_submodule(rest): number for number, block in enumerate(blocks)}
    projections = {block.get_submodule(out): number for number, block in enumerate(blocks)}
    scaled = [one for name, one in model.named_modules() if norms in name and not list(one.children())]

    def keep(module, args, output):
        kept[module] = args[0], output

    with ExitStack() as stack:
        for module in {*constant, *projections, *scaled}:
            stack.callback(module.register_forward_hook(keep).remove)
        before = read()

    def again(module, args, output):
        return kept[module][1]

    def frozen_norm(module, args, output):
        x, y = kept[module]
        bias = getattr(module, "bias", None)
        bias = 0 if bias is None else bias
        centred = isinstance(module, torch.nn.LayerNorm)
        was, now = (one - one.mean(-1, keepdim=True) if centred else one for one in (x, args[0]))
        return (y - bias) / was * now + bias

    def heads_again(module, args):
        z = kept[module][0].clone()
        if projections[module] == writer[0]:
            width = z.shape[-1] // heads
            own = z[:, row, writer[1] * width : (writer[1] + 1) * width]
            own += own.clone() if added_V is None else added_V
        return (z,)

    with ExitStack() as stack:
        for module in constant:
            stack.callback(module.register_forward_hook(again).remove)
        for module in scaled:
            stack.callback(module.register_forward_hook(frozen_norm).remove)
        for module in projections:
            stack.callback(module.register_forward_pre_hook(heads_again).remove)
        return before, read()


def spec_of(model, ids, asked, **inputs):
    found = {}
    listen(model, torch.tensor([ids]), lambda call: found.setdefault((call.stack, call.layer), call.spec), **inputs)
    return found[asked.stack or "decoder" if ("decoder", 0) in found else "encoder", asked.layer]


def product(of_query, of_key, asked):
    """scale * q . k, coordinate by coordinate."""
    group = asked.head // (of_query.heads // of_query.kv_heads)
    q_D, k_D = of_query.q_BHQD[0, asked.head, asked.query], of_key.k_BGKD[0, group, asked.key]
    return of_query.scale * sum(float(q) * float(k) for q, k in zip(q_D, k_D, strict=True))


def logits_of(model, ids, asked):
    spec = spec_of(model, ids, asked)
    return product(spec, spec, asked)


def run(model, ids):
    with torch.no_grad():
        model(torch.tensor([ids]))


@contextmanager
def hooked(module, hook):
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_pairs_sum_over_the_query_to_the_key_side_and_over_the_key_to_the_query_side(demo):
    ids, asked = copied(3, side="both")
    pairs = taken_apart(demo, ids, asked)
    sums = {"key": {}, "query": {}}
    for one, other, value in zip(pairs.components, pairs.others, pairs.contrast_N, strict=True):
        sums["key"][one.name] = sums["key"].get(one.name, 0) + value
        sums["query"][other.name] = sums["query"].get(other.name, 0) + value
    for side, found in sums.items():
        expected = contrasts(taken_apart(demo, *copied(3, side=side)))
        assert found == pytest.approx(expected, abs=1e-4)


# Norms after blocks and on the way, gates and norms before the projection, latent projections, several streams.
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "bert", "qwen3_next", "bitnet", "deepseek_v3", "gemma3n_text"]
)
def test_pairs_by_matrix_products_are_those_by_a_gradient_for_each_number(family, monkeypatch):
    loaded, ids = wrapped(roused_model(family)), ids_for(family)[0].tolist()
    made = []
    monkeypatch.setattr(parts, "vectors_of", lambda *asked: made.append(vectors_of(*asked)) or made[-1])
    found = taken_apart(loaded, ids, LogitQuery(3, 1, 20, 17, side="both"))
    assert [one is None for one in made] == 2 * [family == "gemma3n_text"]
    monkeypatch.setattr(parts, "vectors_of", lambda *asked: None)
    expected = taken_apart(loaded, ids, LogitQuery(3, 1, 20, 17, side="both"))
    np.testing.assert_allclose(found.contribution_N, expected.contribution_N, atol=1e-6)
    np.testing.assert_allclose(found.base_N, expected.base_N, atol=1e-6)


def test_matrix_products_that_are_not_the_contributions_are_not_believed(demo, monkeypatch):
    ids, asked = copied(3, side="both")
    expected = taken_apart(demo, ids, asked)
    right, slow, sides = vectors.projection, parts._Apart._one_by_one, []
    monkeypatch.setattr(vectors, "projection", lambda *given: right(*given).flip(0))  # heads in the wrong order
    monkeypatch.setattr(parts._Apart, "_one_by_one", lambda self, one: sides.append(one.side) or slow(self, one))
    np.testing.assert_allclose(taken_apart(demo, ids, asked).contribution_N, expected.contribution_N, atol=1e-5)
    assert sides == ["query", "key", "key"]


def test_the_tokens_of_a_head_sum_to_it_and_are_its_weights_times_what_values_write(demo):
    ids, asked = copied(4, by_tokens=True)
    split, whole = taken_apart(demo, ids, asked), contrasts(taken_apart(demo, *copied(4)))
    sums = {}
    for one, value in zip(split.components, split.contrast_N, strict=True):
        sums[one.name] = sums.get(one.name, 0) + float(value)
    assert sums == pytest.approx(whole, abs=1e-4)
    largest = split.components[int(np.argmax(split.contrast_N))]
    assert (largest.name, largest.position) == ("L2H1", asked.key - 1)
    assert all(one.position is None or one.kind == "head" for one in split.components)
    reads = {one.position for one in split.components if one.name == "L0H0"}
    assert reads <= set(range(asked.query + 1))  # no key behind the query is seen


def test_against_another_key_the_contrast_is_the_difference_of_the_two(demo):
    ids, asked = copied(5)
    other = asked.key - 3
    keys = [taken_apart(demo, ids, LogitQuery(3, 0, asked.query, key)) for key in (asked.key, other)]
    found = taken_apart(demo, ids, LogitQuery(3, 0, asked.query, asked.key, other))
    np.testing.assert_allclose(found.contrast_N, keys[0].contribution_N - keys[1].contribution_N, atol=1e-5)
    assert found.base == pytest.approx(keys[1].logit)


def test_without_a_key_the_one_with_most_weight_is_meant(demo):
    ids, asked = copied(6)
    found = taken_apart(demo, ids, LogitQuery(3, 0, asked.query))
    weights_K = spec_of(demo.model, ids, asked).weights(asked.query, asked.query + 1)[0, 0, 0]
    assert found.asked.key == int(weights_K.argmax())


@pytest.mark.parametrize("models", [12, pytest.param(24, marks=pytest.mark.e2e)])
def test_in_random_models_no_component_is_preferred(models):
    """Contrasts of one key against another, over models and keys: their means are 0 within their error."""
    found = []
    for seed in range(models):
        ids = ids_for("llama", seed)[0].tolist()
        model = roused_model("llama") if seed == 0 else redrawn("llama", seed)
        found.append(taken_apart(wrapped(model), ids, LogitQuery(3, seed % 4, 23, 5 + seed % 11)).contrast_N)
    contrasts_SN = np.stack(found)[:, :-1]  # Llama's layers have no bias
    z_N = contrasts_SN.mean(0) / (contrasts_SN.std(0, ddof=1) / len(found) ** 0.5)
    assert (np.abs(z_N) < 4).all()
    assert np.mean(np.abs(z_N) < 2) > 0.8


def redrawn(model_type, seed):
    model = roused_model(model_type)
    rouse(model, seed + 100)
    return model


def test_norms_that_are_not_frozen_are_caught(demo, monkeypatch):
    monkeypatch.setattr(frozen.FrozenNorms, "_freeze", lambda *given: None)
    monkeypatch.setattr(factors, "FACTORS", frozenset())  # which its norms divide by, too
    with pytest.raises(ModelError, match="the contributions sum to"):
        taken_apart(demo, *copied(0))


def test_a_model_is_left_as_it_was(demo):
    ids, asked = copied(0)
    before = logits_of(demo.model, ids, asked)
    hooks = [dict(one._forward_pre_hooks) | dict(one._forward_hooks) for one in demo.model.modules()]
    taken_apart(demo, ids, LogitQuery(3, 0, asked.query, verify=VERIFIED))
    with pytest.raises(InputError):
        taken_apart(demo, ids, LogitQuery(3, 0, 5, 9))
    assert [dict(one._forward_pre_hooks) | dict(one._forward_hooks) for one in demo.model.modules()] == hooks
    assert logits_of(demo.model, ids, asked) == before


def test_what_cannot_be_asked_is_refused(demo):
    with pytest.raises(InputError, match="query 5 does not see key 9 in this head"):
        taken_apart(demo, repeated(0), LogitQuery(3, 0, 5, 9))
    with pytest.raises(UsageError, match=r"in bfloat16 the contributions do not sum to the logit; .*float32"):
        taken_apart(wrapped(in_half(roused_model("llama"))), ids_for("llama")[0].tolist(), LogitQuery(1, 0, 5, 3))


@pytest.mark.parametrize(("quantize", "dtype"), [("8bit", "float32"), ("4bit", "float32"), ("4bit", "bfloat16")])
def test_quantized_weights_are_refused(quantize, dtype):
    """Products with 8-bit weights are rounded, and those with 4-bit weights have no gradient on the CPU."""
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match="quantized weights"):
        taken_apart(
            load(LoadOptions(device="cpu", quantize=quantize, dtype=dtype)), repeated(0), LogitQuery(3, 0, 5, 3)
        )


def test_what_positions_add_is_read_off_the_bias_and_the_mask():
    q_BHQD = torch.ones(1, 2, 3, 4)
    bias = torch.arange(18.0).view(1, 2, 3, 3)
    low = torch.finfo(torch.float32).min
    mask = torch.zeros(1, 1, 3, 3).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), low)
    mask[..., 0] -= 2
    visible = Visibility(3, 3, mask)
    spec = AttentionSpec(q_BHQD, q_BHQD, q_BHQD, 0.5, visible, bias=bias)
    assert position_term(spec, 1, 1)[:2].tolist() == [12.0 - 2, 13.0]
    assert position_term(AttentionSpec(q_BHQD, q_BHQD, q_BHQD, 0.5, visible), 1, 2).tolist() == [-2.0, 0.0, 0.0]
    assert not position_term(AttentionSpec(q_BHQD, q_BHQD, q_BHQD, 0.5, Visibility(3, 3, None)), 1, 2).any()
