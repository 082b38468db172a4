"""A call's attention, answered by the Triton kernels as far as they know the questions and have proven themselves.

Shapes: B text, H head, Q query, V width of v.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.attention.questions import Question
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled.operator import TiledAttention
from attnscope.attention.triton_kernel import driver
from attnscope.utils.memory import is_out_of_memory

if TYPE_CHECKING:
    from attnscope.attention.triton_kernel.sweep import Sweep

DTYPES = (torch.float16, torch.bfloat16)  # in float32 every form of the kernels spills: left to the tiles on a card
WIDEST = 256  # of q, k and v: more does not fit a program's registers
LEAST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores


class TritonAttention(TiledAttention):
    """Attention that answers questions by one walk over the keys on the device; the tiles answer what is left.

    Where a kernel did not compile, or differed from the tiles at its first use, `answered_by` says why they answered.
    """

    kernel = "triton"

    def __init__(self, spec: AttentionSpec, with_output: bool = False) -> None:
        super().__init__(spec, with_output)
        self._refused: dict[str, str] = {}

    @property
    def finds_largest(self) -> bool:  # type: ignore[override]
        return usable(self.spec)

    @cached_property
    def _sweep(self) -> Sweep:
        from attnscope.attention.triton_kernel.sweep import Sweep

        return Sweep(self.spec)

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        """What the kernels answer of these, and the output where it is wanted; nothing where they cannot run."""
        if not usable(self.spec):
            return {}
        from attnscope.attention.triton_kernel import proof

        if why := "" if _interpreted() else driver.missing():
            self._refused = proof.unbuilt(questions, why)
            return {}
        parts: list[Question | None] = [question for question in questions if self._sweep.knows(question)]
        parts += [None] if self.with_output and self._output is None else []  # the output
        try:
            self._refused |= proof.refused(self.spec, parts)
            proven = [question for question in parts if proof.kind(question) not in self._refused]
            output, answers = self._of_output(proven), self._sweep.answers(list(filter(None, proven)))
        except Exception as error:  # the tiles' own way with memory, or with anything else, is the better one
            if not is_out_of_memory(error):
                self._refused |= proof.refuse(self.spec, parts, proof.said(error))
            return {}
        self._output = self._output if output is None else output
        return answers

    def _of_output(self, proven: Sequence[Question | None]) -> Tensor | None:
        return self._sweep.output() if None in proven else None

    def _noted(self, answers: dict[Question, Any], who: str) -> dict[Question, Any]:
        super()._noted(answers, who)
        for kind in self.answered_by.keys() & self._refused.keys():
            self.answered_by[kind] = f"tiles: {self._refused[kind]}"
        return answers


def usable(spec: AttentionSpec) -> bool:
    """Whether the kernels may answer a call: triton is there, the device can, and shapes and dtype are among theirs."""
    q, k, v = spec.q_BHQD, spec.k_BGKD, spec.v_BGKV
    dtypes = (*DTYPES, torch.float32) if _interpreted() else DTYPES
    fits = q.dtype in dtypes and q.dtype == k.dtype == v.dtype and max(q.shape[-1], v.shape[-1]) <= WIDEST
    some = min(q.numel(), k.numel()) > 0 and spec.scale > 0
    return fits and some and device_can(spec.device)


@cache
def device_can(device: torch.device) -> bool:
    """CUDA from Ampere on; a CPU where Triton is set to interpret."""
    if find_spec("triton") is None:
        return False
    if _interpreted():
        return device.type == "cpu"
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _interpreted() -> bool:
    """Whether Triton is set to run kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
