"""A logit before the softmax, taken apart by what wrote the residual: contributions that sum to it.

With the scale of every norm frozen, a logit is linear in the residual of its key, and linear in that of its query. The
softmax does not see what all keys share, so that a contribution is shown less its mean over the visible keys.

    decompose_logit(loaded, ids, LogitQuery(3, 0, query=39)).contrast_N

`key_parts` has what each component gives to every key of a head, of many queries at once. What a component writes at a
token reaches the key of that token alone. So one gradient of the sum over all keys has what each of them is given.

    for parts in key_parts(loaded, ids, 3, {0: [39]}): parts.parts_CQK

Shapes: N row, C component, T token, D width of q and k, Q query that was asked for, K key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks.forward import check_gradients, with_gradients
from attnscope.hooks.modules import HALF
from attnscope.model.quantised import is_quantised
from attnscope.studies.attribution_records import ALL_KEYS, Component, KeyParts, LogitParts, LogitQuery
from attnscope.studies.residual import (
    OneSided,
    ResidualSources,
    WrittenSides,
    exact,
    keys_of,
    one_sided,
    position_term,
    vectors_of,
    visible_keys,
)
from attnscope.studies.residual_pass import follow_residual

if TYPE_CHECKING:
    from attnscope.attention.spec import AttentionSpec
    from attnscope.model.loaded import LoadedModel

ALLOWED = 1e-5  # |sum - logit|, as a share of the sum of |terms|
ROUNDING = 1e-6  # what float32 does to a product q . k, as a share of the sum of |q_d k_d|
SIDES = {"key": ("key",), "query": ("query",), "both": ("key", "query")}
BIAS, POSITION = Component("bias"), Component("position")
# Who, with whom, and two columns: what they give to the key, and to what it is compared with.
Rows = tuple[list[Component], list[Component | None], list[np.ndarray]]


@with_gradients
def decompose_logit(
    loaded: LoadedModel, reads: Sequence[int] | Tensor, question: LogitQuery, **inputs: Any
) -> LogitParts:
    """Take a logit apart. Raises InputError for a key that the query does not see, UsageError for half precision,
    quantized weights and those made in inference mode, ModelError for a family whose contributions do not sum to the
    logit.

    reads, inputs: the ids of a text, or what the model's forward is given first, and by name: of an encoder-decoder,
    with an encoder that reads the ids, `decoder_input_ids`.
    """
    check_model(loaded)
    # Cloned, since a tensor of the caller's inference mode cannot be kept for a backward pass.
    ids = reads.clone() if isinstance(reads, Tensor) else torch.tensor([list(reads)], device=loaded.device)
    inputs = {name: one.clone() if isinstance(one, Tensor) else one for name, one in inputs.items()}
    stack = question.stack or loaded.geometry.stack
    with follow_residual(loaded, ids, inputs, stack, question.layer, by_tokens=question.by_tokens) as sides:
        spec = spec_of(sides)
        keys = visible_keys(spec, question.head, question.query)
        if question.key is None:
            # The key that the query gives most weight.
            query_BH = torch.full((1, spec.heads), question.query, device=spec.device)
            question = replace(question, key=int(spec.logits_of(query_BH)[0, question.head].argmax()))
        for key in (question.key, question.against):
            if key is not None and key not in keys:
                raise InputError(
                    f"query {question.query} does not see key {key} in this head", "choose a key that it sees"
                )
        return _Apart(sides, question, keys).parts()


def check_model(loaded: LoadedModel) -> None:
    """Raise ModelError or UsageError for a model that cannot be asked."""
    loaded.check_queries("a logit taken apart")
    loaded.check_bare("a logit taken apart")
    if is_quantised(loaded.model):
        raise UsageError(
            "with quantized weights the contributions do not sum to the logit", "choose weights that are not quantized"
        )
    if next(loaded.model.parameters()).dtype in HALF:
        raise UsageError(
            f"in {loaded.dtype} the contributions do not sum to the logit", "load the model with {dtype=float32}"
        )
    check_gradients(loaded.model)


class _Apart:
    """One logit of a pass, and what it is compared with."""

    def __init__(self, sides: WrittenSides, asked: LogitQuery, seen: list[int]) -> None:
        assert asked.key is not None
        self.sides, self.asked, self.seen, self.key = sides, asked, seen, asked.key
        self.others = seen if asked.against is None else [asked.against]
        self.nothing = {side: sides.side(side).nothing() for side in SIDES[asked.side]}

    def parts(self) -> LogitParts:
        """The rows of what is asked for; the one of positions, which no side has, is last."""
        question, spec = self.asked, self.sides.spec
        components, others, columns = self._pairs() if question.side == "both" else self._rows()
        side = "key" if question.side == "both" else question.side
        logits = [float(one.of(spec).detach()) for one in self._one_sided(side)]
        for column, logit, one in zip(columns, logits, self._one_sided(side), strict=True):
            check_sum(column, logit, one.size(spec))
        # Rows that no side has.
        more: list[tuple[Component, Sequence[float]]] = []
        position_K = position_term(spec, question.head, question.query)
        if bool(position_K.any()):
            added = [float(position_K[keys].mean()) for keys in ([self.key], self.others)]
            more.append((POSITION, added))
            logits = [logit + one for logit, one in zip(logits, added, strict=True)]
        if spec.sinks is not None and question.against is None:
            more.append((ALL_KEYS, (0.0, -logits[1])))
        components, others = [*components, *(one for one, _ in more)], [*others, *[None] * len(more)]
        contribution_N, base_N = (np.append(columns[at], [values[at] for _, values in more]) for at in range(2))
        true_N = self._true(side, components, contribution_N - base_N)
        about: tuple[Any, ...] = (*logits, len(self.seen), spec.softcap, spec.sinks is not None)
        return LogitParts(question, side, tuple(components), tuple(others), contribution_N, base_N, true_N, *about)

    def _one_sided(self, side: str) -> tuple[OneSided, OneSided]:
        question = self.asked
        return one_sided(self.sides.spec, side, question.head, question.query, self.key, self.others)

    def _rows(self) -> Rows:
        """A row per component, or per head and token that it read."""
        both = self._one_sided(self.asked.side)
        if not self.asked.by_tokens:
            columns = [self._given(one) for one in both]
            components = self._components(self.asked.side)
            return components, [None] * len(components), columns
        gradients = [self._gradients(one) for one in both]
        split = self.sides.side(self.asked.side).shares_by_token(gradients)
        whole_2C = np.stack([self._with_bias(*pair) for pair in zip(gradients, both, strict=True)])
        components, parts_2N = list[Component](), list[np.ndarray]()
        for component, whole_2 in zip(self._components(self.asked.side), whole_2C.T, strict=True):
            if component not in split:
                components.append(component)
                parts_2N.append(whole_2[:, None])
                continue
            by_token_2T = split[component].cpu().double().numpy()
            # The weighted sum of a head's values is all that it writes, or its tokens are not its parts.
            missed_2, size_2 = np.abs(by_token_2T.sum(1) - whole_2), np.abs(by_token_2T).sum(1)
            if not (missed_2 <= 10 * ALLOWED * np.maximum(size_2, 1e-3)).all():
                raise ModelError(
                    f"{component.name} writes something else than the weighted sum of its values",
                    "leave out {by=tokens}",
                )
            # Tokens of which a head has nothing are left out.
            read = np.flatnonzero(by_token_2T.any(0))
            components += [replace(component, position=position) for position in read.tolist()]
            parts_2N.append(by_token_2T[:, read])
        return components, [None] * len(components), list(np.concatenate(parts_2N, 1))

    def _pairs(self) -> Rows:
        """A row for each component of the key with each of the query."""
        [q_CD] = self._vectors(self._one_sided("query")[:1])
        scale = self.sides.spec.scale
        columns = [(scale * k_CD @ q_CD.T).ravel() for k_CD in self._vectors(self._one_sided("key"))]
        of_key, of_query = self._components("key"), self._components("query")
        return [one for one in of_key for _ in of_query], [*of_query] * len(of_key), columns

    def _components(self, side: str) -> list[Component]:
        return [*self.sides.side(side).components, BIAS]

    def _vectors(self, numbers: Sequence[OneSided]) -> list[np.ndarray]:
        """(C, D) of each number of one side: the part of each component in the mean of its vectors."""
        side = self.sides.side(numbers[0].side)
        rows = sorted({row for one in numbers for row in one.rows})
        weight_NR = torch.tensor([[(row in one.rows) / len(one.rows) for row in rows] for one in numbers])
        found_NCD = vectors_of(side, replace(numbers[0], rows=tuple(rows)).vectors(self.sides.spec), weight_NR, rows)
        if found_NCD is None:
            return [self._one_by_one(one) for one in numbers]
        vectors = []
        for one, parts_CD in zip(numbers, found_NCD.numpy(), strict=True):
            # The layer's own biases are a component, too; products that are not the contributions are made again.
            vectors_CD = np.vstack([parts_CD, one.vectors(self.nothing[one.side]).mean(0).cpu().numpy()])
            given_C = self._given(one)
            missed_C = np.abs(vectors_CD @ one.towards_D.cpu().numpy() - given_C)
            holds = missed_C.max() <= ALLOWED * np.abs(given_C).sum()
            vectors.append(vectors_CD if holds else self._one_by_one(one))
        return vectors

    def _one_by_one(self, number: OneSided) -> np.ndarray:
        """The same by a gradient for each number of the vector."""
        towards_D = number.towards_D
        unit_DD = torch.eye(len(towards_D), dtype=towards_D.dtype, device=towards_D.device)
        return np.stack([self._given(replace(number, towards_D=unit_D)) for unit_D in unit_DD], 1)

    def _given(self, number: OneSided) -> np.ndarray:
        """(C,): what each component gives to a number; the layer's own biases are what no residual leaves."""
        return self._with_bias(self._gradients(number), number)

    def _with_bias(self, gradients: list[Tensor], number: OneSided) -> np.ndarray:
        shares_C = self.sides.side(number.side).shares(gradients).detach().cpu().numpy()
        return np.append(shares_C, float(number.of(self.nothing[number.side])))

    def _gradients(self, number: OneSided) -> list[Tensor]:
        value = number.of(self.sides.spec)
        check_made(value, number.side)
        return self.sides.side(number.side).gradients(value)

    def _true(self, side: str, components: Sequence[Component], contrast_N: np.ndarray) -> np.ndarray:
        """What the logit loses where a component is replaced by its mean over what the key is compared with."""
        true_N, sources = np.full(len(components), np.nan), self.sides.side(side)
        if not self.asked.verify:
            return true_N
        written_by = sources.components
        known = [place for place in np.argsort(-np.abs(contrast_N)) if components[place] in written_by]
        tried = known[: self.asked.verify]
        vectors = sources.vectors([written_by.index(components[place]) for place in tried])
        intact, row = self._product(self.sides.spec), self.key if side == "key" else self.asked.query
        # The tokens that a cross layer's key is compared with are another text's than its query.
        others = list(range(row + 1)) if self.sides.crosses and side == "query" else self.others
        for place, vector_TE in zip(tried, vectors, strict=True):
            # Each norm has a scale of its own there.
            replaced_BTE = sources.residuals[-1].detach().clone()
            replaced_BTE[0, row] += vector_TE[others].mean(0) - vector_TE[row]
            true_N[place] = intact - self._product(sources.again(replaced_BTE, frozen=False))
        return true_N

    def _product(self, spec: AttentionSpec) -> float:
        """The logit of a call before soft-cap and position."""
        q_D = exact(spec.q_BHQD[0, self.asked.head, self.asked.query].detach())
        return float(q_D @ exact(keys_of(spec, self.asked.head)[self.key].detach())) * spec.scale


def spec_of(sides: WrittenSides) -> AttentionSpec:
    """The call of the layer. Raises ModelError where its keys are no tokens."""
    if sides.key is not None and sides.spec.k_BGKD.shape[2] != sides.key.residuals[-1].shape[1]:
        raise ModelError("this head has keys that are no tokens of the text", "choose another layer")
    return sides.spec


def check_made(value: Tensor, side: str) -> None:
    """Raise ModelError for a number that no residual makes."""
    if not value.requires_grad:
        raise ModelError(f"the {side} side of this head is not made of what enters its layer", "choose another layer")


def check_sum(terms: np.ndarray, logit: np.ndarray | float, size: np.ndarray | float) -> None:
    """Raise ModelError where terms, (N, ...), do not sum to the logit: then the layer is not linear in its residual.

    size: the sum of |q_d k_d| that the logit is made of, which says what float32 does to it.
    """
    total = terms.sum(0)
    missed, allowed = abs(total - logit), np.maximum(ALLOWED * abs(terms).sum(0), ROUNDING * np.asarray(size))
    wrong = ~(missed <= allowed)
    if not wrong.any():
        return
    total, logit, missed, allowed = (
        np.broadcast_to(one, wrong.shape)[wrong][0] for one in (total, logit, missed, allowed)
    )
    raise ModelError(
        f"the contributions sum to {total:.6g}, and the logit is {logit:.6g}: they differ by {missed:.2g}, "
        f"and rounding allows {allowed:.2g}",
        "choose another layer or model",
    )


@with_gradients
def key_parts(
    loaded: LoadedModel, ids: Sequence[int], layer: int, heads: Mapping[int, Sequence[int]]
) -> Iterator[KeyParts]:
    """Take the logits of some heads of a layer apart; heads: {head: the queries}. Raises as `parts_of`."""
    check_model(loaded)
    ids_1T = torch.tensor([list(ids)], device=loaded.device)
    with follow_residual(loaded, ids_1T, {}, loaded.geometry.stack, layer) as sides:
        spec, sources = spec_of(sides), sides.side("key")
        nothing = sources.nothing()
        for head, queries in heads.items():
            yield _of_head(sources, spec, nothing, layer, head, list(queries))


def _of_head(
    sources: ResidualSources, spec: AttentionSpec, nothing: AttentionSpec, layer: int, head: int, queries: list[int]
) -> KeyParts:
    k_KD, bias_KD = exact(keys_of(spec, head)), exact(keys_of(nothing, head))
    check_made(k_KD, "key")
    q_QD = exact(spec.q_BHQD[0, head, queries].detach()) * spec.scale
    # With more queries than a key has numbers, the numbers are taken apart, and queries multiplied with their parts.
    few = len(q_QD) <= q_QD.shape[1]
    directions = q_QD if few else torch.eye(q_QD.shape[1], dtype=q_QD.dtype, device=q_QD.device)
    rows = [sources.shares_by_row(sources.gradients((k_KD @ one_D).sum())).detach() for one_D in directions]
    parts_CNK = torch.stack(rows, 1)
    by_component_CQK = _numbers(parts_CNK if few else q_QD.cpu().double() @ parts_CNK)
    parts_CQK = np.concatenate([by_component_CQK, _numbers(q_QD @ bias_KD.T)[None]])
    components = [*sources.components, BIAS]
    logit_QK, size_QK = _numbers(q_QD @ k_KD.T), _numbers(q_QD.abs() @ k_KD.abs().T)
    check_sum(parts_CQK, logit_QK, size_QK)
    # What positions add to a logit is in no residual.
    position_QK = _numbers(torch.stack([position_term(spec, head, query) for query in queries]))
    if position_QK.any():
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


def _numbers(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().cpu().double().numpy()
    return array
