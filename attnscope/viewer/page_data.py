"""One text read by one model, as the page takes it: tokens, layers, heads with scores, maps, relations, steps.

    Side(seen).packed(blobs, Wanted(bits=8))

Several stacks are one side too: two texts on one axis, one behind the other. Of an encoder-decoder these are its text
and its target: a layer of the encoder fills the corner of the text, one of the decoder that of the target, and
cross-attention the rows of the target in the columns of the text. Of a model that was given pictures they are the text
and the patches that its vision tower reads, each in its corner. Nothing else is visible, and the page shows of each
layer its own queries and keys alone.

Shapes: H head, N head of all layers, Q query, K key, R row of a map, C column, T token, k kept key, T token of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from attnscope.errors import UsageError
from attnscope.inputs.prompt import Span, join_tokens
from attnscope.metrics.metrics import KNOWN, ends
from attnscope.model.geometry import KEYS_NOT_KNOWN, OF_WEIGHTS
from attnscope.model.selection import (
    CHANNELS,
    CROSS,
    DECODER,
    ENCODER,
    MIXING,
    OF_TWO_TEXTS,
    VISION,
    is_bidirectional,
    is_linear,
    looks_back,
    mixes,
)
from attnscope.observe.records import HeadColumns
from attnscope.observe.request import LayerKey, PerLayer
from attnscope.steps.records import SEES_ALL, SEES_SOME, SUMMED, StepWords, attention_words
from attnscope.viewer.pack import Bits, Blobs, binned, joined_arrays, packed_maps, pictures_of, strongest

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.inputs.tokens import TokenMatch, TokenSelection
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import KeptKeys, Matrices

Words = tuple[StepWords, ...]
MOST_KEYS = 16  # per query beside a binned map
DIGITS = 7  # of a score: what float32 holds


@dataclass(frozen=True)
class Wanted:
    """How much of a side goes into the page: bits per weight, and where whole maps are too many, what is made of them.

    rows: of a binned map, at most; None leaves maps whole. top_k: keys per query that are kept as well as binned maps.
    whole: {layer: heads} whose maps stay whole. bins: whether the others are binned; without, they are left out.
    """

    bits: Bits = 8
    rows: int | None = None
    top_k: int = MOST_KEYS
    whole: Mapping[int, Sequence[int]] = field(default_factory=dict)
    bins: bool = True


@dataclass(frozen=True)
class SideMatrices:
    """Maps of some heads of a layer, (H, R, C), each row and column `size` tokens; 0 for what is not visible."""

    heads: Sequence[int]
    values_HRC: np.ndarray
    size: int = 1

    def of(self, heads: Sequence[int]) -> SideMatrices:
        """Those of some of the heads."""
        places = [place for place, head in enumerate(self.heads) if head in heads]
        every = len(places) == len(self.heads)
        values_HRC = self.values_HRC if every else self.values_HRC[places]
        return SideMatrices([self.heads[place] for place in places], values_HRC, self.size)

    def by_bits(self, wanted: Wanted, exact: Sequence[int]) -> Iterator[tuple[SideMatrices, Bits]]:
        """Those of the heads with steps in the page, and the others.

        Steps have all digits, and three decimals of a weight agree with them: 16 bits hold those.
        """
        for bits, among in ((16, True), (wanted.bits, False)):
            if heads := [head for head in self.heads if (head in exact and self.size == 1) == among]:
                yield self.of(heads), bits  # type: ignore[misc]

    def shrunk(self, wanted: Wanted, key: LayerKey) -> list[SideMatrices]:
        """As they are wanted: whole, or binned but for the heads that stay whole."""
        tokens, rows = self.values_HRC.shape[1], wanted.rows
        if rows is None or self.size > 1 or tokens <= rows:
            return [self]
        whole = self.of(wanted.whole.get(key.named, ()))
        rest, size = self.of([head for head in self.heads if head not in whole.heads]), -(-tokens // rows)
        parts = [whole, *([SideMatrices(rest.heads, binned(rest.values_HRC, size), size)] if wanted.bins else [])]
        return [part for part in parts if part.heads]


def said_of(prompt: Prompt) -> dict[str, Any]:
    """The tokens of a text, its words, sentences and turns; characters are counted in the joined `plain`."""
    ends_T = list(accumulate(map(len, prompt.plain)))
    turns = [turn.start for turn in prompt.turns if turn.name == "assistant"]
    answers = turns if prompt.answer is None else [prompt.answer]
    return {
        "text": "".join(prompt.plain),
        "tokens": {
            "text": prompt.tokens,
            "label": prompt.labels,
            "plain": prompt.plain,
            "id": prompt.ids,
            "special": [int(special) for special in prompt.special],
            "start": [0, *ends_T[:-1]],
            "stop": ends_T,
        },
        "words": _spans(prompt.words),
        "sentences": _spans(prompt.sentences),
        "turns": _spans(prompt.turns),
        "answer": answers[-1] if answers else None,
        "pair": prompt.segments[1].start if prompt.segments else None,
    }


class Side:
    """One observation on its way into the page; `said` is what needs no bytes."""

    def __init__(self, seen: Observation) -> None:
        if seen.view.by_kv or seen.view.weights != "softmax":
            raise UsageError("a page shows weights of query heads", "observe with weights=softmax, without by_kv")
        self.seen = seen
        self.at = {key: place for place, key in enumerate(seen.kv_of)}

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """The side as the page's JSON has it, its numbers added to the blobs."""
        maps = list(self._maps(blobs, wanted))
        relations, steps = self._relations(blobs, wanted, maps), self._steps(blobs)
        sides: dict[str, Any] = {"maps": maps, "relations": relations, "steps": steps}
        for side, name in enumerate(("first", "end")):
            ends = [of_layer[side] for of_layer in self.sight]
            sides[name] = [None if end_T is None else blobs.add(end_T)[0] for end_T in ends]
        return {**self.said, **sides}

    @property
    def plain(self) -> Sequence[str]:
        """What each token shows."""
        return self.seen.prompt.plain

    @cached_property
    def said(self) -> dict[str, Any]:
        """What needs no bytes: words and numbers, as the page's JSON has them."""
        seen, prompt = self.seen, self.seen.prompt
        model, metrics = seen.facts.get("model", {}), []
        for metric in map(KNOWN.__getitem__, seen.columns.scores):
            low, high = ends(metric, len(prompt)) or (None, None)
            words = {name: getattr(metric, name) for name in ("id", "short", "title", "formula", "unit", "reading")}
            metrics.append({**words, "low": low, "high": high})
        return {
            "name": model.get("name", "model"),
            "model": {name: model.get(name) for name in ("name", "type", "revision", "layers")}
            | {"dtype": seen.facts.get("dtype")},
            "engine": seen.facts.get("engine"),
            **said_of(prompt),
            **pictures_of(prompt),
            "layers": [self._layer(key, heads, kv) for key, (heads, kv) in seen.kv_of.items()],
            "metrics": metrics,
            "heads": list(self._heads()),
        }

    def _layer(self, key: LayerKey, heads: int, kv: int) -> dict[str, Any]:
        visible = self.seen.visible[key]
        of_channel = key.stack == CHANNELS and self.seen.view.channel is not None
        signed = {"signed": True} if is_linear(key.stack) or of_channel else {}
        which = {"layer": key.layer, "stack": key.stack, "heads": heads, "kv_heads": kv or None}
        return {**which, "visible": visible, **signed, **({"shares": False} if mixes(key.stack) else {})}

    def _heads(self) -> Iterator[dict[str, Any]]:
        columns, scores = self.seen.columns, self.seen.columns.scores.values()
        # Columns (one per metric) as rows (one per head), which are empty where nothing was measured.
        values_N, nulls_N = (
            [[column[place] for column in columns_of] for place in range(len(columns.layer))]
            for columns_of in ([rounded(getattr(score, part)) for score in scores] for part in ("value", "null"))
        )
        mass_N = rounded(columns.top_key_mass)
        for place, (layer, head, stack) in enumerate(
            zip(columns.layer.tolist(), columns.head.tolist(), columns.stack.tolist(), strict=True)
        ):
            yield {
                "at": self.at[layer, stack],  # type: ignore[index]
                "head": head,
                "kv_head": int(columns.kv_head[place]) if columns.kv_head[place] >= 0 else None,
                "role": columns.role[place],
                "text_role": columns.text_role[place],
                "near_uniform": columns.near_uniform[place],
                "top_key": int(columns.top_key[place]) if columns.top_key[place] >= 0 else None,
                "top_key_mass": mass_N[place],
                "scores": values_N[place],
                "uniform": nulls_N[place],
                **({} if columns.atlas_roles[place] is None else {"atlas": columns.atlas_roles[place].split()}),
            }

    def _kept(self, key: LayerKey) -> list[SideMatrices]:
        """What the observation kept of a layer's maps: whole, and of the heads that it has not whole, binned."""
        seen, parts, whole = self.seen, list[SideMatrices](), list[int]()
        if key in seen.weights:
            whole = list(seen.weight_heads[key])
            parts.append(SideMatrices(whole, np.asarray(seen.weights[key])))
        maps = seen.maps
        # the page's cells are sums over keys and means over queries, of as many tokens in rows as in columns
        square = maps is not None and maps.rows == maps.columns and (maps.rule == "sum" or maps.bin_size == 1)
        if maps is not None and key in maps.values and square:
            drawn = SideMatrices(maps.heads[key], maps.values[key], maps.bin_size)
            rest = drawn.of([head for head in drawn.heads if head not in whole])
            parts.append(replace(rest, values_HRC=np.nan_to_num(rest.values_HRC)))
        return [part for part in parts if part.heads]

    def _maps(self, blobs: Blobs, wanted: Wanted) -> Iterator[dict[str, Any]]:
        for key, at in self.at.items():
            windowed = self.sight[at][0] is not None
            exact = self.seen.operands[key].heads if key in self.seen.operands else ()
            for kept in self._kept(key):
                shrunk = kept.shrunk(wanted, key)
                for part, bits in chain.from_iterable(one.by_bits(wanted, exact) for one in shrunk):
                    record = {"at": at, "bin": part.size, "windowed": windowed}
                    entries = packed_maps(blobs, part.values_HRC, bits)
                    yield from (
                        {**record, "head": head, **entry} for head, entry in zip(part.heads, entries, strict=True)
                    )

    def _relations(self, blobs: Blobs, wanted: Wanted, maps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The strongest keys of every query of the heads that have no whole map."""
        whole = {(entry["at"], entry["head"]) for entry in maps if entry["bin"] == 1}
        parts = [part for key in self.at for part in self._strongest(key, wanted.top_k, whole)]
        if not parts:
            return None
        top_k = min(part.weight_HTk.shape[-1] for part in parts)
        weight_NTk = np.concatenate([part.weight_HTk[..., :top_k] for part in parts])
        key_NTk = np.concatenate([part.key_HTk[..., :top_k] for part in parts])
        keys, numbers, scale = strongest(weight_NTk, key_NTk)
        [place, _] = blobs.add(keys, numbers)
        heads = [{"at": part.at, "head": head} for part in parts for head in part.heads]
        signed = {"signed": True} if numbers.dtype.kind == "i" else {}
        return {"k": top_k, "heads": heads, "scale": scale, "bits": 16, **signed, **place}

    def _strongest(self, key: LayerKey, top_k: int, whole: set[tuple[int, int]]) -> Iterator[Strongest]:
        seen, at = self.seen, self.at[key]
        if not top_k:
            return
        of_all_keys = seen.group is None and seen.chosen.key is None  # else they are not the strongest
        if seen.kept_keys is not None and of_all_keys and key in seen.kept_keys:
            heads, weight_HTk, key_HTk = _of_all_queries(seen.kept_keys[key], len(seen.prompt))
        elif key in seen.weights:
            heads = list(seen.weight_heads[key])
            weight_HTk, key_HTk = keys_of_most_weight(np.asarray(seen.weights[key]), min(top_k, len(seen.prompt)))
        else:
            return
        places = [place for place, head in enumerate(heads) if (at, head) not in whole]
        if places:
            count = len(seen.prompt)
            numbers = (array[places, :count, :top_k] for array in (weight_HTk, key_HTk))
            yield Strongest(at, [heads[place] for place in places], *numbers)

    def _steps(self, blobs: Blobs) -> dict[str, Any] | None:
        """q, k and v of heads, and the words of `attnscope explain`: those of a head are the same for many heads."""
        heads, words = list[dict[str, Any]](), list[Words]()
        for key, kept in self.seen.operands.items():
            at, (first_T, end_T) = self.at[key], self.sight[self.at[key]]
            parts = [kept.q_BHTD, kept.k_BHTD, kept.v_BHTV] + ([] if kept.bias_BHTT is None else [kept.bias_BHTT])
            arrays = [np.asarray(part[0]) for part in parts]
            places = blobs.add(
                *(joined_arrays([array[number] for array in arrays]) for number in range(len(kept.heads)))
            )
            width, bias = kept.q_BHTD.shape[-1], kept.bias_BHTT is not None
            # A query that sees a key after it has other words for its mask than one that sees those before it.
            ahead = end_T is not None and bool((end_T > np.arange(1, len(end_T) + 1)).any())
            sight = {"ahead": ahead, "windowed": first_T is not None}
            # The words of a head are those of many heads: they go into the page once.
            for place, head in enumerate(kept.heads):
                sink = None if kept.sinks_H is None else float(kept.sinks_H[place])
                of_head = tuple(attention_words(width, kept.scale, softcap=kept.cap, bias=bias, sink=sink, **sight))
                words += [of_head] * (of_head not in words)
                record = {
                    "at": at,
                    "head": head,
                    "dim": width,
                    "value_dim": kept.v_BHTV.shape[-1],
                    "scale": kept.scale,
                    "cap": kept.cap,
                    "sink": sink,
                    "bias": bias,
                }
                heads.append({**record, **places[place], "words": words.index(of_head)})
        if not heads:
            return None
        return {
            "heads": heads,
            "tokens": len(self.seen.prompt),
            "words": [[vars(step) for step in steps] for steps in words],
            "sees": (SEES_ALL, SEES_SOME),
            "summed": SUMMED,
        }

    @cached_property
    def sight(self) -> list[Sight]:
        """For each layer the first key that each query sees, and what is behind the last one."""
        return [sight_of(self.seen, key) for key in self.at]


@dataclass(frozen=True)
class Strongest:
    """The strongest keys of every query of some heads of a layer."""

    at: int
    heads: Sequence[int]
    weight_HTk: np.ndarray
    key_HTk: np.ndarray


Sight = tuple[np.ndarray | None, np.ndarray | None]  # (T,) each, None where that is key 0, or the query's own


def sight_of(seen: Observation, key: LayerKey) -> Sight:
    """The first key that each query of a layer sees, and what is behind the last one."""
    if seen.visible[key].startswith(OF_WEIGHTS):
        return of_weights(seen, key)
    if is_bidirectional(key.stack):
        return both_sides(seen, key)
    return first_key(seen.visible[key], np.arange(len(seen.queries), dtype="<i4")), ahead(seen, key)


def of_weights(seen: Observation, key: LayerKey) -> tuple[np.ndarray | None, np.ndarray]:
    """The same of weights without a model whose mask has no name: of all heads, else none is shown as hidden."""
    whole = key in seen.weights and len(seen.weight_heads[key]) == seen.kv_of[key][0]
    if not whole or seen.visible[key] == KEYS_NOT_KNOWN:
        return None, np.full(len(seen.queries), len(seen.keys), "<i4")
    some_QK = np.any(np.asarray(seen.weights[key]) > 0, axis=0)
    return some_QK.argmax(-1).astype("<i4"), (len(seen.keys) - some_QK[:, ::-1].argmax(-1)).astype("<i4")


def first_key(visible: str, query_T: np.ndarray) -> np.ndarray | None:
    """The first key that each query sees, from the words for a layer (`window 16`); None where that is key 0."""
    kind, _, size = visible.partition(" ")
    if kind not in ("window", "chunk") or not size.isdecimal():
        return None
    first_T = query_T - int(size) + 1 if kind == "window" else query_T - query_T % int(size)
    first_T = np.maximum(first_T, 0).astype(query_T.dtype)
    return first_T if first_T.any() else None


def both_sides(seen: Observation, key: LayerKey) -> tuple[np.ndarray | None, np.ndarray]:
    """The first key that each query of an encoder sees, (T,), None where that is key 0, and what is behind the last.

    How far a window goes to either side, families count in ways of their own: it is read off the weights, as far as any
    query gives one. Where none were kept, every query sees all keys.
    """
    count = len(seen.queries)
    query_T, before, behind = np.arange(count, dtype="<i4"), count, count
    if seen.visible[key].startswith("window ") and key in seen.weights:
        some_QK = np.any(np.asarray(seen.weights[key]) > 0, axis=0)
        before = int((query_T - some_QK.argmax(-1)).max())
        behind = int((count - 1 - some_QK[..., ::-1].argmax(-1) - query_T).max())
    first_T = np.maximum(query_T - before, 0).astype("<i4")
    return first_T if first_T.any() else None, np.minimum(query_T + behind + 1, count).astype("<i4")


def ahead(seen: Observation, key: LayerKey) -> np.ndarray | None:
    """What is behind the last key that each query gives a weight, (T,), where tokens of pictures see each other.

    None where no query looks ahead.
    """
    token_T = np.arange(len(seen.queries), dtype="<i4")
    last_T = token_T.copy()
    if seen.queries.medium.patches and key in seen.weights:
        some_QK = (np.asarray(seen.weights[key]) > 0).any(0)
        last_T = np.maximum(last_T, np.where(some_QK, token_T, 0).max(1))
    elif seen.queries.medium.patches and seen.kept_keys is not None and key in seen.kept_keys:
        _, weight_HTk, key_HTk = _of_all_queries(seen.kept_keys[key], len(token_T))
        last_T = np.maximum(last_T, np.where(weight_HTk > 0, key_HTk, 0).max((0, 2)))
    return None if (last_T == token_T).all() else (last_T + 1).astype("<i4")


def keys_of_most_weight(weights_HQK: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest weights of every query, (H, Q, k), the largest first, and their keys."""
    shape = (*weights_HQK.shape[:2], count)
    weight_HQk, key_HQk = np.empty(shape, weights_HQK.dtype), np.empty(shape, np.int64)
    for head, weights_QK in enumerate(weights_HQK):  # one by one: the places of all would take twice their weights
        size_QK = np.abs(weights_QK)
        some_Qk = np.sort(np.argpartition(-size_QK, count - 1, axis=-1)[:, :count], axis=-1)
        order_Qk = np.argsort(-np.take_along_axis(size_QK, some_Qk, -1), axis=-1, kind="stable")
        key_HQk[head] = np.take_along_axis(some_Qk, order_Qk, -1)
        weight_HQk[head] = np.take_along_axis(weights_QK, key_HQk[head], -1)
    return weight_HQk, key_HQk


def rounded(values: np.ndarray) -> list[float | None]:
    """Numbers for JSON, to what float32 holds; None for what is none."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def _spans(spans: Sequence[Span]) -> list[tuple[int, int, str]]:
    return [(span.start, span.stop, span.name) for span in spans]


def _of_all_queries(kept: KeptKeys, tokens: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Heads, weights and keys (H, T, k) of every query: NaN for those without kept keys."""
    kept_weight, kept_key = np.asarray(kept.weight), np.asarray(kept.key)
    if len(kept.query) >= tokens:
        return kept.heads, kept_weight, kept_key
    shape = len(kept.heads), tokens, kept_weight.shape[-1]
    weight, key = np.full(shape, np.nan, kept_weight.dtype), np.zeros(shape, kept_key.dtype)
    weight[:, list(kept.query)], key[:, list(kept.query)] = kept_weight, kept_key
    return kept.heads, weight, key


T = TypeVar("T")


@dataclass(frozen=True)
class PageAxis:
    """The texts of an observation on one axis, behind: None for one alone.

    starts: where the queries and the keys of each stack begin; of the others nothing is shown.
    """

    front: Prompt
    behind: Prompt | None
    names: tuple[str, str]
    starts: Mapping[str, tuple[int, int]]


def stacked(seen: Observation) -> bool:
    """Whether an observation is of several stacks that a page shows."""
    return seen.of_two_texts or CROSS in seen.stacks or not seen.other_stacks.keys().isdisjoint((VISION, *MIXING))


def axis_of(seen: Observation) -> PageAxis:
    """Where on one axis the texts of an observation's stacks are."""
    if CROSS in seen.stacks:  # alone, too, where weights were given
        source, target = seen.of(CROSS).keys, seen.of(CROSS).queries
        return PageAxis(source, target, ("text", "target"), starts(len(source)))
    decoder = seen.of(DECODER).queries
    if seen.of_two_texts:
        source = seen.of(ENCODER).queries
        return PageAxis(source, decoder, ("text", "target"), starts(len(source)))
    tower, count = seen.of(VISION).queries if VISION in seen.stacks else None, len(decoder)
    places = {**dict.fromkeys((DECODER, *MIXING), (0, 0)), VISION: (count, count)}
    return PageAxis(decoder, tower, ("text", "vision tower"), places)


class StackedSide(Side):
    """The kept heads of all stacks."""

    def __init__(self, seen: Observation) -> None:
        self.axis, self.stacks = axis_of(seen), seen.stacks
        super().__init__(joined(seen, self.axis))

    def _layer(self, key: LayerKey, heads: int, kv: int) -> dict[str, Any]:
        queries, keys = self._axes(key)
        axes = {"queries": [queries.start, queries.stop], "keys": [keys.start, keys.stop]}
        return {**super()._layer(key, heads, kv), **axes}

    def _axes(self, layer: LayerKey) -> tuple[range, range]:
        """The ranges of a stack's queries and keys on the axis."""
        of_stack, (query, key) = self.stacks[layer.stack], self.axis.starts[layer.stack]
        return range(query, query + len(of_stack.queries)), range(key, key + len(of_stack.keys))

    @cached_property
    def sight(self) -> list[Sight]:
        """That of the tokens of the axis: those of the other text see up to key 0, which is none."""
        result = list[Sight]()
        for layer in self.at:
            (queries, keys), stack = self._axes(layer), layer.stack
            every: Sight = None, np.array(len(keys))  # of cross-attention, and of a vision tower
            ordered = is_bidirectional(stack) or looks_back(stack)
            first_Q, end_Q = sight_of(self.stacks[stack], layer) if ordered else every
            first_T, end_T = np.zeros((2, len(self.seen.queries)), "<i4")
            first_T[queries] = keys.start + (0 if first_Q is None else first_Q)
            end_T[queries] = keys.start + (np.arange(1, len(queries) + 1) if end_Q is None else end_Q)
            result.append((first_T if first_T.any() else None, end_T))
        return result


def joined(seen: Observation, axis: PageAxis) -> Observation:
    """The kept heads of all stacks as those of one, over both texts, one behind the other."""
    stacks = {stack: obs for stack, obs in seen.stacks.items() if stack in axis.starts}
    prompt, columns = behind(axis), kept_columns(HeadColumns.joined([obs.columns for obs in stacks.values()]))
    # top keys at their places on the axis; none stays none
    start_N = np.array([axis.starts[stack][1] for stack in columns.stack.tolist()], columns.top_key.dtype)
    columns = replace(columns, top_key=np.where(columns.top_key < 0, columns.top_key, columns.top_key + start_N))
    keys = dict.fromkeys(LayerKey(*key) for key in zip(columns.layer.tolist(), columns.stack.tolist(), strict=True))

    def merged(parts: Iterable[Mapping[LayerKey, T] | None]) -> PerLayer[T]:
        present = [part for part in parts if part]
        return PerLayer({key: part[key] for key in keys for part in present if key in part})

    def kept(name: str, moved: Callable[[T, int, int], T]) -> PerLayer[T]:
        by_layer: PerLayer[T] = merged(obs.kept.get(name) for obs in stacks.values())
        return PerLayer({key: moved(part, *axis.starts[key.stack]) for key, part in by_layer.items()})

    # Weights and keys go to the rows and columns of their stack; whatever lies outside is not visible.
    def moved_weights(matrices: Matrices, query: int, key: int) -> Matrices:
        weights_HQK = np.asarray(matrices.weights)
        heads, queries, keys = weights_HQK.shape
        whole_HTT: Any = np.zeros((heads, len(prompt), len(prompt)), weights_HQK.dtype)
        whole_HTT[:, query : query + queries, key : key + keys] = weights_HQK
        return matrices._replace(weights=whole_HTT)

    def moved_keys(listed: KeptKeys, query: int, key: int) -> KeptKeys:
        return listed._replace(key=listed.key + key, query=range(query, query + listed.weight.shape[1]))

    # what a page draws is moved to its places; of two texts operands are of one stack, and maps are drawn from weights
    weights, related = kept("weights", moved_weights), kept("relations", moved_keys)
    of_two_texts: dict[str, Any] = {} if axis.behind is None else {"operands": PerLayer(), "maps": None}
    chosen = {stack: obs.chosen for stack, obs in stacks.items()}
    return replace(
        seen,
        queries=prompt,
        keys=prompt,
        text_columns=columns,
        kv_of=merged(obs.kv_of for obs in stacks.values()),
        visible=merged(obs.visible for obs in stacks.values()),
        kept={**seen.kept, "weights": weights, "relations": related or None, **of_two_texts},
        chosen=seen.chosen if not seen.of_two_texts and CROSS not in chosen else first_asked(chosen, len(axis.front)),
        other_stacks={},
    )


def behind(axis: PageAxis) -> Prompt:
    """Both texts as one, with what they are as its turns."""
    source, target = axis.front, axis.behind
    if target is None:
        return source
    moved, plain, count = len(source.text), list(target.plain), len(source)
    characters = tuple((start + moved, stop + moved) for start, stop in target.characters)
    if False in target.special:  # so that neither the page's text nor its title runs from one into the other
        plain[target.special.index(False)] = "\n" + plain[target.special.index(False)]
    return replace(
        source,
        text=source.text + target.text,
        **join_tokens(source, replace(target, plain=tuple(plain), characters=characters)),
        turns=(Span(0, count, axis.names[0]), Span(count, count + len(target), axis.names[1])),
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


def first_asked(chosen_of: Mapping[str, TokenSelection], source: int) -> TokenSelection:
    """What the first stack was asked that was asked, cross-attention before the others, at its places on the axis."""

    def moved(match: TokenMatch | None, start: int) -> TokenMatch | None:
        return match and replace(match, positions=tuple(at + start for at in match.positions))

    stack = next(
        (stack for stack in reversed(OF_TWO_TEXTS) if stack in chosen_of and not chosen_of[stack].nothing), CROSS
    )
    chosen, (query, key) = chosen_of[stack], starts(source)[stack]
    return replace(chosen, query=moved(chosen.query, query), key=moved(chosen.key, key))


def starts(source: int) -> dict[str, tuple[int, int]]:
    """Where the queries and the keys of an encoder-decoder's stacks begin, behind a text of so many tokens."""
    return {ENCODER: (0, 0), DECODER: (source, source), CROSS: (source, 0)}
