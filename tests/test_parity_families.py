"""Every causal-LM type of transformers against the oracle, and everything a family can switch on.

`docs/families/causal.csv` and `switched_on.csv` are what these measurements gave; the last tests hold them to it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import attnscope.certificate.compare
from attnscope.certificate.check import ATOL, check_parity
from attnscope.model.families import family as family_of_name
from attnscope.reference import reader
from attnscope.reference.layouts import ALONE, FAMILIES, UNREAD, VARIANTS, Layout, layout_of
from helpers.families import BYPASS, FEW, WITHOUT_ATTENTION, few, of_all_families, one_per_layout, tiny_config
from helpers.families_table import DOCS, causal, figures_of, measure_case, page, read, switched_on, without_figures
from helpers.parity_cases import CASES
from helpers.parity_models import NOT_MADE, TYPES, Measured, as_loaded, ids_for, in_half, measure, roused_model
from helpers.seconds import once
from helpers.sweep_table import EVERY, SINCE


def words(text: str) -> list[str]:
    return text.split()


NAMED = words(
    """
    llama mistral ministral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo
    gpt_neox gptj codegen gpt_bigcode starcoder2 opt bloom falcon mpt olmo olmo2 olmo3 olmoe cohere cohere2 granite
    granitemoe glm glm4 nemotron persimmon stablelm smollm3 gpt_oss deepseek_v2 deepseek_v3 minicpm3 llama4_text xglm
    biogpt qwen3_next jamba
    """
)
SCORES_ONLY = words(
    """
    axk2 blt deepseek_v32 deepseek_v4 diffllama doge dots3_note dots3_note_text glm_moe_dsa hy_v4
    inkling2_text inkling_text jetmoe minimax_m3_vl_text qwen4_exp qwen4_exp_text zaya
    """
)
NONE = ["cpmant", "prophetnet", "xlnet"]
FULL = sorted(set(TYPES) - set(SCORES_ONLY) - set(NONE))
INTERFACE = sorted(set(TYPES) - set(BYPASS))
IN_HALF = words(
    """
    bloom codegen deepseek_v2 deepseek_v3 falcon gemma2 gemma3_text gemma3n_text gpt2 gpt_neo gpt_neox gpt_oss gptj
    llama4_text mistral mpt olmo2 phi3 qwen3 qwen3_next
    """
)
# What does not hold, though it is read in full: transformers computes something else than the config says.
BROKEN = {"falcon, ALiBi", "mpt, other ALiBi slopes", "mpt, no ALiBi"}

measured: Callable[[str], Measured] = once(measure)
measured_case: Callable[[str], Measured] = once(measure_case)


def assert_holds(found: Measured, level: str) -> None:
    """The one assertion of this file: the level is reached, and weights and output are within 1e-5."""
    assert (found.level, found.holds) == (level, True), found
    assert found.weights is not None
    assert found.output is not None
    assert max(found.weights, found.output) <= ATOL


@pytest.mark.parametrize("family", one_per_layout(FULL))
def test_full(family: str) -> None:
    assert_holds(measured(family), "full")


AS_ANOTHER = {"axk2", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp"}  # an indexer of their own


@pytest.mark.parametrize("family", few(SCORES_ONLY, also=set(SCORES_ONLY) - AS_ANOTHER))
def test_what_is_not_full_says_why(family: str) -> None:
    assert_holds(measured(family), "scores")
    assert measured(family).why


@pytest.mark.parametrize("family", NONE)
def test_what_cannot_be_heard_says_so(family: str) -> None:
    found = measured(family)
    assert (found.level, found.holds) == ("none", False)
    assert found.why


OF_CALLS = [  # masks a head, chunks, sinks of the output, shared keys, two widths, hybrids, several rows of ids
    *("deepseek_v32", "doge", "gemma3n_text", "granite_swa", "jamba", "llama4_text", "longcat_flash"),
    *("mimo_v2_flash", "minimax_m3_vl_text", "musicgen", "zamba2"),
]


@pytest.mark.parametrize("family", few(INTERFACE, also=OF_CALLS))
def test_scores(family: str) -> None:
    assert_holds(measure(family, level="scores"), "scores")


AGAIN = {  # goes through what another case goes through
    *("mixtral, sliding window", "starcoder2, sliding window", "phi3, sliding window", "cohere2, small window"),
    *("gpt_oss, small window", "phi3, partial rotary", "nemotron, partial rotary", "codegen, fewer rotary dims"),
    *("minicpm3, rope longrope", "olmoe, clipped", "stablelm, biases", "deepseek_v3, biases", "gpt_neox, no biases"),
    *("stablelm, norm a head", "glm4_moe, norm a head", "falcon, old decoder", "llama, wide heads", "zamba2, rotary"),
    *("persimmon, no norm", "exaone4, no window", "mpt, 6 heads"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.families] * (case in AGAIN)) for case in sorted(set(CASES) - BROKEN)],
)
def test_what_a_family_can_switch_on(case: str) -> None:
    assert_holds(measured_case(case), "full")


IN_BFLOAT16 = [*FEW, "gemma3n_text", "llama4_text"]
IN_FLOAT16 = ("bloom", "gemma2", "gpt2", "gpt_oss", "llama4_text")  # biases, caps, sinks and masks that may overflow it


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        pytest.param(dtype, family, marks=[] if family in default else pytest.mark.families)
        for dtype, default in ((torch.bfloat16, IN_BFLOAT16), (torch.float16, IN_FLOAT16))
        for family in IN_HALF
    ],
)
def test_half_precision(dtype: torch.dtype, family: str) -> None:
    """The implementation holds in half precision too; its rounding is beside it."""
    report = check_parity(as_loaded(in_half(roused_model(family), dtype)), ids_for(family))
    assert report.level == "full"
    assert report.holds, report.largest()
    assert all(layer.rounding.output_relative for layer in report.layers)


@of_all_families
def test_the_counts_are_what_was_promised() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(types) == len(FULL) + len(SCORES_ONLY) + len(NONE) + len(NOT_MADE) + len(WITHOUT_ATTENTION)
    assert len(FULL) >= 100
    assert len(INTERFACE) == 160
    assert set(NAMED) <= set(FULL)


@pytest.mark.families
def test_no_row_of_the_tables_is_idle() -> None:
    configs = [roused_model(family).config for family in TYPES]
    parts = [getattr(config, part) for config in configs for part in family_of_name(config.model_type).parts.values()]
    used = {config.model_type for config in [*(one.get_text_config(decoder=True) for one in configs), *parts]}
    assert set(FAMILIES) | set(UNREAD) <= used
    assert not set(FAMILIES) & set(UNREAD)
    assert set(VARIANTS) <= {*FAMILIES, *ALONE}


# Oracles that leave something out: the assertion that passes for the right one must catch each.

LEFT_OUT: dict[str, dict[str, Any]] = {
    "norm": {"norm": ""},
    "rotary": {"rotary": ""},
    "alibi": {"alibi": ""},
    "softcap": {"softcap": ""},
    "sinks": {"sinks": ""},
    "gate": {"gate": ""},
    "residual": {"residual": ""},
    "value_factor": {"value_factor": ""},
    "key_factor": {"key_factor": ""},
    "v_norm": {"v_norm": ""},
}
ALWAYS: dict[str, dict[str, Any]] = {"scale": {"scale": "off by 1 %"}}


def wrong_layouts(layout: Layout) -> list[Layout]:
    """The layout with one part left out at a time, each part that it has, and with its scale off by 1 %."""
    wrong = [replace(layout, **change) for part, change in LEFT_OUT.items() if getattr(layout, part)]
    return [*wrong, *(replace(layout, **change) for change in ALWAYS.values())]


OF_PARTS = ("beam", "gemma3n_text", "longcat_flash", "mimo_v2_flash", "mpt")  # which have parts that no other has


@pytest.mark.parametrize("family", few(FULL, also=OF_PARTS))
def test_an_oracle_that_leaves_something_out_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = roused_model(family)
    config = model.config.get_text_config(decoder=True)
    layout = layout_of(config)
    assert layout is not None
    right = reader.SCALES[layout.scale]
    monkeypatch.setattr(
        reader, "SCALES", {**reader.SCALES, "off by 1 %": lambda given, head_dim: 1.01 * right(given, head_dim)}
    )
    for wrong in wrong_layouts(layout):
        if not in_use(layout, wrong, model):
            continue
        monkeypatch.setattr(attnscope.certificate.compare, "layout_of", lambda config, wrong=wrong: wrong)
        assert not check_parity(as_loaded(model), ids_for(family)).holds, wrong


def in_use(layout: Layout, wrong: Layout, model: Any) -> bool:
    """Whether the tiny model has what was left out: a norm's weights, a layer that turns, a factor not 1."""
    names = " ".join(name for name, _ in model.named_parameters())
    config = model.config.get_text_config(decoder=True)
    if wrong.norm != layout.norm:
        return layout.q_norm == "*" or layout.q_norm in names
    if wrong.rotary != layout.rotary:
        return getattr(config, "use_mem_rope", True) and getattr(config, "position_embedding_type", "rope") == "rope"
    if wrong.key_factor != layout.key_factor or wrong.value_factor != layout.value_factor:
        return getattr(config, "key_multiplier", 2.0) != 1.0
    return True


@pytest.mark.parametrize("case", ["mistral, sliding window", "gpt_neo, window", "llama4_text, small chunks"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_in_the_oracle_is_caught(case: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "visible", shifted(reader.visible, by))
    assert not measure_case(case).holds


def shifted(
    visible: Callable[[reader.LayerInputs], torch.Tensor], by: int
) -> Callable[[reader.LayerInputs], torch.Tensor]:
    def wrong(inputs: reader.LayerInputs) -> torch.Tensor:
        layer = replace(inputs.layer, window=inputs.layer.window + by) if inputs.layer.window else inputs.layer
        return visible(replace(inputs, layer=layer))

    return wrong


SETTINGS = {  # what changes numbers, and no shape
    *("rope_parameters", "max_position_embeddings", "rms_norm_eps", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("sliding_window", "attention_chunk_size", "window_size", "layer_types", "use_sliding_window", "no_rope_layers"),
    *("floor_scale", "attn_scale", "attn_temperature_tuning", "clip_qkv", "rotary_dim", "attention_multiplier"),
    *("rope_interleave", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "use_qk_norm"),
}
WITHOUT_TRACE = {
    "llama, rope dynamic, short text",  # differs only on a longer one
    "deepseek_v3, other epsilon",  # its norms have their own
    "cohere, norm a head",  # brings parameters, which the layout finds
    "glm4_moe, norm a head",
}
MATTERS = [case for case, (_, overrides) in CASES.items() if set(overrides) <= SETTINGS and case not in WITHOUT_TRACE]


OF_READING = [case for case in MATTERS if case.startswith(("gemma2", "gpt2", "llama,", "mistral", "gpt_neo,"))]


@pytest.mark.parametrize(
    "case", [one if one in OF_READING else pytest.param(one, marks=pytest.mark.families) for one in MATTERS]
)
def test_what_is_switched_on_matters(case: str) -> None:
    """An oracle that reads the family's default config instead is caught."""
    family, overrides = CASES[case]
    model = roused_model(family, **overrides)
    model.config = tiny_config(family)
    assert not check_parity(as_loaded(model), ids_for(family)).holds


# Falcon with ALiBi: what transformers' eager attention computes is not what the model was trained with.


def test_falcon_with_alibi_does_not_hold_because_eager_adds_the_bias_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_case("falcon, ALiBi")
    assert (found.level, found.holds) == ("full", False)
    once = reader.alibi_bias
    monkeypatch.setattr(reader, "alibi_bias", lambda *numbers: 2 * once(*numbers))
    assert_holds(measure_case("falcon, ALiBi"), "full")


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_what_transformers_computes_otherwise_is_named(case: str) -> None:
    found = measured_case(case)
    assert (found.level, found.holds) == ("full", False)
    assert found.weights > 1e-3
    assert "transformers" in found.why
    family, _ = CASES[case]
    assert measured(family).why == ""


def test_falcon_with_alibi_holds_under_sdpa() -> None:
    family, overrides = CASES["falcon, ALiBi"]
    model = roused_model(family, attention="sdpa", **overrides)
    layers, outputs = as_loaded(model).geometry.layers, []

    def compare(module: Any, args: Any, output: Any) -> None:
        given = reader.LayerInputs(
            layout_of(model.config),
            dict(module.named_parameters()),
            model.config,
            layers[module.layer_idx],
            args[0],
            torch.arange(args[0].shape[1]),
        )
        outputs.append((output[0] - reader.read(given).output_BTE).abs().max())

    for block in model.transformer.h:
        block.self_attention.register_forward_hook(compare)
    with torch.no_grad():
        model(ids_for(family))
    assert len(outputs) == len(layers)
    assert max(outputs) <= ATOL


@pytest.mark.families
@pytest.mark.parametrize(("name", "rows"), [("causal", causal), ("switched_on", switched_on)])
def test_the_tables_are_what_is_measured(name: str, rows: Callable[..., list[tuple[str, ...]]]) -> None:
    """Types, layouts, levels and reasons equal; the figures in them are within the tolerance that the page states."""
    written = read(name)
    made = rows(measured if name == "causal" else measured_case)
    assert without_figures(written) == without_figures(made), "run scripts/families_doc.py"
    assert all(figure <= ATOL for figure in figures_of(written))


def test_the_page_counts_what_the_tables_hold() -> None:
    tables = {
        name: read(name) for name in ("causal", "switched_on", "studies", "stacks", "linear", "types", "libraries")
    }
    written = (DOCS / "families.md").read_text("utf-8").partition(f"\n{EVERY}")[0]
    found = re.search(r"transformers (?P<transformers>\S+), torch (?P<torch>\S+),", written)
    assert found
    assert written == page(tables, found.groupdict(), SINCE), "run scripts/families_doc.py --page"
    fewer = {**tables, "causal": tables["causal"][1:]}
    assert written != page(fewer, found.groupdict(), SINCE)
