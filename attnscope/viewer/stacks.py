"""Several stacks as one side of a page: two texts on one axis, one behind the other.

Of an encoder-decoder its text and behind it its target: a layer of the encoder fills the corner of the text, one of the
decoder that of the target, and cross-attention the rows of the target in the columns of the text. Of a model that was
given pictures the text, and behind it the patches that its vision tower reads, each in its corner. Nothing else is
visible, and the page shows of each layer its own queries and keys alone.

Shapes: H head, Q query, K key, T token of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from attnscope.inputs.prompt import Span
from attnscope.model.selection import CROSS, DECODER, ENCODER, OF_TWO_TEXTS, VISION, is_bidirectional, is_causal
from attnscope.observe.layers import LayerKey, PerLayer
from attnscope.viewer.side import Side, ahead, both_sides, first_key

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.inputs.tokens import TokenMatch as Found
    from attnscope.inputs.tokens import TokenSelection as Chosen
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import HeadColumns, KeptKeys, Matrices

T = TypeVar("T")


@dataclass(frozen=True)
class PageAxis:
    """The texts of an observation on one axis; starts: where the queries and the keys of each stack begin."""

    front: Prompt
    behind: Prompt
    names: tuple[str, str]
    starts: Mapping[str, tuple[int, int]]


def stacked(seen: Observation) -> bool:
    """Whether an observation is of several stacks that a page shows."""
    return seen.of_two_texts or VISION in seen.other_stacks


def axis_of(seen: Observation) -> PageAxis:
    """Where on one axis the texts of an observation's stacks are."""
    decoder = seen.of(DECODER).queries
    if seen.of_two_texts:
        source = seen.of(ENCODER).queries
        return PageAxis(source, decoder, ("text", "target"), starts(len(source)))
    tower, count = seen.of(VISION).queries, len(decoder)
    return PageAxis(decoder, tower, ("text", "vision tower"), {DECODER: (0, 0), VISION: (count, count)})


class StackedSide(Side):
    """The kept heads of all stacks."""

    def __init__(self, seen: Observation) -> None:
        self.axis, self.stacks = axis_of(seen), seen.stacks
        super().__init__(joined(seen, self.axis))

    @cached_property
    def first(self) -> list[np.ndarray | None]:
        return [self._first(layer) for layer in self.at]

    @cached_property
    def end(self) -> list[np.ndarray | None]:
        return [self._end(layer) for layer in self.at]

    def _layer(self, key: LayerKey, heads: int, kv: int) -> dict[str, Any]:
        queries, keys = self._axes(key)
        axes = {"queries": [queries.start, queries.stop], "keys": [keys.start, keys.stop]}
        return {**super()._layer(key, heads, kv), **axes}

    def _axes(self, layer: LayerKey) -> tuple[range, range]:
        """The ranges of a stack's queries and keys on the axis."""
        of_stack, (query, key) = self.stacks[layer.stack], self.axis.starts[layer.stack]
        return range(query, query + len(of_stack.queries)), range(key, key + len(of_stack.keys))

    def _first(self, layer: LayerKey) -> np.ndarray | None:
        """The first key that each token of the axis sees, (T,); None where that is key 0."""
        queries, keys = self._axes(layer)
        first_Q = None
        if is_bidirectional(layer.stack):
            first_Q = both_sides(self.stacks[layer.stack], layer)[0]
        elif is_causal(layer.stack):
            first_Q = first_key(self.seen.visible[layer], np.arange(len(queries), dtype="<i4"))
        first_T = np.zeros(len(self.seen.queries), "<i4")
        first_T[queries] = keys.start + (0 if first_Q is None else first_Q)
        return first_T if first_T.any() else None

    def _end(self, layer: LayerKey) -> np.ndarray:
        """What is behind the last key that each token of the axis sees, (T,): 0 for the queries of the other text."""
        of_stack, (queries, keys) = self.stacks[layer.stack], self._axes(layer)
        end_Q = np.full(len(queries), len(keys))
        if is_bidirectional(layer.stack):
            end_Q = both_sides(of_stack, layer)[1]
        elif is_causal(layer.stack):
            ahead_Q = ahead(of_stack, layer)
            end_Q = np.arange(1, len(queries) + 1) if ahead_Q is None else ahead_Q
        end_T = np.zeros(len(self.seen.queries), "<i4")
        end_T[queries] = keys.start + end_Q
        return end_T


def joined(seen: Observation, axis: PageAxis) -> Observation:
    """The kept heads of all stacks as those of one, over both texts, one behind the other."""
    prompt, columns = behind(axis), kept_columns(seen.every)
    # top keys at their places on the axis; none stays none
    start_N = np.array([axis.starts[stack][1] for stack in columns.stack.tolist()], columns.top_key.dtype)
    columns = replace(columns, top_key=np.where(columns.top_key < 0, columns.top_key, columns.top_key + start_N))
    keys = dict.fromkeys(LayerKey(*key) for key in zip(columns.layer.tolist(), columns.stack.tolist(), strict=True))

    def merged(parts: Iterable[Mapping[LayerKey, T] | None]) -> dict[LayerKey, T]:
        there = [part for part in parts if part]
        return {key: part[key] for key in keys for part in there if key in part}

    def kept(name: str, placed: Callable[[T, tuple[int, int]], T]) -> PerLayer[T]:
        by_layer: dict[LayerKey, T] = merged(one.kept.get(name) for one in seen.stacks.values())
        return PerLayer({key: placed(one, axis.starts[key.stack]) for key, one in by_layer.items()})

    weights, related = kept("weights", partial(_placed, count=len(prompt))), kept("relations", _moved)
    chosen = {stack: one.chosen for stack, one in seen.stacks.items()}
    return replace(
        seen,
        queries=prompt,
        keys=prompt,
        text_columns=columns,
        kv_of=PerLayer(merged(one.kv_of for one in seen.stacks.values())),
        visible=PerLayer(merged(one.visible for one in seen.stacks.values())),
        kept={**seen.kept, "weights": weights, "relations": related or None, "operands": PerLayer(), "maps": None},
        chosen=first_asked(chosen, len(axis.front)) if ENCODER in chosen else seen.chosen,
        other_stacks={},
    )


def behind(axis: PageAxis) -> Prompt:
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
        medium=source.medium.joined(count, target.medium),
    )


def kept_columns(columns: HeadColumns) -> HeadColumns:
    """The kept heads alone."""
    kept_N = columns.kept
    parts = {name: column[kept_N] for name, column in vars(columns).items() if name != "scores"}
    scores = {
        name: replace(score, value=score.value[kept_N], null=score.null[kept_N])
        for name, score in columns.scores.items()
    }
    return replace(columns, **parts, scores=scores)


def _placed(matrices: Matrices, start: tuple[int, int], count: int) -> Matrices:
    weights_HQK = np.asarray(matrices.weights)
    heads, queries, keys = weights_HQK.shape
    whole_HTT: Any = np.zeros((heads, count, count), weights_HQK.dtype)
    whole_HTT[:, start[0] : start[0] + queries, start[1] : start[1] + keys] = weights_HQK
    return matrices._replace(weights=whole_HTT)


def _moved(kept: KeptKeys, start: tuple[int, int]) -> KeptKeys:
    return kept._replace(key=kept.key + start[1], query=range(start[0], start[0] + kept.weight.shape[1]))


def first_asked(chosen_of: Mapping[str, Chosen], source: int) -> Chosen:
    """What the first stack was asked that was asked, cross-attention before the others, at its places on the axis."""

    def moved(match: Found | None, start: int) -> Found | None:
        return match and replace(match, positions=tuple(at + start for at in match.positions))

    stack = next(
        (stack for stack in reversed(OF_TWO_TEXTS) if stack in chosen_of and not chosen_of[stack].nothing), CROSS
    )
    chosen, (query, key) = chosen_of[stack], starts(source)[stack]
    return replace(chosen, query=moved(chosen.query, query), key=moved(chosen.key, key))


def starts(source: int) -> dict[str, tuple[int, int]]:
    """Where the queries and the keys of an encoder-decoder's stacks begin, behind a text of so many tokens."""
    return {ENCODER: (0, 0), DECODER: (source, source), CROSS: (source, 0)}
