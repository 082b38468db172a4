"""The rows of the forwards of a text, joined to one map of it.

    layers = joined(path(kept.forwards[-1], row=0)).layers

A forward with a cache has the queries of its own tokens alone. The maps of a whole text are made of the joined q and k.
Their rows times the values must give the model's own outputs.

Shapes: B text, H head, G kv head, Q query of a forward, K key, T token of a joined text, D width of q and k, V width
of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec, Visibility, allowed, by_place
from attnscope.errors import ModelError
from attnscope.hooks.calls import REPEATED_ROWS, AttentionCall, check_call, relative_error
from attnscope.hooks.engines import full_precision, select_operator
from attnscope.hooks.forwards import CallRows, Layer, SeenKeys, Segment, ids_of, real_of
from attnscope.hooks.report import CallCheck, tolerance
from attnscope.model.selection import CROSS, DECODER, ENCODER, consecutive, prefix

ROUNDED = "its cache rounds what it keeps, or moves it to other positions"


class JoinedLayer(NamedTuple):
    """A layer's attention over a whole text, how it held, and its kv heads."""

    P: AttentionOperator
    check: CallCheck
    kv_heads: int


class JoinedText(NamedTuple):
    """A text that forwards read: its ids, those of its source, and its layers; missing: layers of some forwards only.

    queries, keys: the ids of a stack's axes, without padding.
    """

    ids: Tensor
    source: Tensor | None
    layers: Mapping[Layer, JoinedLayer]
    missing: Sequence[str]
    forwards: int


def joined(segments: Sequence[Segment]) -> JoinedText:
    """The maps of a text. Raises ModelError where its rows do not give what the model's own attention gave."""
    root, main = segments[0].forward, segments[-1].forward.main
    if root.loose:
        raise ModelError(
            f"a forward continued {root.start} tokens of a cache, and which recorded forward filled it is not known",
            "begin the recording before the cache is filled, and use the model's default cache",
        )
    # Each stack is joined over its own text: an encoder's is of one forward.
    encoded = _encoded(segments) if main == DECODER else None
    stacks = {main: segments} | ({ENCODER: encoded} if encoded else {})
    joiner = {stack: _Joiner(of_stack, stack) for stack, of_stack in stacks.items()}
    layers, missing = dict[Layer, JoinedLayer](), list[str]()
    of_decoder = {key for segment in segments for key in segment.forward.calls if key[0] in (main, CROSS)}
    of_encoder = {key for key in encoded[0].forward.calls if key[0] == ENCODER} if encoded else set()
    order = {ENCODER: 0, DECODER: 1, CROSS: 2}
    for key in sorted(of_decoder | of_encoder, key=lambda key: (order[key[0]], key[1])):
        stack = key[0]
        # Rows of a layer that one forward did not show cannot be made up.
        if any(key not in segment.forward.calls for segment in stacks.get(stack, segments)):
            missing.append(f"{prefix(stack)}layer {key[1]}")
            continue
        if stack == CROSS:
            source = joiner[ENCODER].real_T if encoded else None
            layers[key] = joiner[main].cross(key, root.calls[key], segments[0].row, source)
        else:
            layers[key] = joiner[stack].layer(key)
    source = joiner[ENCODER].ids_T if encoded else None
    return JoinedText(joiner[main].ids_T, source, layers, missing, len(segments))


def _encoded(segments: Sequence[Segment]) -> list[Segment] | None:
    """The source of a text: its row among those that the encoder read, of which each may have several beams."""
    root, row, _ = segments[0]
    if root.encoder is None:
        return None
    of_encoder = root.encoder.ids[ENCODER]
    return [Segment(root.encoder, row * len(of_encoder) // root.batch, of_encoder.shape[1])]


class _Joiner:
    """Joins the rows of one text, stack by stack, without its padding."""

    def __init__(self, segments: Sequence[Segment], stack: str) -> None:
        self.segments, self.stack = segments, stack
        self.real_T = real_of(segments, stack)
        self.ids_T = ids_of(segments, stack)[self.real_T]
        self.places = self.real_T.nonzero()[:, 0]  # of the tokens that stay, among all
        self.before = torch.cat([torch.zeros(1, dtype=torch.long), self.real_T.cumsum(0)])  # those that stay, before
        self._made: dict[Any, Any] = {}
        counts = [segment.end for segment in segments]
        self.starts = [sum(counts[:at]) for at in range(len(counts))]

    def layer(self, key: Layer) -> JoinedLayer:
        """A layer's attention of the text to itself."""
        rows = [forward.calls[key] for forward, _, _ in self.segments]
        sights = tuple((id(of.sight), of.begin) for of in rows)
        visible: Visibility = self._once(sights, lambda: self._seen(rows))
        if rows[0].spec is None:
            return _dense(rows[0], self._square(rows, [of.queries for of in rows]), visible)
        k, v = (
            self._cat([getattr(spec, name)[row, :, :count] for spec, row, count, _ in self._specs(rows)])
            for name in ("k_BGKD", "v_BGKV")
        )
        biases = [spec.bias for spec, *_ in self._specs(rows) if spec.bias is not None]
        bias = self._once(tuple(map(id, biases)), lambda: self._square(rows, biases)) if biases else None
        return self._checked(rows, k, v, visible, bias)

    def cross(self, key: Layer, first: CallRows, row: int, source_T: Tensor | None) -> JoinedLayer:
        """A layer's attention to the source; first: the call of the first forward, which has its keys."""
        rows = [forward.calls[key] for forward, _, _ in self.segments]
        if first.spec is None:
            weights = self._cat([of.queries[at, :, :count] for of, at, count, _ in self._parts(rows)])
            weights = weights if source_T is None else weights[..., source_T.to(weights.device)]
            T, S = weights.shape[2:]
            return _dense(first, weights, Visibility(T, S, None, False, None, weights.device))
        S, device = first.spec.k_BGKD.shape[2], first.spec.k_BGKD.device
        real_S = torch.ones(S, dtype=torch.bool) if source_T is None or len(source_T) != S else source_T
        seen = [_stretches(of.sight, at, count, S) for of, at, count, _ in self._parts(rows)]
        seen_TS = torch.cat(seen).cpu()[self.places][:, real_S]
        mask = None if bool(seen_TS.all()) else seen_TS[None, None].to(device)
        visible = Visibility(len(seen_TS), int(real_S.sum()), mask, False, None, device)
        k, v = (part[row : row + 1, :, real_S.to(device)] for part in (first.spec.k_BGKD, first.spec.v_BGKV))
        return self._checked(rows, k, v, visible, None)

    def _parts(self, rows: Sequence[CallRows]) -> Iterator[tuple[CallRows, int, int, int]]:
        """The call of each segment, its row there, how many of its queries, and how far its columns are moved."""
        for of, (_, row, count), start in zip(rows, self.segments, self.starts, strict=True):
            yield of, row, count, start - of.begin

    def _specs(self, rows: Sequence[CallRows]) -> Iterator[tuple[AttentionSpec, int, int, int]]:
        """The same with what each call computed."""
        for of, row, count, shift in self._parts(rows):
            assert of.spec is not None
            yield of.spec, row, count, shift

    def _once(self, same: Any, make: Callable[[], Any]) -> Any:
        """What layers share whose calls had the same."""
        if same not in self._made:
            self._made[same] = make()
        return self._made[same]

    def _cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts of tokens as one text without its padding, (1, H, T, ...)."""
        whole = torch.cat(list(parts), 1)
        if len(self.places) < whole.shape[1]:
            whole = whole.index_select(1, self.places.to(whole.device))
        return whole[None]

    def _square(self, rows: Sequence[CallRows], values: Sequence[Tensor]) -> Tensor:
        """What calls had of each query and key, (B or 1, H, Q, K) each, as the text's, (1, H, T, T); 0 elsewhere."""
        parts, tokens = list[Tensor](), len(self.real_T)
        for value, (_, row, count, shift) in zip(values, self._parts(rows), strict=True):
            part = value[row if len(value) > 1 else 0, :, :count]
            whole = part.new_zeros(*part.shape[:2], tokens)
            stop = min(part.shape[-1], tokens - shift)
            whole[..., max(0, shift) : stop + shift] = part[..., max(0, -shift) : stop]
            parts.append(whole)
        square = self._cat(parts)
        return square[..., self.places.to(square.device)]

    def _seen(self, rows: Sequence[CallRows]) -> Visibility:
        """Which keys each query saw."""
        T, device = len(self.places), rows[0].sight.first_BQ.device
        first, past = list[Tensor](), list[Tensor]()
        for of, (_, row, count), start in zip(rows, self.segments, self.starts, strict=True):
            for part, edge_BQ in ((first, of.sight.first_BQ), (past, of.sight.past_BQ)):
                edge_Q = edge_BQ[row if len(edge_BQ) > 1 else 0, :count]
                part.append(edge_Q.cpu() - of.begin + start)
        if any(of.sight.mask is not None for of in rows):
            return self._masked(rows, device)
        first_T, past_T = (
            self.before[torch.cat(part).clamp(0, len(self.real_T))[self.places]] for part in (first, past)
        )
        place_T = torch.arange(T)
        if bool((past_T == place_T + 1).all()):
            window = int((past_T - first_T).max())
            if torch.equal(first_T, (past_T - window).clamp(min=0)):
                return Visibility(T, T, None, True, None if window == T else window, device)
        if bool((first_T == 0).all()) and bool((past_T == T).all()):
            return Visibility(T, T, None, False, None, device)
        seen_TT = (first_T[:, None] <= place_T) & (place_T < past_T[:, None])
        return Visibility(T, T, seen_TT[None, None].to(device), device=device)

    def _masked(self, rows: Sequence[CallRows], device: torch.device) -> Visibility:
        """The same of calls of which some have a mask of their own: its rows, put where their tokens are."""
        adds = any(of.sight.mask is not None and of.sight.mask.is_floating_point() for of in rows)
        hidden: Any = torch.finfo(torch.float32).min if adds else False
        heads = max(1 if of.sight.mask is None else of.sight.mask.shape[1] for of in rows)
        whole = torch.full((heads, len(self.real_T), len(self.real_T)), hidden, device=device)
        for (of, row, count, shift), start in zip(self._parts(rows), self.starts, strict=True):
            mask = of.sight.mask
            if mask is None:
                seen = _stretches(of.sight, row, count, len(self.real_T) - shift)[None]
            else:
                seen = mask[row if len(mask) > 1 else 0, :, :count]
            if adds:
                seen = torch.where(allowed(seen), seen.float() if seen.is_floating_point() else 0.0, hidden)
            columns = range(max(0, -shift), min(seen.shape[-1], len(self.real_T) - shift))
            part = seen[..., columns.start : columns.stop].to(whole.dtype)
            whole[:, start : start + count, columns.start + shift : columns.stop + shift] = part
        places = self.places.to(device)
        whole = whole[:, places][:, :, places]
        return by_place(Visibility(len(places), len(places), whole[None], device=device), [None])

    def _checked(
        self, rows: Sequence[CallRows], k: Tensor, v: Tensor, visible: Visibility, bias: Tensor | None
    ) -> JoinedLayer:
        """The layer as an operator, after some rows times the values were compared with the model's own outputs."""
        first, _, _, _ = next(self._specs(rows))
        q, sinks, own_sinks = list[Tensor](), list[Tensor](), first.sinks is not None and first.sinks.shape[-1] > 1
        for of, row, count, _ in self._specs(rows):
            # Each query times what makes one scale right for all.
            part = of.q_BHQD[row, :, :count]
            q.append(part if of.scale == first.scale else part * (of.scale / first.scale))
            if own_sinks and of.sinks is not None:
                sinks.append(of.sinks[row if len(of.sinks) > 1 else 0, :, :count])
        spec = replace(first, q_BHQD=self._cat(q), k_BGKD=k, v_BGKV=v, visible=visible, bias=bias)
        spec.sinks = self._cat(sinks) if sinks else first.sinks
        P = select_operator(spec)
        check = check_call(AttentionCall(rows[0].place, P, spec), "interface")
        check.dtype = rows[0].dtype
        # Of some rows the model's own output was kept: a cache that rounds its keys shows here.
        actual, expected = list[Tensor](), list[Tensor]()
        with full_precision(P.device):
            known = dict[int, Tensor]()
            for place, at, row in self._last_rows():
                if (last_BHV := rows[at].last_BHV) is not None:
                    known[place] = last_BHV[row]
            for run in consecutive(sorted(known)):  # rows of a generation follow each other
                start, stop = run[0], run[-1] + 1
                weights = spec.weights(start, stop).reshape(1, spec.kv_heads, -1, spec.visible.keys)
                product = (weights @ spec.v_BGKV.float()).view(1, spec.heads, stop - start, -1)
                if (share := spec.output_shares(start, stop)) is not None:
                    product = product * share
                actual += product[0].unbind(1)
                expected += [known[place].float() for place in run]
            if actual and actual[0].shape == expected[0].shape:
                check.note(value_error=relative_error(torch.stack(actual), torch.stack(expected)))
        most = tolerance(rows[0].dtype)[1]
        if check.value_error is not None and not check.value_error <= most:
            raise ModelError(
                f"the forwards cannot be joined: in {check.name} the joined rows differ from what the model's own "
                f"attention gave by {check.value_error:.2g}, {most:.2g} is allowed: {ROUNDED}",
                "record with the model's default cache",
            )
        return JoinedLayer(P, check, spec.kv_heads)

    def _last_rows(self) -> list[tuple[int, int, int]]:
        """The last queries of the first forwards and of the last: place, segment, and the row of its forward."""
        places = []
        for at, (forward, row, count) in enumerate(self.segments):
            last = self.starts[at] + count
            if count == forward.ids[self.stack].shape[1] and bool(self.real_T[last - 1]):
                places.append((int(self.before[last]) - 1, at, row))
        half = REPEATED_ROWS // 2
        return places if len(places) <= 2 * half else places[:half] + places[-half:]


def _dense(rows: CallRows, weights: Tensor, visible: Visibility) -> JoinedLayer:
    """A layer of which weights alone are known."""
    P = DenseAttention(weights, visible)
    with full_precision(P.device):
        check = check_call(AttentionCall(rows.place, P, None, weights), "hook")
    return JoinedLayer(P, check, P.heads)


def _stretches(sight: SeenKeys, row: int, count: int, keys: int) -> Tensor:
    """(count, keys) boolean: what the queries of a row see, as columns of their call."""
    if sight.mask is not None:
        return allowed(sight.mask[row if len(sight.mask) > 1 else 0, 0, :count, :keys])
    first, past = (edge_BQ[row if len(edge_BQ) > 1 else 0, :count, None] for edge_BQ in (sight.first_BQ, sight.past_BQ))
    key_K = torch.arange(keys, device=first.device)
    return (first <= key_K) & (key_K < past)
