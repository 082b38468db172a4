#!/usr/bin/env bash
# transformers 5.23.0: sliding_window=8 in three configs of decoders that look both ways.
#
# A good guess: a token sees the same keys in all three, 8 or 9 of them with itself in the middle.
#
# What it is: Gemma 3 sees 9 keys, Gemma 4 sees 11, and Gemma 3 with is_causal=False in place of its own field sees 17. The
# first two store 5, half of 8 and 1, which one code takes without its end and the other with it; the third takes 8 to
# either side.
set -euo pipefail
expected='Gemma 3, use_bidirectional_attention=True: stored 5, 9 keys
Gemma 4, use_bidirectional_attention="all": stored 5, 11 keys
Gemma 3, is_causal=False: stored 8, 17 keys'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import Gemma3TextConfig, Gemma3TextModel, Gemma4TextConfig, Gemma4TextModel

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
sizes |= {"vocab_size": 64, "num_key_value_heads": 2, "sliding_window": 8}
sizes["layer_types"] = ["sliding_attention", "full_attention"]
of_four = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}
cases = {
    "Gemma 3, use_bidirectional_attention=True": (
        Gemma3TextModel,
        Gemma3TextConfig(**sizes, use_bidirectional_attention=True),
    ),
    'Gemma 4, use_bidirectional_attention="all"': (
        Gemma4TextModel,
        Gemma4TextConfig(**sizes, **of_four, use_bidirectional_attention="all"),
    ),
    "Gemma 3, is_causal=False": (Gemma3TextModel, Gemma3TextConfig(**sizes, is_causal=False)),
}
for name, (kind, config) in cases.items():
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        row = model(torch.arange(40)[None] + 3, output_attentions=True).attentions[0][0, 0, 20]
    print(f"{name}: stored {config.sliding_window}, {int((row > 0).sum())} keys")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
