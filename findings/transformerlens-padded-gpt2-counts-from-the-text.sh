#!/usr/bin/env bash
# transformer-lens 4.3.0 and transformers 5.23.0: a GPT-2 that is given a batch padded on the left, with its attention mask.
#
# A good guess: the bridge runs the module of transformers, so its patterns are the attentions which transformers returns for
# the same ids and mask; for other models they are, to the last bit.
#
# What it is: the bridge counts positions from the mask, so that a padded text has the weights that it has alone. transformers
# counts padding too, unless position_ids are given, and the same text has others. Both are a reading of the same call.
# Whoever checks the one with the other in batches finds a difference of 0.9 that no single text shows.
set -euo pipefail
expected='transformers, padded and alone: over 0.5
bridge, padded and alone: under 1e-5
bridge and transformers, both padded: over 0.5'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "transformer-lens==4.3.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import tempfile

import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import pad
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

PADDING = 3


def size(difference):
    largest = float(difference.abs().max())
    return "under 1e-5" if largest < 1e-5 else "over 0.5" if largest > 0.5 else str(largest)


torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64, initializer_range=0.3)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1").save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
text = torch.arange(10, 18)[None]
padded, mask = pad(text, (PADDING, 0)), pad(torch.ones_like(text), (PADDING, 0))
with torch.no_grad():
    alone = model(text, output_attentions=True).attentions[0]
    theirs = model(padded, attention_mask=mask, output_attentions=True).attentions[0][:, :, PADDING:, PADDING:]
    _, cache = bridge.run_with_cache(padded, attention_mask=mask)
pattern = cache["pattern", 0][:, :, PADDING:, PADDING:]
print("transformers, padded and alone:", size(theirs - alone))
print("bridge, padded and alone:", size(pattern - alone))
print("bridge and transformers, both padded:", size(pattern - theirs))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
