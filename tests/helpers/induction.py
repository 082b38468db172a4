"""A GPT-2 whose weights are written by hand: its first layer finds the token before, its second what followed it.

A residual is [token | position | token before | answer], each a one-hot of the places that were written. The norms only
subtract the mean, since their epsilon is large and their weight its root.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, PLACES = 8, 16
TOKEN, PLACE, BEFORE, ANSWER = (
    slice(0, WORDS),
    slice(WORDS, WORDS + PLACES),
    slice(WORDS + PLACES, 2 * WORDS + PLACES),
    slice(2 * WORDS + PLACES, 3 * WORDS + PLACES),
)
WIDTH = 3 * WORDS + PLACES
SHARP, SURE = 400.0, 30.0  # of the logits before a softmax, and of the answer's logit


def induction() -> GPT2LMHeadModel:
    """Two layers of one head each; the last token's answer is what followed its first copy."""
    config = GPT2Config(
        n_layer=2,
        n_head=1,
        n_embd=WIDTH,
        n_positions=PLACES,
        vocab_size=WORDS,
        tie_word_embeddings=False,
        layer_norm_epsilon=1e8,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    for name, module in model.named_modules():
        if "ln_" in name:
            module.weight.fill_(1e4)
    body, one = model.transformer, torch.eye(WORDS)
    body.wte.weight[:, TOKEN] = one
    body.wpe.weight[:, PLACE] = torch.eye(PLACES)
    before, copied = body.h
    root = (SHARP * WIDTH**0.5) ** 0.5
    write(before.attn.c_attn, 0, PLACE, PLACE, root * torch.eye(PLACES).roll(-1, 1))  # from a place to the one before
    write(before.attn.c_attn, 1, PLACE, PLACE, root * torch.eye(PLACES))
    write(before.attn.c_attn, 2, TOKEN, TOKEN, one)
    before.attn.c_proj.weight[TOKEN, BEFORE] = one
    write(copied.attn.c_attn, 0, TOKEN, TOKEN, root * one)
    write(copied.attn.c_attn, 1, BEFORE, TOKEN, root * one)
    write(copied.attn.c_attn, 2, TOKEN, TOKEN, one)
    copied.attn.c_proj.weight[TOKEN, ANSWER] = one
    model.lm_head.weight[:, ANSWER] = SURE * one
    return model


def write(projection, which: int, read: slice, into: slice, values: torch.Tensor) -> None:
    """Of a joint projection, q (0), k (1) or v (2): what it reads of the residual, and where it puts it."""
    start = which * WIDTH
    projection.weight[read, start + into.start : start + into.stop] = values
