"""How one attention layer is built, in words: the `Layout` of each family, and the few that most families share.

Each family is a row that says how it differs from one of these. `reader.py` reads a layer by its layout. The names in a
layout are those of the attention module's own parameters, and of the rules in `reader.py` and `projections.py`.
Families as of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layout:
    """One way to build an attention layer.

    split: how projections become heads (`projections.SPLITS`). q, k, v: the separate projections; fused: the fused one;
    out: the projection after the heads, "" where the module returns the heads side by side. transposed: matrices are
    kept (in, out), as GPT-2's Conv1D does. clip: where the config says at what size q, k and v are clamped.

    norm: "rms" or "layer", of the parameters q_norm, k_norm, v_norm, wherever the module has them (v_norm: "*" is a
    norm without weights); norm_at: "heads", "whole" (before the split) or "rotated"; norm_on: which layers
    (`reader.NORM_ON`); offset is added to the weight; eps: a number, or the config's name for it.

    rotary: "half", "interleaved", "deinterleaved" or "" (none); part: which dims turn; reverse: the other way;
    rotary_on: which layers turn (`reader.ROTARY_ON`); base: the rotary base of families whose config has none. axes:
    which pair turns by which axis, where tokens have positions on several (`reader.AXES`).
    alibi: "" or one of `reader.ALIBI`. table: the parameter with a bias for every bucket of distances, of the stack's
    first layer where a layer has none of its own.

    scale, query_factor, key_factor, value_factor: rules of `reader.SCALES`, `reader.QUERY_FACTORS`, `reader.FACTORS`.
    softcap: the config's name for it. sinks: the parameter's name; sinks_in_weights: whether the model's weights are
    after the sink took its share. window: whether the layer's type limits the keys; block_in_window: whether also those
    of a block whose tokens see each other.
    gate: what is done to the heads before the output projection (`reader.GATES`). residual: the argument that the
    module adds to its output; out_norm: the layer norm of that sum. caveat: where transformers is known to compute
    something else than this.

    >>> replace(SEPARATE, rotary="interleaved", softcap="attn_logit_softcapping").text
    'separate, rotary interleaved, soft-cap'
    """

    name: str
    split: str = "separate"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    fused: str = ""
    out: str = "o_proj"
    transposed: bool = False
    clip: str = ""
    norm: str = ""
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    v_norm: str = ""
    norm_at: str = "heads"
    norm_on: str = "all"
    offset: float = 0.0
    eps: str | float = "rms_norm_eps"
    rotary: str = "half"
    part: str = "first"
    reverse: bool = False
    rotary_on: str = "all"
    base: float | None = None
    axes: str = ""
    alibi: str = ""
    table: str = ""
    scale: str = "head_dim"
    query_factor: str = ""
    key_factor: str = ""
    value_factor: str = ""
    softcap: str = ""
    sinks: str = ""
    sinks_in_weights: bool = True
    window: bool = True
    block_in_window: bool = False
    gate: str = ""
    residual: str = ""
    out_norm: str = ""
    caveat: str = ""

    @property
    def text(self) -> str:
        """The layout in words."""
        parts = [
            self.name,
            f"{self.norm} norm {NORM_AT[self.norm_at]}" if self.norm else "",
            "norm of v" if self.v_norm else "",
            f"rotary {self.rotary}" if self.rotary else "",
            f"by {self.axes}" if self.axes else "",
            "reversed" if self.reverse else "",
            f"on some layers ({self.rotary_on})" if self.rotary and self.rotary_on != "all" else "",
            "ALiBi" if self.alibi else "",
            "relative bias" if self.table else "",
            f"scale {self.scale}" if self.scale != "head_dim" else "",
            *(f"{part} factor" for part in ("query", "key", "value") if getattr(self, f"{part}_factor")),
            "soft-cap" if self.softcap else "",
            "sinks" if self.sinks else "",
            "clipped" if self.clip else "",
            f"gate {self.gate}" if self.gate else "",
            "residual and norm after" if self.out_norm else "",
            "" if self.out else "output projection in another module",
        ]
        return ", ".join(part.replace("_", " ") for part in parts if part)

    @property
    def across(self) -> Layout:
        """The same layer where it attends to an encoder's states: two texts have no distances from one to the other."""
        return replace(self, rotary="", alibi="", table="")


NORM_AT = {"heads": "a head", "whole": "full width", "rotated": "after rotation"}
SEPARATE = Layout("separate")
HEAD_NORM = replace(SEPARATE, norm="rms")
WIDE_NORM = replace(SEPARATE, norm="rms", norm_at="whole")
NO_ROTARY = replace(SEPARATE, rotary="")
FAIRSEQ = replace(NO_ROTARY, out="out_proj")
BERT = replace(NO_ROTARY, q="query", k="key", v="value", out="")
T5 = replace(NO_ROTARY, q="q", k="k", v="v", out="o", scale="one", table="relative_attention_bias.weight")
LINEAR = replace(NO_ROTARY, q="q_lin", k="k_lin", v="v_lin", out="out_lin")
CONCAT = Layout("fused [q k v]", split="concat", fused="qkv_proj")
CONV1D = replace(
    CONCAT, name="fused [q k v], Conv1D", fused="c_attn", out="c_proj", transposed=True, rotary="", scale="gpt2"
)
PER_HEAD = Layout("fused by head (q k v)", split="per_head", fused="query_key_value", out="dense")
GROUPED = replace(PER_HEAD, name="fused by kv group (q.. k v)", split="grouped")
FOUR_BLOCKS = Layout("fused in 4 blocks (q v k)", split="four_blocks", fused="qkv_proj", out="out_proj")
LATENT = Layout("latent", split="latent", rotary="deinterleaved", part="last", scale="yarn", eps=1e-6)
GATED = replace(
    HEAD_NORM, name="separate, q with a gate", split="gated_query", offset=1.0, gate="sigmoid_of_query_half"
)


_LISTS: tuple[tuple[Layout, str], ...] = (
    (
        SEPARATE,
        "arcee aria_text bamba cwm emu3_text_model gemma internlm3 iquestcoder jais2 llama minimax ministral mistral "
        "mixtral nemotron phimoe qwen2 qwen2_moe seed_oss solar_open starcoder2 mllama_text_model",
    ),
    (HEAD_NORM, "apertus dots1 hy_v3 mellum qwen3 qwen3_moe glm4_moe"),
    (WIDE_NORM, "flex_olmo minimax_m2 olmo2 olmo3 olmo_hybrid"),
    (NO_ROTARY, "jamba nemotron_h"),
    (FAIRSEQ, "bart bigbird_pegasus biogpt blenderbot blenderbot-small marian mbart mvp opt pegasus plbart trocr"),
    (FAIRSEQ, "musicgen_decoder musicgen_melody_decoder whisper xglm"),
    (
        BERT,
        "bert bert-generation big_bird camembert data2vec-text electra ernie git megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod",
    ),
    (CONCAT, "phi3 phi4_multimodal"),
    (CONV1D, "gpt2 openai-gpt"),
    (PER_HEAD, "gpt_neox gpt_neox_japanese"),
    (replace(PER_HEAD, norm="layer", q_norm="q_layernorm", k_norm="k_layernorm", eps="layer_norm_eps"), "persimmon"),
    (LATENT, "axk1 deepseek_v3 glm4_moe_lite youtu"),
    (GATED, "qwen3_next qwen3_5_moe_text qwen3_5_text"),
    (replace(SEPARATE, rotary="interleaved"), "ernie4_5 ernie4_5_moe glm glm4"),
    (replace(SEPARATE, rotary="interleaved"), "blt_patcher blt_local_encoder blt_global_transformer blt_local_decoder"),
    (replace(SEPARATE, scale="attention_multiplier"), "granite granitemoe granitemoeshared hyperclovax"),
    (replace(SEPARATE, scale="query_pre_attn_scalar", softcap="attn_logit_softcapping"), "gemma2 vaultgemma"),
    (replace(HEAD_NORM, offset=1.0, scale="query_pre_attn_scalar", block_in_window=True), "gemma3_text"),
    (replace(HEAD_NORM, scale="one", v_norm="*"), "gemma3n_text gemma4_text gemma4_unified_text"),
    (replace(HEAD_NORM, rotary_on="sliding_or_no_window"), "exaone4 exaone_moe kolibri1"),
    (
        replace(SEPARATE, scale="attention_multiplier", sinks="sinks", sinks_in_weights=False),
        "granite_swa granitemoe_swa",
    ),
    (
        replace(HEAD_NORM, q_norm="query_layernorm", k_norm="key_layernorm", norm_at="rotated"),
        "hunyuan_v1_dense hunyuan_v1_moe",
    ),
    (replace(HEAD_NORM, q_norm="q_layernorm", k_norm="k_layernorm", out="out_proj", eps="norm_eps"), "lfm2 lfm2_moe"),
    (
        replace(
            HEAD_NORM,
            rotary="interleaved",
            rotary_on="listed",
            norm_at="rotated",
            q_norm="*",
            k_norm="*",
            norm_on="use_qk_norm",
            query_factor="llama4",
        ),
        "llama4_text",
    ),
    (replace(SEPARATE, rotary="interleaved", norm="layer", eps="layer_norm_eps"), "cohere"),
)

FAMILIES: Mapping[str, Layout] = {
    **{family: layout for layout, families in _LISTS for family in families.split()},
    "afmoe": replace(HEAD_NORM, rotary_on="sliding", gate="sigmoid"),
    "bailing_hybrid": replace(LATENT, gate="sigmoid_per_head"),
    "beam": replace(HEAD_NORM, query_factor="beam", gate="sigmoid_with_head_bias"),
    "bitnet": replace(SEPARATE, gate="sub_norm"),
    "bloom": replace(PER_HEAD, rotary="", alibi="press", residual="residual"),
    "codegen": replace(FOUR_BLOCKS, rotary="interleaved", base=10000.0),
    "cohere2": replace(SEPARATE, rotary="interleaved", rotary_on="sliding"),
    "cohere2_moe": replace(SEPARATE, rotary="interleaved", rotary_on="cohere2_moe"),
    "cohere_compass_text": SEPARATE,
    "ctrl": replace(NO_ROTARY, q="Wq", k="Wk", v="Wv", out="dense"),
    "dbrx": replace(CONCAT, fused="Wqkv", out="out_proj", clip="attn_config.clip_qkv"),
    "deepseek_v2": replace(LATENT, rotary="interleaved"),
    "falcon": GROUPED,
    "falcon_h1": replace(SEPARATE, key_factor="key_multiplier"),
    "flint": replace(HEAD_NORM, rotary_on="sliding", sinks="sinks"),
    "gpt_bigcode": replace(CONCAT, fused="c_attn", out="c_proj", rotary="", scale="gpt2"),
    "gpt_neo": replace(FAIRSEQ, scale="one"),
    "gpt_oss": replace(SEPARATE, sinks="sinks"),
    "gptj": replace(SEPARATE, rotary="interleaved", base=10000.0, out="out_proj"),
    "granitemoehybrid": replace(SEPARATE, scale="attention_multiplier", rotary_on="position_embedding_type"),
    "helium": replace(SEPARATE, rotary="interleaved"),
    "hrm_text": replace(SEPARATE, gate="sigmoid"),
    "kimi_linear": replace(LATENT, rotary="", scale="head_dim"),
    "laguna": replace(HEAD_NORM, gate="softplus"),
    "lfm3": replace(HEAD_NORM, gate="sigmoid_per_head", eps="norm_eps"),
    "longcat_flash": replace(LATENT, query_factor="latent_width", key_factor="latent_width"),
    "mimo_v2_flash": replace(SEPARATE, value_factor="attention_value_scale", sinks="sinks"),
    "minicpm3": replace(LATENT, rotary="half"),
    "ministral3": replace(SEPARATE, query_factor="ministral3"),
    "modernbert-decoder": replace(SEPARATE, out="Wo"),
    "moshi": replace(SEPARATE, q="q_proj.linear", k="k_proj.linear", v="v_proj.linear", out="o_proj.linear"),
    "mpt": replace(
        CONCAT, fused="Wqkv", out="out_proj", rotary="", alibi="mpt", scale="mpt", clip="attn_config.clip_qkv"
    ),
    "nanochat": replace(HEAD_NORM, reverse=True, norm_at="rotated", q_norm="*", k_norm="*"),
    "olmo": replace(SEPARATE, clip="clip_qkv"),
    "olmoe": replace(WIDE_NORM, clip="clip_qkv"),
    "phi": replace(
        SEPARATE, norm="layer", q_norm="q_layernorm", k_norm="k_layernorm", eps="layer_norm_eps", out="dense"
    ),
    "recurrent_gemma": SEPARATE,
    "roformer": replace(BERT, rotary="interleaved", base=10000.0),
    "smollm3": replace(SEPARATE, rotary_on="listed"),
    "stablelm": replace(SEPARATE, norm="layer", q_norm="q_layernorm", k_norm="k_layernorm", eps="layer_norm_eps"),
    "xlm": LINEAR,
    "zamba": replace(NO_ROTARY, scale="half_head_dim"),
    "zamba2": replace(SEPARATE, scale="half_head_dim", rotary_on="use_mem_rope"),
}

# Families of which transformers has no causal language model: encoders, and encoder-decoders of two texts.
ENCODERS: Mapping[str, Layout] = {
    **dict.fromkeys(["dpr", "layoutlm", "markuplm", "splinter", "tapas", "visual_bert"], BERT),
    **dict.fromkeys(["m2m_100", "nllb-moe", "seamless_m4t", "speech_to_text", "tipsv2_text_model"], FAIRSEQ),
    **dict.fromkeys(["mt5", "switch_transformers", "t5", "umt5"], T5),
    **dict.fromkeys(["distilbert", "flaubert"], LINEAR),
    **dict.fromkeys(["eurobert", "gte", "jina_embeddings_v3", "nomic_bert", "ultrabert"], SEPARATE),
    "albert": replace(BERT, out="dense", residual="hidden_states", out_norm="LayerNorm", eps="layer_norm_eps"),
    "embedding_gemma2_text": replace(HEAD_NORM, scale="one", v_norm="*"),
    "modernbert": replace(CONCAT, fused="Wqkv", out="Wo"),
    "openai_privacy_filter": replace(SEPARATE, rotary="interleaved", sinks="sinks"),
    "t5_gemma_module": replace(SEPARATE, scale="query_pre_attn_scalar", softcap="attn_logit_softcapping"),
}

# Decoders that read pictures beside text, and the vision towers that read these for them.
_TOWER = replace(CONCAT, fused="qkv", out="proj", base=10000.0, axes="halves")
SEEING: Mapping[str, Layout] = {
    **dict.fromkeys(["qwen2_vl_text", "qwen2_5_vl_text"], replace(SEPARATE, axes="sections")),
    "qwen3_vl_text": replace(HEAD_NORM, axes="interleaved"),
    **dict.fromkeys(["clip_vision_model", "idefics3_vision", "siglip_vision_model", "smolvlm_vision"], FAIRSEQ),
    **dict.fromkeys(["qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision"], _TOWER),
}

# Models that read a picture alone, patch by patch.
ALONE: Mapping[str, Layout] = {
    **dict.fromkeys(
        ["deit", "dinov2", "dinov2_with_registers", "ijepa", "pixio", "radio", "vit", "vit_msn"], NO_ROTARY
    ),
    "tipsv2_vision_model": NO_ROTARY,
    **dict.fromkeys(["aimv2_vision_model", "altclip_vision_model", "chinese_clip_vision_model"], FAIRSEQ),
    **dict.fromkeys(["clipseg_vision_model", "metaclip_2_vision_model", "siglip2_vision_model"], FAIRSEQ),
    **dict.fromkeys(["dpt", "yolos"], BERT),
    "dinov3_vit": replace(SEPARATE, base=100.0, axes="halves"),
    "internvl_vision": replace(NO_ROTARY, out="projection_layer"),
}

# Families whose attention no layout here describes, and why.
UNREAD: Mapping[str, str] = {
    **dict.fromkeys(
        ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text", "qwen4_exp_text"],
        "an indexer of its own chooses the keys of each query",
    ),
    "cpmant": "it attends outside the attention interface and adds a learned bias of segments",
    "deepseek_v4": "its keys are a window of tokens and compressed summaries of those before",
    "diffllama": "its weights are the difference of two softmaxes",
    "doge": "a dynamic mask made from the values chooses the keys",
    "inkling2_text": "short convolutions, learned relative positions and a sink for every query",
    "inkling_text": "short convolutions and learned relative positions",
    "jetmoe": "a router chooses the query projections of each token",
    "prophetnet": "two streams predict several tokens at once",
    "xlnet": "two streams with relative positions over permuted text",
    "zaya": "convolutions over the projected queries and keys",
}
UNREAD_ENCODERS: Mapping[str, str] = {
    "convbert": "convolutions next to and within its heads",
    **dict.fromkeys(["deberta", "deberta-v2"], "its scores add products of contents with relative positions"),
    "ibert": "its activations are quantised, each with a factor of its own",
    "mobilebert": "its queries and keys are made of another tensor than its values",
    "mpnet": "a bias of relative positions that its encoder makes, for all layers",
}
UNREAD_TOWERS: Mapping[str, str] = dict.fromkeys(
    ["beit", "data2vec-vision"], "a bias of relative positions on two axes"
)


def layout_of(config: Any) -> Layout | None:
    """The layout of a family, from its config; None for a family that no table here knows.

    >>> layout_of(config).name  # a Llama's
    'separate'
    """
    kind = config.model_type
    layout = FAMILIES.get(kind) or ENCODERS.get(kind) or SEEING.get(kind) or ALONE.get(kind)
    variant = VARIANTS.get(kind)
    return replace(layout, **variant(config)) if layout and variant else layout


TWICE = "transformers' eager attention adds the ALiBi bias twice, in its mask and to its scores (its sdpa does not)"


def _falcon(config: Any) -> dict[str, Any]:
    split = "grouped" if config.new_decoder_architecture else "concat" if config.multi_query else "per_head"
    return {"split": split} | ({"rotary": "", "alibi": "falcon", "caveat": TWICE} if config.alibi else {})


def _mpt(config: Any) -> dict[str, Any]:
    if not config.attn_config.alibi:
        return {"alibi": "", "caveat": "transformers adds the ALiBi bias also where attn_config.alibi is false"}
    bound = config.attn_config.alibi_bias_max
    return {} if bound == 8 else {"caveat": f"transformers takes 8 for attn_config.alibi_bias_max, which is {bound}"}


# Families whose config chooses between layouts.
VARIANTS: Mapping[str, Any] = {
    **dict.fromkeys(
        ["axk1", "deepseek_v3", "glm4_moe_lite", "youtu"],
        lambda config: {"rotary": "deinterleaved" if config.rope_interleave else "half"},
    ),
    "falcon": _falcon,
    "gpt_bigcode": lambda config: {"split": "concat" if config.multi_query else "per_head"},
    "internvl_vision": lambda config: {"norm": "rms", "norm_at": "whole", "eps": 1e-6} if config.use_qk_norm else {},
    "mpt": _mpt,
}
