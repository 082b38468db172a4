#!/usr/bin/env bash
# transformers 5.23.0: the ids that generate has an XLM read at each step, of a model with causal=True.
#
# A good guess: the text and what was written so far, as of every causal model, so that the next token is what the last
# token's row says.
#
# What it is: each step reads a mask token after the text, and takes the next token from the row of that one. That
# suits a model of masked words. One that was trained with causal=True has no use for it: the row of its last token,
# which predicts the next, is left aside. FlauBERT does the same.
set -euo pipefail
expected='GPT2LMHeadModel wrote [12, 12]: steps read [10, 11, 12] [10, 11, 12, 12]
XLMWithLMHeadModel wrote [5, 5]: steps read [10, 11, 12, 5] [10, 11, 12, 5, 5]
FlaubertWithLMHeadModel wrote [5, 5]: steps read [10, 11, 12, 5] [10, 11, 12, 5, 5]'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import FlaubertConfig, FlaubertWithLMHeadModel, GPT2Config, GPT2LMHeadModel
from transformers import XLMConfig, XLMWithLMHeadModel

sizes = {"emb_dim": 32, "n_layers": 1, "n_heads": 4, "max_position_embeddings": 64, "causal": True}
models = (
    (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, eos_token_id=None)),
    (XLMWithLMHeadModel, XLMConfig(vocab_size=64, mask_token_id=5, **sizes)),
    (FlaubertWithLMHeadModel, FlaubertConfig(vocab_size=64, mask_token_id=5, **sizes)),
)
for kind, config in models:
    torch.manual_seed(0)
    model = kind(config).eval()
    read = []

    def note(module, args, kwargs):
        read.append(kwargs["input_ids"][0].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    settings = {"max_new_tokens": 2, "do_sample": False, "use_cache": False, "pad_token_id": 2}
    made = model.generate(torch.tensor([[10, 11, 12]]), **settings)
    print(f"{kind.__name__} wrote {made[0, 3:].tolist()}: steps read", *read)
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
