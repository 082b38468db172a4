"""Groups of tokens: the named, the units of a text, and the mass between them. B text, H head, G group, T token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnscope.attention.questions import GroupMass
from attnscope.attention.rows import indicator
from attnscope.inputs.prompt import Prompt, Span
from attnscope.inputs.tokens import TokenMatch as Found
from attnscope.keep.collector import Answers
from attnscope.keep.layers import Layer
from attnscope.keep.view import View
from attnscope.metrics.binned import MAP_SIDE


def group_question(layer: Layer, query_groups_BT: Tensor, key_groups_BT: Tensor) -> GroupMass:
    """What a probe asks of a layer for the mass between groups, (B, T) numbers each, -1 for none."""
    sizes = int(query_groups_BT.max()) + 1, int(key_groups_BT.max()) + 1  # counted where they are: on the host
    return GroupMass(layer.here(query_groups_BT), layer.here(key_groups_BT), sizes)


def group_mass(layer: Layer, view: View, answers: Answers, query_groups_BT: Tensor, key_groups_BT: Tensor) -> Tensor:
    """(B, H, G, G): sum over the keys of a group, mean over its queries, so rows keep their sum."""
    asked = group_question(layer, query_groups_BT, key_groups_BT)
    mass_BHGG = answers[asked]
    mass_BHGG = layer.per_kv_head(mass_BHGG) if view.by_kv else mass_BHGG
    size_BG = indicator(asked.query_group_BQ, asked.counts[0]).sum(1).clamp_min(1)
    return mass_BHGG[:, view.kept(layer)] / size_BG[:, None, :, None]


def bins(prompt: Prompt, most: int = MAP_SIDE) -> list[Span]:
    """The text cut into at most `most` runs of as many tokens each; single tokens where that is enough.

    >>> [unit.name for unit in bins(prompt, 3)]
    ['<s> the', ' bank is', ' wide']
    """
    size = -(-len(prompt) // most)
    return [
        Span(start, min(len(prompt), start + size), "".join(prompt.tokens[start : start + size]))
        for start in range(0, len(prompt), size)
    ]


def units_of(prompt: Prompt, group: str) -> Sequence[Span]:
    """The units of a prompt: its tokens, words or sentences, or `bins` of tokens."""
    if group in ("bins", "tokens"):
        return bins(prompt) if group == "bins" else bins(prompt, len(prompt))
    return prompt.spans(group)


def groups_of(prompts: Sequence[Prompt], group: str) -> Tensor:
    """The number of each token's group, (B, T); -1 for padding."""
    groups_BT = torch.full((len(prompts), max(len(prompt) for prompt in prompts)), -1)
    for row, prompt in enumerate(prompts):
        for number, unit in enumerate(units_of(prompt, group)):
            groups_BT[row, unit.start : unit.stop] = number
    return groups_BT


def marked(found: Sequence[Found | None], longest: int, default: bool) -> Tensor | None:
    """True on each text's named tokens, (B, T); `default` in a text that names none, None where none does."""
    if not any(found):
        return None
    marked_BT = torch.full((len(found), longest), default)
    for row, one in enumerate(found):
        if one is not None:
            marked_BT[row] = False
            marked_BT[row, list(one.positions)] = True
    return marked_BT
