#!/usr/bin/env bash
# triton 3.7.1 with torch 2.13.0 and TRITON_INTERPRET=1, where kernels run on a CPU: sums and products of bfloat16.
#
# A good guess: the result, rounded, as in float16 and as a card gives it; or an error, as NumPy has no bfloat16.
#
# What it is: the interpreter keeps a bfloat16 as the 16-bit whole number of its bits, and computes with those. One times
# two is 16,256 times 16,384, and one plus two is the bits of infinity. No error is raised. So a kernel that is tried
# without a card has to widen its operands to float32 before each operation.
set -euo pipefail
expected='float32: product 2.0, sum 3.0
float16: product 2.0, sum 3.0
bfloat16: product 266338304.0, sum inf
bfloat16 widened: product 2.0, sum 3.0'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "triton==3.7.1" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def both(left, right, product, total, N: tl.constexpr, WIDEN: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(left + place), tl.load(right + place)
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(product + place, tl.dot(a, b))
    tl.store(total + place, (a + b).to(tl.float32))


for name, widen in (("float32", False), ("float16", False), ("bfloat16", False), ("bfloat16", True)):
    dtype = getattr(torch, name)
    left, right = torch.eye(16, dtype=dtype), torch.full((16, 16), 2.0, dtype=dtype)
    product, total = torch.zeros(2, 16, 16)
    both[(1,)](left, right, product, total, N=16, WIDEN=widen)
    print(f"{name}{' widened' * widen}: product {product[0, 0].item()}, sum {total[0, 0].item()}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
