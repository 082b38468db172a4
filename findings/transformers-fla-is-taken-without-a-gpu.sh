#!/usr/bin/env bash
# transformers 5.23.0 and fla-core 0.6.0: a Qwen3-Next on a machine without a GPU, before and after the package is installed.
#
# A good guess: without a GPU the rule is that of transformers, in torch, with the package or without it. Its own
# `is_flash_linear_attention_available` says False there, and each kernel has a "Torch only path".
#
# What it is: that function is not asked. A modelling file takes the kernel of `fla` wherever the import works, which it does on
# a CPU. The same forward then raises from Triton, and the message names neither the model nor the package.
set -euo pipefail
expected='without fla: 20 tokens read
with fla: is_flash_linear_attention_available() is False
with fla: RuntimeError: 0 active drivers ([]). There should only be one.'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" "triton==3.7.1"

cat > "$place/try.py" <<'PYTHON'
import sys

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils.import_utils import is_flash_linear_attention_available

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
config = Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2, **sizes)
model = Qwen3NextForCausalLM(config).eval()
if sys.argv[1] == "with":
    print("with fla: is_flash_linear_attention_available() is", is_flash_linear_attention_available())
try:
    with torch.no_grad():
        print(f"{sys.argv[1]} fla: {model(torch.arange(20)[None]).logits.shape[1]} tokens read")
except RuntimeError as error:
    print(f"{sys.argv[1]} fla: {type(error).__name__}: {error}")
PYTHON

seen="$(CUDA_VISIBLE_DEVICES="" "$place/env/bin/python" "$place/try.py" without 2>/dev/null)"
"$place/env/bin/pip" install -q "fla-core==0.6.0"
seen="$seen
$(CUDA_VISIBLE_DEVICES="" "$place/env/bin/python" "$place/try.py" with 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
