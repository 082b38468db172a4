"""Forwards that somebody else runs, kept row by row: q, k and v of their own tokens, and which keys they saw.

    with kept_forwards(loaded) as kept:
        loaded.model.generate(ids, num_beams=3)
    path(kept.forwards[-1], row=0)  # the rows of one text, from its first forward on

The tokens before those of a forward with a cache are those of an earlier one. Which one shows in the keys that the
model took from its cache: beams change places there, a draft that was rejected is cut off.

Shapes: B text, H head, G kv head, Q query of a forward, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.hooks.calls import AttentionCall, CallSite
from attnscope.hooks.forward import bound, temporary
from attnscope.hooks.listen import overhearing
from attnscope.hooks.report import tolerance
from attnscope.model.selection import CROSS, DECODER, ENCODER, has_summaries

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

Layer = tuple[str, int]  # a stack and the number of a layer
UNKNOWN = -1  # the id of a token with an embedding alone
NO_VISIBILITY = Visibility(0, 0)  # of calls of which SeenKeys says what a query sees


@dataclass(eq=False)
class SeenKeys:
    """Which keys the queries of a call see, as columns of that call: from first to past, without past.

    mask: instead, where some query sees no single stretch of keys, or the mask adds to logits; (B or 1, H or 1, Q, K).
    """

    first_BQ: Tensor
    past_BQ: Tensor
    mask: Tensor | None = None

    @classmethod
    def of(cls, visible: Visibility) -> SeenKeys:
        """What a call's queries see.

        >>> SeenKeys.of(Visibility(2, 3)).past_BQ
        tensor([[2, 3]])
        """
        if visible.mask is None:
            past_BQ = (visible.position_Q[None] + 1).clamp(max=visible.keys)
            first_BQ = torch.zeros_like(past_BQ) if visible.window is None else (past_BQ - visible.window).clamp(min=0)
            whole = torch.full_like(past_BQ, visible.keys)
            return cls(first_BQ, past_BQ if visible.causal else whole)
        mask = visible.mask[..., : visible.keys].detach()
        seen = visible.rows(0, visible.queries)
        count_BHQ, first_BHQ = seen.sum(-1), seen.byte().argmax(-1)
        past_BHQ = torch.where(count_BHQ > 0, visible.keys - seen.flip(-1).byte().argmax(-1), first_BHQ)
        adds = mask.is_floating_point() and bool(((mask != 0) & seen).any())
        one_stretch = mask.shape[1] == 1 and bool((past_BHQ - first_BHQ == count_BHQ).all())
        return cls(first_BHQ[:, 0], past_BHQ[:, 0], None if one_stretch and not adds else mask.clone())

    def sees_itself(self, begin: int) -> Tensor:
        """(B or 1, Q): whether the queries see their own keys; begin: the column of the first."""
        own_Q = begin + torch.arange(self.first_BQ.shape[1], device=self.first_BQ.device)
        return (self.first_BQ <= own_Q) & (own_Q < self.past_BQ)


@dataclass(eq=False)
class CallRows:
    """What is kept of one call: how its rows are made, with the keys and values of its own tokens alone.

    begin: the column of the first query's own key; earlier tokens are before it. spec: of those keys, of which `sight`
    says what a query sees; None of a family that shows its weights alone, weights_BHQK, whose keys may be in the cache.
    last_BHV: what the model's own attention gave for the last query.
    """

    place: CallSite
    sight: SeenKeys
    begin: int
    dtype: torch.dtype
    spec: AttentionSpec | None = None
    weights_BHQK: Tensor | None = None
    cached_BGQD: Tensor | None = None
    last_BHV: Tensor | None = None

    @property
    def queries(self) -> Tensor:
        """A tensor of a row per query, (B, H, Q, ...)."""
        queries = self.weights_BHQK if self.spec is None else self.spec.q_BHQD
        assert queries is not None
        return queries

    @property
    def keys_BGQD(self) -> Tensor | None:
        """The keys of its own tokens, where they are known."""
        return self.cached_BGQD if self.spec is None else self.spec.k_BGKD


class Parent(NamedTuple):
    """The token before a row's first: the forward that read it, its row there, and its place among that row's."""

    forward: Forward
    row: int
    place: int


@dataclass(eq=False)
class Forward:
    """One forward: what its calls leave, and what its texts continue.

    start: how many tokens of its texts were read before it. ids: (B, Q) of a stack, UNKNOWN for embeddings. real_BQ:
    which are no padding. parents: of each row, None where its text begins here. run: the same number for all forwards
    of the same texts. encoder: the forward in which its source was read.
    """

    number: int
    start: int = 0
    ids: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[Layer, CallRows] = field(default_factory=dict)
    real: dict[str, Tensor] = field(default_factory=dict)
    parents: list[Parent | None] = field(default_factory=list)
    run: int = 0
    encoder: Forward | None = None

    @property
    def loose(self) -> bool:
        """Whether its texts continue a cache that no kept forward is known to have filled."""
        return self.start > 0 and None in self.parents

    @property
    def stop(self) -> int:
        """How many tokens its texts have with its own."""
        return self.start + self.queries

    @property
    def queries(self) -> int:
        return self.ids[self.main].shape[1]

    @property
    def batch(self) -> int:
        return self.ids[self.main].shape[0]

    @property
    def main(self) -> str:
        """The stack whose texts continue from forward to forward."""
        return DECODER if DECODER in self.ids else ENCODER


class Segment(NamedTuple):
    """The tokens of a text that one forward read: its row there, and the place after the last of them."""

    forward: Forward
    row: int
    end: int


def path(forward: Forward, row: int, count: int | None = None) -> list[Segment]:
    """All that was read of a text up to some of a forward's tokens, in order; count: all of them without it."""
    segments = [Segment(forward, row, forward.queries if count is None else count)]
    while (parent := segments[-1].forward.parents[segments[-1].row]) is not None:
        segments.append(Segment(parent.forward, parent.row, parent.place + 1))
    return segments[::-1]


def ids_of(segments: Sequence[Segment], stack: str) -> Tensor:
    """The ids of a text, padding too, (T,)."""
    return torch.cat([forward.ids[stack][row, :count] for forward, row, count in segments])


def real_of(segments: Sequence[Segment], stack: str) -> Tensor:
    """Which of them are no padding, (T,)."""
    return torch.cat([forward.real[stack][row, :count] for forward, row, count in segments])


class ForwardKeeper:
    """Keeps what the forwards of one thread leave; `kept_forwards` makes one.

    main: the stack of the model. readers: its modules that are given ids, and the stack that reads the ids of each.
    over_summaries: layers over keys that are no tokens. forwards: those with calls, in order. silent: how many made no
    call that was heard. failed: how many ended with an error. elsewhere: how many ran in other threads. loose: calls
    outside a forward. others: what of the forwards is in no map, in words.
    """

    def __init__(self, main: str, readers: Mapping[nn.Module, str], over_summaries: Collection[int] = ()) -> None:
        self.main, self.readers, self.over_summaries = main, readers, over_summaries
        self.thread = threading.get_ident()
        self.forwards, self.others = list[Forward](), set[str]()
        self.silent = self.failed = self.elsewhere = self.loose = 0
        self.begin: Callable[[], None] = lambda: None
        self._open: _OpenForward | None = None
        self._runs: dict[int, Forward] = {}
        self._others: dict[int, nn.Module] = {}  # by thread: the outermost module that runs there

    # Forwards

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module begins that reads ids; the outermost begins a forward."""
        thread = threading.get_ident()
        if thread != self.thread:
            if self._others.setdefault(thread, module) is module:
                self.elsewhere += 1
            return
        if self._open is None or self._open.module is module:  # the same again: an error has ended it
            self._open = _OpenForward(module, Forward(len(self.forwards)), self.others)
            self.begin()
        self._open.read(bound(module, args, kwargs), self.readers[module])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module ends; without an output an error has ended it."""
        thread = threading.get_ident()
        if thread != self.thread:
            if self._others.get(thread) is module:
                del self._others[thread]
            return
        if self._open is None or self._open.module is not module:
            return
        ended, self._open = self._open, None
        if output is None:
            self.failed += 1
        elif not {stack for stack, _ in ended.forward.calls} & {DECODER, ENCODER}:
            self.silent += 1
        else:
            with torch.no_grad():
                ended.cache = ended.cache or getattr(output, "past_key_values", None)
                self._close(ended)

    def on_call(self, call: AttentionCall) -> None:
        """Keep what a call leaves."""
        if self._open is None:
            self.loose += 1
            return
        if call.stack == DECODER and call.layer in self.over_summaries:
            self.others.add(f"decoder layer {call.layer}: its keys are summaries of several tokens")
            return
        with torch.no_grad():
            self._open.keep(call)

    def _close(self, ended: _OpenForward) -> None:
        """The forward as it stays: its ids, its padding, and what its texts continue."""
        forward = ended.forward
        for stack in {stack for stack, _ in forward.calls} & {DECODER, ENCODER}:
            forward.ids[stack], forward.real[stack] = ended.tokens(stack)
        if forward.main != self.main and DECODER not in forward.ids:  # an encoder that `generate` runs alone
            forward.parents, forward.run = [None] * forward.batch, UNKNOWN
            self.forwards.append(forward)
            return
        forward.start = ended.start
        forward.parents = ended.parents(self.forwards)
        first = next((parent for parent in forward.parents if parent is not None), None)
        if first is not None:
            forward.run, forward.encoder = first.forward.run, first.forward.encoder
            for (stack, _), rows in forward.calls.items():
                if stack == CROSS and (spec := rows.spec):  # the source's keys are those of the first forward
                    k, v = (part[:, :, :0].clone() for part in (spec.k_BGKD, spec.v_BGKV))
                    rows.spec = replace(spec, k_BGKD=k, v_BGKV=v)
        else:
            encoders = (other for other in (forward, *reversed(self.forwards)) if ENCODER in other.ids)
            forward.encoder = next(encoders, None) if forward.main == DECODER else None
            forward.run = next((run for run, last in self._runs.items() if _goes_on(last, forward)), len(self._runs))
        self._runs[forward.run] = forward
        self.forwards.append(forward)

    @property
    def last_of_runs(self) -> list[Forward]:
        """The last forward of the same texts, of each."""
        return list(self._runs.values())


def _goes_on(last: Forward, forward: Forward) -> bool:
    """Whether a forward without a cache reads the texts of an earlier one again, with more after them."""
    if forward.main != DECODER or last.start or last.batch != forward.batch or last.queries >= forward.queries:
        return False
    before, now = last.ids[DECODER], forward.ids[DECODER][:, : last.queries]
    if bool((now == UNKNOWN).any()):
        return False
    return all(bool((before == row).all(-1).any()) for row in now)


class _OpenForward:
    """A forward while it runs."""

    def __init__(self, module: nn.Module, forward: Forward, others: set[str]) -> None:
        self.module, self.forward, self.others = module, forward, others
        self.cached: int | None = 0  # tokens in the cache that it is given; None where the cache does not say it
        self.cache: Any = None
        self.ids: dict[str, Tensor] = {}
        self.masks: dict[str, Tensor] = {}
        self.deepest: tuple[Layer, Tensor] | None = None  # the keys that the last layer's queries saw
        self._queries: dict[Layer, Tensor] = {}
        self._made: dict[int, tuple[Any, Any]] = {}

    def read(self, arguments: Mapping[str, Any], stack: str) -> None:
        """Note what a module is given, which reads ids for a stack: the first of each kind is that of the texts."""
        for name, of in (("input_ids", stack), ("decoder_input_ids", DECODER)):
            if isinstance(ids := arguments.get(name), Tensor) and ids.ndim == 2:
                self.ids.setdefault(of, ids.detach())
        for name, of in (("attention_mask", stack), ("decoder_attention_mask", DECODER)):
            mask = arguments.get(name)
            mask = next(iter(mask.values()), None) if isinstance(mask, Mapping) else mask  # one for each kind of layer
            if isinstance(mask, Tensor) and mask.ndim in (2, 4):
                self.masks.setdefault(of, mask.detach())
        cache = arguments.get("past_key_values")
        if cache is not None and self.cache is None:
            self.cache = cache
            try:
                self.cached = int(cache.get_seq_length())
            except (AttributeError, TypeError, ValueError):  # tuples of older code, and states without a length
                self.cached = None

    @property
    def start(self) -> int:
        """How many tokens of its texts were read before."""
        if self.cached is not None:
            return self.cached
        return max([0, *(rows.begin for (stack, _), rows in self.forward.calls.items() if stack == DECODER)])

    def keep(self, call: AttentionCall) -> None:
        """Keep what a layer's first call leaves."""
        key, Q, K = (call.stack, call.layer), call.P.queries, call.P.keys
        queries = call.weights_BHQK if call.spec is None else call.spec.q_BHQD
        assert queries is not None
        again = self._queries.setdefault(key, queries)
        if call.stack not in (DECODER, ENCODER, CROSS) or (call.stack != CROSS and K < Q):
            self.others.add(f"{call.stack} layer {call.layer}: its keys are not the tokens of the text")
        elif again is not queries:
            self.others.add(f"{call.stack} layer {call.layer}: its further calls in a forward")
        elif key not in self.forward.calls:  # else the same weights, over other values
            self._keep(key, call)

    def _keep(self, key: Layer, call: AttentionCall) -> None:
        Q, K = call.P.queries, call.P.keys
        begin, first = 0, self.cached
        if call.stack == DECODER:
            begin = K - Q if first is None or first + Q > K else first
        # The source's keys are the same in every forward; those of the first are kept.
        width = (0 if first else K) if call.stack == CROSS else Q
        spec, output = call.spec, call.output_BQHV
        rows = CallRows(call.place, self._once(call.visible, SeenKeys.of), begin, torch.float32)
        if output is not None and output.ndim == 4 and output.shape[1:3] == (Q, call.P.heads):
            rows.last_BHV = output[:, -1].detach().clone()
        if spec is None:
            assert call.weights_BHQK is not None
            rows.weights_BHQK, rows.dtype = call.weights_BHQK.detach().clone(), call.weights_BHQK.dtype
        else:
            # Autocast rounds what it multiplies, whatever the rest is computed in.
            rounded = {part.dtype for part in (spec.q_BHQD, spec.v_BGKV, output) if part is not None}
            rows.dtype = max(rounded, key=lambda dtype: tolerance(dtype)[1]) if len(rounded) > 1 else rounded.pop()
            q, own = _own(spec.q_BHQD), slice(begin, begin + width)
            k, v = (part[:, :, own].detach().clone() for part in (spec.k_BGKD, spec.v_BGKV))
            bias = None if spec.bias is None else self._once(spec.bias, lambda bias: bias.detach().clone())
            scale = float(spec.scale)
            rows.spec = replace(spec, q_BHQD=q, k_BGKD=k, v_BGKV=v, scale=scale, visible=NO_VISIBILITY, bias=bias)
            if call.stack == DECODER:
                self.deepest = key, spec.k_BGKD
        self.forward.calls[key] = rows

    def _once(self, shared: Any, make: Callable[[Any], Any]) -> Any:
        """What is made of something that layers share, as of their mask."""
        if id(shared) not in self._made:
            self._made[id(shared)] = shared, make(shared)  # holding it keeps its id its own
        return self._made[id(shared)][1]

    def tokens(self, stack: str) -> tuple[Tensor, Tensor]:
        """The ids of a stack's texts, (B, Q), and which are no padding, (B, Q)."""
        of_stack = [rows for (name, _), rows in self.forward.calls.items() if name == stack]
        B, _, Q, _ = of_stack[0].queries.shape
        ids_BQ = self.ids.get(stack)
        if ids_BQ is None or ids_BQ.shape != (B, Q):
            ids_BQ = torch.full((B, Q), UNKNOWN)
        start = self.start if stack == DECODER else 0
        mask = self.masks.get(stack)
        if mask is not None and mask.ndim == 2 and len(mask) == B and mask.shape[1] >= start + Q:
            real_BQ = mask[:, start : start + Q] != 0
        else:  # a token of padding is hidden from all, itself too
            edges = {(id(rows.sight), rows.begin): rows.sight for rows in of_stack if rows.sight.mask is None}
            itself = [sight.sees_itself(begin) for (_, begin), sight in edges.items()]
            if mask is not None and mask.ndim == 4 and mask.shape[2] == Q:  # that of a cache of a fixed length
                K = mask.shape[3]
                itself = [SeenKeys.of(Visibility(Q, K, mask)).sees_itself(start if start + Q <= K else K - Q)]
            real_BQ = torch.stack([of.expand(B, -1) for of in itself]).any(0) if itself else torch.ones(B, Q).bool()
        return ids_BQ.cpu(), real_BQ.cpu()

    def parents(self, earlier: Sequence[Forward]) -> list[Parent | None]:
        """Of each row the token before its first; of all None where the text begins, or no kept forward read it."""
        forward = self.forward
        known: list[Parent | None] = [None] * forward.batch
        deepest = self._keys()
        if forward.start == 0:
            return known
        if deepest is None:
            return self._by_place(earlier, known)
        # The key that the cache has of the token before says which row of an earlier forward read that token.
        key, keys_BGKD = deepest
        for other in reversed(earlier):
            missing = [row for row, parent in enumerate(known) if parent is None]
            if not missing:
                break
            place, rows = forward.start - 1 - other.start, other.calls.get(key)
            if DECODER not in other.ids or not 0 <= place < other.queries:
                continue
            if rows is None or rows.keys_BGQD is None:
                continue
            before_BGD, theirs_BGD = keys_BGKD[:, :, forward.calls[key].begin - 1], rows.keys_BGQD[:, :, place]
            if before_BGD.shape[1:] != theirs_BGD.shape[1:]:
                continue
            equal_BB = (before_BGD[:, None] == theirs_BGD).flatten(2).all(-1).tolist()
            for row in missing:
                same = [at for at, is_same in enumerate(equal_BB[row]) if is_same]
                same = sorted(same, key=lambda at: at != row)  # of equal beams the one in its own place
                same = [at for at in same if self._one_text(Parent(other, at, place), row, key, keys_BGKD)]
                if same:
                    known[row] = Parent(other, same[0], place)
        if None in known:
            known = self._by_place(earlier, known)
        return known

    def _keys(self) -> tuple[Layer, Tensor] | None:
        """The deepest layer with known keys, and all that its queries saw: of weights alone those of the cache."""
        if self.deepest is not None:
            return self.deepest
        layers = [key for key in self.forward.calls if key[0] == DECODER]
        for key in reversed(layers):
            rows, kept = self.forward.calls[key], getattr(self.cache, "layers", ())
            keys = getattr(kept[key[1]], "keys", None) if key[1] < len(kept) else None
            if isinstance(keys, Tensor) and keys.ndim == 4 and rows.weights_BHQK is not None:
                rows.cached_BGQD = keys[:, :, rows.begin : rows.begin + rows.weights_BHQK.shape[2]].detach().clone()
                return key, keys
        return None

    def _one_text(self, parent: Parent, row: int, key: Layer, keys_BGKD: Tensor) -> bool:
        """Whether tokens with the same key have the same tokens before them.

        Keys of a layer behind another one hold the whole text before them. Those of the first hold their token alone.
        """
        if any(stack == DECODER and layer < key[1] for stack, layer in self.forward.calls):
            return True
        kept = []
        for forward, at, end in path(parent.forward, parent.row, parent.place + 1):
            if (keys_BGQD := forward.calls[key].keys_BGQD) is None:
                return False
            kept.append(keys_BGQD[at, :, :end])
        own_GTD, begin = torch.cat(kept, 1), self.forward.calls[key].begin
        count = min(begin, own_GTD.shape[1])
        return torch.equal(own_GTD[:, own_GTD.shape[1] - count :], keys_BGKD[row, :, begin - count : begin])

    def _by_place(self, earlier: Sequence[Forward], known: list[Parent | None]) -> list[Parent | None]:
        """The same row of the last forward that ended there, where no key is the same: joined rows are checked.

        Rows of weights cannot be: of several texts it is not known which one each continues.
        """
        forward = self.forward
        last = next((other for other in reversed(earlier) if DECODER in other.ids), None)
        checked = forward.batch == 1 or self.deepest is not None
        if last is None or last.batch != forward.batch or not last.start < forward.start <= last.stop or not checked:
            return [None] * forward.batch
        place = forward.start - 1 - last.start
        return [Parent(last, row, place) if parent is None else parent for row, parent in enumerate(known)]


def _own(x: Tensor) -> Tensor:
    """The tensor, or a copy where it is a part of a larger one, which would stay with it."""
    x = x.detach()
    return x if x.untyped_storage().nbytes() <= x.numel() * x.element_size() else x.clone()


@contextmanager
def kept_forwards(loaded: LoadedModel) -> Iterator[ForwardKeeper]:
    """While open, what the forwards of a model leave is kept, those of this thread. The model's outputs are its own.

    Layers over keys that are no tokens are left out.
    """
    model, geometry = loaded.model, loaded.geometry
    summaries = {layer.index for stack, of in geometry.views.items() if has_summaries(stack) for layer in of}
    readers = _readers(model, geometry.stack)
    keeper = ForwardKeeper(geometry.stack, readers, summaries)
    hooks = [part.register_forward_pre_hook(keeper.enter, with_kwargs=True) for part in readers]
    hooks += [part.register_forward_hook(keeper.leave, always_call=True) for part in readers]
    with temporary(hooks), overhearing(model, keeper.on_call, geometry.windows) as keeper.begin:
        yield keeper


def _readers(model: nn.Module, main: str) -> dict[nn.Module, str]:
    """The modules that are models in themselves, and the stack that reads the ids of each.

    An encoder-decoder's `input_ids` are the source's; its decoder may be run alone, and so may its encoder.
    """
    of_two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    readers = {model: ENCODER if of_two else main}
    for part in model.modules():
        if hasattr(part, "config") and hasattr(part, "main_input_name"):
            readers.setdefault(part, ENCODER if of_two else main)
    if of_two and isinstance(decoder := getattr(model, "get_decoder", lambda: None)(), nn.Module):
        readers |= {part: DECODER for part in decoder.modules() if part in readers}
    return readers
