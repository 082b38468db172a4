#!/usr/bin/env bash
# transformers 5.23.0: sliding_window=4 in a Moshi and in a Mistral, ten tokens in one pass and step by step.
#
# A good guess: the last token sees four keys in both, however it is read. A step with a cache is a row of one pass.
#
# What it is: of Moshi that holds with a cache alone. Its mask is made without the window, so that one pass sees all ten
# keys, and only the cache keeps it, by throwing older keys away. A text that is longer than the window is scored with
# another attention than the one that wrote it.
set -euo pipefail
expected='MistralForCausalLM: the last token sees 4 keys in one pass, 4 in steps
MoshiForCausalLM: the last token sees 10 keys in one pass, 4 in steps'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import MistralConfig, MistralForCausalLM, MoshiConfig, MoshiForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "sliding_window": 4}
models = (
    (MistralForCausalLM, MistralConfig(intermediate_size=32, **sizes)),
    (MoshiForCausalLM, MoshiConfig(ffn_dim=64, **sizes)),
)
ids = torch.arange(3, 13)[None]
for kind, config in models:
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        whole = model(ids, use_cache=False, output_attentions=True).attentions[0][0, 0, -1]
        cache = None
        for token in ids[0]:
            out = model(token[None, None], past_key_values=cache, use_cache=True, output_attentions=True)
            cache = out.past_key_values
    step = out.attentions[0][0, 0, -1]
    keys = [int((weights > 0).sum()) for weights in (whole, step)]
    print(f"{kind.__name__}: the last token sees {keys[0]} keys in one pass, {keys[1]} in steps")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
