"""The mass between groups of tokens, as probes ask it of a layer. B text, H head, G group, T token."""

from __future__ import annotations

from torch import Tensor

from attnscope.attention.questions import GroupMass
from attnscope.attention.rows import indicator
from attnscope.measure.probes import Answers, Layer, View


def group_question(layer: Layer, query_groups_BT: Tensor, key_groups_BT: Tensor) -> GroupMass:
    """What a probe asks of a layer for the mass between groups, (B, T) numbers each, -1 for none."""
    return GroupMass(layer.here(query_groups_BT), layer.here(key_groups_BT))


def group_mass(layer: Layer, view: View, answers: Answers, query_groups_BT: Tensor, key_groups_BT: Tensor) -> Tensor:
    """(B, H, G, G): sum over the keys of a group, mean over its queries, so rows keep their sum."""
    mass_BHGG = answers[group_question(layer, query_groups_BT, key_groups_BT)]
    mass_BHGG = layer.per_kv_head(mass_BHGG) if view.by_kv else mass_BHGG
    size_BG = indicator(query_groups_BT.to(layer.P.device)).sum(1).clamp_min(1)
    return mass_BHGG[:, view.kept(layer)] / size_BG[:, None, :, None]
