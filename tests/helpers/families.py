"""A tiny random decoder of every causal-LM family of transformers: 64 wide, 4 heads, 128 words, no download.

`tiny_config` starts from the family's own defaults, makes every size it knows small (`SIZES`), keeps one layer of each
kind that the family has, and then applies what the family needs to stay consistent (`FAMILIES`).

    model = tiny_model("gemma2", sliding_window=4)
    model(torch.arange(12)[None], output_attentions=True)
"""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnscope.model.libraries import TRIED
from attnscope.reference import layouts

LAYERS = 4
VOCABULARY = 128
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

SIZES = {
    name: size
    for size, names in {
        64: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width "
        "ple_embed_dim hidden_size_global backbone_hidden_size input_embedding_size output_embedding_size "
        "out_hidden_size pronunciation_embed_dim shape_embed_dim adapter_out_dim projector_input_dim output_channels "
        "input_size cross_attention_hidden_size mamba_d_ssm encoder_hash_byte_group_vocab ngram_vocab_size_base",
        4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads index_n_heads "
        "conf_num_attention_heads linear_num_value_heads mamba_n_heads mamba_num_heads num_query_groups "
        "num_experts num_local_experts n_routed_experts moe_num_experts index_topk index_block_size "
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
        "num_decoder_layers depth num_blocks conf_num_hidden_layers num_global_layers num_layers_per_stack",
        2: "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads n_groups "
        "mamba_n_groups linear_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k "
        "index_topk_blocks zero_expert_num",
        16: "head_dim swa_head_dim qk_nope_head_dim v_head_dim kv_channels dim_head d_kv d_head attention_head_size "
        "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state "
        "ssm_state_size global_head_dim attention_head_dim swa_v_head_dim mamba_chunk_size time_step_rank rel_extent "
        "prompt_length",
        8: "qk_rope_head_dim rotary_dim state_size d_rel patch_size sliding_window attention_chunk_size window_size "
        "attention_window_size sliding_window_size keep_window_size",
        32: "q_lora_rank kv_lora_rank o_lora_rank adapter_rank laurel_rank hidden_size_per_layer_input gated_norm_rank "
        "hc_lowrank image_size",
        96: "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff d_ff dim_ff d_inner "
        "ffn_hidden_size intermediate_size_mlp shared_expert_intermediate_size shared_experts_intermediate_size "
        "dense_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size feed_forward_size mlp_dim "
        "router_hidden_size prompt_mid_dim n_inner",
        VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size audio_vocab_size "
        "pronunciation_vocab_size shape_vocab_size padded_vocab_size",
        512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
        "context_length model_max_length position_bias_max_distance",
        1: "n_shared_experts moe_num_shared_experts num_shared_experts n_group topk_group num_expert_group "
        "first_k_dense_replace num_dense_layers pretraining_tp",
    }.items()
    for name in names.split()
}  # fmt: skip

OMITTED = object()  # an argument that the family derives from others and does not take
DECODER = {"is_decoder": True}
SLIDING_FULL = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4}
QWEN4 = INDEXER | {"indexer_compress_ratio": 2, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}

# What shrinking alone gets wrong: sizes that depend on each other, and hybrids whose defaults have no attention layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 8},
    "bamba": {"mamba_d_head": 32, "mamba_n_heads": 4, "layers_block_type": OMITTED, "attn_layer_indices": [1, 3]},
    "big_bird": DECODER | {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"sliding_attention": ROPE | {"mrope_section": [4, 2, 2]}, "full_attention": None},
    },
    "dbrx": {"rope_parameters": ROPE, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {"head_dim": 8},
    "dots1": {"n_shared_experts": 1, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": SLIDING_FULL * 3,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {"mamba_d_head": 32, "mamba_n_heads": 4, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "laguna": {"num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_local_blocks": 1,
        "index_topk_blocks": 2,
        "index_block_size": 2,
        "num_local_experts": 4,
    },
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": DECODER
    | {
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [4, 16],
        "axial_pos_embds_dim": [32, 32],
        "num_buckets": 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "attention_head_size": 16,
        "pad_token_id": 0,
    },
    "xlm": DECODER | {"causal": True},
    "xmod": DECODER | {"default_language": "en_XX"},
    "youtu": {"head_dim": 8},
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 6,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "num_logits_to_keep": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
} | dict.fromkeys(
    [
        *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
        *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    ],
    DECODER,
)

# Types whose model needs a package, a second model or a nested config that this table doesn't build.
NOT_BUILT = {
    "dots3_note",
    "dots3_note_text",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "musicgen",
    "musicgen_melody",
}
MODEL_TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT)
# They never call the attention interface, so no q, k and v can be heard.
BYPASS = (
    "big_bird", "bloom", "codegen", "falcon", "git", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt",
    "mvp", "openai-gpt", "prophetnet", "rembert", "roformer", "trocr", "xglm", "xlm", "cpmant", "xlnet",
)  # fmt: skip
# An earlier transformers lacks some of the families; a later one shows what is new in it.
EARLIER = Version(transformers.__version__) < Version(TRIED[-1])
of_all_families = pytest.mark.skipif(
    EARLIER, reason=f"is about the families of transformers {TRIED[-1]}, this is {transformers.__version__}"
)
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "reformer", "rwkv", "xlstm")


def config_class_of(model_type: str) -> type[PreTrainedConfig]:
    """The class of a family's configs; the test skips where an earlier transformers has no such family."""
    if EARLIER and model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return CONFIG_MAPPING[model_type]


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The config of a tiny model of this family; `overrides` are the family's own config arguments.

    Example:
        tiny_config("llama", num_key_value_heads=1).head_dim  # 16
        tiny_config("gemma2").layer_types  # one sliding, one full, and so on
    """
    config_class = config_class_of(model_type)
    wanted = FAMILIES.get(model_type, {}) | overrides
    layers = next((wanted[name] for name in LAYER_COUNTS if name in wanted), None)
    arguments = _shrunk(config_class(), layers)
    _update(arguments, wanted)
    return config_class(**arguments)


def tiny_model(model_type: str, seed: int = 0, attention: str = "eager", **overrides: Any) -> PreTrainedModel:
    """A tiny random float32 model of this family in eval mode; the same seed gives the same weights.

    Example:
        tiny_model("gpt2").config.n_head  # 4
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def _shrunk(config: PreTrainedConfig, layers: int | None = None) -> dict[str, Any]:
    """The constructor arguments that make this config small, nested configs included."""
    values = config.to_dict()
    nested = {name for name in config.sub_configs if getattr(config, name, None) is not None}
    arguments = _per_layer_lists(values, layers)
    count = len(next(iter(arguments.values()), [None] * (layers or LAYERS)))
    latent = isinstance(values.get("kv_lora_rank"), int) and "qk_nope_head_dim" in values
    for name in values.keys() - nested - arguments.keys():
        value = values[name]
        if name in SIZES and isinstance(value, int | float) and not isinstance(value, bool):
            arguments[name] = _small(name, value, count, latent)
        elif name.endswith(("_token_id", "_token_index")) and _outside_vocabulary(value):
            arguments[name] = 3 if "pad" in name else 5
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            arguments[name] = copy.deepcopy(value)
    if latent and values.get("head_dim") == values.get("qk_rope_head_dim") is not None:
        arguments["head_dim"] = SIZES["qk_rope_head_dim"]
    for name in nested:
        part = getattr(config, name)
        arguments[name] = _shrunk(part) | {"model_type": part.model_type}
    return arguments


def _small(name: str, value: float, layers: int, latent: bool) -> int:
    if value == 0:
        return 0
    if name in LAYER_COUNTS:
        return layers
    if name == "num_key_value_heads":  # multi-query stays multi-query, latent attention has a key for every head
        return 1 if value == 1 else SIZES["num_attention_heads"] if latent else SIZES[name]
    return SIZES[name]


def _outside_vocabulary(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, int) and value >= VOCABULARY)


def _per_layer_lists(values: dict[str, Any], layers: int | None) -> dict[str, list[Any]]:
    """Lists with one entry a layer, cut to a few layers that still show every kind the family has."""
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), 0)
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count > 3}
    if not lists:
        return {}
    kinds = [str(kind) for kind in zip(*lists.values(), strict=True)]
    first_of_kind = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    wanted = layers or max(LAYERS, min(len(first_of_kind), 6))
    others = [index for index in range(count) if index not in first_of_kind]
    kept = sorted((first_of_kind + others)[:wanted])
    kept += [kept[index % len(kept)] for index in range(len(kept), wanted)]
    return {name: [value[index] for index in kept] for name, value in lists.items()}


def _update(arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    """Change in place, nested configs key by key."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(arguments.get(name), dict) and not name.startswith("rope_"):
            _update(arguments[name], value)
        elif value is OMITTED:
            arguments.pop(name, None)
        else:
            arguments[name] = copy.deepcopy(value)


# What the default selection tries; the rest of a matrix is marked `families`. Plain, fused by q k v or by head, ALiBi,
# soft-cap, windows, wide norms, latent, sinks, gates in a hybrid, bytes; then encoders and encoder-decoders.
FEW = """
    llama gpt2 gpt_neox bloom falcon gemma2 gemma3_text olmo2 deepseek_v3 gpt_oss qwen3_next blt bert t5 bart whisper
""".split()  # noqa: SIM905


def few(types: Iterable[str], also: Iterable[str] = ()) -> list[Any]:
    """Types as parameters: those of `FEW`, and others that this test needs, by default; the rest marked."""
    default = {*FEW, *also}
    return [name if name in default else pytest.param(name, marks=pytest.mark.families) for name in types]


def one_per_layout(types: Iterable[str]) -> list[Any]:
    """Types as parameters: of each layout that the oracle knows the first, and `FEW`, by default; the rest marked."""
    types, rows = list(types), {**layouts.ENCODERS, **layouts.FAMILIES}
    first = {(rows.get(name), layouts.VARIANTS.get(name)): name for name in reversed(types)}
    return few(types, first.values())
