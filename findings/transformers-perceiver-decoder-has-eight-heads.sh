#!/usr/bin/env bash
# transformers 5.23.0: the maps of a Perceiver for masked words, configured with four heads of each kind.
#
# A good guess: all its maps have four heads, as the config has num_self_attention_heads=4 and
# num_cross_attention_heads=4.
#
# What it is: the decoder's map, from words to latents, has eight. That number is a default of the decoder's class, which
# no field of the config reaches.
set -euo pipefail
expected='latents to latents: (1, 4, 6, 6)
latents to words: (1, 4, 6, 12)
words to latents: (1, 8, 12, 6)'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import PerceiverConfig, PerceiverForMaskedLM

config = PerceiverConfig(
    vocab_size=64,
    num_latents=6,
    d_latents=32,
    d_model=32,
    num_blocks=1,
    num_self_attends_per_block=1,
    num_self_attention_heads=4,
    num_cross_attention_heads=4,
    max_position_embeddings=12,
)
model = PerceiverForMaskedLM(config).eval()
with torch.no_grad():
    out = model(inputs=torch.randint(3, 64, (1, 12)), output_attentions=True)
print("latents to latents:", tuple(out.attentions[0].shape))
for name, weights in zip(("latents to words", "words to latents"), out.cross_attentions, strict=True):
    print(f"{name}:", tuple(weights.shape))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
