"""Logits of models made in memory, taken apart as a caller takes them apart: by `attnscope.why`."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

import attnscope
from attnscope.api.why import MEAN
from attnscope.model.loaded import LoadedModel
from attnscope.studies.attribution_records import LogitParts, LogitQuery

QUERY = 15
LAYERS = 4  # of a stack; keys may be an earlier layer's


def wrapped(model: Any) -> LoadedModel:
    """A model made in memory with the demo's tokenizer, as a caller of the library has it."""
    return attnscope.wrap(model, _demo().tokenizer)


def taken_apart(loaded: LoadedModel, ids: Any, asked: LogitQuery, **inputs: Any) -> LogitParts:
    """What `attnscope.why` gives of a logit; verify of `asked`: whether components are replaced.

    ids: of one text, as numbers or (1, T). inputs: `decoder_input_ids` of an encoder-decoder, (1, T), which begin with
    the decoder's start token where it has one.
    """
    found = attnscope.why(
        loaded,
        _numbers(ids),
        ("" if asked.stack is None else f"{asked.stack} ") + f"L{asked.layer}H{asked.head}",
        query=asked.query,
        key=asked.key,
        against=MEAN if asked.against is None else asked.against,
        side=asked.side,
        by="tokens" if asked.by_tokens else "component",
        verify=asked.verify > 0,
        target=_numbers(inputs["decoder_input_ids"]) if inputs else None,
    )
    return found.parts


def last_of(
    model: Any,
    ids: Any,
    query: int = QUERY,
    stack: str | None = None,
    sides: Iterable[str] = ("key", "query"),
    **inputs: Any,
) -> float:
    """The last layer of a stack, by both sides; its largest error as a share of the sum of |terms|."""
    loaded = wrapped(model)
    stack = None if stack == loaded.geometry.stack else stack
    layers = loaded.geometry.heads_of_stacks[stack or loaded.geometry.stack]
    layer, heads = [(layer, heads) for layer, heads in layers.items() if heads][-1]
    errors = []
    for side in sides:
        found = taken_apart(loaded, ids, LogitQuery(layer, heads - 1, query, side=side, stack=stack), **inputs)
        assert len(found.components) > min(layer, LAYERS)  # a row for what each earlier block writes
        errors.append(abs(found.sum - found.logit) / abs(found.contribution_N).sum())
    return max(errors)


@cache
def _demo() -> LoadedModel:
    return attnscope.load("demo", device="cpu")


def _numbers(ids: Any) -> Sequence[int]:
    if isinstance(ids, torch.Tensor):
        [ids] = ids.reshape(-1, ids.shape[-1]).tolist()
    return list(ids)
