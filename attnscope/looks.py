"""Per head, or on average over several, what every token has to do with the tokens that were asked about.

Shapes: H head, T token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from attnscope.errors import InputError, UsageError
from attnscope.keep.layers import codes
from attnscope.model.selection import DECODER, STACKS
from attnscope.utils.tables import as_table, numbers, texts_at

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.keep.layers import LayerKey
    from attnscope.observation import Observation

Mean = Literal["none", "layer", "all"]


@dataclass(frozen=True)
class Look:
    """One head, or the mean of several: every token's weight, and what uniform attention gives it, (T,), NaN if hidden.

    layer, head, kv_head: None where several were averaged. sink: the key to which most of the heads give most.
    stack: the layer's stack.
    """

    name: str
    layer: int | None
    head: int | None
    kv_head: int | None
    weight_T: np.ndarray
    uniform_T: np.ndarray
    sink: int
    stack: str = DECODER


def looks(seen: Observation, mean: Mean = "none") -> list[Look]:
    """The kept heads of every stack, one by one, or on average per layer, or over all of the stack.

    Raises UsageError where none was asked for, InputError where no stack's texts have what is named.
    """
    stacks = list(seen.stacks.values())
    weights = [look for obs in stacks for look in _of_stack(obs, mean, f"{obs.stack} " * bool(seen.other_stacks))]
    if not weights and any(obs.chosen.nothing for obs in stacks):
        raise InputError("no stack that is shown has what is named in its texts", "choose others: {select=enc,dec}")
    if not weights:
        raise UsageError("this observation kept no weights per token", "ask with Request(per_token=True)")
    return weights


def _of_stack(seen: Observation, mean: Mean, stack: str) -> list[Look]:
    weights = [look for key in seen.per_token for look in _of_layer(seen, key, stack)]
    if mean == "none" or not weights:
        return weights
    if mean == "all":
        return [_averaged(weights, f"{stack}mean of {len(weights)} heads", None)]
    layers = sorted({look.layer for look in weights if look.layer is not None})
    per_layer = [[look for look in weights if look.layer == layer] for layer in layers]
    return [
        _averaged(group, f"{stack}L{group[0].layer}, mean of {len(group)} heads", group[0].layer) for group in per_layer
    ]


def coloured(seen: Observation) -> Prompt:
    """The text whose tokens have weights: of a stack's queries where keys alone were chosen, else of its keys."""
    return seen.queries if seen.chosen.keys_alone else seen.keys


def look_table(seen: Observation, mean: Mean = "none") -> pa.Table:
    """The looks as rows; see `Capture.token_table`."""
    weights = looks(seen, mean)
    counts = [len(look.weight_T) for look in weights]
    position = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    which = {
        name: np.repeat(
            np.array([-1 if (number := getattr(look, name)) is None else number for look in weights]), counts
        )
        for name in ("layer", "head", "kv_head")
    }
    tokens = [token for look in weights for token in coloured(seen.of(look.stack)).tokens]
    return as_table(
        {
            **{name: numbers(column.astype(np.int32), column < 0) for name, column in which.items()},
            "position": position,
            "token": texts_at(tokens, np.arange(len(tokens))),
            "weight": np.concatenate([look.weight_T for look in weights]),
            "uniform": np.concatenate([look.uniform_T for look in weights]),
            "stack": texts_at(STACKS, np.repeat(codes([look.stack for look in weights]), counts)),
        }
    )


def _of_layer(seen: Observation, key: LayerKey, stack: str) -> list[Look]:
    kept, columns, by_kv = seen.per_token[key], seen.columns, seen.view.by_kv
    places = np.flatnonzero((columns.layer == key.layer) & (columns.stack == key.stack))[kept.heads]
    sinks = np.where(columns.top_key_mass[places] > seen.rests_above, columns.top_key[places], 0).tolist()
    return [
        Look(
            stack + seen.heads[place].name,
            key.layer,
            None if by_kv else head,
            head if by_kv else int(seen.kv_head(key, head)),
            np.asarray(kept.weight[row]),
            np.asarray(kept.uniform[row]),
            sinks[row],
            key.stack,
        )
        for row, (place, head) in enumerate(zip(places.tolist(), kept.heads, strict=True))
    ]


def _averaged(weights: list[Look], name: str, layer: int | None) -> Look:
    """The mean; a token that some of the heads cannot see has nothing of theirs."""
    sink = Counter(look.sink for look in weights).most_common(1)[0][0]
    means = {}
    for part in ("weight_T", "uniform_T"):
        part_HT = np.stack([getattr(look, part) for look in weights])
        mean_T = np.nan_to_num(part_HT).mean(0, dtype=np.float64)
        means[part] = np.where(np.isnan(part_HT).all(0), np.nan, mean_T).astype(np.float32)
    return Look(name, layer, None, None, **means, sink=sink, stack=weights[0].stack)
