"""A model's attention as a plain loop over texts, heads and queries, in which some weights are cut.

with looped(model, cut):        # cut(layer, head, query) -> keys
    model(ids)
with looped(model, patch=patch):        # patch(module, what, tensor) -> tensor
    model(ids)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

Cut = Callable[[torch.nn.Module, int, int], Sequence[int]]
Patch = Callable[[torch.nn.Module, object, torch.Tensor], torch.Tensor]  # "key", "value", (text, head, query), "output"
NAME = "attnscope_loop"
SINKS = ("s_aux", "sinks")


def loop(
    module, query, key, value, attention_mask, scaling=None, cut=None, how="mask", scaled=False, patch=None, **given
):
    """One row after the other: logits, soft-cap, bias, mask, cut, sink, softmax, values."""
    patch = patch or (lambda module, what, value: value)
    key, value = patch(module, "key", key), patch(module, "value", value)
    batch, heads, queries, width = query.shape
    scaling = width**-0.5 if scaling is None else scaling
    shared, softcap, bias = heads // key.shape[1], given.get("softcap"), given.get("position_bias")
    sinks = next((given[name] for name in SINKS if given.get(name) is not None), None)
    out = torch.zeros(batch, queries, heads, value.shape[-1])
    for text in range(batch):
        for head in range(heads):
            for at in range(queries):
                k, v = key[text, head // shared], value[text, head // shared]
                logits = scaling * (k @ query[text, head, at])
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if bias is not None:
                    logits = logits + bias.expand(batch, heads, queries, -1)[text, head, at]
                if attention_mask is not None:
                    row = attention_mask[..., : len(k)].expand(batch, heads, queries, -1)[text, head, at]
                    logits = logits.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else logits + row
                gone = list(cut(module, head, at))
                if how == "mask":
                    logits[gone] = -torch.inf
                if bool((logits < -1e30).all()) and gone:
                    continue
                numerators = (logits - logits.max()).exp()
                sink = 0.0
                if sinks is not None:
                    one = sinks.reshape(heads, -1)[head, at if sinks.numel() > heads else 0]
                    sink = (one - logits.max()).exp()
                weights = numerators / (numerators.sum() + (0.0 if scaled else sink))
                if how == "zero":
                    weights[gone] = 0.0
                weights = patch(module, (text, head, at), weights)
                out[text, at, head] = weights @ v
                if scaled:
                    out[text, at, head] *= numerators.sum() / (numerators.sum() + sink)
    return patch(module, "output", out), None


@contextmanager
def looped(
    model,
    cut: Cut = lambda module, head, query: (),
    how: str = "mask",
    scaled: bool = False,
    patch: Patch | None = None,
) -> Iterator[None]:
    """The model with its attention as a loop.

    cut(module, head, query): the keys that are cut from that row. patch: what is put in the place of keys, values,
    weights and outputs.
    """

    def attend(module, query, key, value, attention_mask, **given):
        return loop(module, query, key, value, attention_mask, cut=cut, how=how, scaled=scaled, patch=patch, **given)

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
