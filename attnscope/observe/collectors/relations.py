"""The strongest keys that are kept of every query, or of those that are asked about.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, G group of tokens, k kept keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

import torch
from torch import Tensor

from attnscope.attention.questions import Question, Strongest, TopK
from attnscope.attention.rows import inside, join, strongest
from attnscope.observe.collector import Answers, Collector, group_mass, group_question, groups_of
from attnscope.observe.layers import Layer, View
from attnscope.observe.records import KeptKeys
from attnscope.observe.request import Request, TextInputs, nothing_named


@dataclass(frozen=True)
class TopKeys(Collector):
    """The k strongest keys of every query of every kept head (None: all visible keys), strongest first.

    With groups (the group of each token, -1 for none, of the queries (B, Q) and of the keys (B, K)), queries and keys
    are groups: sum over the keys of a group, mean over its queries.
    """

    k: int | None
    view: View = View()
    groups: tuple[Tensor, Tensor] | None = None

    name = "relations"

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> TopKeys:
        """The strongest keys of all queries, or of those that are asked about; none where no text has what is named."""
        view = replace(request.view, heads={}) if nothing_named(texts) else request.view
        groups = None
        if request.group:
            of_queries = groups_of([text.prompt for text in texts], request.group)
            others = texts[0].keys is not None
            groups = of_queries, groups_of([text.looked_at for text in texts], request.group) if others else of_queries
        if not any(text.chosen.query or text.chosen.key or text.prompt.medium.unasked for text in texts):
            return TopKeys(request.top_k, view, groups)

        def units(places: Sequence[int], text: int, side: int) -> Sequence[int]:
            """Tokens, or the groups that they are in."""
            return places if groups is None else tuple(groups[side][text, list(places)].unique().tolist())

        query = tuple(units(text.queries, row, 0) for row, text in enumerate(texts))
        key = tuple(units(text.key_positions, row, 1) for row, text in enumerate(texts))
        return ChosenKeys(request.top_k, view, groups, query, key)

    def questions(self, layer: Layer) -> Sequence[Question]:
        if not self.view.kept(layer):
            return []
        if self.groups is not None:
            return [group_question(layer, *self._groups)]
        return [self._question(layer)] if self.view.of_heads else []

    def collect(self, layer: Layer, answers: Answers) -> list[KeptKeys] | None:
        heads = self.view.kept(layer)
        return self._kept(layer, answers, heads) if heads else None

    def of_text(self, collected: Sequence[KeptKeys], row: int, text: TextInputs) -> KeptKeys:
        return collected[row]

    def _kept(self, layer: Layer, answers: Answers, heads: list[int]) -> list[KeptKeys]:
        if self.groups is not None:
            mass_BHGG = group_mass(layer, self.view, answers, *self._groups)
            weight, key = _top(mass_BHGG.masked_fill(mass_BHGG == 0, -torch.inf), self.k)
        else:
            weight, key = answers[self._question(layer)] if self.view.of_heads else self._of_blocks(layer, heads)
        every = range(weight.shape[2])
        return [KeptKeys(heads, *pair, every) for pair in zip(weight, key.int(), strict=True)]

    @property
    def _groups(self) -> tuple[Tensor, Tensor]:
        assert self.groups is not None
        return self.groups

    def _question(self, layer: Layer) -> Question:
        heads = self.view.kept(layer)
        every = heads == list(range(layer.P.heads))
        return TopK(min(self.k or layer.P.keys, layer.P.keys), None if every else tuple(heads))

    def _of_blocks(self, layer: Layer, heads: list[int]) -> tuple[Tensor, Tensor]:
        parts = []
        for a, b in layer.P.blocks():
            seen = self.view.seen(layer, heads, layer.P.visible.rows(a, b)).to(layer.P.device)
            parts.append(_top(self.view.rows(layer, heads, a, b).masked_fill(~seen, -torch.inf), self.k))
        return torch.cat([weight for weight, _ in parts], 2), torch.cat([key for _, key in parts], 2)


@dataclass(frozen=True)
class ChosenKeys(TopKeys):
    """The k strongest of chosen keys (None: all) of every chosen query, else as `TopKeys`.

    query, key: which, per text, ascending: positions, or with groups the numbers of groups.
    """

    query: tuple[Sequence[int], ...] = ()
    key: tuple[Sequence[int], ...] = ()

    def _kept(self, layer: Layer, answers: Answers, heads: list[int]) -> list[KeptKeys]:
        if self.groups is not None:
            found = self._of_groups(layer, answers)
        else:
            found = answers[self._question(layer)] if self.view.of_heads else self._from_rows(layer, heads)
        kept = zip(self.query, found, strict=True)
        return [KeptKeys(heads, weight, key, query) for query, (weight, key) in kept]

    def _question(self, layer: Layer) -> Strongest:
        return self._strongest(layer, self.view.kept(layer))

    def _strongest(self, layer: Layer, heads: Sequence[int]) -> Strongest:
        return Strongest(self.k or layer.P.keys, tuple(heads), self.query, self.key)

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        """The number of each token's group among the chosen ones, as query and as key, (B, T) each; -1 for none."""
        assert self.groups is not None
        return _renumbered(self.groups[0], self.query), _renumbered(self.groups[1], self.key)

    def _of_groups(self, layer: Layer, answers: Answers) -> list[tuple[Tensor, Tensor]]:
        mass_BHGG = group_mass(layer, self.view, answers, *self._groups)
        found = []
        for mass_HGG, query, key in zip(mass_BHGG, self.query, self.key, strict=True):
            mine = mass_HGG[:, : len(query), : len(key)]
            weight, place = _top(mine.masked_fill(mine == 0, -torch.inf), self.k)
            found.append((weight, torch.tensor(key, device=place.device)[place]))
        return found

    def _from_rows(self, layer: Layer, heads: list[int]) -> list[tuple[Tensor, Tensor]]:
        question, P = self._strongest(layer, range(len(heads))), layer.P
        parts = []
        for a, b in self._runs(P.blocks()):
            seen = self.view.seen(layer, heads, P.visible.rows(a, b)).to(P.device)
            entries = self.view.rows(layer, heads, a, b)
            found = strongest(question, entries.abs() if self.view.by_size else entries, seen, a)
            parts.append(self._signed(found, entries, a) if self.view.by_size else found)
        return join(question, parts)

    def _signed(self, found: list[tuple[Tensor, Tensor]], entries: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Entries that were found by their size, with their sign; entries: a block of rows from `start` on."""
        signed = []
        for text, (size, key) in enumerate(found):
            here = self.query[text][inside(self.query[text], start, start + entries.shape[2])]
            own = entries[text][:, [row - start for row in here]].gather(-1, key.long())
            signed.append((own.masked_fill(size.isnan(), torch.nan), key))
        return signed

    def _runs(self, blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The chosen queries of all texts as ranges of rows, none longer than a block."""
        chosen = sorted({*chain.from_iterable(self.query)})
        for start, stop in blocks:
            for _, run in groupby(enumerate(chosen[inside(chosen, start, stop)]), lambda pair: pair[1] - pair[0]):
                _, rows = zip(*run, strict=True)
                yield rows[0], rows[-1] + 1


def _renumbered(groups_BT: Tensor, chosen: Sequence[Sequence[int]]) -> Tensor:
    """The place of each token's group among the chosen ones of its text, (B, T); -1 for none."""
    places = []
    for groups_T, wanted in zip(groups_BT, chosen, strict=True):
        place = torch.full((len(groups_T) + 1,), -1)  # the last: of tokens in no group
        place[list(wanted)] = torch.arange(len(wanted))
        places.append(place[groups_T])
    return torch.stack(places)


def _top(entries: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """The k largest entries of every row and their positions; NaN for what is -inf."""
    best = entries.topk(min(k or entries.shape[-1], entries.shape[-1]), dim=-1)
    return best.values.masked_fill(torch.isneginf(best.values), torch.nan), best.indices
