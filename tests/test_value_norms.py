"""Weights times what keys write, A |v W_O|, against loops over output_attentions, v and W_O.

Shapes: H head, G kv head, Q query, K key, T token, V width of v, E model width.
"""

from collections.abc import Container, Iterable

import numpy as np
import pytest
import torch
from torch import nn

import attnscope
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.errors import UsageError
from attnscope.hooks.calls import AttentionCall, CallSite
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import ProjectionInputs
from attnscope.model.loading import wrap
from attnscope.observe import value_norms
from attnscope.observe.request import Request, View
from attnscope.observe.value_norms import Projections, ValueNorms
from attnscope.utils.tables import rows
from helpers.dispatched import largest_tensor
from helpers.families import tiny_model
from helpers.parity_models import roused_model

IDS, VALUE = [6, 9, 7, 6, 9, 30, 41, 7, 6, 9, 12], View(weights="value")
GROUPS = {"llama": 2, "gemma2": 2, "olmo2": 2, "gpt2": 4}  # kv heads of 4 heads
BEHIND = {"gemma2": 1.0, "olmo2": 0.0}  # a norm takes what W_O gives; what is added to its weight


def sharpened(family: str) -> nn.Module:
    """Weights that are not uniform, biases that are not 0."""
    model = tiny_model(family)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if any(part in name for part in ("q_proj", "k_proj", "c_attn.weight")):
            parameter.data.mul_(6)
        if name.endswith(("bias", "post_attention_layernorm.weight")):
            parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    return model


def by_loops(model: nn.Module, family: str) -> list[torch.Tensor]:
    """Per layer (H, Q, K): the norm of every alpha v W_O, a vector as wide as the model at a time.

    Where a norm takes what W_O gives, of what it makes of it with the scale that it has in the query's row.
    """
    values: list[torch.Tensor] = []
    normed: list[torch.Tensor] = []
    projections = [
        (name, part) for name, part in model.named_modules() if name.endswith(("v_proj", "attn.c_attn", "self_attn.v"))
    ]
    handles = [part.register_forward_hook(lambda _, inputs, out: values.append(out[0])) for _, part in projections]
    behind = [part for name, part in model.named_modules() if name.endswith("post_attention_layernorm")]
    handles += [one.register_forward_hook(lambda _, inputs, out: normed.append(inputs[0][0])) for one in behind]
    with torch.no_grad():
        attentions = model(torch.tensor([IDS]), output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    found = []
    for layer, weights in enumerate(attentions):
        if family == "gpt2":
            v_TGV = values[layer].chunk(3, -1)[2].unflatten(-1, (4, -1))
            W_O_HVE = model.transformer.h[layer].attn.c_proj.weight.unflatten(0, (4, -1))
        else:
            v_TGV = values[layer].unflatten(-1, (GROUPS[family], -1))
            W_O_HVE = model.model.layers[layer].self_attn.o_proj.weight.T.unflatten(0, (4, -1))
        norms = torch.zeros(4, len(IDS), len(IDS))
        for head in range(4):
            for key in range(len(IDS)):
                written_E = v_TGV[key, head * GROUPS[family] // 4].double() @ W_O_HVE[head].double()
                if family in BEHIND:
                    written_E = (behind[layer].weight.double() + BEHIND[family]) * written_E
                for query in range(len(IDS)):
                    scale = 1.0
                    if family in BEHIND:
                        scale = (normed[layer][query].double().square().mean() + model.config.rms_norm_eps) ** -0.5
                    norms[head, query, key] = (scale * weights[0, head, query, key] * written_E).norm()
        found.append(norms)
    return found


def on_engines(families: Iterable[str], fused: Container[str]) -> pytest.MarkDecorator:
    """Each family on its own attention; by default on the fused engine too where it is among those."""
    return pytest.mark.parametrize(
        ("family", "engine"),
        [
            pytest.param(family, engine, marks=[] if engine == "eager" or family in fused else pytest.mark.families)
            for family in families
            for engine in ("eager", "fused")
        ],
    )


@on_engines(GROUPS, ("llama", "gemma2"))
def test_norms_are_those_of_a_loop(family: str, engine: str, demo) -> None:
    """As matrices, as maps, as relations, and as means over a kv head."""
    model = sharpened(family)
    expected = by_loops(model, family)
    loaded = wrap(model, demo.tokenizer)
    wanted = Request(view=VALUE, metrics=(), weights=True, relations=True, top_k=2, maps="all")
    seen = attnscope.capture(loaded, IDS, engine=engine, request=wanted)
    for layer, norms in enumerate(expected):
        assert norms.max() > 2 * norms[norms > 0].median()
        torch.testing.assert_close(seen.weights[layer], norms, atol=1e-5, rtol=1e-5)
        assert (np.isnan(seen.maps.values[layer]) == (norms == 0).numpy()).all()
        np.testing.assert_allclose(np.nan_to_num(seen.maps.values[layer]), norms, atol=1e-5, rtol=1e-5)
    assert seen.relations().column_names[-2:] == ["norm", "stack"]
    strongest = {(layer, head, query): [] for layer in range(4) for head in range(4) for query in range(len(IDS))}
    for layer, head, _, query, _, _, _, norm, _ in rows(seen.relations()):
        strongest[layer, head, query].append(norm)
    for (layer, head, query), norms in strongest.items():
        largest = sorted(expected[layer][head, query].tolist(), reverse=True)[:2]
        assert norms == pytest.approx([norm for norm in largest if norm > 0], abs=1e-5)
    by_kv = Request(view=View(weights="value", by_kv=True), metrics=(), weights=True)
    mean = attnscope.capture(loaded, IDS, engine=engine, request=by_kv).weights
    for layer, norms in enumerate(expected):
        torch.testing.assert_close(mean[layer], norms.unflatten(0, (GROUPS[family], -1)).mean(1), atol=1e-5, rtol=1e-5)


def test_a_wrong_kv_head_is_noticed(demo) -> None:
    model = sharpened("llama")
    expected = by_loops(model, "llama")
    swapped = nn.Parameter(model.model.layers[0].self_attn.v_proj.weight.unflatten(0, (2, -1)).flip(0).flatten(0, 1))
    model.model.layers[0].self_attn.v_proj.weight = swapped
    found = attnscope.capture(wrap(model, demo.tokenizer), IDS, request=Request(view=VALUE, metrics=(), weights=True))
    assert (found.weights[0] - expected[0]).abs().max() > 1e-2


def of_query_half(module: nn.Module, hidden_QE: torch.Tensor, z_QHV: torch.Tensor) -> torch.Tensor:
    return module.q_proj(hidden_QE).unflatten(-1, (4, -1)).chunk(2, -1)[1].sigmoid()


def projected(module: nn.Module, hidden_QE: torch.Tensor, z_QHV: torch.Tensor) -> torch.Tensor:
    bias_H = getattr(module, "gate_bias", torch.zeros(4))
    return (module.gate_proj(hidden_QE).view(z_QHV.shape) + bias_H[:, None]).sigmoid()


def of_heads(module: nn.Module, hidden_QE: torch.Tensor, z_QHV: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(module.g_proj(hidden_QE))[..., None]


def of_norm(module: nn.Module, hidden_QE: torch.Tensor, z_QHV: torch.Tensor) -> torch.Tensor:
    return rms_scale(module.attn_sub_norm, z_QHV.flatten(-2)) * module.attn_sub_norm.weight.view(z_QHV.shape[1:])


def rms_scale(norm: nn.Module, x_QE: torch.Tensor) -> torch.Tensor:
    return (x_QE.double().square().mean(-1)[:, None, None] + norm.variance_epsilon).rsqrt()


GATES = {  # by the layer's own weights, not by what its projection is given
    "qwen3_next": of_query_half,
    "qwen3_5_text": of_query_half,
    "bitnet": of_norm,
    "afmoe": projected,
    "beam": projected,
    "laguna": of_heads,
}
NORMED = {"afmoe", "beam"}  # what the projection gives
SHARED = {"granite_swa"}  # sinks take a share of what the weights give
OUTSIDE = {"bert"}  # the projection is not a part of the module that attends
FUSED = {(family, "fused") for family in ("qwen3_next", "bitnet", "beam", *SHARED)}  # by default


def by_hand(model: nn.Module, family: str) -> dict[int, torch.Tensor]:
    """Per layer (H, Q, K): the norm of each alpha (g v) W_O, every vector as wide as the model."""
    modules = dict(model.named_modules())
    given: dict[str, torch.Tensor] = {}

    def keep(name: str):
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            given[name] = (args[0] if args else kwargs["hidden_states"])[0]

        return before

    parts = [name for name in modules if name.endswith(("self_attn", "post_attention_layernorm"))]
    handles = [modules[name].register_forward_pre_hook(keep(name), with_kwargs=True) for name in parts]
    calls: list[AttentionCall] = []
    listen(model, torch.tensor([IDS]), calls.append, engine=ENGINES["eager"])
    for handle in handles:
        handle.remove()
    found = {}
    for call in calls:
        spec, alpha_HQK, z_QHV = call.spec, call.weights_BHQK[0].double(), call.output_BQHV[0]
        gate_QHV = torch.ones(z_QHV.shape)
        if family in GATES:
            gate_QHV = GATES[family](call.module, given[call.path], z_QHV).expand(z_QHV.shape)
        if family in SHARED:
            logsumexp_HQ = spec.logits(0, len(IDS))[0].logsumexp(-1)
            alpha_HQK = alpha_HQK * (logsumexp_HQ - call.module.sinks[:, None]).sigmoid()[..., None]
        out = modules[call.path.replace(".self", ".output.dense")] if family in OUTSIDE else call.module.o_proj
        v_HKV = spec.v_BGKV[0].repeat_interleave(spec.heads // spec.kv_heads, 0).double()
        W_O_HVE = out.weight.T.unflatten(0, (spec.heads, -1)).double()
        written_HQKE = torch.einsum("hqk,qhv,hkv,hve->hqke", alpha_HQK, gate_QHV.double(), v_HKV, W_O_HVE)
        if family in NORMED:
            behind = call.path.replace("self_attn", "post_attention_layernorm")
            written_HQKE = written_HQKE * modules[behind].weight * rms_scale(modules[behind], given[behind])
        found[call.layer] = written_HQKE.norm(dim=-1).float()
    return found


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        pytest.param(
            family, engine, marks=[] if engine == "eager" or (family, engine) in FUSED else pytest.mark.families
        )
        for family in (*GATES, *SHARED, *OUTSIDE)
        for engine in ("eager", "fused", "tiles")
    ],
)
@torch.no_grad()
def test_norms_behind_gates_are_those_of_the_layers_own_weights(family: str, engine: str, demo) -> None:
    """Each query has a gate of its own, so that no norm of a key serves all rows."""
    model = roused_model(family)
    expected = by_hand(model, family)
    wanted = Request(view=VALUE, metrics=(), weights=True, relations=True, top_k=2)
    seen = attnscope.capture(wrap(model, demo.tokenizer), IDS, engine=engine, request=wanted)
    assert {layer.layer for layer in seen.weights} == expected.keys()
    for layer, norms in expected.items():
        torch.testing.assert_close(seen.weights[layer], norms, atol=1e-5, rtol=1e-5)
    for layer, head, _, query, _, _, _, norm, _ in rows(seen.relations()):
        assert norm <= expected[layer][head, query].max() + 1e-5


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.bfloat16, 0.02), pytest.param(torch.float16, 0.003, marks=pytest.mark.families)]
)
@pytest.mark.parametrize("engine", ["eager", "fused"])
@pytest.mark.parametrize("family", ["qwen3_next", "bitnet", pytest.param("laguna", marks=pytest.mark.families)])
@torch.no_grad()
def test_a_gate_of_half_precision_is_as_exact_as_its_numbers(family: str, engine: str, dtype, allowed, demo) -> None:
    expected = by_hand(roused_model(family), family)
    loaded = wrap(roused_model(family).to(dtype), demo.tokenizer)
    found = attnscope.capture(loaded, IDS, engine=engine, request=Request(view=VALUE, metrics=(), weights=True)).weights
    for layer, norms in expected.items():
        assert (found[layer] - norms).abs().max() < allowed * norms.max()


def test_texts_beside_each_other_have_the_norms_that_they_have_alone(demo) -> None:
    loaded, wanted = wrap(roused_model("bitnet"), demo.tokenizer), Request(view=VALUE, metrics=(), weights=True)
    texts = [IDS, IDS[3:8]]
    for beside, ids in zip(attnscope.capture(loaded, texts, request=wanted), texts, strict=True):
        alone = attnscope.capture(loaded, ids, request=wanted).weights
        for layer, norms in alone.items():
            torch.testing.assert_close(beside.weights[layer], norms, atol=1e-5, rtol=1e-5)


def test_no_tensor_is_as_wide_as_the_model_for_every_key() -> None:
    heads, keys, width, model = 8, 300, 16, 2048
    q, v = torch.randn(1, heads, keys, width), torch.randn(1, 2, keys, width)
    attention, out = nn.Identity(), nn.Linear(heads * width, model, bias=False)
    P = TiledAttention(AttentionSpec(q, v, v, 1.0, Visibility(keys, keys)))
    call = AttentionCall(CallSite(0, 0, "", attention), P, P.spec)
    norms = ValueNorms(Projections({attention: out}, {}, ProjectionInputs({})), call)
    norms(0, 1)  # W_O itself is read once
    again = ValueNorms(Projections({attention: out}, {}, ProjectionInputs({})), call)
    again._root_HVV = norms._root_HVV
    with torch.no_grad(), largest_tensor() as largest:
        found_BH1K = again(0, keys)
    assert largest[0] <= 4 * heads * keys * width
    W_O_HVE = out.weight.T.unflatten(0, (heads, width))
    expected = torch.stack([(v[0, head // 4] @ W_O_HVE[head]).norm(dim=-1) for head in range(heads)])
    torch.testing.assert_close(found_BH1K[0, :, 0], expected.detach(), atol=1e-5, rtol=1e-5)


def gated_norms(queries: int, width: int = 8) -> ValueNorms:
    """Norms behind a gate of 4 heads on 2 kv heads, of two texts; the gate of one row of one head is NaN."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, queries, width, generator=draw) for heads in (4, 2, 2))
    gate = torch.rand(2, queries, 4, width, generator=draw)
    gate[1, queries - 1, 2] = torch.nan
    attention, out = nn.Identity(), nn.Linear(4 * width, 64, bias=False)
    P = TiledAttention(AttentionSpec(q, k, v, 1.0, Visibility(queries, queries)))
    call = AttentionCall(CallSite(0, 0, "", attention), P, P.spec, output_BQHV=torch.ones_like(gate))
    return ValueNorms(Projections({attention: out}, {}, ProjectionInputs({attention: out})), call, gate)


@pytest.mark.parametrize("many", [value_norms.MANY_PAIRS, 60], ids=["pairs", "many"])
@pytest.mark.parametrize("spread", [0.0, 3.0], ids=["flat", "sharp"])
@torch.no_grad()
def test_the_strongest_keys_behind_a_gate_are_those_of_all_norms(spread: float, many: int, monkeypatch) -> None:
    monkeypatch.setattr(value_norms, "MANY_PAIRS", many)
    norms, most = gated_norms(60), 3
    logits = spread * torch.randn(2, 4, 60, 60, generator=torch.Generator().manual_seed(1))
    weights = logits.masked_fill(torch.ones(60, 60).triu(1) > 0, -torch.inf).softmax(-1)
    searched, every = norms(0, 60, weights, most), norms(0, 60)
    torch.testing.assert_close(*((weights * of).topk(most).values for of in (searched, every)), equal_nan=True)
    computed = (searched != 0) & (weights > 0)
    torch.testing.assert_close(searched[computed], every[computed], equal_nan=True)
    assert bool(searched[1, 2, 59].isnan().all())
    if spread and many < 60:  # of sharp rows most keys cannot be among the strongest
        assert computed.sum() < 0.5 * (weights > 0).sum()


@torch.no_grad()
def test_a_bound_that_is_too_small_would_be_seen() -> None:
    norms, weights = gated_norms(60), torch.full((2, 4, 60, 60), 1 / 60)
    norms.__dict__["_size_H"] = norms._size_H / 4
    most = [(weights * of)[0].topk(3).values for of in (norms(0, 60, weights, 3), norms(0, 60))]
    assert (most[0] < most[1] - 1e-4).any()


@torch.no_grad()
def test_relations_behind_a_gate_are_the_strongest_of_the_matrix(demo) -> None:
    loaded, ids = wrap(roused_model("qwen3_next"), demo.tokenizer), IDS * 3
    request = Request(view=VALUE, metrics=(), weights=True, relations=True, top_k=2)
    seen = attnscope.capture(loaded, ids, engine="eager", request=request)
    for layer, norms_HQK in seen.weights.items():
        strongest = norms_HQK[:, 1:].topk(2).values  # the first query sees one key
        torch.testing.assert_close(seen.kept_keys[layer].weight[:, 1:], strongest, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("xlnet", "has no output projection that is given the heads"),
        ("diffllama", "has no output projection that is given the heads"),
    ],
)
def test_families_without_a_plain_projection_are_refused_in_a_line(family: str, why: str, demo) -> None:
    loaded = wrap(tiny_model(family), demo.tokenizer)
    with pytest.raises(UsageError, match=why) as refused:
        attnscope.capture(loaded, IDS, request=Request(view=VALUE, metrics=(), weights=True), engine="eager")
    assert "\n" not in str(refused.value)
