"""Copying, the second property of an induction head: it raises the logit of the token that it looks at.

Olsson et al. 2022, arXiv 2209.11895.

Long-range copying: the head finds what is hidden in a long text, and the model says the token that it looks at. Counted
as the code of Wu et al. 2024, arXiv 2404.15574 counts (retrieval_head_detection.py): steps of greedy decoding, where
the paper intersects sets of tokens; runs in which the model did not find the needle do not count. No retrieval head is
claimed: they ask a question about natural text, and here the key is repeated among random tokens, which an induction
head answers as well.

Shapes: S sequence, T token, B text of a pass, R asked row, H head, Q query, V width of v, or value of the needle,
E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.attention.questions import Question, TopK
from attnscope.errors import ModelError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.generation import greedy
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import Norm, ProjectionInputs, plain_and_gated, projection
from attnscope.model.loaded import as_input
from attnscope.model.selection import GATED_AFTER
from attnscope.observe.collectors import Answers
from attnscope.observe.logit_path import norms_after_attention
from attnscope.observe.request import Layer

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.model.loaded import LoadedModel

RAISED = 5  # logits that count as raised most


@dataclass(frozen=True)
class CalledLayer(Layer):
    """A layer with the call that it was heard in.

    gated_BRC: of heads behind a gate, what their projection is given in the rows that are asked; C: all heads' numbers.
    """

    call: AttentionCall
    gated_BRC: Tensor | None = None

    @property
    def output_BQHV(self) -> Tensor | None:
        """What its heads give, before the output projection; None where the family does not show it."""
        if self.call.output_BQHV is not None or self.call.spec is None:
            return self.call.output_BQHV
        return self.call.P.output() if hasattr(self.call.P, "output") else None


@dataclass(frozen=True)
class Copying:
    """The share of asked rows whose strongest key's token is among the RAISED logits that z W_O W_U raises most.

    unembed: the vocabulary projection W_U. out: the output projection of each attention module. row_R: the rows. gated:
    the attention modules with a gate between heads and projection, which is frozen. after: the norm that takes what an
    attention module gives, where there is one, with a frozen scale: z W_O means what it makes of that.
    """

    unembed: nn.Module
    out: Mapping[nn.Module, nn.Module]
    row_R: Tensor | None = None
    gated: frozenset[nn.Module] = frozenset()
    after: Mapping[nn.Module, Norm] = field(default_factory=dict)

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [TopK(1)]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        assert isinstance(layer, CalledLayer)
        attention, output_BQHV = layer.call.module, layer.output_BQHV
        out = self.out.get(attention)
        if out is None or output_BQHV is None or self.row_R is None:
            return torch.full((layer.P.batch, layer.P.heads), torch.nan, dtype=torch.float64)
        row_R = self.row_R.to(output_BQHV.device)
        key_BHR = answers[TopK(1)][1][..., 0][..., row_R]
        ids_BT = layer.texts.ids_BT
        token_BHR = ids_BT[:, None].expand(-1, layer.P.heads, -1).gather(-1, key_BHR)
        z_BRHV = output_BQHV[:, row_R]
        if layer.gated_BRC is not None:
            z_BRHV = layer.gated_BRC.reshape(z_BRHV.shape)
        W_O_HVE, norm = projection(out, layer.P.heads, output_BQHV), self.after.get(attention)
        if norm is not None:  # its scale is one factor of a row's logits, which changes no rank
            W_O_HVE = norm.straight(W_O_HVE.float()).to(W_O_HVE.dtype)
        shares = [self._raised(z_BRHV[:, :, head] @ W_O_HVE[head], token_BHR[:, head]) for head in range(layer.P.heads)]
        return torch.stack(shares, 1).cpu()

    def behind_gates(self, loaded: LoadedModel, ids_BT: Tensor) -> dict[nn.Module, Tensor]:
        """(B, R, C) by attention module: what projections behind gates are given, in a pass of its own."""
        gated: dict[nn.Module, Tensor] = {}
        inputs = ProjectionInputs({attention: self.out[attention] for attention in self.gated})

        def on_call(call: AttentionCall) -> None:
            def keep(given: Tensor) -> None:
                gated[call.module] = given.reshape(*ids_BT.shape, -1)[:, self.row_R]

            if call.module in self.gated:
                inputs.on_next(call.module, keep)

        if self.gated:
            with inputs.watched():
                listen(loaded.model, ids_BT, on_call, engine=UNCHECKED)
        return gated

    def _raised(self, written_BRE: Tensor, token_BR: Tensor) -> Tensor:
        """(B,): the share of rows; what all logits have in common, mean or bias of the projection, raises none."""
        with torch.no_grad():
            logits = self.unembed(as_input(written_BRE, self.unembed))
            bias = getattr(self.unembed, "bias", None)
            top_BRk = (logits if bias is None else logits - bias).topk(RAISED).indices
        return (top_BRk == token_BR.to(top_BRk.device)[..., None]).any(-1).double().mean(-1)


def copying_of(loaded: LoadedModel, ids: Sequence[int]) -> Copying | str:
    """What asks a model's heads whether they copy; or why they cannot be asked. ids: some tokens to find W_O with."""
    unembed = loaded.model.get_output_embeddings()
    if unembed is None:
        return "the model has no vocabulary projection"
    if not loaded.geometry.heads_by_layer:
        return f"linear heads have none: {GATED_AFTER}"
    plain, gated = plain_and_gated(loaded, ids, len(loaded.geometry.heads_by_layer))
    if not plain and not gated:
        return "no projection takes the heads side by side, as they come or gated"
    return Copying(unembed, gated | plain, gated=frozenset(gated), after=norms_after_attention(loaded, ids))


VALUES = 8  # tokens of the needle behind its key, and tokens that the model makes
DEPTHS = (0.1, 0.5, 0.9)
SHORTEST = 64  # tokens of a run, with those that are made
RECALLED = 0.5  # a run with no more of the needle does not count


def lengths(count: int, room: int) -> dict[int, int]:
    """How many runs have so many tokens: `count` short ones, then half as many of twice the length, up to `room`.

    >>> lengths(64, 512)
    {64: 64, 128: 32, 256: 16, 512: 8}
    """
    runs, length = {}, SHORTEST
    while length <= room and count:
        runs[length] = count
        length, count = 2 * length, count // 2
    return runs


def needles(
    pool: Sequence[int], begin: Sequence[int], length_S: Sequence[int], generator: np.random.Generator
) -> np.ndarray:
    """(S, T): a haystack with a key and its values at one depth after the other, and the key once more.

    Other tokens of the pool make the haystack, distinct as far as they go. -1 pads a shorter sequence.
    """
    ids_ST, ordinary = np.full((len(length_S), max(length_S) - VALUES), -1, np.int64), np.setdiff1d(pool, begin)
    for place, length in enumerate(length_S):
        room = length - len(begin) - 2 * (VALUES + 1)
        drawn = generator.choice(ordinary, min(VALUES + 1 + room, len(ordinary)), replace=False)
        needle, hay = np.split(drawn, [VALUES + 1])
        hay = hay if len(hay) == room else generator.choice(hay, room)
        hidden = np.insert(hay, round(DEPTHS[place % len(DEPTHS)] * room), needle)
        ids_ST[place, : length - VALUES] = np.concatenate([begin, hidden, needle[:1]])
    return ids_ST


class FoundNeedles(NamedTuple):
    """Of completed texts: where the needle's values are (B, V), the tokens made (B, V), how many values they say."""

    value_BV: Tensor
    made_BV: Tensor
    recall_B: Tensor


def find_needles(ids_BT: Tensor) -> FoundNeedles:
    """Where the last token of the prompt occurs first, its needle begins: no other token is as it."""
    key_B1 = ids_BT[:, -VALUES - 1, None]
    value_BV = (ids_BT == key_B1).int().argmax(-1, keepdim=True) + torch.arange(1, VALUES + 1, device=ids_BT.device)
    made_BV = ids_BT[:, -VALUES:]
    recalled_BV = (ids_BT.gather(-1, value_BV)[..., None] == made_BV[:, None]).any(-1)
    return FoundNeedles(value_BV, made_BV, recalled_BV.double().mean(-1))


@dataclass(frozen=True)
class LongRangeCopying:
    """The share of decoding steps whose strongest key is a value of the needle and the token that was made.

    NaN where the model did not find the needle, and for heads whose mask hides it. moved: the same of as many keys a
    third of the prompt away.
    """

    moved: bool = False

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [TopK(1)]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        ids_BT = layer.texts.ids_BT
        tokens, needle = ids_BT.shape[1], find_needles(ids_BT)
        row_V = torch.arange(tokens - VALUES - 1, tokens - 1, device=ids_BT.device)
        key_BHV = answers[TopK(1)][1][..., 0][..., row_V]
        token_BHV = ids_BT[:, None].expand(-1, layer.P.heads, -1).gather(-1, key_BHV)
        start_B11 = needle.value_BV[:, None, :1]
        if self.moved:
            prompt = tokens - VALUES
            fits = start_B11 + prompt // 3 + VALUES < prompt
            start_B11 = start_B11 + torch.where(fits, prompt // 3, -(prompt // 3))
        inside_BHV = (key_BHV >= start_B11) & (key_BHV < start_B11 + VALUES)
        share_BH = (inside_BHV & (token_BHV == needle.made_BV[:, None])).double().mean(-1)
        # A head counts where each of its steps may look at the value that is its turn.
        key_BQ, visible = torch.full_like(ids_BT, -1), layer.P.visible
        key_BQ[:, row_V] = needle.value_BV
        sees_BH = visible.at(key_BQ.to(visible.position_Q.device))[..., row_V].all(-1).to(ids_BT.device)
        counts_BH = (needle.recall_B > RECALLED)[:, None] & sees_BH
        return share_BH.masked_fill(~counts_BH, torch.nan).cpu()


@dataclass(frozen=True)
class Recall:
    """The share of the needle's values among the tokens made, ROUGE-1 recall: the same for every head."""

    def questions(self, layer: Layer) -> Sequence[Question]:
        return []

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        return find_needles(layer.texts.ids_BT).recall_B[:, None].expand(-1, layer.P.heads).cpu()


def recalled(ids_ST: np.ndarray, recall_S: np.ndarray) -> dict[str, Any]:
    """What atlas.json says of the runs: how many there were and counted, and the mean recall by their length."""
    length_S = (ids_ST >= 0).sum(1) + VALUES
    by_length = {str(length): float(recall_S[length_S == length].mean()) for length in np.unique(length_S)}
    return {"runs": len(recall_S), "counted": int((recall_S > RECALLED).sum()), "recall": by_length}


def complete(loaded: LoadedModel, ids_BT: np.ndarray, count: int) -> np.ndarray:
    """The texts with so many more tokens, each the likeliest; (B, T) -> (B, T + count)."""
    return np.asarray(greedy(loaded, torch.tensor(ids_BT, device=loaded.device), count, settings=False).cpu())


def unable(loaded: LoadedModel, ids: Sequence[int]) -> str:
    """Why a model cannot complete texts; empty where it can. ids: some tokens to try it with."""
    longest = loaded.geometry.max_positions
    if longest is not None and longest < SHORTEST:
        return f"the model reads {longest} tokens, and {SHORTEST} are needed"
    if loaded.model.get_output_embeddings() is None:
        return "the model makes no tokens"
    try:
        complete(loaded, np.array([list(ids)]), 2)
    except ModelError as error:
        return error.message
    return ""
