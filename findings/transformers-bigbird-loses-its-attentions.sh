#!/usr/bin/env bash
# transformers 5.23.0: output_attentions of a BigBird with block-sparse attention, before and after one short text.
#
# A good guess: a text that is too short for blocks is read with full attention, and its weights are returned as those of
# any other encoder; the next long text is read in blocks again.
#
# What it is: the short text changes the model for good, so that every later text is read with full attention. And from
# then on `attentions` is an empty tuple, of short texts and long ones: the modules that weights are recorded from were
# replaced by others. The numbers of a script depend on the order of its texts.
set -euo pipefail
expected='82 tokens: block_sparse afterwards, 2 maps
20 tokens: original_full afterwards, 0 maps
82 tokens: original_full afterwards, 0 maps'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import BigBirdConfig, BigBirdModel

torch.manual_seed(0)
config = BigBirdConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    attention_type="block_sparse",
    block_size=4,
    num_random_blocks=1,
)
model = BigBirdModel(config).eval()
for tokens in (82, 20, 82):
    with torch.no_grad():
        out = model(torch.randint(3, 64, (1, tokens)), output_attentions=True)
    print(f"{tokens} tokens: {model.attention_type} afterwards, {len(out.attentions)} maps")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
