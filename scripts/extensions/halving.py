"""Heads whose output is halved. Shapes: B text, T token, H head, V width of v."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnscope.hooks.calls import CallSite
from attnscope.hooks.engines import Change
from attnscope.interventions.base import Intervention, replacing
from attnscope.interventions.spec import HeadSet


class Halving(Intervention):
    """A head's output, before the output projection, is halved."""

    name = "halved"

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        return replacing(sets, lengths, halved)


def halved(site: CallSite, output_BTHV: Tensor, lengths: Sequence[int]) -> Tensor:
    """Half of what the head gave."""
    return output_BTHV / 2
