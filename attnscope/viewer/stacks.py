"""The stacks of an encoder-decoder as one side of a page: on one axis its text, and behind it its target.

A layer of the encoder fills the corner of the text, one of the decoder that of the target, and cross-attention the rows
of the target in the columns of the text; nothing else is visible. Shapes: H head, Q query, K key, T token of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.measure.layers import LayerKey, PerLayer
from attnscope.stacks import CROSS, DECODER, ENCODER
from attnscope.text.prompt import Span
from attnscope.viewer.side import Side, first_key

if TYPE_CHECKING:
    import torch

    from attnscope.measure.relations import KeptKeys
    from attnscope.observation import HeadColumns, Observation
    from attnscope.text.prompt import Prompt
    from attnscope.text.tokens import Chosen, Found


class StackedSide(Side):
    """The kept heads of all stacks."""

    def __init__(self, seen: Observation) -> None:
        super().__init__(joined(seen))
        self.source = len(seen.of(ENCODER).queries)

    @cached_property
    def first(self) -> list[np.ndarray | None]:
        return [self._first(key) for key in self.at]

    @cached_property
    def end(self) -> list[np.ndarray | None]:
        return [end_of(key.kind, self.source, len(self.seen.queries)) for key in self.at]

    def _first(self, key: LayerKey) -> np.ndarray | None:
        return first_of(key.kind, self.source, len(self.seen.queries), self.seen.visible[key])


def first_of(kind: str, source: int, count: int, visible: str = "") -> np.ndarray | None:
    """The first key that each query of a stack sees, (T,), of so many tokens of the text and of both."""
    if kind != DECODER:
        return None
    token_T = np.arange(count, dtype="<i4")
    windowed_T = first_key(visible, token_T)
    first_T = np.maximum(source, 0 if windowed_T is None else windowed_T)
    return np.where(token_T < source, 0, first_T).astype("<i4")


def end_of(kind: str, source: int, count: int) -> np.ndarray:
    """Behind the last key that each query of a stack sees, (T,): 0 for the queries of the other text."""
    token_T = np.arange(count, dtype="<i4")
    ends: dict[str, tuple[Any, Any]] = {ENCODER: (source, 0), DECODER: (0, token_T + 1), CROSS: (0, source)}
    return np.where(token_T < source, *ends[kind]).astype("<i4")


def joined(seen: Observation) -> Observation:
    """The kept heads of all stacks as those of one, over the text and the target, one behind the other."""
    source, target = seen.of(ENCODER).queries, seen.of(DECODER).queries
    prompt, columns = behind(source, target), _kept(seen.every, len(source))
    keys = dict.fromkeys(LayerKey(*key) for key in zip(columns.layer.tolist(), columns.kind.tolist(), strict=True))

    def merged(name: str) -> dict[LayerKey, Any]:
        parts = [getattr(one, name) or {} for one in seen.stacks.values()]
        return {key: part[key] for key in keys for part in parts if key in part}

    at = starts(len(source))
    weights = {key: _placed(one, at[key.kind], len(prompt)) for key, one in merged("weights").items()}
    related = {key: _moved(one, at[key.kind]) for key, one in merged("kept_keys").items()}
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
        chosen=first_asked({kind: one.chosen for kind, one in seen.stacks.items()}, len(source)),
        beside={},
    )


def behind(source: Prompt, target: Prompt) -> Prompt:
    """Both texts as one, with what they are as its turns."""
    moved, plain = len(source.text), list(target.plain)
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
        turns=(Span(0, len(source), "text"), Span(len(source), len(source) + len(target), "target")),
        characters=source.characters + tuple((start + moved, stop + moved) for start, stop in target.characters),
    )


def _kept(columns: HeadColumns, source: int) -> HeadColumns:
    """The kept heads, the top keys of the decoder's at their places behind the text."""
    top_key = np.where(columns.kind == DECODER, columns.top_key + source, columns.top_key)
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
    """Where the queries and the keys of each stack begin on the axis, behind a text of so many tokens."""
    return {ENCODER: (0, 0), DECODER: (source, source), CROSS: (source, 0)}
