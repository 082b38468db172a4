"""A call's attention, answered by the Triton kernels as far as they know the questions and have proven themselves.

Before any kernel Triton needs a C compiler and Python's headers, of which it builds its driver. That is looked up once
per process, so that what is missing is named once and not by the compiler, kernel for kernel.

Shapes: B text, H head, Q query, V width of v.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnscope.attention.questions import Question, TopK
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import TiledAttention
from attnscope.utils.isolation import without_stderr
from attnscope.utils.memory import is_out_of_memory

if TYPE_CHECKING:
    from attnscope.attention.kernels_cuda.sweep import Sweep


def c_compiler() -> str | None:
    """The C compiler that Triton would call: what CC says, gcc or clang; None for none."""
    chosen = os.environ.get("CC")
    return next((name for name in ((chosen,) if chosen else ("gcc", "clang")) if shutil.which(name)), None)


def python_header() -> Path:
    """Where Python's header would be."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for it
    return Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"


@cache
def missing() -> str:
    """Why no kernel can be built here, "" where Triton's driver is there."""
    from triton.runtime import driver

    try:
        with without_stderr():  # where the compiler says it at length
            driver.active.utils  # noqa: B018 - built at the first look
    except Exception as error:  # whatever a compiler, a linker or a driver does
        if c_compiler() is None:
            return "needs a C compiler, and there is none: install gcc"
        if not python_header().is_file():
            return "needs Python's headers, and there are none: install python3-dev"
        first = (str(error).strip().splitlines() or [""])[0]
        return f"has no driver here: {type(error).__name__}: {first}"[:200]
    return ""


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
        from attnscope.attention.kernels_cuda.sweep import Sweep

        return Sweep(self.spec)

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        """What the kernels answer of these, and the output where it is wanted; nothing where they cannot run."""
        if not usable(self.spec):
            return {}
        from attnscope.attention.kernels_cuda import proof

        if why := "" if _interpreted() else missing():
            self._refused = proof.unbuilt(questions, why)
            return {}
        parts: list[Question | None] = [question for question in questions if self._sweep.knows(question)]
        parts += [None] if self.with_output and self._output is None else []  # the output
        try:
            self._sweep.joins = not self._sweep.begun and proof.joins(self.spec, parts)
            joined = [part for part in parts if self._sweep.joins and isinstance(part, TopK)]
            proven = [part for part in parts if part not in joined]
            while unfit := proof.refused(self.spec, proven):  # the rest shares a launch without them
                self._refused |= unfit
                proven = [question for question in proven if proof.kind(question) not in unfit]
            answers = self._sweep.answers(list(filter(None, [*joined, *proven])))
            output = self._sweep.output() if None in proven else None
        except Exception as error:  # the tiles' own way with memory, or with anything else, is the better one
            if not is_out_of_memory(error):
                self._refused |= proof.refuse(self.spec, parts, proof.said(error))
            return {}
        self._output = self._output if output is None else output
        return answers

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
