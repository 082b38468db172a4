#!/usr/bin/env bash
# transformers 5.23.0: which tokens the next-token logits of a ProphetNet decoder depend on.
#
# A good guess: on the tokens up to their own, as of any causal language model; and not on how long the text is.
#
# What it is: on later ones too, and on the length. Biases by relative position are computed in one order of axes
# (position, stream, head) and taken in another (stream, head, position), so that a row of the stream that predicts gets
# those of some other row. Which one depends on the length of the text. Of ten tokens, row 0 changes with token 2. A
# loss over a whole text has seen tokens that it is to predict, and no step with a cache can repeat its numbers.
set -euo pipefail
expected='BartForCausalLM: rows before token 2 that change with it: []
BartForCausalLM: rows that change when a token is added behind the text: []
ProphetNetForCausalLM: rows before token 2 that change with it: [0, 1]
ProphetNetForCausalLM: rows that change when a token is added behind the text: [0, 1, 2, 3, 4, 5, 6, 7, 8]'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import BartConfig, BartForCausalLM, ProphetNetConfig, ProphetNetForCausalLM

shared = {"vocab_size": 64, "max_position_embeddings": 64, "is_decoder": True, "add_cross_attention": False}
shared["decoder_ffn_dim"] = 32
bart = BartConfig(d_model=32, decoder_layers=2, decoder_attention_heads=4, **shared)
prophet = ProphetNetConfig(hidden_size=32, num_decoder_layers=2, num_decoder_attention_heads=4, **shared)
models = ((BartForCausalLM, bart), (ProphetNetForCausalLM, prophet))
ids = torch.arange(5, 15)[None]
other = ids.clone()
other[0, 2] = 50
for kind, config in models:
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        logits, changed, shorter = (model(text).logits[0] for text in (ids, other, ids[:, :9]))
    rows = [row for row in range(2) if (logits[row] - changed[row]).abs().max() > 1e-4]
    print(f"{kind.__name__}: rows before token 2 that change with it: {rows}")
    rows = [row for row in range(9) if (logits[row] - shorter[row]).abs().max() > 1e-4]
    print(f"{kind.__name__}: rows that change when a token is added behind the text: {rows}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
