"""What each component gives to a vector of a call rather than to a number: its part of a key, or of a query.

A head's part of what its output projection gives is one matrix product for all its tokens. From there to the vector a
gradient is asked of each of its numbers; where nothing lies between two blocks but additions, they share it.

    vectors_of(found, k_KD[rows], torch.full((1, len(rows)), 1 / len(rows)), rows)[0]    # (C, D), of the mean key

Shapes: N weighting, R row of the side, C component, D width of q and k, d some of these, H head, V width of v, E model
width, P part: a residual or a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnscope.hooks.projections import projection
from attnscope.study.why.sides import exact
from attnscope.study.why.written import Written

AT_ONCE = 2**26  # numbers of gradients


def vectors_of(found: Written, vector_RD: Tensor, weight_NR: Tensor, rows: Sequence[int]) -> Tensor | None:
    """(N, C, D) float64 on the CPU: what each component gives to weighted sums of the vectors of some rows.

    None where the heads' outputs do not go through one module with weights, side by side.
    """
    variables = [*found.residuals, *(one.gave for _, one in sorted(found.projections.items()))]
    if len(found.projections) < len(found.heads) or any(one.ndim != 3 for one in variables):
        return None
    # which of them share a gradient, and how many numbers of the vector fit at once
    groups = _alike(_gradients(vector_RD[:, 0], variables))
    asked = [variables[alike[0]] for alike in groups]
    at_once = max(1, AT_ONCE // (len(asked) * variables[0].numel()))
    parts: list[list[Tensor]] = [[] for _ in variables]
    for numbers in torch.arange(vector_RD.shape[1]).split(at_once):
        given = [_gradients(vector_RD[:, one], asked) for one in numbers.tolist()]
        for alike, of_group in zip(groups, zip(*given, strict=True), strict=True):
            towards_RdE = torch.stack([one[0, rows] for one in of_group], 1)
            for place in alike:
                parts[place].append(_weighted(_part(found, place, rows), towards_RdE, weight_NR))
    # whole residuals and heads become components
    every = [torch.cat(one, 2) for one in parts]
    whole, by_head = every[: len(found.residuals)], every[len(found.residuals) :]
    of_weighting = range(len(weight_NR))
    return torch.stack([found.shared([one[n, 0] for one in whole], [one[n] for one in by_head]) for n in of_weighting])


def _gradients(numbers_R: Tensor, variables: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(numbers_R.sum(), variables, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if one is None else one for x, one in zip(variables, found, strict=True)]


def _alike(gradients: Sequence[Tensor]) -> list[list[int]]:
    """The places of gradients that are one tensor, together."""
    found: dict[int, list[int]] = {}
    for place, one in enumerate(gradients):
        found.setdefault(one.data_ptr(), []).append(place)
    return list(found.values())


@torch.no_grad()
def _part(found: Written, place: int, rows: Sequence[int]) -> Tensor:
    """(R, P, E): a residual, or what each head of a call gives by its projection, at some rows."""
    at = place - len(found.residuals)
    if at < 0:
        return found.residuals[place][0, rows, None].detach()
    through, heads = found.projections[at], found.heads[at][1].output_BQHV
    given_HRV = through.given.detach().reshape(heads.shape)[0, rows].transpose(0, 1)
    return (given_HRV @ projection(through.module, heads.shape[2], heads)).transpose(0, 1)


def _weighted(part_RPE: Tensor, towards_RdE: Tensor, weight_NR: Tensor) -> Tensor:
    """(N, P, d) float64 on the CPU: the products of parts with gradients, weighted over the rows."""
    product_RPd = exact(part_RPE @ towards_RdE.mT)
    return torch.einsum("nr,rpd->npd", weight_NR.to(product_RPd), product_RPd).cpu().double()
