"""The stacks of attention that a model may have, and how their layers and heads are called.

A causal model has one, its decoder; BERT has one, its encoder; an encoder-decoder has three: encoder, decoder, and the
attention of the decoder to what the encoder read.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
DECODER, ENCODER, CROSS, VISION = "decoder", "encoder", "cross", "vision"
# Maps of their own that layers of a decoder may have: over tokens and summaries of several tokens (DeepSeek-V4's
# compressed sparse and heavily compressed attention); the difference of two heads' weights (differential attention).
CSA, HCA, DIFFERENCE = "csa", "hca", "difference"
# Those of the Byte Latent Transformer next to its decoder over bytes: the model whose entropies cut patches; the local
# encoder, over bytes; each patch over its bytes; patches over patches; bytes over patches.
PATCHER, LOCAL, POOLING, GLOBAL, UNPOOLING = "patcher", "local", "pooling", "global", "unpooling"
OVER_PATCHES = (POOLING, GLOBAL, UNPOOLING)
CROSSING = {POOLING: LOCAL, UNPOOLING: DECODER}  # the part of the model that each belongs to
CAUSAL = (PATCHER, LOCAL, DECODER)  # that read one text from left to right
OF_TWO_TEXTS = (ENCODER, DECODER, CROSS)  # those of an encoder-decoder
# In the order in which a forward pass comes to them.
SOFTMAX = (ENCODER, PATCHER, LOCAL, POOLING, GLOBAL, UNPOOLING, DECODER, CROSS, VISION, CSA, HCA)
STACKS = (*SOFTMAX, DIFFERENCE)
CAUSAL_LM, ENCODER_ONLY, SEQ2SEQ, VISION_ONLY = TASKS = ("decoder", "encoder", "seq2seq", "vision")  # read at
NAMES = {
    CAUSAL_LM: "a causal model",
    ENCODER_ONLY: "an encoder",
    SEQ2SEQ: "an encoder-decoder",
    VISION_ONLY: "a vision tower",
}
TEXT_TASKS = (CAUSAL_LM, ENCODER_ONLY, SEQ2SEQ)  # the tasks of models that read text


def main_stack(task: str) -> str:
    """The stack that a layer's number means where no one names one: of an encoder-decoder its decoder.

    >>> main_stack("seq2seq")
    'decoder'
    """
    return {ENCODER_ONLY: ENCODER, VISION_ONLY: VISION}.get(task, DECODER)


def prefix(stack: str) -> str:
    """What precedes a layer's number where a model has several stacks: `cross `, and nothing for the decoder's."""
    return "" if stack == DECODER else f"{stack} "


def is_causal(stack: str) -> bool:
    """Whether its tokens see none after them."""
    return stack in CAUSAL


def heard_as(stack: str, ahead: float) -> str:
    """The stack whose metrics a layer has: an encoder's where all its queries see the next key, a decoder's where none.

    ahead: the share of queries that do; NaN of one query, where the stack's own name says it.

    >>> heard_as("decoder", ahead=1.0)
    'encoder'
    """
    if is_causal(stack) and ahead == 1:
        return ENCODER
    return DECODER if is_bidirectional(stack) and ahead == 0 else stack


def is_bidirectional(stack: str) -> bool:
    """Whether its tokens are of a text, and see those after them too."""
    return stack == ENCODER


def is_cross(stack: str) -> bool:
    """Whether its keys are of another text than its queries."""
    return stack == CROSS


def is_vision(stack: str) -> bool:
    """Whether its tokens are of pictures."""
    return stack == VISION


def is_over_patches(stack: str) -> bool:
    """Whether its queries or keys are patches of bytes, which the pass alone finds."""
    return stack in OVER_PATCHES


def is_difference(stack: str) -> bool:
    """Whether its maps are differences of two heads' weights."""
    return stack == DIFFERENCE


def has_summaries(stack: str) -> bool:
    """Whether its keys are summaries of several tokens too."""
    return stack in (CSA, HCA)


def has_decoder_heads(stack: str) -> bool:
    """Whether its heads are those of a decoder, over tokens or over summaries of them."""
    return stack == DECODER or has_summaries(stack)


def sides(stack: str, source: T, target: T) -> tuple[T, T]:
    """Of the two texts of an encoder-decoder, those that the queries and the keys of a stack are of.

    >>> sides("cross", "the text", "its translation")
    ('its translation', 'the text')
    """
    return source if stack == ENCODER else target, target if stack == DECODER else source
