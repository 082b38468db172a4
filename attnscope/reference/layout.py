"""How one attention layer is built, in words: the `Layout` of a family, and the few that most families share.

The names in a layout are those of the attention module's own parameters, and of the rules in `rules.py` and
`splits.py`; `layouts.py` says which family has which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """One way to build an attention layer.

    split: how projections become heads (`splits.SPLITS`). q, k, v: the separate projections; fused: the fused one;
    out: the projection after the heads, "" where the module returns the heads side by side. transposed: matrices are
    kept (in, out), as GPT-2's Conv1D does. clip: where the config says at what size q, k and v are clamped.

    norm: "rms" or "layer", of the parameters q_norm, k_norm, v_norm, wherever the module has them (v_norm: "*" is a
    norm without weights); norm_at: "heads", "whole" (before the split) or "rotated"; norm_on: which layers
    (`rules.NORM_ON`); offset is added to the weight; eps: a number, or the config's name for it.

    rotary: "half", "interleaved", "deinterleaved" or "" (none); part: which dims turn; reverse: the other way;
    rotary_on: which layers turn (`rules.ROTARY_ON`); base: the rotary base of families whose config has none. axes:
    which pair turns by which axis, where tokens have positions on several (`rules.AXES`).
    alibi: "" or a rule of `rules.ALIBI`. table: the parameter with a bias for every bucket of distances, of the stack's
    first layer where a layer has none of its own.

    scale, query_factor, key_factor, value_factor: rules of `rules.SCALES`, `rules.QUERY_FACTORS`, `rules.FACTORS`.
    softcap: the config's name for it. sinks: the parameter's name; sinks_in_weights: whether the model's weights are
    after the sink took its share. window: whether the layer's type limits the keys; block_in_window: whether also those
    of a block whose tokens see each other.
    gate: what is done to the heads before the output projection (`rules.GATES`). residual: the argument that the module
    adds to its output; out_norm: the layer norm of that sum. caveat: where transformers is known to compute something
    else than this.

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
