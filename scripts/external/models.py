"""The models that judges are given: tiny random ones, written to a folder with a tokenizer of words, and the demo.

Weights are large enough that attention is far from uniform, and no norm's weight is 1: a scale, a mask or a norm that
is left out shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = 64  # of the vocabulary: w00 to w63
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}
LATENT: dict[str, Any] = {  # keys and values from one vector per token
    **SIZES,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256},
    "gpt_neox": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
    },
    "gptj": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "rotary_dim": 4},
    "bert": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
    },
    "bart": {
        "d_model": 48,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_position_embeddings": 256,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    },
    "gpt_oss": {**SIZES, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {
        **SIZES,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "mistral": {**SIZES, "sliding_window": 4},
    "olmo2": SIZES,
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 6},
    "mpt": {"d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256, "expansion_ratio": 2},
    "qwen3_next": {
        **SIZES,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention", "full_attention"]},
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    "modernbert": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
    },
    "t5": {
        "d_model": 48,
        "d_kv": 8,
        "d_ff": 96,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_heads": 6,
        "decoder_start_token_id": 1,
    },
}
MAKERS = {
    "bert": "AutoModelForMaskedLM",
    "modernbert": "AutoModelForMaskedLM",
    "bart": "AutoModelForSeq2SeqLM",
    "t5": "AutoModelForSeq2SeqLM",
}


def demo_folder() -> Path:
    """The folder of the model inside the package."""
    import attnscope

    return Path(attnscope.__file__).parent / "demo"


def tiny(kind: str, folder: Path) -> Path:
    """Write a random model of a family in TINY with its tokenizer."""
    import torch
    import transformers

    tokens = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = transformers.CONFIG_MAPPING[kind](**tokens, **TINY[kind])
    model = getattr(transformers, MAKERS.get(kind, "AutoModelForCausalLM")).from_config(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            torch.nn.init.normal_(weights, float(weights.ndim == 1 and name.endswith("weight")), 0.2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """One token per word: `w05 w17`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word(number): number for number in range(WORDS)}, unk_token=word(2)))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=word(0), eos_token=word(1), unk_token=word(2))


def word(number: int) -> str:
    """Of two digits, so that no word is a part of another."""
    return f"w{number:02}"


def words(ids: Any) -> str:
    """The text of ids of a tiny model."""
    return " ".join(word(int(one)) for one in ids)
