"""What each component gives to every key of a head: the rows of `parts_of` for all keys of many queries at once.

What a component writes at a token reaches the key of that token alone. So one gradient of the sum over all keys has
what each of them is given.

    for one in key_parts(loaded, ids, 3, {0: [39]}): one.parts_CQK

Shapes: C component, Q query that was asked for, T token, K key, D width of q and k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attnscope.hooks.forward import with_gradients
from attnscope.study.why.following import written
from attnscope.study.why.parts import BIAS, POSITION, check_made, check_model, check_sum, spec_of
from attnscope.study.why.records import KeyParts
from attnscope.study.why.sides import exact, keys_of, position_term, visible_keys
from attnscope.study.why.written import Written

if TYPE_CHECKING:
    from attnscope.attention.spec import AttentionSpec
    from attnscope.model.loaded import LoadedModel


@with_gradients
def key_parts(
    loaded: LoadedModel, ids: Sequence[int], layer: int, heads: Mapping[int, Sequence[int]]
) -> Iterator[KeyParts]:
    """Take the logits of some heads of a layer apart; heads: {head: the queries}. Raises as `parts_of`."""
    check_model(loaded)
    given = torch.tensor([list(ids)], device=loaded.device)
    with written(loaded, given, {}, loaded.geometry.stack, layer) as sides:
        spec, found = spec_of(sides), sides.side("key")
        nothing = found.nothing()
        for head, queries in heads.items():
            yield _of_head(found, spec, nothing, layer, head, list(queries))


def _of_head(
    found: Written, spec: AttentionSpec, nothing: AttentionSpec, layer: int, head: int, queries: list[int]
) -> KeyParts:
    k_KD, bias_KD = exact(keys_of(spec, head)), exact(keys_of(nothing, head))
    check_made(k_KD, "key")
    q_QD = exact(spec.q_BHQD[0, head, queries].detach()) * spec.scale
    components, parts_CQK = (
        [*found.components, BIAS],
        np.concatenate([_of_keys(found, k_KD, q_QD), _pairs(q_QD, bias_KD)]),
    )
    logit_QK, size_QK = _pairs(q_QD, k_KD)[0], _pairs(q_QD.abs(), k_KD.abs())[0]
    check_sum(parts_CQK, logit_QK, size_QK)
    position_QK = _positions(spec, head, queries)
    if position_QK is not None:
        components, parts_CQK = [*components, POSITION], np.concatenate([parts_CQK, position_QK[None]])
        logit_QK = logit_QK + position_QK
    seen_QK = np.zeros(logit_QK.shape, bool)
    for row, query in enumerate(queries):
        seen_QK[row, visible_keys(spec, head, query)] = True
    return KeyParts(
        layer,
        head,
        tuple(queries),
        tuple(components),
        np.where(seen_QK, parts_CQK, 0.0),  # the position of a hidden key may be -inf
        np.where(seen_QK, logit_QK, np.nan),
        spec.softcap,
        spec.sinks is not None,
    )


def _of_keys(found: Written, k_KD: Tensor, q_QD: Tensor) -> np.ndarray:
    """(C, Q, K): what each component gives to the product of each query with each key.

    With more queries than a key has numbers, the numbers are taken apart, and the queries multiplied with their parts.
    """
    few = len(q_QD) <= q_QD.shape[1]
    directions = q_QD if few else torch.eye(q_QD.shape[1], dtype=q_QD.dtype, device=q_QD.device)
    rows = [found.shares_by_row(found.gradients((k_KD @ one_D).sum())).detach() for one_D in directions]
    parts_CNK = torch.stack(rows, 1)
    return _numbers(parts_CNK if few else q_QD.cpu().double() @ parts_CNK)


def _pairs(q_QD: Tensor, k_KD: Tensor) -> np.ndarray:
    """(1, Q, K): the products."""
    return _numbers(q_QD @ k_KD.T)[None]


def _positions(spec: AttentionSpec, head: int, queries: Sequence[int]) -> np.ndarray | None:
    """(Q, K): what positions add to the logits; None where they add nothing."""
    added = [position_term(spec, head, query) for query in queries]
    if all(one is None for one in added):
        return None
    none_K = torch.zeros(spec.k_BGKD.shape[2], dtype=torch.float64)
    return _numbers(torch.stack([none_K if one is None else one for one in added]))


def _numbers(values: Tensor) -> np.ndarray:
    found: np.ndarray = values.detach().cpu().double().numpy()
    return found
