"""The oracle: attention written from the papers, with torch and nothing else.

attention.py    weights and output, matrix form; the layer that learns
naive.py        the same with loops, float64; layers without a softmax, token by token, each with its map
masks.py        causal, padding, window, chunks
positions.py    rotary, its frequencies, ALiBi, relative positions
projections.py  what the oracle is given, how projections become heads, norms, multi-head latent attention
layouts.py      which family builds its attention how
reader.py       a layer of a real model, recomputed from its raw weights

The first three files, positions and norms are also a textbook: some (`packed_mask`, `key_padding_mask`,
`additive_mask`, `l2_norm`, `MultiHeadAttention`) serve no layer that the reader reads. Tests hold each against torch or
transformers.
"""

from attnscope.reference.attention import MultiHeadAttention, attention_logits, attention_output, attention_weights
from attnscope.reference.masks import causal_mask, positions

__all__ = [
    "MultiHeadAttention",
    "attention_logits",
    "attention_output",
    "attention_weights",
    "causal_mask",
    "positions",
]
