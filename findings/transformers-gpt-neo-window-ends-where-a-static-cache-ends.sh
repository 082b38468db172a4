#!/usr/bin/env bash
# transformers 5.23.0: generate of GPT-Neo with cache_implementation "static" and "dynamic": the logits of the first new
# token of a prompt of 10 tokens, in a model whose local layers have a window of 4.
#
# A good guess: equal: the kind of cache is a matter of memory, and generate takes the static one without a word.
#
# What it is: equal in global layers. A local layer reads its window from a table of positions, and takes the last row
# of the cache for the last token. A static cache has room for the prompt and the answer, so the window lies in part or
# in whole over rows that nothing was written to yet. The keys outside it get the smallest number of float32 as score,
# as the empty rows do. So the first new token changes with max_new_tokens. There is no difference where the cache ends
# with the prompt, nor while prompt and answer fit in the window, which is 256 tokens by default.
set -euo pipefail
expected='global layers, max_new_tokens 8: equal True
local layers, window 4, max_new_tokens 1: equal True
local layers, window 4, max_new_tokens 8: equal False
local layers, window 32, max_new_tokens 8: equal True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
sizes |= {"bos_token_id": None, "eos_token_id": None}
ids = torch.arange(3, 13)[None]
for kind, window, new in (("global", None, 8), ("local", 4, 1), ("local", 4, 8), ("local", 32, 8)):
    torch.manual_seed(0)
    config = GPTNeoConfig(**sizes, attention_types=[[[kind], 2]], **({"window_size": window} if window else {}))
    model = GPTNeoForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    options = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    dynamic, static = (
        model.generate(ids, cache_implementation=cache, **options).logits[0] for cache in ("dynamic", "static")
    )
    words = f"{kind} layers, " + (f"window {window}, " if window else "") + f"max_new_tokens {new}"
    print(f"{words}: equal {torch.allclose(dynamic, static, atol=1e-3)}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
