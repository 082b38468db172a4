"""Several stacks as one side of a page: two texts on one axis, one behind the other.

Of an encoder-decoder its text and behind it its target: a layer of the encoder fills the corner of the text, one of the
decoder that of the target, and cross-attention the rows of the target in the columns of the text. Of a model that was
given pictures the text, and behind it the patches that its vision tower reads, each in its corner. Nothing else is
visible. Shapes: H head, Q query, K key, T token of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.measure.layers import LayerKey, PerLayer
from attnscope.stacks import CROSS, DECODER, ENCODER, VISION
from attnscope.text.prompt import Span
from attnscope.viewer.side import Side, ahead, first_key

if TYPE_CHECKING:
    import torch

    from attnscope.measure.relations import KeptKeys
    from attnscope.observation import HeadColumns, Observation
    from attnscope.text.prompt import Prompt
    from attnscope.text.tokens import Chosen, Found


@dataclass(frozen=True)
class Axis:
    """The texts of an observation on one axis; starts: where the queries and the keys of each stack begin."""

    front: Prompt
    behind: Prompt
    names: tuple[str, str]
    starts: Mapping[str, tuple[int, int]]


def stacked(seen: Observation) -> bool:
    """Whether an observation is of several stacks that a page shows."""
    return ENCODER in seen.beside or VISION in seen.beside


def axis_of(seen: Observation) -> Axis:
    """Where the stacks of an observation stand."""
    decoder = seen.of(DECODER).queries
    if ENCODER in seen.beside:
        source = seen.of(ENCODER).queries
        return Axis(source, decoder, ("text", "target"), starts(len(source)))
    tower, count = seen.of(VISION).queries, len(decoder)
    return Axis(decoder, tower, ("text", "vision tower"), {DECODER: (0, 0), VISION: (count, count)})


class StackedSide(Side):
    """The kept heads of all stacks."""

    def __init__(self, seen: Observation) -> None:
        self.axis, self.stacks = axis_of(seen), seen.stacks
        super().__init__(joined(seen, self.axis))

    @cached_property
    def first(self) -> list[np.ndarray | None]:
        return [self._first(key) for key in self.at]

    @cached_property
    def end(self) -> list[np.ndarray | None]:
        """Behind the last key that each query sees, (T,): 0 for the queries of the other text."""
        return [self._end(key) for key in self.at]

    def _first(self, key: LayerKey) -> np.ndarray | None:
        query, start = self.axis.starts[key.kind]
        first_T, token_T = np.zeros(len(self.seen.queries), "<i4"), np.arange(len(self.seen.queries), dtype="<i4")
        windowed_T = first_key(self.seen.visible[key], token_T) if key.kind == DECODER else None
        own = slice(query, query + len(self.stacks[key.kind].queries))
        first_T[own] = np.maximum(start, 0 if windowed_T is None else windowed_T[own])
        return first_T if first_T.any() else None

    def _end(self, key: LayerKey) -> np.ndarray:
        (query, start), of_stack = self.axis.starts[key.kind], self.stacks[key.kind]
        queries, end_T = len(of_stack.queries), np.zeros(len(self.seen.queries), "<i4")
        own_Q: np.ndarray | int = start + len(of_stack.keys)
        if key.kind == DECODER:
            ahead_Q = ahead(of_stack, key)
            own_Q = start + (np.arange(1, queries + 1) if ahead_Q is None else ahead_Q)
        end_T[query : query + queries] = own_Q
        return end_T


def joined(seen: Observation, axis: Axis) -> Observation:
    """The kept heads of all stacks as those of one, over both texts, one behind the other."""
    prompt, columns = _behind(axis), _kept(seen.every, axis)
    keys = dict.fromkeys(LayerKey(*key) for key in zip(columns.layer.tolist(), columns.kind.tolist(), strict=True))

    def merged(name: str) -> dict[LayerKey, Any]:
        parts = [getattr(one, name) or {} for one in seen.stacks.values()]
        return {key: part[key] for key in keys for part in parts if key in part}

    weights = {key: _placed(one, axis.starts[key.kind], len(prompt)) for key, one in merged("weights").items()}
    related = {key: _moved(one, axis.starts[key.kind]) for key, one in merged("kept_keys").items()}
    asked = {kind: one.chosen for kind, one in seen.stacks.items()}
    return replace(
        seen,
        queries=prompt,
        keys=prompt,
        columns=columns,
        kv_of=PerLayer(merged("kv_of")),
        visible=PerLayer(merged("visible")),
        weight_heads=PerLayer(merged("weight_heads")),
        weights=PerLayer(weights),
        kept_keys=PerLayer(related) if related else None,
        operands=PerLayer({}),
        maps=None,
        chosen=first_asked(asked, len(axis.front)) if ENCODER in asked else seen.chosen,
        beside={},
    )


def _behind(axis: Axis) -> Prompt:
    """Both texts as one, with what they are as its turns."""
    source, target = axis.front, axis.behind
    moved, plain, count = len(source.text), list(target.plain), len(source)
    if False in target.special:  # so that neither the page's text nor its title runs from one into the other
        plain[target.special.index(False)] = "\n" + plain[target.special.index(False)]
    return replace(
        source,
        text=source.text + target.text,
        ids=source.ids + target.ids,
        tokens=source.tokens + target.tokens,
        labels=source.labels + target.labels,
        special=source.special + target.special,
        plain=(*source.plain, *plain),
        turns=(Span(0, count, axis.names[0]), Span(count, count + len(target), axis.names[1])),
        characters=source.characters + tuple((start + moved, stop + moved) for start, stop in target.characters),
        patches={**source.patches, **{count + at: patch for at, patch in target.patches.items()}},
    )


def _kept(columns: HeadColumns, axis: Axis) -> HeadColumns:
    """The kept heads, their top keys at their places on the axis."""
    top_key = columns.top_key + np.array(
        [axis.starts[kind][1] for kind in columns.kind.tolist()], columns.top_key.dtype
    )
    parts = {one.name: getattr(columns, one.name)[columns.kept] for one in fields(columns) if one.name != "scores"}
    scores = {
        name: replace(one, value=one.value[columns.kept], null=one.null[columns.kept])
        for name, one in columns.scores.items()
    }
    return replace(columns, **parts | {"top_key": top_key[columns.kept]}, scores=scores)


def _placed(weights_HQK: torch.Tensor, start: tuple[int, int], count: int) -> torch.Tensor:
    heads, queries, keys = weights_HQK.shape
    whole_HTT = weights_HQK.new_zeros(heads, count, count)
    whole_HTT[:, start[0] : start[0] + queries, start[1] : start[1] + keys] = weights_HQK
    return whole_HTT


def _moved(kept: KeptKeys, start: tuple[int, int]) -> KeptKeys:
    return kept._replace(key=kept.key + start[1], query=range(start[0], start[0] + kept.weight.shape[1]))


def first_asked(asked: Mapping[str, Chosen], source: int) -> Chosen:
    """What the first stack was asked that was asked, cross-attention before the others, at its places on the axis."""

    def moved(found: Found | None, start: int) -> Found | None:
        return found and replace(found, positions=tuple(at + start for at in found.positions))

    kind = next((kind for kind in (CROSS, DECODER, ENCODER) if kind in asked and not asked[kind].nothing), CROSS)
    one, (query, key) = asked[kind], starts(source)[kind]
    return replace(one, query=moved(one.query, query), key=moved(one.key, key))


def starts(source: int) -> dict[str, tuple[int, int]]:
    """Where the queries and the keys of an encoder-decoder's stacks begin, behind a text of so many tokens."""
    return {ENCODER: (0, 0), DECODER: (source, source), CROSS: (source, 0)}
