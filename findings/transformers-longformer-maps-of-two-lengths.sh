#!/usr/bin/env bash
# transformers 5.23.0: the two kinds of attention that a Longformer returns, of a text of 21 tokens and windows of 8.
#
# A good guess: both have 21 rows, as the text and the last hidden state have: the padding to a multiple of the window
# is taken off again.
#
# What it is: it is taken off the hidden states and `attentions`, and left on `global_attentions`, which have 24. Rows of
# global tokens in `attentions` are zero; their weights stand in the other tensor alone. Whoever joins the two by position
# has three rows of padding.
set -euo pipefail
expected='last_hidden_state: (1, 21, 32)
attentions: (1, 4, 21, 11)
global_attentions: (1, 4, 24, 2)
weight in rows of global tokens: 0.0'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import LongformerConfig, LongformerModel

torch.manual_seed(0)
config = LongformerConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=64,
    attention_window=[8],
)
model = LongformerModel(config).eval()
ids = torch.randint(3, 64, (1, 21))
whole = torch.zeros_like(ids)
whole[0, :2] = 1
with torch.no_grad():
    out = model(ids, global_attention_mask=whole, output_attentions=True)
print("last_hidden_state:", tuple(out.last_hidden_state.shape))
print("attentions:", tuple(out.attentions[0].shape))
print("global_attentions:", tuple(out.global_attentions[0].shape))
print("weight in rows of global tokens:", float(out.attentions[0][0, :, :2].sum()))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
