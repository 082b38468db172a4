"""The stacks of attention that a model may have, and how their layers and heads are called.

A causal model has one, its decoder; BERT has one, its encoder; an encoder-decoder has three: encoder, decoder, and the
attention of the decoder to what the encoder read.
"""

from __future__ import annotations

DECODER, ENCODER, CROSS, VISION = "decoder", "encoder", "cross", "vision"
# Maps of their own that layers of a decoder may have: over tokens and summaries of several tokens (DeepSeek-V4's
# compressed sparse and heavily compressed attention); the difference of two heads' weights (differential attention).
CSA, HCA, DIFFERENCE = "csa", "hca", "difference"
# Those of the Byte Latent Transformer beside its decoder over bytes: the model whose entropies cut patches; the local
# encoder, over bytes; each patch over its bytes; patches over patches; bytes over patches.
PATCHER, LOCAL, POOLING, GLOBAL, UNPOOLING = "patcher", "local", "pooling", "global", "unpooling"
OVER_PATCHES = (POOLING, GLOBAL, UNPOOLING)
CROSSING = {POOLING: LOCAL, UNPOOLING: DECODER}  # the part of the model that each belongs to
CAUSAL = (PATCHER, LOCAL, DECODER)  # that read one text from left to right
# In the order in which a forward pass comes to them.
SOFTMAX = (ENCODER, PATCHER, LOCAL, POOLING, GLOBAL, UNPOOLING, DECODER, CROSS, VISION, CSA, HCA)
STACKS = (*SOFTMAX, DIFFERENCE)
TASKS = ("decoder", "encoder", "seq2seq")  # what a model is read at
NAMES = {"decoder": "a causal model", "encoder": "an encoder", "seq2seq": "an encoder-decoder"}


def main_stack(task: str) -> str:
    """The stack that a layer's number means where nobody names one: of an encoder-decoder its decoder.

    >>> main_stack("seq2seq")
    'decoder'
    """
    return ENCODER if task == ENCODER else DECODER
