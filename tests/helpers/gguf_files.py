"""GGUF files of tiny random models, written as llama.cpp's converter writes them.

Names, permutations and offsets are stated here, from llama.cpp's `conversion/*.py` (`convert_hf_to_gguf.py` before
2026): nothing is taken from the loader of transformers, which these files are to test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFWriter

VOCABULARY = ("<s>", "</s>", "<unk>", *(chr(number) for number in range(33, 93)), "AB")  # 64 tokens
Rows = Iterator[tuple[str, np.ndarray]]

# What transformers calls a module, and what a GGUF file calls it. Of layers without their number.
DENSE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
EXPERTS = DENSE | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GEMMA = DENSE | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
PHI = DENSE | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
STARCODER = DENSE | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
LFM = DENSE | {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
BLOOM = {  # Falcon's too
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm",
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
T5 = {
    "shared": "token_embd",
    "lm_head": "output",
    "encoder.final_layer_norm": "enc.output_norm",
    "decoder.final_layer_norm": "dec.output_norm",
    "SelfAttention.q": "attn_q",
    "SelfAttention.k": "attn_k",
    "SelfAttention.v": "attn_v",
    "SelfAttention.o": "attn_o",
    "SelfAttention.relative_attention_bias": "attn_rel_b",
    "EncDecAttention.q": "cross_attn_q",
    "EncDecAttention.k": "cross_attn_k",
    "EncDecAttention.v": "cross_attn_v",
    "EncDecAttention.o": "cross_attn_o",
    "DenseReluDense.wi": "ffn_up",
    "DenseReluDense.wi_0": "ffn_gate",
    "DenseReluDense.wi_1": "ffn_up",
    "DenseReluDense.wo": "ffn_down",
}
T5_NORMS = {"enc": ("attn_norm", "ffn_norm"), "dec": ("attn_norm", "cross_attn_norm", "ffn_norm")}
LAYER = re.compile(r"(?:model\.layers|transformer\.h|(encoder|decoder)\.block)\.(\d+)\.(?:layer\.(\d+)\.)?(.+)")


def plain(name: str, x: np.ndarray, config: Any) -> Rows:
    """As it is."""
    yield name, x


def turned(name: str, x: np.ndarray, config: Any) -> Rows:
    """llama.py, permute: llama.cpp turns neighbours of a head where transformers turns halves; of llama alone."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    yield name, x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape) if heads else x


def norms_of_one(name: str, x: np.ndarray, config: Any) -> Rows:
    """gemma.py, nemotron.py: their norms multiply by 1 + weight."""
    yield name, x + 1 if name.endswith("norm.weight") else x


def transposed(name: str, x: np.ndarray, config: Any) -> Rows:
    """gpt2.py: matrices of Conv1D."""
    matrix = any(part in name for part in ("attn_qkv.w", "attn_output.w", "ffn_up.w", "ffn_down.w"))
    yield name, x.T if matrix else x


def without_interleaving(name: str, x: np.ndarray, config: Any) -> Rows:
    """bloom.py: all queries, all keys, all values; transformers has those of a head together."""
    if "attn_qkv" in name:
        x = x.reshape(config.n_head, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    yield name, x


def without_groups(name: str, x: np.ndarray, config: Any) -> Rows:
    """falcon.py: the same where one key and value follow each group of queries."""
    if "attn_qkv" in name:
        size, groups = config.hidden_size // config.num_attention_heads, kv_heads_of_falcon(config)
        grouped = x.reshape(groups, config.num_attention_heads // groups + 2, size, -1)
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        x = np.concatenate([part.reshape(-1, x.shape[1]) for part in parts])
    yield name, x


def kv_heads_of_falcon(config: Any) -> int:
    """Its config has a number that counts in one of two architectures alone."""
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def split_experts(name: str, x: np.ndarray, config: Any) -> Rows:
    """qwen.py, minimax.py: gates and ups of all experts apart; single rows are vectors."""
    if "gate_up_proj" in name:
        for part, half in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
            yield name.replace("mlp.experts.gate_up_proj", f"ffn_{part}_exps"), half
    elif "e_score_correction_bias" in name:
        yield name.replace("mlp.e_score_correction_bias.weight", "exp_probs_b.bias"), x
    else:
        yield name, x[0] if "ffn_gate_inp_shexp" in name else x


def split_gpt_oss(name: str, x: np.ndarray, config: Any) -> Rows:
    """gpt_oss.py: gates and ups alternate, and matrices are those of x @ W."""
    name = name.replace("self_attn.sinks", "attn_sinks").replace("mlp.router", "ffn_gate_inp")
    name = name.replace("blk.0.ffn_norm", "blk.0.post_attention_norm").replace(
        "blk.1.ffn_norm", "blk.1.post_attention_norm"
    )
    found = re.fullmatch(r"(blk\.\d+)\.(?:mlp\.experts\.|ffn_)(gate_up_proj|down_proj|down_exps)(_bias)?\.weight", name)
    if not found:
        yield name, x
        return
    layer, what, bias = found.groups()
    x = x if bias else x.swapaxes(1, 2)
    end = "bias" if bias else "weight"
    parts = {"gate": x[:, ::2], "up": x[:, 1::2]} if what == "gate_up_proj" else {"down": x}
    yield from ((f"{layer}.ffn_{part}_exps.{end}", piece) for part, piece in parts.items())


def squeezed(name: str, x: np.ndarray, config: Any) -> Rows:
    """lfm2.py: the kernel of the convolution is a matrix."""
    yield name, x[:, 0] if "shortconv.conv" in name else x


@dataclass(frozen=True)
class Layout:
    """How one architecture is written: its classes, its names, what happens to its tensors, its keys."""

    model: str
    config: str
    names: Mapping[str, str]
    sizes: Mapping[str, Any]
    tensor: Callable[[str, np.ndarray, Any], Rows] = plain
    keys: Callable[[Any], dict[str, Any]] = field(default=lambda config: {})


SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
OTHER_EPS = {"rms_norm_eps": 3e-3}  # no class has it by default
EPS_KEYS = {
    "rms_norm_eps": "layer_norm_rms_epsilon",
    "layer_norm_eps": "layer_norm_epsilon",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "norm_epsilon": "layer_norm_epsilon",
}


def base_keys(config: Any) -> dict[str, Any]:
    """What base.py writes of any config, TextModel.set_gguf_parameters."""
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **{f"attention.{key}": getattr(config, of) for of, key in EPS_KEYS.items() if hasattr(config, of)},
    }
    if config.model_type != "gemma4_text" and getattr(config, "head_dim", None):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    return keys | rope_keys(config)


def rope_keys(config: Any) -> dict[str, Any]:
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    keys: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if "sliding_attention" in ropes:
        keys["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                keys[f"rope.scaling.yarn_{name.replace('attention', 'attn')}"] = float(rope[name])
    return keys


def llama_keys(config: Any) -> dict[str, Any]:
    return {**base_keys(config), "vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}


def moe_keys(config: Any) -> dict[str, Any]:
    keys = {
        **base_keys(config),
        "expert_count": getattr(config, "num_experts", None) or config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size),
    }
    if hasattr(config, "shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return keys


def minimax_keys(config: Any) -> dict[str, Any]:
    size = config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)
    return {**moe_keys(config), "rope.dimension_count": int(size), "expert_gating_func": 2}


def gpt_oss_keys(config: Any) -> dict[str, Any]:
    return {**moe_keys(config), "attention.sliding_window": config.sliding_window}


def gemma2_keys(config: Any) -> dict[str, Any]:
    keys = {key: value for key, value in base_keys(config).items() if not key.startswith("rope.")}
    return keys | {
        "attention.sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def gemma3_keys(config: Any) -> dict[str, Any]:
    keys = {**base_keys(config), "attention.sliding_window": config.sliding_window}
    if config.final_logit_softcapping:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    return keys


def gemma4_keys(config: Any) -> dict[str, Any]:
    sizes = {kind: config.per_layer_config[index].head_dim for index, kind in enumerate(config.layer_types)}
    full, sliding = sizes["full_attention"], sizes["sliding_attention"]
    return {
        **gemma3_keys(config),
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window_pattern": [one == "sliding_attention" for one in config.layer_types],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
    }


def phi3_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    size = config.hidden_size // config.num_attention_heads * rope.get("partial_rotary_factor", 1.0)
    keys = {
        **base_keys(config),
        "rope.dimension_count": int(size),
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
    return keys


def partial_keys(config: Any) -> dict[str, Any]:
    """stablelm.py and nemotron.py."""
    size = config.hidden_size // config.num_attention_heads
    rotary = int(config.rope_parameters["partial_rotary_factor"] * size)
    return {**base_keys(config), "rope.dimension_count": rotary}


def nemotron_keys(config: Any) -> dict[str, Any]:
    keys = {**partial_keys(config), "vocab_size": config.vocab_size, "attention.layer_norm_epsilon": config.norm_eps}
    return {"rope.scaling.type": "none"} | keys


def stablelm_keys(config: Any) -> dict[str, Any]:
    keys = {key: value for key, value in partial_keys(config).items() if key != "rope.freq_base"}
    return keys | {"use_parallel_residual": config.use_parallel_residual}


def gpt2_keys(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def bloom_keys(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layer,
        "context_length": config.hidden_size,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def falcon_keys(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 2048,
        "tensor_data_layout": "jploski",
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads_of_falcon(config),
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def t5_keys(config: Any) -> dict[str, Any]:
    return {
        "context_length": 96,
        "block_count": config.num_layers,
        "decoder_block_count": config.num_decoder_layers,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.key_length": config.d_kv,
        "attention.value_length": config.d_kv,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "decoder_start_token_id": config.decoder_start_token_id,
    }


def lfm2_keys(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads * (one == "full_attention") for one in config.layer_types]
    return {
        **base_keys(config),
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
        "shortconv.l_cache": config.conv_L_cache,
    }


MOE = SIZES | OTHER_EPS | {"num_experts_per_tok": 2}
LAYOUTS = {
    "llama": Layout("LlamaForCausalLM", "LlamaConfig", DENSE, SIZES | OTHER_EPS, turned, llama_keys),
    "qwen2": Layout("Qwen2ForCausalLM", "Qwen2Config", DENSE, SIZES | OTHER_EPS, keys=base_keys),
    "qwen2moe": Layout(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        EXPERTS,
        MOE | {"num_experts": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28},
        split_experts,
        moe_keys,
    ),
    "qwen3": Layout("Qwen3ForCausalLM", "Qwen3Config", DENSE, SIZES | OTHER_EPS | {"head_dim": 12}, keys=base_keys),
    "qwen3moe": Layout(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        EXPERTS,
        MOE | {"num_experts": 3, "moe_intermediate_size": 20, "head_dim": 12, "norm_topk_prob": True},
        split_experts,
        moe_keys,
    ),
    "gpt-oss": Layout(
        "GptOssForCausalLM",
        "GptOssConfig",
        DENSE,
        MOE | {"num_local_experts": 3, "head_dim": 12, "sliding_window": 6},
        split_gpt_oss,
        gpt_oss_keys,
    ),
    "minimax-m2": Layout(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        EXPERTS,
        MOE | {"num_local_experts": 3, "head_dim": 12},
        split_experts,
        minimax_keys,
    ),
    "phi3": Layout("Phi3ForCausalLM", "Phi3Config", PHI, SIZES | OTHER_EPS | {"pad_token_id": 2}, keys=phi3_keys),
    "starcoder2": Layout(
        "Starcoder2ForCausalLM", "Starcoder2Config", STARCODER, SIZES | {"norm_epsilon": 3e-3}, keys=base_keys
    ),
    "stablelm": Layout(
        "StableLmForCausalLM", "StableLmConfig", DENSE, SIZES | {"layer_norm_eps": 3e-3}, keys=stablelm_keys
    ),
    "nemotron": Layout(
        "NemotronForCausalLM", "NemotronConfig", DENSE, SIZES | {"norm_eps": 3e-3}, norms_of_one, nemotron_keys
    ),
    "gemma2": Layout(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GEMMA,
        SIZES | OTHER_EPS | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6},
        norms_of_one,
        gemma2_keys,
    ),
    "gemma3": Layout(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GEMMA,
        SIZES | OTHER_EPS | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6, "num_hidden_layers": 7},
        norms_of_one,
        gemma3_keys,
    ),
    "gemma4": Layout(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA,
        SIZES
        | OTHER_EPS
        | {"head_dim": 12, "global_head_dim": 16, "sliding_window": 6, "num_hidden_layers": 3}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(VOCABULARY)}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        keys=gemma4_keys,
    ),
    "falcon": Layout(
        "FalconForCausalLM",
        "FalconConfig",
        BLOOM,
        {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
        | {"layer_norm_epsilon": 3e-3},
        without_groups,
        falcon_keys,
    ),
    "bloom": Layout(
        "BloomForCausalLM",
        "BloomConfig",
        BLOOM,
        {"vocab_size": len(VOCABULARY), "hidden_size": 32, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 3e-3},
        without_interleaving,
        bloom_keys,
    ),
    "gpt2": Layout(
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT2,
        {"vocab_size": len(VOCABULARY), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
        | {"layer_norm_epsilon": 3e-3},
        transposed,
        gpt2_keys,
    ),
    "t5": Layout(
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        {"vocab_size": len(VOCABULARY), "d_model": 32, "d_kv": 12, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        | {"num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 3e-3}
        | {"relative_attention_num_buckets": 16, "decoder_start_token_id": 0},
        keys=t5_keys,
    ),
    "lfm2": Layout(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        LFM,
        SIZES
        | {"norm_eps": 3e-3, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]}
        | {"block_auto_adjust_ff_dim": False},
        squeezed,
        lfm2_keys,
    ),
    "deci": Layout("LlamaForCausalLM", "LlamaConfig", DENSE, SIZES | OTHER_EPS, turned, llama_keys),
}


def tiny(arch: str, **changes: Any) -> Any:
    """A random model of an architecture; changes: of its config. Its weights are large, so that attention is sharp."""
    layout = LAYOUTS[arch]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager"}
    config = getattr(transformers, layout.config)(**{**layout.sizes, **ids, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, layout.model)(config).eval()
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if tensor.ndim == 1:
                tensor.add_(0.3 * torch.randn(tensor.shape))
            else:
                tensor.copy_(0.5 * torch.randn(tensor.shape))
            if name == "layer_scalar":
                tensor.fill_(0.7)
    return model


def write(path: Path, arch: str, model: Any, without: tuple[str, ...] = (), **more: Any) -> Path:
    """Write a model as a GGUF file of an architecture.

    without: keys that are left out. more: others, without the architecture unless they are general (`**{"rope.scale":
    0.5}`); an array is a tensor of that name (`rope_freqs=array`).
    """
    writer = GGUFWriter(str(path), arch)
    keys = LAYOUTS[arch].keys(model.config) | more
    add_keys(writer, arch, {key: value for key, value in keys.items() if key not in without})
    _vocabulary(writer, "t5" if arch == "t5" else "gpt2")
    for name, x in rows(arch, model):
        writer.add_tensor(name, np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    buffers = ("layer_scalar", "e_score_correction_bias")
    return dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name.endswith(buffers)}


def rows(arch: str, model: Any) -> Rows:
    """The tensors of a model by their names in a file."""
    layout = LAYOUTS[arch]
    for name, tensor in _tensors(model).items():
        yield from layout.tensor(_name(name, layout.names), tensor.detach().float().numpy(), model.config)


def add_keys(writer: GGUFWriter, arch: str, keys: Mapping[str, Any]) -> None:
    """Add keys, named without the architecture unless they are general; an array becomes a tensor."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(f"{key}.weight", value)
        else:
            add = kinds.get(type(value), writer.add_array)
            add(key if key.startswith(("general.", "split.")) else f"{arch}.{key}", value)


def _vocabulary(writer: GGUFWriter, kind: str) -> None:
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(VOCABULARY))
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(VOCABULARY))])
    writer.add_token_scores([-float(number) for number in range(len(VOCABULARY))])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(2)


def _name(name: str, names: Mapping[str, str]) -> str:
    """What a GGUF file calls a tensor of transformers; of what is not in the table, the place alone is changed."""
    stem, _, end = name.rpartition(".")
    if end not in ("weight", "bias"):  # of no module
        stem, end = name, "weight"
    found = LAYER.fullmatch(stem)
    if not found:
        return f"{names[stem]}.{end}"
    side, layer, part, rest = found.groups()
    place = f"{side[:3]}.blk.{layer}" if side else f"blk.{layer}"
    if side and rest == "layer_norm":
        return f"{place}.{T5_NORMS[side[:3]][int(part)]}.{end}"
    return f"{place}.{names.get(rest, rest)}.{end}"
