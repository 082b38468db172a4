#!/usr/bin/env bash
# torch 2.13.0 on a CPU: scaled_dot_product_attention with attn_mask and is_causal=True at once.
#
# A good guess: an error, as the documentation says; or the mask wins, as it is what was stated in full.
#
# What it is: the kernel decides. The math kernel raises. The default and the flash kernel take both, and a query sees
# what the mask and the triangle both let it see. So a mask that lets tokens look ahead is cut to a causal one without a
# word, and the same call is an error once another kernel is chosen.
set -euo pipefail
expected='default: sees ahead False, sees key 1 False
FLASH_ATTENTION: sees ahead False, sees key 1 False
MATH: RuntimeError'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
q, values = torch.randn(1, 1, 6, 8), torch.eye(6, 8).expand(1, 1, 6, 8)  # the output is the weights
mask = torch.ones(6, 6, dtype=torch.bool)
mask[:, 1] = False
kernels = {"default": nullcontext()}
kernels |= {one.name: sdpa_kernel(one) for one in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)}
for name, kernel in kernels.items():
    try:
        with kernel:
            weights = scaled_dot_product_attention(q, q, values, attn_mask=mask, is_causal=True)[0, 0, :, :6]
        ahead, hidden = bool(weights.triu(1).any()), bool(weights[:, 1].any())
        print(f"{name}: sees ahead {ahead}, sees key 1 {hidden}")
    except RuntimeError:
        print(f"{name}: RuntimeError")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
