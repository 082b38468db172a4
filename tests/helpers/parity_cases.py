"""What a family can switch on, beyond its tiny default: each a case of the parity tests."""

from typing import Any

LONG = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 128,
}
YARN_MLA = {**LONG, "rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.9}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}

# name: (family, config arguments)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, rope linear": ("llama", {"rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 3.0}}),
    "llama, rope dynamic": (
        "llama",
        {"rope_parameters": DEFAULT | {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "llama, rope dynamic, short text": (
        "llama",
        {"rope_parameters": DEFAULT | {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "llama, rope yarn": ("llama", {"rope_parameters": LONG | {"rope_type": "yarn"}, "max_position_embeddings": 64}),
    "llama, rope llama3": (
        "llama",
        {
            "rope_parameters": LONG | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "max_position_embeddings": 64,
        },
    ),
    "phi3, rope longrope, short text": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 512}),
    "phi3, rope longrope, long text": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "max_position_embeddings": 512},
    ),
    "phi3, partial rotary": ("phi3", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}}),
    "phi3, sliding window": ("phi3", {"sliding_window": 5}),
    "llama, other base": ("llama", {"rope_parameters": DEFAULT | {"rope_theta": 500000.0}}),
    "llama, one head a kv head": ("llama", {"num_key_value_heads": 4}),
    "llama, multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
    "mixtral, sliding window": ("mixtral", {"sliding_window": 7}),
    "qwen2, sliding layers": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 6},
    ),
    "starcoder2, sliding window": ("starcoder2", {"sliding_window": 6}),
    "gemma2, other softcap and scalar": ("gemma2", {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 40}),
    "gemma2, no softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma3_text, another base on sliding layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": DEFAULT | {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": DEFAULT,
            }
        },
    ),
    "gemma4_text, keys shared by later layers": (
        "gemma4_text",
        {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt2, weights not scaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, scaled by the layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, reordered and upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "gpt_bigcode, a key a head": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox, whole rotary": ("gpt_neox", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False}),
    "gptj, fewer rotary dims": ("gptj", {"rotary_dim": 4}),
    "codegen, fewer rotary dims": ("codegen", {"rotary_dim": 12}),
    "falcon, old decoder": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    "falcon, old decoder, a key a head": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "alibi": False, "bias": True, "num_kv_heads": 4},
    ),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon, ALiBi": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "alibi": True, "num_kv_heads": 4},
    ),
    "bloom, 6 heads": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "mpt, 6 heads": ("mpt", {"n_heads": 6, "d_model": 96}),
    "mpt, other ALiBi slopes": ("mpt", {"attn_config": {"alibi_bias_max": 4}}),
    "mpt, no ALiBi": ("mpt", {"attn_config": {"alibi": False}}),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    "dbrx, clipped": ("dbrx", {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0}}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 0.5}),
    "phi, norm a head": ("phi", {"qk_layernorm": True}),
    "stablelm, norm a head": ("stablelm", {"qk_layernorm": True}),
    "stablelm, biases": ("stablelm", {"use_qkv_bias": True}),
    "cohere, norm a head": ("cohere", {"use_qk_norm": True}),
    "glm4_moe, norm a head": ("glm4_moe", {"use_qk_norm": True}),
    "persimmon, no norm": ("persimmon", {"qk_layernorm": False}),
    "deepseek_v2, no low rank for q": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": YARN_MLA, "max_position_embeddings": 64}),
    "deepseek_v3, half-split": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3, biases": ("deepseek_v3", {"attention_bias": True}),
    "minicpm3, rope longrope": (
        "minicpm3",
        {
            "rope_parameters": LONGROPE | {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [1.0, 2.0, 4.0, 8.0]},
            "max_position_embeddings": 512,
        },
    ),
    "llama4_text, small chunks": ("llama4_text", {"attention_chunk_size": 5}),
    "llama4_text, temperature": ("llama4_text", {"floor_scale": 4, "attn_scale": 0.5, "attn_temperature_tuning": True}),
    "llama4_text, no norm": ("llama4_text", {"use_qk_norm": False}),
    "ministral3, temperature": (
        "ministral3",
        {
            "rope_parameters": LONG | {"rope_type": "yarn", "llama_4_scaling_beta": 0.5},
            "max_position_embeddings": 64,
        },
    ),
    "smollm3, layers without rotary": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "exaone4, no window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere2, small window": ("cohere2", {"sliding_window": 3}),
    "gpt_oss, small window": ("gpt_oss", {"sliding_window": 4}),
    "gpt_oss, yarn": (
        "gpt_oss",
        {"rope_parameters": LONG | {"rope_type": "yarn", "truncate": False}, "max_position_embeddings": 64},
    ),
    "granite, other multiplier": ("granite", {"attention_multiplier": 0.3}),
    "granitemoehybrid, rotary": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "gpt_neo, window": ("gpt_neo", {"window_size": 3}),
    "nemotron, partial rotary": ("nemotron", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}}),
    "laguna, gate a dim": ("laguna", {"gating": "per-dim"}),
    "lfm3, no gate": ("lfm3", {"use_attention_gate": False}),
    "zamba2, rotary": ("zamba2", {"use_mem_rope": True}),
    "qwen3, other epsilon": ("qwen3", {"rms_norm_eps": 0.1}),
    "deepseek_v3, other epsilon": ("deepseek_v3", {"rms_norm_eps": 0.1}),
}
