"""The reader of raw weights: each split against index arithmetic, a whole layer against loops, and what it refuses.

Shapes: B text, T token, E model width, H head, G kv head, D head dim, V width of v.
"""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attnscope.reference import layouts
from attnscope.reference.layouts import ENCODERS, FAMILIES, Layout, layout_of
from attnscope.reference.projections import SPLITS, LayerInputs, UnreadableError
from attnscope.reference.reader import (
    ALIBI,
    GATES,
    NORM_ON,
    QUERY_FACTORS,
    ROTARY_ON,
    SCALES,
    norm_parameters,
    queries_keys_values,
    read,
    visible,
)

H, G, D, E, T = 4, 2, 6, 10, 5


@dataclass(frozen=True)
class Layer:
    index: int = 1
    heads: int = H
    kv_heads: int = G
    type: str = "full"
    window: int | None = None


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def given(layout: Layout, parameters: dict[str, Tensor], layer: Layer | None = None, **config: Any) -> LayerInputs:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    settings = SimpleNamespace(**{"rope_parameters": rope, "layer_types": None, **config})
    return LayerInputs(layout, parameters, settings, layer or Layer(), random(1, T, E), torch.arange(T))


SEPARATE = {"q_proj.weight": random(H * D, E), "k_proj.weight": random(G * D, E), "v_proj.weight": random(G * D, E)}


def test_a_layer_spelled_with_loops() -> None:
    """Projection, rotation, scale, causal mask, softmax, values and output projection, one number at a time."""
    parameters = {**SEPARATE, "k_proj.bias": random(G * D), "o_proj.weight": random(E, H * D)}
    layer = given(layouts.SEPARATE, parameters)
    reading = read(layer)
    x_TE = layer.hidden_BTE[0]

    def head(name: str, number: int, t: int) -> list[float]:
        rows = range(number * D, (number + 1) * D)
        bias = parameters.get(f"{name}.bias", torch.zeros(H * D))
        return [
            sum(float(parameters[f"{name}.weight"][r, e] * x_TE[t, e]) for e in range(E)) + float(bias[r]) for r in rows
        ]

    def turned(vector: list[float], t: int) -> list[float]:
        half = D // 2
        angle = [t / 100.0 ** (2 * m / D) for m in range(half)]
        first = [vector[m] * math.cos(angle[m]) - vector[m + half] * math.sin(angle[m]) for m in range(half)]
        second = [vector[m + half] * math.cos(angle[m]) + vector[m] * math.sin(angle[m]) for m in range(half)]
        return first + second

    expected_TE = torch.zeros(T, E, dtype=torch.float64)
    for h in range(H):
        for i in range(T):
            q = turned(head("q_proj", h, i), i)
            keys = [turned(head("k_proj", h // (H // G), j), j) for j in range(i + 1)]
            exp = [math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(D)) for k in keys]
            for j in range(i + 1):
                weight = exp[j] / sum(exp)
                assert float(reading.weights_BHQK[0, h, i, j]) == pytest.approx(weight, abs=1e-6)
                value = head("v_proj", h // (H // G), j)
                for d in range(D):
                    expected_TE[i] += weight * value[d] * parameters["o_proj.weight"][:, h * D + d]
    assert_close(reading.output_BTE[0], expected_TE, atol=1e-5, rtol=0)
    assert (reading.weights_BHQK.triu(1) == 0).all()


# How each fused projection is cut, row by row of its matrix.

FUSED = random((H + 2 * G) * D, E)
PER_HEAD = random(3 * H * D, E)
ROWS = {
    "concat": lambda part, head, d: {"q": head, "k": H + head, "v": H + G + head}[part] * D + d,
    "grouped": lambda part, head, d: (
        {"q": head // 2 * 4 + head % 2, "k": head * 4 + 2, "v": head * 4 + 3}[part] * D + d
    ),
    "per_head": lambda part, head, d: (head * 3 + "qkv".index(part)) * D + d,
    "four_blocks": lambda part, head, d: (head * 3 + "qvk".index(part)) * D + d,
}


@pytest.mark.parametrize("split", ROWS)
def test_a_fused_projection_is_cut_where_it_should_be(split: str) -> None:
    whole = split in ("per_head", "four_blocks")
    fused = PER_HEAD if whole else FUSED
    layout = replace(layouts.CONCAT, split=split, fused="fused")
    layer = given(layout, {"fused.weight": fused}, Layer(kv_heads=H if whole else G))
    for part, found_BTHD in zip("qkv", SPLITS[split](layer), strict=True):
        for head in range(found_BTHD.shape[2]):
            for d in range(D):
                row = fused[ROWS[split](part, head, d)]
                assert_close(found_BTHD[0, :, head, d], layer.hidden_BTE[0] @ row)


def test_every_row_of_a_fused_projection_is_used_once() -> None:
    for split, row in ROWS.items():
        kv_heads = H if split in ("per_head", "four_blocks") else G
        parts = [("q", H), ("k", kv_heads), ("v", kv_heads)]
        rows = sorted(row(part, head, d) for part, heads in parts for head in range(heads) for d in range(D))
        assert rows == list(range((H + 2 * kv_heads) * D)), split


def test_conv1d_keeps_its_matrix_the_other_way_round() -> None:
    layout = replace(layouts.CONV1D, fused="fused")
    turned = given(layout, {"fused.weight": FUSED.T.contiguous()})
    plain = given(replace(layout, transposed=False), {"fused.weight": FUSED})
    for ours, theirs in zip(queries_keys_values(turned), queries_keys_values(plain), strict=True):
        assert_close(ours, theirs)


def test_a_query_with_a_gate_gives_its_first_half() -> None:
    parameters = {**SEPARATE, "q_proj.weight": random(2 * H * D, E)}
    q_BTHD, _, _ = SPLITS["gated_query"](given(layouts.GATED, parameters))
    for head in range(H):
        rows = parameters["q_proj.weight"][2 * head * D : 2 * head * D + D]
        assert_close(q_BTHD[0, :, head], random(1, T, E)[0] @ rows.T)


def test_a_layer_without_values_of_its_own_takes_the_keys() -> None:
    parameters = {name: weight for name, weight in SEPARATE.items() if not name.startswith("v")}
    _, k, v = SPLITS["separate"](given(layouts.SEPARATE, parameters))
    assert_close(k, v)


# Masks, positions and norms.


@pytest.mark.parametrize(("layer_type", "window"), [("full", None), ("sliding", 2), ("chunked", 3), ("full", 2)])
def test_which_keys_are_visible(layer_type: str, window: int | None) -> None:
    found_QK = visible(given(layouts.SEPARATE, {}, Layer(type=layer_type, window=window)))
    for i in range(T):
        for j in range(T):
            near = {"sliding": i - j < (window or 0), "chunked": window and i // window == j // window}.get(
                layer_type, True
            )
            assert bool(found_QK[i, j]) == (j <= i and bool(near))


def test_a_layer_reads_the_rope_of_its_kind() -> None:
    rope = {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}
    kinds = ["sliding_attention", "full_attention"]
    layer = given(layouts.SEPARATE, {}, rope_parameters=rope, layer_types=kinds)
    assert layer.rope == {"rope_theta": 1.0}
    assert replace(layer, layer=Layer(index=0)).rope == {"rope_theta": 2.0}


def test_a_family_without_rope_parameters_has_its_base_in_the_layout() -> None:
    layer = given(FAMILIES["gptj"], {}, rope_parameters=None)
    assert layer.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert given(layouts.SEPARATE, {}, rope_parameters=None).rope is None


def test_partial_rotary_leaves_the_other_dims_alone() -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1 / 3}
    turned, _, _ = queries_keys_values(given(layouts.SEPARATE, SEPARATE, rope_parameters=rope))
    plain, _, _ = queries_keys_values(given(layouts.NO_ROTARY, SEPARATE))
    assert_close(turned[..., 2:], plain[..., 2:])
    assert not torch.allclose(turned[..., 1:, :2], plain[..., 1:, :2])


def test_what_is_done_to_q_and_k_is_noted_in_its_order() -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    parameters = {**SEPARATE, "q_norm.weight": random(D), "k_norm.weight": random(D)}
    settings = {"rope_parameters": rope, "rms_norm_eps": 1e-6, "clip_qkv": 0.5, "key_multiplier": 3.0}
    for norm_at, order in {
        "heads": ["split", "norm", "multipliers", "frequencies", "positions", "factor"],
        "rotated": ["split", "multipliers", "frequencies", "positions", "norm", "factor"],
    }.items():
        layout = replace(layouts.HEAD_NORM, norm_at=norm_at, clip="clip_qkv", key_factor="key_multiplier")
        noted: dict[str, Any] = {}
        found = queries_keys_values(given(layout, parameters, **settings), noted.__setitem__)
        assert list(noted) == order
        assert all(ours is theirs for ours, theirs in zip(noted["factor"], found, strict=True))
        before = noted["norm" if norm_at == "heads" else "split"]
        assert_close(noted["multipliers"][0], before[0].clamp(-0.5, 0.5))
        assert_close(noted["multipliers"][1], before[1].clamp(-0.5, 0.5) * 3)
        assert_close(noted["positions"][0][..., 0, :], noted["multipliers"][0][..., 0, :])  # the first turns by 0
        assert not torch.allclose(noted["positions"][0], noted["multipliers"][0])


def test_norms_a_head_are_stacked() -> None:
    parameters = {f"q_layernorm.norms.{head}.weight": random(D) + head for head in range(H)}
    weight_HD, bias = norm_parameters(parameters, "q_layernorm")
    assert weight_HD is not None
    assert weight_HD.shape == (H, D)
    assert_close(weight_HD[3], random(D) + 3)
    assert bias is None


def test_biased_norms_a_head_bring_their_biases() -> None:
    parameters = {f"n.norms.{head}.{kind}": random(D) for head in range(H) for kind in ("weight", "bias")}
    _, bias_HD = norm_parameters(parameters, "n")
    assert bias_HD is not None
    assert bias_HD.shape == (H, D)


# Encoders and cross-attention.


@pytest.mark.parametrize("stack", ["encoder", "cross"])
def test_a_layer_without_direction_is_pytorchs_own(stack: str) -> None:
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
    projections = zip("qkv", theirs.in_proj_weight.chunk(3), strict=True)
    parameters = {f"{letter}_proj.weight": weight for letter, weight in projections}
    parameters |= {"out_proj.weight": theirs.out_proj.weight, "out_proj.bias": theirs.out_proj.bias}
    x_BTE, source_BSE = random(1, T, 8), random(1, T + 3, 8) if stack == "cross" else None
    layer = replace(given(layouts.FAIRSEQ, parameters, Layer(kv_heads=H)), hidden_BTE=x_BTE)
    reading = read(replace(layer, stack=stack, source_BSE=source_BSE))
    keyed = x_BTE if source_BSE is None else source_BSE
    output_BTE, weights_BHQK = theirs(x_BTE, keyed, keyed, average_attn_weights=False)
    assert_close(reading.weights_BHQK, weights_BHQK)
    assert_close(reading.output_BTE, output_BTE)


@pytest.mark.parametrize("window", [1, 2])
def test_a_window_that_looks_both_ways_has_so_many_keys_on_either_side(window: int) -> None:
    layer = replace(given(layouts.SEPARATE, {}, Layer(type="sliding", window=window)), stack="encoder")
    for i, row in enumerate(visible(layer)):
        assert row.tolist() == [abs(i - j) <= window for j in range(T)]


def test_a_fused_projection_makes_no_keys_of_another_text() -> None:
    layer = given(replace(layouts.CONCAT, fused="fused"), {"fused.weight": FUSED})
    with pytest.raises(UnreadableError, match="of the text that the queries are made of"):
        read(replace(layer, stack="cross", source_BSE=random(1, 3, E)))


# What it refuses, and the tables.


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(UnreadableError, match=r"expects a parameter k_proj\.weight"):
        read(given(layouts.SEPARATE, {"q_proj.weight": SEPARATE["q_proj.weight"]}))


def test_a_missing_residual_is_named() -> None:
    parameters = {**SEPARATE, "o_proj.weight": random(E, H * D)}
    with pytest.raises(UnreadableError, match="expects an argument residual"):
        read(given(replace(layouts.SEPARATE, residual="residual"), parameters))


def test_the_rules_that_layouts_name_exist() -> None:
    for family, layout in {**FAMILIES, **ENCODERS}.items():
        assert layout.split in SPLITS, family
        assert layout.scale in SCALES, family
        assert layout.rotary_on in ROTARY_ON, family
        assert layout.norm_on in NORM_ON, family
        assert not layout.gate or layout.gate in GATES, family
        assert not layout.alibi or layout.alibi in ALIBI, family


def test_no_rule_is_idle() -> None:
    used = {name: {getattr(layout, name) for layout in FAMILIES.values()} for name in vars(layouts.SEPARATE)}
    assert set(GATES) <= used["gate"]
    assert set(ALIBI) <= used["alibi"] | {"falcon"}
    assert set(SCALES) <= used["scale"]
    assert set(ROTARY_ON) <= used["rotary_on"]
    assert set(NORM_ON) <= used["norm_on"]
    assert set(QUERY_FACTORS) <= used["query_factor"]
    assert set(SPLITS) <= used["split"]


def test_a_config_chooses_between_layouts() -> None:
    def falcon(**config: bool) -> Layout | None:
        return layout_of(SimpleNamespace(model_type="falcon", **{"alibi": False, "multi_query": True, **config}))

    assert falcon(new_decoder_architecture=True).split == "grouped"
    assert falcon(new_decoder_architecture=False).split == "concat"
    assert falcon(new_decoder_architecture=False, multi_query=False).split == "per_head"
    assert (
        falcon(new_decoder_architecture=False, alibi=True).rotary,
        falcon(new_decoder_architecture=True).rotary,
    ) == (
        "",
        "half",
    )
    assert layout_of(SimpleNamespace(model_type="a family of tomorrow")) is None
