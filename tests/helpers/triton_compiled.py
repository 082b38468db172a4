"""The Triton kernels compiled for cards that are not here: what each launch of a call takes of the chip.

    python -m helpers.triton_compiled '[{"arch": 90, "width": 128}]'     # one JSON row per kernel
    python -m helpers.triton_compiled '[{"shape": [2048, 2048]}]'        # what the proof and the call are compiled for

The launches are those that `Sweep` makes for the shape, with its own blocks unless others are given; the compiler and
its tools are those of Triton's wheel. stack: bytes of a thread beyond its registers, what spills. shared: of a program.
step: instructions of the shortest loop that multiplies on tensor cores, 0 where there is none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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

from attnscope.attention.kernels_cuda import proof, sweep
from attnscope.attention.kernels_cuda import sweep as chosen
from attnscope.attention.kernels_cuda.sweep import Sweep
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
from attnscope.attention.spec import AttentionSpec, Visibility

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TOKENS = 256
LEAST_RUN = 64  # tokens of a group that the walk over rows takes with the most rows at a step


def spec_of(width: int, options: Sequence[str] = (), dtype: str = "bfloat16", tokens: int = TOKENS) -> AttentionSpec:
    """A call of the shape; what its tensors hold is not read. options: of boolean, additive, window, bias, ..."""
    kind, square = getattr(torch, dtype), (1, 1, tokens, tokens)
    q, k = (torch.zeros(1, tokens, heads, width, dtype=kind).transpose(1, 2) for heads in (4, 2))
    masks = {"boolean": torch.ones(square, dtype=torch.bool), "additive": torch.zeros(square, dtype=kind)}
    mask = next((masks[name] for name in options if name in masks), None)
    visible = Visibility(
        tokens, tokens, mask, causal="ahead" not in options, window=100 if "window" in options else None
    )
    return AttentionSpec(
        *(q, k, k, 0.1, visible),
        softcap=50.0 if "softcap" in options else None,
        bias=torch.zeros(1, 4, tokens, tokens, dtype=kind) if "bias" in options else None,
        sinks=torch.zeros(1, 4, 1) if "sinks" in options else None,
    )


def questions(queries: int = TOKENS, keys: int = TOKENS) -> dict[str, tuple[Question, ...]]:
    """Those of one launch for each kernel; none of the output."""
    ids = torch.zeros(1, keys, dtype=torch.long)
    own = ids[:, keys - queries :]
    runs = torch.arange(keys)[None] // LEAST_RUN
    of_runs, received = GroupMass(runs[:, keys - queries :], runs), Received(torch.ones(1, queries))
    return {
        "statistics": (MaxWeight(),),
        "one_key": (Back(1),),
        "recent": (Window(32),),
        "equal": (EqualLabels(own, ids, 1),),
        "received": (received,),
        "runs": (of_runs,),
        "received, runs": (received, of_runs),
        "largest": (TopK(8),),
        "statistics, largest": (MaxWeight(), TopK(8)),
        "features": (Features(torch.zeros(keys, 64)),),
        "groups": (GroupMass(own, torch.arange(keys)[None] % 64),),
        "output": (),
    }


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and its blocks."""

    kernel: Any
    given: dict[str, Any]
    form: chosen.Blocks


def launch(spec: AttentionSpec, asked: Sequence[Question]) -> Launch:
    """What answering questions launches last: their own kernel; without any, that of the output."""
    found: list[Launch] = []

    def note(whole: Sweep, kernel: Any, grid: tuple[int, ...], rest: tuple[Any, ...], form: Any, **known: Any) -> None:
        arguments = dict(zip(kernel.arg_names, (whole.call, *rest, form.M), strict=False))
        found.append(Launch(kernel, {**arguments, "M": form.M, **known}, form))

    with mock.patch.object(Sweep, "_launch", note):
        whole, v = Sweep(spec, joins=len(asked) > 1), spec.v_BGKV  # the strongest alone have a walk of their own
        if not asked:
            whole._product(v, v.stride(), v.shape[-1], torch.empty_like(spec.q_BHQD), left=True)
        else:
            whole.answers(asked)
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
        said, code = (
            subprocess.run([TOOLS / tool, *how, file.name], capture_output=True, text=True, check=True).stdout
            for tool, how in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", ["-c"]))
        )
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return {"registers": registers, "stack": stack, "shared": made.metadata.shared, "step": step_of(code)}


def step_of(code: str) -> int:
    """The instructions of the shortest loop that multiplies on tensor cores, from its label to the branch back."""
    labels: dict[str, int] = {}
    products: list[bool] = []  # of each instruction: is it one?
    found = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(products)
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            products.append("MMA" in line)
            back = re.search(r"\bBRA.*`\((\.L_x_\d+)\)", line)
            start = labels.get(back[1], len(products)) if back else len(products)
            found += [len(products) - start] if any(products[start:]) else []
    return min(found, default=0)


def rows(
    arch: int, kernels: Sequence[str] = (), given: Mapping[str, int] | None = None, **form: Any
) -> Iterator[dict[str, Any]]:
    """A row per kernel. given: blocks instead of those that would be chosen."""
    spec = spec_of(**form)
    with mock.patch.multiple(sweep, **_always(given)) if given else _card(arch):
        for name, asked in questions(spec.visible.queries, spec.visible.keys).items():
            if not kernels or name in kernels:
                one = launch(spec, asked)
                yield {"arch": arch, **form, "kernel": name, **asdict(one.form), **taken(arch, one)}


def _always(given: Mapping[str, int]) -> dict[str, Any]:
    return dict.fromkeys(
        ("blocks", "of_statistics", "of_largest", "of_received"), lambda *of, **how: chosen.Blocks(**given)
    )


def _card(arch: int) -> AbstractContextManager[Any]:
    """Blocks are chosen as on a card of that kind."""
    return mock.patch.object(chosen, "generation", return_value=arch // 10)


SEVERAL = {  # kinds whose kernels have other sizes with other questions
    "largest": lambda Q, K: (TopK(8, (1, 5), True),),
    "features": lambda Q, K: (Features(torch.empty(K, 20)),),
}


def proven(
    shape: Sequence[int], options: Sequence[str] = (), heads: Sequence[int] = (32, 8)
) -> Iterator[dict[str, Any]]:
    """A row per kernel: whether the slice that proves it is answered by the compiled form that answers the call."""
    (Q, K), (H, G), width = shape, heads, 64
    q, k = (torch.empty(2, n, h, width, dtype=torch.bfloat16).transpose(1, 2) for n, h in ((Q, H), (K, G)))
    mask = torch.empty(1, 1, Q, K, dtype=torch.bool).fill_(True) if "boolean" in options else None
    window = 4096 if "window" in options else None
    spec = AttentionSpec(q, k, k, 0.1, Visibility(Q, K, mask, True, window))
    small = proof._slice(spec)
    asked = {**questions(Q, K), **{name: make(Q, K) for name, make in SEVERAL.items()}}
    for name, one in asked.items():
        cut = [proof._sliced(question, small, Sweep(spec)) for question in one]
        with _card(90):
            both = [_specialised(launch(call, of)) for call, of in ((small, cut), (spec, one))]
        yield {"kernel": name, "same": both[0] == both[1], "queries": small.visible.queries}


def _specialised(one: Launch) -> Any:
    """What Triton keeps a compiled kernel by, but for the device."""
    bind = create_function_from_signature(
        one.kernel.signature, one.kernel.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    _, specialization, _ = bind(**{name: one.given[name] for name in one.kernel.arg_names})
    return repr(specialization), one.form


if __name__ == "__main__":
    for form in json.loads(sys.argv[1]):
        for row in proven(**form) if "shape" in form else rows(**form):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
