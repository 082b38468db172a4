#!/usr/bin/env bash
# transformers 5.23.0: a Gemma with use_bidirectional_attention=True, under eager attention and under sdpa.
#
# A good guess: the two differ by rounding, and every token sees those behind it, as the config's documentation says of
# the field.
#
# What it is: under eager the field does nothing, and the model is causal. It is handed to the attention modules as
# their is_causal, which sdpa asks where there is no mask. The mask that eager is given is made from config.is_causal,
# which nobody set. Whoever loads such an embedder with eager attention, to see its weights, has another model.
set -euo pipefail
expected='eager: changing the last token changes earlier ones: False
sdpa: changing the last token changes earlier ones: True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import GemmaConfig, GemmaModel

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
config = GemmaConfig(vocab_size=64, num_key_value_heads=2, use_bidirectional_attention=True, **sizes)
ids = torch.arange(12)[None] + 3
other = ids.clone()
other[0, -1] = 60
for implementation in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = GemmaModel._from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        moved = (model(ids).last_hidden_state - model(other).last_hidden_state)[0, :-1].abs().max()
    print(f"{implementation}: changing the last token changes earlier ones: {bool(moved > 1e-4)}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
