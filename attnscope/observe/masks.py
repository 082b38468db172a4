"""Which keys the queries of a layer see, of a layer that no pass computed: as it is given, or read off its weights.

    Sight.of(weights_QK > 0)  # Sight(before=15, after=0): a window of 16
    mask_of_layer(layer, "layer 0", keys=9, causal=True, mask_of=rule).words

A rule is known where every query shows it: causal, a window, runs of tokens such as chunks, texts or a prefix.

Shapes: H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.spec import Visibility
from attnscope.errors import InputError
from attnscope.inputs.tensors import GivenLayer
from attnscope.model.selection import as_ranges
from attnscope.utils.memory import check_free

AS_GIVEN = "mask as given"
Side = int | tuple[int, ...] | None  # so many keys; to the end of the run of tokens, by where runs begin; or all


class Sight(NamedTuple):
    """Which keys the queries of a layer see before their own and after it: so many, those of a run, or all (None).

    >>> Sight(None, 0).words(12), Sight((0, 4, 8), 0).words(12)
    ('causal', 'causal, chunk 4')
    """

    before: Side
    after: Side

    @classmethod
    def of(cls, seen_QK: Tensor) -> Sight | None:
        """The mask that lets queries see these keys and no others, None where no rule of these does.

        A rule has evidence in every query: each sees one stretch of keys with its own among them. A query that sees its
        own key alone is none, but the first of a run: its heads may look there.

        >>> Sight.of(torch.ones(3, 3).tril().bool())
        Sight(before=None, after=0)
        """
        queries, keys = seen_QK.shape
        if bool(seen_QK.all()):
            return cls(None, 0 if queries == keys == 1 else None)
        shown = as_listed(seen_QK)
        place_Q, first_Q, last_Q = shown.position_Q, shown.reach_Q2[:, 0], shown.reach_Q2[:, 1] - 1
        whole_Q = (shown.counts_BHQ[0, 0] == last_Q - first_Q + 1) & (first_Q <= place_Q) & (place_Q <= last_Q)
        if queries != keys or not bool(whole_Q.all()):
            return None
        before = _side(place_Q - first_Q, place_Q)
        after = _side((last_Q - place_Q).flip(0), place_Q)
        if isinstance(after, tuple):  # counted from the end of the text
            after = (0, *sorted(keys - start for start in after[1:]))
        alone_Q = (first_Q == place_Q) & (last_Q == place_Q)
        alone_Q[list(before) if isinstance(before, tuple) else [0]] = False
        short = isinstance(before, tuple) and chunk_of(before, keys) is None and 1 in np.diff([*before, keys])
        return None if UNKNOWN in (before, after) or bool(alone_Q.any()) or short else cls(before, after)

    def visible(self, seen_QK: Tensor) -> Visibility:
        """The mask of this rule, which is `seen_QK`: by place where a rule of causal attention or of none says it."""
        (before, after), (queries, keys) = self, seen_QK.shape
        if after == 0 and not isinstance(before, tuple):
            return Visibility(queries, keys, window=None if before is None else before + 1)
        if self == (None, None):
            return Visibility(queries, keys, causal=False)
        return as_listed(seen_QK)

    def words(self, tokens: int) -> str:
        """`causal, window 16`, `causal, chunk 4`, `both ways`, `both ways in the first 3 tokens, causal after them`."""
        before, after = self
        if isinstance(before, tuple):
            chunk = chunk_of(before, tokens)
            runs = f"runs of tokens from {as_ranges(before)}" if chunk is None else f"chunk {chunk}"
            return f"both ways, {runs}" if after == before else f"{Sight(None, after).words(tokens)}, {runs}"
        if isinstance(after, tuple):
            prefix = after[1] if list(after[1:]) == list(range(after[1], tokens)) else None
            runs = "runs of tokens" if prefix is None else f"the first {prefix} tokens"
            window = "" if before is None else f", window {before + 1}"
            return f"causal{window}, both ways in {runs}"
        if after == 0:
            return "causal" if before is None else f"causal, window {before + 1}"
        sides = [f"{count} {side}" for count, side in zip(self, ("before", "after"), strict=True) if count is not None]
        return f"both ways, {' and '.join(sides)}" if sides else "both ways"


UNKNOWN = -1


def _side(reach_Q: Tensor, room_Q: Tensor) -> Side:
    """How far every query sees to one side, of so many keys that there are; UNKNOWN without a rule."""
    most = int(reach_Q.max())
    if torch.equal(reach_Q, room_Q.clamp(max=most)):
        return None if 0 < most == int(room_Q.max()) else most
    start_Q = room_Q - reach_Q
    # Runs: the query where one begins sees none further.
    if torch.equal(start_Q[start_Q], start_Q) and bool((start_Q.diff() >= 0).all()):
        return tuple(start_Q.unique().tolist())
    return UNKNOWN


def chunk_of(starts: Sequence[int], tokens: int) -> int | None:
    """The length of runs of equal length, the last may be shorter; None where they differ."""
    size = starts[1]
    return size if list(starts) == list(range(0, tokens, size)) and 2 <= size <= tokens // 2 else None


@dataclass(frozen=True)
class LayerMask:
    """Which keys the queries of a layer see; sight: the rule of it, None where it has none that is known."""

    words: str
    visible: Visibility
    sight: Sight | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether queries see keys after them, other than those of a prefix or a picture in a causal text."""
        if self.sight is None:
            queries, keys = self.visible.queries, self.visible.keys
            return bool(self.visible.rows(0, queries)[0, 0].triu(1 + keys - queries).any())
        before, after = self.sight
        return after != 0 and (not isinstance(after, tuple) or isinstance(before, tuple))


def below_causal(seen_QK: Tensor) -> Tensor:
    """Which keys all tokens of a text see whose last ones see these, and the others all before them, (K, K)."""
    queries, keys = seen_QK.shape
    check_free("the mask of all tokens takes", keys * keys, "save the keys that the queries see alone")
    whole_KK = torch.ones(keys, keys, dtype=torch.bool).tril()
    whole_KK[keys - queries :] = seen_QK
    return whole_KK


def mask_of_layer(
    layer: GivenLayer, name: str, keys: int, causal: bool, mask_of: Callable[[Tensor], LayerMask | None]
) -> LayerMask:
    """Which keys the queries of a layer see, from what is given with its q and k. InputError where one sees none.

    keys: of the text. causal: whether the stack is, where the layer does not say it. mask_of: the rule of a mask.
    """
    queries, positions_K = layer.q.shape[1], _positions(layer, name, keys)
    causal = causal if layer.causal is None else bool(layer.causal)
    if layer.mask is not None:
        return _mask_as_given(layer.mask, positions_K, name, keys, mask_of)
    if not causal and (layer.window or layer.chunk):
        word = "window" if layer.window else "chunk"
        raise InputError(f"{name}: a {word} is of a causal layer", f"give mask in place of {word}")
    visible = Visibility(queries, keys, causal=causal, window=layer.window)
    chunk = layer.chunk if layer.chunk is not None and layer.chunk < keys else None
    if causal and queries > keys:  # the first of them would see none
        _check_sees(visible.rows(0, queries)[0], name, keys)
    if chunk is None and positions_K is None:
        sight = Sight(None if layer.window is None else layer.window - 1, 0 if causal else None)
        return LayerMask(sight.words(keys), visible, sight)
    place_Q, place_K = torch.arange(keys - queries, keys), torch.arange(keys)
    seen_QK = visible.rows(0, queries)[0, 0]
    if chunk is not None:
        seen_QK = seen_QK & (place_Q[:, None] // chunk == place_K // chunk)
    if positions_K is None:
        return mask_of(seen_QK) or LayerMask(AS_GIVEN, as_listed(seen_QK))
    seen_QK = seen_QK & torch.isin(place_K, positions_K)
    _check_sees(seen_QK[None], name, keys)
    # A cache that holds the last keys alone is a window, for the one query after them.
    window = Visibility(queries, keys, window=len(positions_K))
    if torch.equal(window.rows(0, queries)[0, 0], seen_QK):
        sight = Sight(len(positions_K) - 1, 0)
        return LayerMask(sight.words(keys), window, sight)
    return LayerMask(AS_GIVEN, as_listed(seen_QK))


def _mask_as_given(
    mask: Tensor, positions_K: Tensor | None, name: str, keys: int, mask_of: Callable[[Tensor], LayerMask | None]
) -> LayerMask:
    """A layer's own mask over all keys of the text, boolean or additive, (Q, K) or (H or 1, Q, K)."""
    mask_HQK = mask if mask.ndim == 3 else mask[None]
    added = mask_HQK.is_floating_point()
    if added and bool((torch.isnan(mask_HQK) | (mask_HQK == torch.inf)).any()):
        raise InputError(f"{name}: mask has NaN or infinite numbers", "give -inf for a key that is hidden, else 0")
    if positions_K is not None:
        short_HQK, hidden = mask_HQK, float("-inf") if added else False
        check_free("the mask takes", 4 * short_HQK[..., 0].numel() * keys, "save fewer queries")
        mask_HQK = short_HQK.new_full((*short_HQK.shape[:2], keys), hidden)
        mask_HQK[..., positions_K] = short_HQK
    visible = Visibility(mask_HQK.shape[1], keys, mask_HQK[None])
    seen_HQK = visible.rows(0, visible.queries)[0]
    _check_sees(seen_HQK, name, keys)
    biased = added and bool((mask_HQK.masked_fill(~seen_HQK, 0) != 0).any())
    if bool((seen_HQK != seen_HQK[:1]).any()):
        return LayerMask(AS_GIVEN, visible if biased else replace(visible, mask=seen_HQK[None], _once={}))
    rule = mask_of(seen_HQK[0])
    if biased:
        return LayerMask(AS_GIVEN, visible) if rule is None else replace(rule, visible=visible)
    return rule or LayerMask(AS_GIVEN, as_listed(seen_HQK[0]))


def _positions(layer: GivenLayer, name: str, keys: int) -> Tensor | None:
    """The tokens that a layer's keys are of, None of all. Raises InputError for what are no places of a text."""
    if layer.key_positions is None:
        return None
    if layer.key_positions.is_floating_point() or layer.key_positions.dtype == torch.bool:
        raise InputError(f"{name}: expected key_positions as numbers of tokens", "save them as whole numbers")
    positions_K = layer.key_positions.long()
    if bool((positions_K.diff() <= 0).any()) or not 0 <= int(positions_K[0]) <= int(positions_K[-1]) < keys:
        raise InputError(f"{name}: expected key_positions from 0 to {keys - 1}, each once, in order", "correct them")
    return None if len(positions_K) == keys else positions_K


def _check_sees(seen_HQK: Tensor, name: str, keys: int) -> None:
    """Raise InputError where a query sees no key."""
    blind_Q = ~seen_HQK.any(-1).all(0)
    if (row := first_row(blind_Q)) is not None:
        query = keys - len(blind_Q) + row if len(blind_Q) <= keys else row
        raise InputError(f"{name}: the mask hides every key from query {query}", "correct it, or leave out its token")


def as_listed(seen_QK: Tensor, known: bool = True) -> Visibility:
    return Visibility(len(seen_QK), seen_QK.shape[1], seen_QK[None, None], known=known)


def first_row(wrong_Q: Tensor) -> int | None:
    """The first row that is wrong."""
    return int(wrong_Q.byte().argmax()) if bool(wrong_Q.any()) else None
