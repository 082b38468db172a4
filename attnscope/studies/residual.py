"""What writes the residual that enters a layer, and how much of a number each of its writers gives.

One side of a logit at a time: the other side is a constant, so that it is linear in the residual that enters the layer.

To a vector of a call each component gives its part of a key, or of a query. A head's part of what its output projection
gives is one matrix product for all its tokens. From there to the vector a gradient is asked of each of its numbers;
where nothing lies between two blocks but additions, they share it.

    vectors_of(sources, k_KD[rows], torch.full((1, len(rows)), 1 / len(rows)), rows)[0]    # (C, D), of the mean key

Shapes: B text (one), T token, K key, H head, G kv head, V width of v, E model width, C component, D width of q and k,
d some of these, N weighting, R row of the side, P part: a residual or a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnscope.attention.spec import AttentionSpec
from attnscope.errors import ModelError
from attnscope.hooks.projections import projection
from attnscope.studies.attribution_records import Component
from attnscope.studies.residual_places import ANOTHER, ResidualPath

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall


@dataclass(frozen=True)
class OneSided:
    """A mean of products q . k of one head, times their scale: one side's vectors with what the other side is.

    rows: the tokens of the side. towards_D: the other side, times the scale of the logits.
    """

    side: str
    head: int
    rows: tuple[int, ...]
    towards_D: Tensor

    def of(self, spec: AttentionSpec) -> Tensor:
        """The number itself, of a call."""
        return (self.vectors(spec) @ self.towards_D).mean()

    def size(self, spec: AttentionSpec) -> float:
        """The mean sum of |q_d k_d| that it is made of, which bounds what float32 does to it."""
        return float((self.vectors(spec).detach().abs() @ self.towards_D.abs()).mean())

    def vectors(self, spec: AttentionSpec) -> Tensor:
        """(R, D): of its rows, before the scale of the logits."""
        one_TD = keys_of(spec, self.head) if self.side == "key" else spec.q_BHQD[0, self.head]
        return exact(one_TD[list(self.rows)])


def exact(x: Tensor) -> Tensor:
    """In float64, where the device has it.

    >>> exact(torch.ones(1)).dtype
    torch.float64
    """
    return x.to(widest(x.device))


def widest(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def keys_of(spec: AttentionSpec, head: int) -> Tensor:
    """(K, D): the keys of a query head."""
    return spec.k_BGKD[0, head // (spec.heads // spec.kv_heads)]


def one_sided(
    spec: AttentionSpec, side: str, head: int, query: int, key: int, others: Sequence[int]
) -> tuple[OneSided, OneSided]:
    """The logit of a key, and the mean of those that it is compared with, from one side."""
    q_D = exact(spec.q_BHQD[0, head, query].detach()) * spec.scale
    k_KD = exact(keys_of(spec, head).detach()) * spec.scale
    if side == "key":
        return OneSided(side, head, (key,), q_D), OneSided(side, head, tuple(others), q_D)
    return OneSided(side, head, (query,), k_KD[key]), OneSided(side, head, (query,), k_KD[list(others)].mean(0))


def visible_keys(spec: AttentionSpec, head: int, query: int) -> list[int]:
    """The keys that a query sees."""
    seen_K = spec.visible.rows(query, query + 1)[0].expand(spec.heads, -1, -1)[head, 0]
    keys: list[int] = torch.nonzero(seen_K)[:, 0].tolist()
    return keys


def position_term(spec: AttentionSpec, head: int, query: int) -> Tensor:
    """(K,) float64: what positions add to the logits of q and k, as ALiBi and relative bias do; 0 without."""
    keys = spec.k_BGKD.shape[2]
    added_K = torch.zeros(keys, dtype=torch.float64)
    for values in (spec.bias, spec.visible.mask if spec.visible.additive else None):
        if values is not None:
            values_HQK = values[0, ..., :keys].expand(spec.heads, spec.q_BHQD.shape[2], keys)
            added_K = added_K + values_HQK[head, query].detach().cpu().double()
    # What a mask adds to hidden keys alone is no position's.
    return added_K if bool(added_K[visible_keys(spec, head, query)].any()) else torch.zeros_like(added_K)


ROWS = 128  # of weights at once
# Asked for several times, and 0 where a number does not depend on a variable.
gradients_of: Callable[..., tuple[Tensor, ...]] = partial(
    torch.autograd.grad, retain_graph=True, allow_unused=True, materialize_grads=True
)


@dataclass(frozen=True)
class Projection:
    """The module that the heads of a call are given to side by side, and what it was given and gave, (B, T, ...).

    A gate may lie between: then what it is given is gated.
    """

    module: nn.Module
    given: Tensor
    gave: Tensor


@dataclass(frozen=True)
class HeadOutputs:
    """What the heads of one attention call wrote: a variable, before their projection.

    call: the call itself, where it is asked for its q and k, or for what its heads read.
    """

    layer: int
    stack: str
    output_BQHV: Tensor
    call: AttentionCall | None


@dataclass
class ResidualSources:
    """What writes one residual in a pass, and what its gradients are asked of.

    residuals: (B, T, E), what each block run is given, the last that of the layer. heads: what the attention calls in
    them gave, each with the place of its run. projections: of some of these, by their place. plain: the model's own
    stack. rerun: see `again`.
    """

    course: ResidualPath
    plain: str
    residuals: list[Tensor] = field(default_factory=list)
    heads: list[tuple[int, HeadOutputs]] = field(default_factory=list)
    projections: dict[int, Projection] = field(default_factory=dict)
    rerun: Callable[[Tensor, bool], AttentionSpec] | None = None

    @property
    def components(self) -> list[Component]:
        """Who writes, in the model's order."""
        return list(dict.fromkeys(self._slots))

    @property
    def _slots(self) -> list[Component]:
        """Who gives each row of `shared`; a head that runs again is there again."""
        slots = [Component("embedding", stack=self.course.stack)]
        for at, run in enumerate(self.course.runs[: len(self.residuals) - 1]):
            for heads in (heads for place, heads in self.heads if place == at):
                slots += self._heads_of(heads)
            slots.append(Component("rest", run.number, stack=self.course.stack))
        return slots

    def _heads_of(self, heads: HeadOutputs) -> list[Component]:
        stack = None if heads.stack == self.plain else heads.stack
        return [Component("head", heads.layer, head, stack=stack) for head in range(heads.output_BQHV.shape[2])]

    def gradients(self, value: Tensor, along: Tensor | None = None) -> list[Tensor]:
        """Of a number at the residuals, then at the heads' outputs, 0 where it does not depend on them; along: of a
        tensor, in this direction, itself a variable."""
        variables = [*self.residuals, *(heads.output_BQHV for _, heads in self.heads)]
        return list(gradients_of(value, variables, along, create_graph=along is not None))

    def shares(self, gradients: Sequence[Tensor], products: Callable[..., Tensor] | None = None) -> Tensor:
        """(C,) float64: how much of a number each component gives, by its gradients; products: those of heads."""
        products, whole = products or _products, []
        residuals, of_heads = gradients[: len(self.residuals)], gradients[len(self.residuals) :]
        # A residual is one head; of several streams in any order of axes, all its numbers are one vector.
        for x, gradient in zip(self.residuals, residuals, strict=True):
            shape = (*x.shape[:2], 1, x.shape[2]) if x.ndim == 3 else (1, 1, 1, -1)
            whole.append(products(x.reshape(shape), gradient.reshape(shape))[0])
        outputs = [heads.output_BQHV for _, heads in self.heads]
        return self.shared(whole, [products(*pair) for pair in zip(outputs, of_heads, strict=True)])

    def shares_by_row(self, gradients: Sequence[Tensor]) -> Tensor:
        """(C, T) float64: how much of a number each component gives by what it wrote at each token."""
        if any(x.ndim != 3 for x in self.residuals):
            raise ModelError("the residual of this model is several vectors per token", ANOTHER)
        return self.shares(gradients, _by_row)

    def shared(self, whole: Sequence[Tensor], by_head: Sequence[Tensor]) -> Tensor:
        """(C, ...): what each component gives, by what each residual and the heads of each call give.

        What else a block writes is what the residual gives behind it, less what it gives before it and what its heads
        give.
        """
        parts = [whole[0][None]]
        for at in range(len(whole) - 1):
            of_heads = [one for (run, _), one in zip(self.heads, by_head, strict=True) if run == at]
            rest = whole[at + 1] - whole[at] - sum(one.sum(0) for one in of_heads)
            parts += [*of_heads, rest[None]]
        part_C, slots = torch.cat(parts), self._slots
        places = {component: place for place, component in enumerate(self.components)}
        if len(places) == len(slots):
            return part_C
        at_C = torch.tensor([places[component] for component in slots], device=part_C.device)
        return part_C.new_zeros(len(places), *part_C.shape[1:]).index_add(0, at_C, part_C)

    def shares_by_token(self, of_numbers: Sequence[Sequence[Tensor]]) -> dict[Component, Tensor]:
        """{head: (N, K) float64}: how much of each number, by its gradients, each head gives by each token it reads."""
        shares: dict[Component, Tensor] = {}
        for at, (_, heads) in enumerate(self.heads, len(self.residuals)):
            by_token_NHK = _by_token(heads, [gradients[at] for gradients in of_numbers])
            for component, by_token_NK in zip(self._heads_of(heads), by_token_NHK.unbind(1), strict=True):
                shares[component] = shares[component] + by_token_NK if component in shares else by_token_NK
        return shares

    def vectors(self, chosen: Sequence[int]) -> list[Tensor]:
        """(T, E) of each chosen component: what of the layer's residual is its own, every norm on the way frozen."""
        along = torch.zeros_like(self.residuals[-1], requires_grad=True)
        share_C = self.shares(self.gradients(self.residuals[-1], along))
        return [torch.autograd.grad(share_C[place], along, retain_graph=True)[0][0] for place in chosen]

    def made_keys(self, spec: AttentionSpec) -> int | None:
        """The earlier layer that made the keys of a call, where its own layer did not."""
        if spec.k_BGKD.requires_grad:
            return None
        earlier = [heads.call for _, heads in self.heads if heads.call is not None]
        keys = [(call.layer, call.spec.k_BGKD) for call in reversed(earlier) if call.spec is not None]
        alike = (layer for layer, k in keys if k.shape == spec.k_BGKD.shape and torch.equal(k, spec.k_BGKD))
        return next(alike, None)

    def nothing(self) -> AttentionSpec:
        """The layer's call on a residual of 0: what its own biases give."""
        return self.again(torch.zeros_like(self.residuals[-1]))

    def again(self, residual_BTE: Tensor, frozen: bool = True) -> AttentionSpec:
        """The layer's call on another residual; frozen: with the scales that the norms had."""
        assert self.rerun is not None
        with torch.no_grad():
            return self.rerun(residual_BTE, frozen)


@dataclass(frozen=True)
class WrittenSides:
    """One pass up to an attention: its call, and what writes the residuals of its queries and of its keys.

    Both are one residual, but for a cross layer; key is None where what an encoder's heads write is not seen. keys_of:
    an earlier layer whose keys the attention uses.
    """

    spec: AttentionSpec
    query: ResidualSources
    key: ResidualSources | None
    keys_of: int | None = None

    @property
    def crosses(self) -> bool:
        """Whether keys and queries are of two texts."""
        return self.key is not self.query

    def side(self, name: str) -> ResidualSources:
        """What writes the residual of the `key` or of the `query`. Raises ModelError where that is not seen."""
        sources = self.query if name == "query" else self.key
        if sources is None:
            raise ModelError("what the heads of this encoder write is not seen", "ask for {side=query}")
        return sources


def _by_row(x_BTHV: Tensor, gradient_BTHV: Tensor) -> Tensor:
    """(H, T) float64 on the CPU: what each head gives by each token of its output."""
    product_BTHV = exact(x_BTHV.detach()) * exact(gradient_BTHV)
    return product_BTHV.sum((0, 3)).T.cpu().double()


def _products(x_BTHV: Tensor, gradient_BTHV: Tensor) -> Tensor:
    """(H,) float64 on the CPU: what each head gives, the sum of x times gradient over the tokens that it reaches."""
    x_BTHV = x_BTHV.detach()
    if not gradient_BTHV.requires_grad:  # of one key or query, nearly all rows are 0
        row_R = torch.nonzero(gradient_BTHV[0].flatten(1).any(1))[:, 0]
        x_BTHV, gradient_BTHV = (values.index_select(1, row_R) for values in (x_BTHV, gradient_BTHV))
    return (x_BTHV * gradient_BTHV).sum((0, 1, 3), dtype=widest(x_BTHV.device)).cpu().double()


@torch.no_grad()
def _by_token(heads: HeadOutputs, gradients: Sequence[Tensor]) -> Tensor:
    """(N, H, K): what each head gives to each number by each key, A (v . gradient), summed over its rows."""
    call, v_BGKV = heads.call, None if heads.call is None else heads.call.v_BGKV
    if call is None or v_BGKV is None:
        raise ModelError("the values of this model's heads are not seen", "leave out {by=tokens}")
    P, v_GKV = call.P, v_BGKV[0].float()
    found_NHK = exact(torch.zeros(len(gradients), P.heads, v_GKV.shape[1], device=P.device))
    rows_of = [torch.nonzero(one[0].flatten(1).any(1))[:, 0].tolist() for one in gradients]
    for start in range(0, heads.output_BQHV.shape[1], ROWS):
        here = [[row for row in rows if start <= row < start + ROWS] for rows in rows_of]
        reached = [row for rows in here for row in rows]
        if not reached:
            continue
        first, stop = min(reached), max(reached) + 1
        weights_HQK, shares_BHQ1 = P.rows(first, stop)[0], call.output_shares(first, stop)
        weights_HQK = weights_HQK if shares_BHQ1 is None else weights_HQK * shares_BHQ1[0]
        for number, rows in enumerate(here):
            if rows:
                # What a whole weight on a key gives, by the gradients at these rows of the heads' outputs.
                gradient_GrV = (
                    gradients[number][0, rows].float().transpose(0, 1).reshape(len(v_GKV), -1, v_GKV.shape[-1])
                )
                read_HrK = (gradient_GrV @ v_GKV.mT).view(P.heads, len(rows), -1)
                found_NHK[number] += (weights_HQK[:, [row - first for row in rows]] * read_HrK).sum(1)
    return found_NHK


AT_ONCE = 2**26  # numbers of gradients


def vectors_of(found: ResidualSources, vector_RD: Tensor, weight_NR: Tensor, rows: Sequence[int]) -> Tensor | None:
    """(N, C, D) float64 on the CPU: what each component gives to weighted sums of the vectors of some rows.

    None where the heads' outputs do not go through one module with weights, side by side.
    """
    variables = [*found.residuals, *(one.gave for _, one in sorted(found.projections.items()))]
    if len(found.projections) < len(found.heads) or any(variable.ndim != 3 for variable in variables):
        return None
    # Where nothing lies between two blocks but additions, they share one gradient, which is asked for once.
    places: dict[int, list[int]] = {}
    for place, gradient in enumerate(gradients_of(vector_RD[:, 0].sum(), variables)):
        places.setdefault(gradient.data_ptr(), []).append(place)
    groups = list(places.values())
    leaders = [variables[alike[0]] for alike in groups]
    at_once = max(1, AT_ONCE // (len(leaders) * variables[0].numel()))
    parts: list[list[Tensor]] = [[] for _ in variables]
    for numbers in torch.arange(vector_RD.shape[1]).split(at_once):
        gradients = [gradients_of(vector_RD[:, number].sum(), leaders) for number in numbers.tolist()]
        for alike, of_group in zip(groups, zip(*gradients, strict=True), strict=True):
            towards_RdE = torch.stack([one[0, rows] for one in of_group], 1)
            for place in alike:
                product_RPd = exact(_part(found, place, rows) @ towards_RdE.mT)
                weighted_NPd = torch.einsum("nr,rpd->npd", weight_NR.to(product_RPd), product_RPd)
                parts[place].append(weighted_NPd.cpu().double())
    # Whole residuals and heads become components.
    every = [torch.cat(one, 2) for one in parts]
    whole, by_head = every[: len(found.residuals)], every[len(found.residuals) :]
    of_weighting = range(len(weight_NR))
    return torch.stack([found.shared([one[n, 0] for one in whole], [one[n] for one in by_head]) for n in of_weighting])


@torch.no_grad()
def _part(sources: ResidualSources, place: int, rows: Sequence[int]) -> Tensor:
    """(R, P, E): a residual, or what each head of a call gives by its projection, at some rows."""
    at = place - len(sources.residuals)
    if at < 0:
        return sources.residuals[place][0, rows, None].detach()
    through, heads = sources.projections[at], sources.heads[at][1].output_BQHV
    given_HRV = through.given.detach().reshape(heads.shape)[0, rows].transpose(0, 1)
    return (given_HRV @ projection(through.module, heads.shape[2], heads)).transpose(0, 1)
