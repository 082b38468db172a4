"""The oracle: multi-head attention written from the papers, with torch and nothing else.

attention.py    weights and output, matrix form        naive.py      the same with loops, float64
masks.py        causal, padding, window, chunks        multihead.py  the layer that learns
rotary.py, frequencies.py, alibi.py, relative.py    positions        norms.py      norms of q and k
latent.py       multi-head latent attention
reader.py       a layer of a real model, recomputed from its raw weights: given.py (what it works from),
                layout.py, layouts.py (where things are), splits.py (heads) and rules.py (scales, gates)

The first four rows are also a textbook: some (`packed_mask`, `key_padding_mask`, `additive_mask`,
`l2_norm`, `MultiHeadAttention`) serve no layer that the reader reads. Tests hold each against torch or transformers.
"""

from attnscope.reference.attention import attention_logits, attention_output, attention_weights
from attnscope.reference.masks import causal_mask, positions
from attnscope.reference.multihead import MultiHeadAttention

__all__ = [
    "MultiHeadAttention",
    "attention_logits",
    "attention_output",
    "attention_weights",
    "causal_mask",
    "positions",
]
