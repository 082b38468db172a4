#!/usr/bin/env bash
# transformer-lens 4.3.0 and transformers 5.23.0: a model of one's own, given to boot_transformers as hf_model.
#
# A good guess: the bridge reads it, or copies it, and the model works as before: it is the caller's.
#
# What it is: from then on output_attentions=True of the model itself returns an empty tuple, with no warning, while its logits
# stay the same. The bridge has put its own modules into the model in the place of those that transformers records weights
# from. A notebook that draws the one and then the other has nothing to draw, depending on the order of its cells.
set -euo pipefail
expected='before: 2 layers of weights
after: 0 layers of weights, same logits: True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "transformer-lens==4.3.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import tempfile

import torch
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes), attn_implementation="eager").eval()
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
text = torch.arange(10, 18)[None]
before = model(text, output_attentions=True)
print("before:", len(before.attentions), "layers of weights")
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1").save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32)
after = model(text, output_attentions=True)
same = bool(torch.allclose(before.logits, after.logits, atol=1e-5))
print("after:", len(after.attentions), "layers of weights, same logits:", same)
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
