"""Attention answered by a compiled sweep: every question of the closed set from one reading of each tile.

What the sweep does not know (how many keys hold a row, the strongest of chosen keys) is left to the tiles.

Shapes: B text, H head, G kv head, Q query, K key, D width of q and k, V width of v, C columns that P is multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnscope.attention.compiled.asked import SweepQuestions
from attnscope.attention.compiled.object_code import installed
from attnscope.attention.compiled.sweeping import Sweeping
from attnscope.attention.questions import Question
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled.operator import TiledAttention

PAYS = 2**22  # scores of a call: below, loading the kernel takes longer than some layers save


class CompiledAttention(TiledAttention):
    """The tiles' operator, with the kernel asked first."""

    kernel = "numba"

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        if self.spec.device.type != "cpu":
            return {}
        asked = SweepQuestions.of(questions, self.spec)
        wants_output = self.with_output and self._output is None
        if not (asked.known or wants_output):
            return {}
        answers = Sweeping(self.spec, asked, wants_output).run()
        if answers.output_BQHV is not None:
            self._output = answers.output_BQHV.to(self.spec.q_BHQD.dtype)
        return answers.answers()


def usable(spec: AttentionSpec) -> bool:
    """Whether the kernel reads such a call, and saves more than loading it takes."""
    scores = spec.batch * spec.heads * spec.visible.queries * spec.visible.keys
    return spec.device.type == "cpu" and scores >= PAYS and installed()
