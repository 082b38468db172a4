"""The Triton kernels compiled for cards that are not here: what each launch of a call takes of the chip.

    python -m helpers.triton_compiled '[{"arch": 90, "width": 128}]'     # one JSON row per kernel

The launches are those that `Sweep` makes for the shape, with its own blocks unless others are given; the compiler and
its tools are those of Triton's wheel. stack: bytes of a thread beyond its registers, what spills. shared: of a program.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from attnscope.attention.questions import (
    Back,
    EqualLabels,
    Features,
    GroupMass,
    MaxWeight,
    Question,
    Received,
    TopK,
    Window,
)
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.triton_kernel import blocks as chosen
from attnscope.attention.triton_kernel import sweep
from attnscope.attention.triton_kernel.sweep import Sweep
from attnscope.attention.visibility import Visibility

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TOKENS = 256


def spec_of(width: int, dtype: str = "bfloat16", window: bool = False, softcap: bool = False) -> AttentionSpec:
    """A call of the shape; what its tensors hold is not read."""
    kind = getattr(torch, dtype)
    q, k = (torch.zeros(1, TOKENS, heads, width, dtype=kind).transpose(1, 2) for heads in (4, 2))
    visible = Visibility(TOKENS, TOKENS, window=100 if window else None)
    return AttentionSpec(q, k, k, 0.1, visible, softcap=50.0 if softcap else None)


def questions() -> dict[str, Question | None]:
    """One for each kernel, and, with None, the output."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    return {
        "statistics": MaxWeight(),
        "one_key": Back(1),
        "recent": Window(32),
        "equal": EqualLabels(ids, ids, 1),
        "received": Received(torch.ones(1, TOKENS)),
        "largest": TopK(8),
        "features": Features(torch.zeros(TOKENS, 64)),
        "groups": GroupMass(ids, torch.arange(TOKENS)[None] // 4),
        "output": None,
    }


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and its blocks."""

    kernel: Any
    given: dict[str, Any]
    form: chosen.Blocks


def launch(spec: AttentionSpec, asked: Question | None) -> Launch:
    """What answering a question launches last: its own kernel."""
    found: list[Launch] = []

    def note(whole: Sweep, kernel: Any, grid: tuple[int, ...], rest: tuple[Any, ...], form: Any, **known: Any) -> None:
        arguments = dict(zip(kernel.arg_names, (whole.call, *rest, form.M), strict=False))
        found.append(Launch(kernel, {**arguments, "M": form.M, **known}, form))

    with mock.patch.object(Sweep, "_launch", note):
        whole, v = Sweep(spec), spec.v_BGKV
        if asked is None:
            whole._product(v, v.stride(), v.shape[-1], torch.empty_like(spec.q_BHQD), left=True)
        else:
            whole.answers([asked])
    return found[-1]


def taken(arch: int, one: Launch) -> dict[str, int]:
    """Registers, stack and shared bytes of a kernel, compiled as Triton's own launcher would."""
    target, kernel = GPUTarget("cuda", arch, 32), one.kernel
    backend, options = CUDABackend(target), {"num_warps": one.form.warps, "num_stages": one.form.stages}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**{name: one.given[name] for name in kernel.arg_names})
    _, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, None)
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return {"registers": registers, "stack": stack, "shared": made.metadata.shared}


def rows(
    arch: int, kernels: Sequence[str] = (), given: Mapping[str, int] | None = None, **form: Any
) -> Iterator[dict[str, Any]]:
    """A row per kernel. given: blocks instead of those that would be chosen."""
    spec = spec_of(**form)
    with mock.patch.object(sweep, "blocks", return_value=chosen.Blocks(**given)) if given else nullcontext():
        for name, question in questions().items():
            if not kernels or name in kernels:
                one = launch(spec, question)
                yield {"arch": arch, **form, "kernel": name, **asdict(one.form), **taken(arch, one)}


if __name__ == "__main__":
    for form in json.loads(sys.argv[1]):
        for row in rows(**form):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
