"""The rows of the forwards of a text, joined to one map of it.

    layers = joined(path(kept.forwards[-1], row=0)).layers

A forward with a cache has the queries of its own tokens alone. The maps of a whole text are made of the joined q and k.
Their rows times the values must give the model's own outputs.

Shapes: B text, H head, G kv head, Q query of a forward, K key, T token of a joined text, D width of q and k, V width
of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec, Visibility, by_place
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
    rows: CallRows


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
        self._visible: dict[tuple[int, ...], Visibility] = {}
        self._biases: dict[tuple[int, ...], Tensor] = {}
        counts = [segment.end for segment in segments]
        self.starts = [sum(counts[:at]) for at in range(len(counts))]

    def layer(self, key: Layer) -> JoinedLayer:
        """A layer's attention of the text to itself."""
        rows = [forward.calls[key] for forward, _, _ in self.segments]
        visible = self._seen(rows)
        if rows[0].weights_BHQK is not None:
            return self._of_weights(rows, visible)
        keys, values = list[Tensor](), list[Tensor]()
        for of, (_, row, count) in zip(rows, self.segments, strict=True):
            assert of.k_BGQD is not None
            assert of.v_BGQV is not None
            keys.append(of.k_BGQD[row, :, :count])
            values.append(of.v_BGQV[row, :, :count])
        k, v = self._cat(keys), self._cat(values)
        bias = None if rows[0].bias is None else self._bias(rows)
        return self._checked(key, rows, AttentionSpec(self._q(rows), k, v, rows[0].scale, visible, bias=bias))

    def cross(self, key: Layer, first: CallRows, row: int, source_T: Tensor | None) -> JoinedLayer:
        """A layer's attention to the source; first: the call of the first forward, which has its keys."""
        rows = [forward.calls[key] for forward, _, _ in self.segments]
        if first.weights_BHQK is not None:
            weights = self._cat([part for part, _, _ in self._weights(rows)])
            weights = weights if source_T is None else weights[..., source_T.to(weights.device)]
            T, S = weights.shape[2:]
            return _dense(first, weights, Visibility(T, S, None, False, None, weights.device))
        assert first.k_BGQD is not None
        assert first.v_BGQV is not None
        S = first.k_BGQD.shape[2]
        real_S = torch.ones(S, dtype=torch.bool) if source_T is None or len(source_T) != S else source_T
        seen_TS = torch.cat(
            [_stretches(of.sight, row, count, S) for of, (_, row, count) in zip(rows, self.segments, strict=True)]
        ).cpu()[self.places][:, real_S]
        T, S, device = len(seen_TS), int(real_S.sum()), first.k_BGQD.device
        mask = None if bool(seen_TS.all()) else seen_TS[None, None].to(device)
        visible = Visibility(T, S, mask, False, None, device)
        k, v = (part[row : row + 1, :, real_S.to(device)] for part in (first.k_BGQD, first.v_BGQV))
        return self._checked(key, rows, AttentionSpec(self._q(rows), k, v, first.scale, visible))

    def _cat(self, parts: Sequence[Tensor], axis: int = 1) -> Tensor:
        """Parts of tokens as one text without its padding, (1, H, T, ...)."""
        whole = torch.cat(list(parts), axis)
        if len(self.places) < whole.shape[axis]:
            whole = whole.index_select(axis, self.places.to(whole.device))
        return whole[None]

    def _q(self, rows: Sequence[CallRows]) -> Tensor:
        """The queries, each times what makes one scale right for all."""
        parts = []
        for of, (_, row, count) in zip(rows, self.segments, strict=True):
            assert of.q_BHQD is not None
            part = of.q_BHQD[row, :, :count]
            parts.append(part if of.scale == rows[0].scale else part * (of.scale / rows[0].scale))
        return self._cat(parts)

    def _seen(self, rows: Sequence[CallRows]) -> Visibility:
        """Which keys each query saw; layers whose calls saw the same share it."""
        same = tuple(id(of.sight) for of in rows) + tuple(of.begin for of in rows)
        if same not in self._visible:
            self._visible[same] = self._make_seen(rows)
        return self._visible[same]

    def _make_seen(self, rows: Sequence[CallRows]) -> Visibility:
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
        key_T = torch.arange(T)
        seen_TT = (first_T[:, None] <= key_T) & (key_T < past_T[:, None])
        return Visibility(T, T, seen_TT[None, None].to(device), device=device)

    def _masked(self, rows: Sequence[CallRows], device: torch.device) -> Visibility:
        """The same of calls of which some have a mask of their own: its rows, put where their tokens are."""
        adds = any(of.sight.mask is not None and of.sight.mask.is_floating_point() for of in rows)
        hidden: Any = torch.finfo(torch.float32).min if adds else False
        heads = max(1 if of.sight.mask is None else of.sight.mask.shape[1] for of in rows)
        whole = torch.full((heads, len(self.real_T), len(self.real_T)), hidden, device=device)
        for of, (_, row, count), start in zip(rows, self.segments, self.starts, strict=True):
            mask, shift = of.sight.mask, start - of.begin
            if mask is None:
                seen = _stretches(of.sight, row, count, len(self.real_T) - shift)[None]
            else:
                seen = mask[row if len(mask) > 1 else 0, :, :count]
            if adds:
                allowed = _allowed(seen)
                seen = torch.where(allowed, seen.float() if seen.is_floating_point() else 0.0, hidden)
            columns = range(max(0, -shift), min(seen.shape[-1], len(self.real_T) - shift))
            part = seen[..., columns.start : columns.stop].to(whole.dtype)
            whole[:, start : start + count, columns.start + shift : columns.stop + shift] = part
        places = self.places.to(device)
        whole = whole[:, places][:, :, places]
        return by_place(Visibility(len(places), len(places), whole[None], device=device), [None])

    def _bias(self, rows: Sequence[CallRows]) -> Tensor:
        """What is added to the logits, (1, H, T, T); layers whose calls had the same share it."""
        same = tuple(id(of.bias) for of in rows)
        if same not in self._biases:
            parts = []
            for of, (_, row, count), start in zip(rows, self.segments, self.starts, strict=True):
                assert of.bias is not None
                part = of.bias[row if len(of.bias) > 1 else 0, :, :count]
                shift = start - of.begin
                whole = part.new_zeros(*part.shape[:2], len(self.real_T))
                stop = min(part.shape[-1], len(self.real_T) - shift)
                whole[..., max(0, shift) : stop + shift] = part[..., max(0, -shift) : stop]
                parts.append(whole)
            places = self.places.to(parts[0].device)
            self._biases[same] = torch.cat(parts, 1)[:, places][:, :, places][None]
        return self._biases[same]

    def _sinks(self, rows: Sequence[CallRows]) -> Tensor | None:
        """The sink logits: one for each head, or of each query its own."""
        if (sinks := rows[0].sinks) is None or sinks.shape[-1] == 1:
            return sinks
        own = [
            of.sinks[row if len(of.sinks) > 1 else 0, :, :count]
            for of, (_, row, count) in zip(rows, self.segments, strict=True)
            if of.sinks is not None
        ]
        return self._cat(own)

    def _weights(self, rows: Sequence[CallRows]) -> Iterator[tuple[Tensor, int, int]]:
        """The weights of each segment's rows, (H, Q, K), the column of its first token, and that token's place."""
        for of, (_, row, count), start in zip(rows, self.segments, self.starts, strict=True):
            assert of.weights_BHQK is not None
            yield of.weights_BHQK[row, :, :count], of.begin, start

    def _of_weights(self, rows: Sequence[CallRows], visible: Visibility) -> JoinedLayer:
        """The layer of a family that shows its weights alone: each row as it was."""
        parts, tokens = [], len(self.real_T)
        for part, begin, start in self._weights(rows):
            shift = start - begin
            whole = part.new_zeros(*part.shape[:2], tokens)
            stop = min(part.shape[-1], tokens - shift)
            whole[..., max(0, shift) : stop + shift] = part[..., max(0, -shift) : stop]
            parts.append(whole)
        weights = self._cat(parts)
        return _dense(rows[0], weights[..., self.places.to(weights.device)], visible)

    def _checked(self, key: Layer, rows: Sequence[CallRows], spec: AttentionSpec) -> JoinedLayer:
        """The layer as an operator, after some rows times the values were compared with the model's own outputs."""
        spec.softcap, spec.sinks = rows[0].softcap, self._sinks(rows)
        spec.sinks_scale_output = rows[0].sinks_scale_output
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
        allowed = tolerance(rows[0].dtype)[1]
        if check.value_error is not None and not check.value_error <= allowed:
            raise ModelError(
                f"the forwards cannot be joined: in {check.name} the joined rows differ from what the model's own "
                f"attention gave by {check.value_error:.2g}, {allowed:.2g} is allowed: {ROUNDED}",
                "record with the model's default cache",
            )
        return JoinedLayer(P, check, rows[0])

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
    return JoinedLayer(P, check, rows)


def _stretches(sight: SeenKeys, row: int, count: int, keys: int) -> Tensor:
    """(count, keys) boolean: what the queries of a row see, as columns of their call."""
    if sight.mask is not None:
        mask = sight.mask[row if len(sight.mask) > 1 else 0, 0, :count, :keys]
        return _allowed(mask)
    edges = (edge_BQ[row if len(edge_BQ) > 1 else 0, :count, None] for edge_BQ in (sight.first_BQ, sight.past_BQ))
    first, past = edges
    key_K = torch.arange(keys, device=first.device)
    return (first <= key_K) & (key_K < past)


def _allowed(mask: Tensor) -> Tensor:
    """Boolean: which keys a mask lets a query see."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
