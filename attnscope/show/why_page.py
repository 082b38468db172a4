"""Logits taken apart on their way into the page: what each component gives to every key of some heads and queries.

WhySide(seen, why).packed(blobs, Wanted())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.studies.attribution_records import KeyParts
from attnscope.viewer.pack import Blobs, joined_arrays
from attnscope.viewer.side import Side, Wanted

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation
    from attnscope.studies.attribution_records import Component


class WhySide(Side):
    """A side with logits that were taken apart."""

    def __init__(self, seen: Observation, why: Sequence[KeyParts]) -> None:
        super().__init__(seen)
        self.why = why

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """As that of a side."""
        side = super().packed(blobs, wanted)
        return {**side, "why": packed_why(blobs, self.why, {key.layer: at for key, at in self.at.items()})}


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
