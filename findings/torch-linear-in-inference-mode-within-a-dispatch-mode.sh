#!/usr/bin/env bash
# torch 2.13.0 on a CPU: F.linear of a permuted input of four dimensions and a weight that requires grad, alone and
# within a TorchDispatchMode that hands each operator on as it is.
#
# A good guess: the same kernels and the same bits: the mode only looks on.
#
# What it is: that holds in torch.no_grad, and in torch.inference_mode for a weight that requires no grad. In
# torch.inference_mode, the transposed weight requires grad as the weight does, and torch.matmul then makes one matrix
# of the input and multiplies once. Within the mode the operator runs below autograd, where the transposed weight
# requires no grad, and torch.matmul multiplies in batches. Sums in another order have other last bits, in more or fewer
# shapes by the processor. So what looks on has to be there in both passes where their bits are compared.
set -euo pipefail
expected='no_grad, weight requires grad True: alone mm, within the mode mm, equal in all shapes True
no_grad, weight requires grad False: alone bmm, within the mode bmm, equal in all shapes True
inference_mode, weight requires grad True: alone mm, within the mode bmm, equal in all shapes False
inference_mode, weight requires grad False: alone bmm, within the mode bmm, equal in all shapes True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
from contextlib import nullcontext
from itertools import product

import torch
from torch.nn.functional import linear
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode


class LooksOn(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        return operator(*arguments, **(keywords or {}))


for context, requires in product((torch.no_grad, torch.inference_mode), (True, False)):
    torch.manual_seed(0)
    equal, kernels = [], {}
    for length, width, size in product((7, 50), (64, 128, 200), (1, 24, 96)):
        x = torch.randn(2, 4, length, width).permute(0, 2, 1, 3)
        weight = torch.randn(size, width, requires_grad=requires)
        results = []
        for words, mode in (("alone", nullcontext), ("within the mode", LooksOn)):
            with context(), mode():
                results.append(linear(x, weight))
        equal.append(torch.equal(*results))
    for words, mode in (("alone", nullcontext), ("within the mode", LooksOn)):
        with profile() as profiled, context(), mode():
            linear(x, weight)
        names = {event.name for event in profiled.events()} & {"aten::mm", "aten::bmm"}
        kernels[words] = " and ".join(sorted(name.removeprefix("aten::") for name in names))
    kernels = ", ".join(f"{words} {kernel}" for words, kernel in kernels.items())
    print(f"{context.__name__}, weight requires grad {requires}: {kernels}, equal in all shapes {all(equal)}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
