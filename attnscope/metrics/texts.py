"""What metrics know of a batch of texts: token ids, which are text, and which queries and keys were named.

And the sides of a map: the tokens of a text put together, so that it can be drawn.

Shapes: B text, H head, Q query, K key, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from attnscope.attention.questions import Features, Question
from attnscope.model.selection import DECODER

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator
    from attnscope.attention.spec import Visibility


def _by_mask() -> Any:
    """What was found of each mask; layers that share one share it."""
    return field(default_factory=WeakKeyDictionary, compare=False, repr=False)


@dataclass(frozen=True)
class Texts:
    """What the metrics know of a batch of texts, as queries: token ids (B, T) and how many of them are text.

    query_BT, key_BT: True on the queries that metrics are means over, and on the keys that `mass` is of; None for all
    queries, and where no keys were named. answer_B: where the answer to a prompt begins, the length of a text that is
    none; None where no text is. stack: the stack that reads them; in cross-attention the keys are another text's.
    unasked: the first so many tokens are keys and no queries. virtual: so many come before no token of the text.
    asked: what each metric asks, once it was asked. counted, rows_of: the rows that count for metrics of a kind, and
    for some metrics together, by mask, once they were counted.
    """

    ids_BT: Tensor
    length_B: Tensor
    query_BT: Tensor | None = None
    key_BT: Tensor | None = None
    answer_B: Tensor | None = None
    stack: str = DECODER
    unasked: int = 0
    virtual: int = 0
    asked: dict[str, tuple[Question, ...]] = field(default_factory=dict, compare=False, repr=False)
    counted: WeakKeyDictionary[Visibility, dict[str, Tensor]] = _by_mask()
    rows_of: WeakKeyDictionary[Visibility, dict[tuple[str, ...], tuple[Tensor, Tensor]]] = _by_mask()
    _seen: WeakKeyDictionary[Visibility, dict[Features, Tensor]] = _by_mask()

    @cached_property
    def position_T(self) -> Tensor:
        import torch

        return torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device)

    @cached_property
    def real_BT(self) -> Tensor:
        """True where a token is text, not right padding."""
        return self.position_T < self.length_B[:, None]

    @cached_property
    def asked_BT(self) -> Tensor:
        """True where a token of the text has a query and, where queries were named, is one of them."""
        has_BT = self.real_BT & self.has_query_T if self.unasked else self.real_BT
        return has_BT if self.query_BT is None else has_BT & self.query_BT

    @cached_property
    def has_query_T(self) -> Tensor:
        return self.position_T >= self.unasked

    @cached_property
    def mean_BT(self) -> Tensor:
        """What makes a sum over queries the mean over those that are asked: 1 / how many, 0 for the others."""
        return self.asked_BT / self.asked_BT.sum(1, keepdim=True)

    @cached_property
    def keys(self) -> Features:
        """The question for the mass on the named keys, (B, H, Q, 1)."""
        assert self.key_BT is not None
        return Features(self.key_BT[..., None].float(), of_size=True)

    def shares(self, visible: Visibility, features: Features) -> Tensor:
        """What uniform attention gives to features, (B, H or 1, Q, M); layers that share a mask share it."""
        from attnscope.attention.operator import UniformAttention

        shares = self._seen.setdefault(visible, {})
        if features not in shares:
            shares[features] = UniformAttention(visible).ask(features)
        return shares[features]

    @cached_property
    def parts(self) -> Features:
        """The question for the mass on the prompt, on the prompt without key 0, and on the answer, (B, H, Q, 3)."""
        import torch

        assert self.answer_B is not None
        prompt_BT = self.position_T < self.answer_B[:, None]
        return Features(torch.stack([prompt_BT, prompt_BT & (self.position_T > 0), ~prompt_BT], -1).float())

    def answering(self, P: AttentionOperator, part: int) -> Tensor:
        """(B, H or 1, Q): True where a token of the answer made the next one, and saw a part of the prompt."""
        assert self.answer_B is not None
        made_BT = (self.position_T >= self.answer_B[:, None]) & (self.position_T < self.length_B[:, None] - 1)
        return made_BT[:, None] & (self.shares(P.visible, self.parts)[..., part].to(P.device) > 0)

    @cached_property
    def first_BT(self) -> Tensor:
        """Where in its text each position's token first occurs."""
        import torch

        order_BT = torch.argsort(self.ids_BT, dim=1, stable=True)
        sorted_BT = self.ids_BT.gather(1, order_BT)
        place_BT = torch.arange(sorted_BT.shape[1], device=sorted_BT.device).repeat(len(sorted_BT), 1)
        place_BT[:, 1:].masked_fill_(sorted_BT[:, 1:] == sorted_BT[:, :-1], 0)
        first_BT = order_BT.gather(1, place_BT.cummax(1).values)  # of a run of equal tokens the first
        return torch.zeros_like(order_BT).scatter(1, order_BT, first_BT)

    def repeated(self, back: int) -> Tensor:
        """(B, T): True where an equal token is at least `back` tokens earlier in the text."""
        return (self.first_BT <= self.position_T - back) & self.real_BT

    @cached_property
    def previous_BT(self) -> Tensor:
        """The id of the token before each position; -1 before the first of the text."""
        import torch

        return torch.nn.functional.pad(self.ids_BT[:, self.virtual : -1], (self.virtual + 1, 0), value=-1)

    def to(self, device: torch.device) -> Texts:
        """The same texts on another device."""
        if self.ids_BT.device == device:
            return self
        optional = (self.query_BT, self.key_BT, self.answer_B)
        query_BT, key_BT, answer_B = (None if part is None else part.to(device) for part in optional)
        ids_BT, length_B = self.ids_BT.to(device), self.length_B.to(device)
        return Texts(ids_BT, length_B, query_BT, key_BT, answer_B, self.stack, self.unasked, self.virtual)


MAP_SIDE = 200  # the most rows and columns of a drawn map; longer texts are binned


class Cells(NamedTuple):
    """One side of a map: its tokens in their order, and how many of them each row (or column) holds.

    size: how many a whole one holds.
    """

    tokens: Sequence[int]
    sizes: Sequence[int]
    size: int

    @classmethod
    def of(cls, tokens: Sequence[int], side: int, split_key0: bool = False) -> Cells:
        """At most `side` of one size, but for the last; split_key0: token 0 has one more, of its own."""
        size = max(1, -(-len(tokens) // side))
        sizes = [min(size, len(tokens) - start) for start in range(0, len(tokens), size)]
        if split_key0 and tokens[0] == 0 and sizes[0] > 1:
            sizes[:1] = [1, sizes[0] - 1]
        return cls(tokens, sizes, size)

    @property
    def starts(self) -> list[int]:
        """The first token of each."""
        return [self.tokens[place] for place in accumulate(self.sizes[:-1], initial=0)]

    def coarser(self, side: int, key0_apart: bool = False) -> tuple[np.ndarray, Cells]:
        """At most about `side` of them, neighbours put together: where each begins among these, and what it is.

        key0_apart: token 0 stays, or gets, one of its own.
        """
        import numpy as np

        apart = key0_apart and self.tokens[0] == 0
        own = int(apart and self.size > 1 and self.sizes[0] == 1)
        step = max(1, -(-(len(self.sizes) - own) // side))
        if step == 1:
            return np.arange(len(self.sizes)), self
        starts = np.arange(0, len(self.sizes) - own, step) + own  # where rows begin, that is: the axes stay in step
        starts = np.concatenate([[0], np.maximum(starts, 1)]) if apart else starts
        return starts, Cells(self.tokens, np.add.reduceat(self.sizes, starts).tolist(), self.size * step)

    def groups(self, count: int) -> Tensor:
        """The number of the row or column that each of so many tokens is in, -1 for none."""
        import torch

        groups_T = torch.full((count,), -1)
        groups_T[torch.tensor(self.tokens)] = torch.repeat_interleave(
            torch.arange(len(self.sizes)), torch.tensor(self.sizes)
        )
        return groups_T
