"""Logits taken apart on their way into the page: what each component gives to every key of some heads and queries.

WhySide(seen, why_of(loaded, ids, {3: (0,)}, range(11), Plan()))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError
from attnscope.study.why.keys import key_parts
from attnscope.study.why.parts import check_model
from attnscope.study.why.records import KeyParts
from attnscope.viewer.pack import Blobs, joined_arrays
from attnscope.viewer.side import Side, Wanted

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.observation import Observation
    from attnscope.selection import HeadsByLayer
    from attnscope.study.why.records import Component
    from attnscope.viewer.plan import Plan

REST = 3  # components that are no heads or blocks: embedding, bias, position


class WhySide(Side):
    """A side with logits that were taken apart."""

    def __init__(self, seen: Observation, why: Sequence[KeyParts]) -> None:
        super().__init__(seen)
        self.why = why

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """As that of a side."""
        side = super().packed(blobs, wanted)
        return {**side, "why": packed_why(blobs, self.why, {key.layer: at for key, at in self.at.items()})}


def why_of(
    loaded: LoadedModel, ids: Sequence[int], heads: HeadsByLayer, queries: Sequence[int], plan: Plan
) -> list[KeyParts]:
    """The logits of some heads and queries.

    Raises UsageError where they have no room in the page, and as `parts_of`.
    """
    check_model(loaded)
    _check_room(loaded.geometry.heads_by_layer, heads, len(queries), len(ids), plan)
    return [
        one
        for layer, of_layer in heads.items()
        for one in key_parts(loaded, ids, layer, dict.fromkeys(of_layer, queries))
    ]


def _check_room(heads_by_layer: Mapping[int, int], chosen: HeadsByLayer, queries: int, tokens: int, plan: Plan) -> None:
    components = sum(
        len(heads) * (REST + sum(1 + of_layer for other, of_layer in heads_by_layer.items() if other < layer))
        for layer, heads in chosen.items()
    )
    needed, room = plan.why_bytes(components, queries, tokens), plan.why_room
    if needed > room:
        raise UsageError(
            f"the logits of {sum(map(len, chosen.values()))} heads and {queries} queries take {needed / 1e6:.2g} MB, "
            f"expected at most {room / 1e6:.2g} MB of this page",
            "name fewer heads in {why}, or queries with {query}, or take more room with {max_mb}",
        )


def packed_why(blobs: Blobs, found: Sequence[KeyParts], at: Mapping[int, int]) -> list[dict[str, Any]]:
    """As the page's JSON has it; at: the place of each layer. The numbers are float32: parts_CQK, then logit_QK."""
    return [
        {
            "at": at[one.layer],
            "head": one.head,
            "queries": list(one.queries),
            "components": [_said(component, at) for component in one.components],
            "cap": one.softcap,
            "sinks": one.sinks,
            **blobs.add(joined_arrays([one.parts_CQK, one.logit_QK]))[0],
        }
        for one in found
    ]


def _said(component: Component, at: Mapping[int, int]) -> dict[str, Any]:
    if component.layer is None or component.head is None or component.layer not in at:
        return {"name": component.name}
    return {"name": component.name, "at": at[component.layer], "head": component.head}
