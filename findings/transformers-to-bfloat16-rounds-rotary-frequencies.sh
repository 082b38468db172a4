#!/usr/bin/env bash
# transformers 5.23.0: one Llama made bfloat16 in two ways, by dtype= of from_pretrained and by .to(torch.bfloat16).
# Both are then made float32, so that nothing but what they hold is compared.
#
# A good guess: the same model, as all weights are equal.
#
# What it is: the rotary frequencies, which are a buffer and no weight, differ. Loading keeps them in float32, and .to
# rounds them to eight bits, as .bfloat16() does (.half() to eleven). Over 400 tokens a key is turned 0.1 radians too
# far or too little, and weights of attention are 0.3 off, more the longer the text is. .float() brings nothing back.
set -euo pipefail
expected='dtype=bfloat16: weights equal True, 0.0 radians off after 400 tokens, attention 0.0 off
.to(bfloat16): weights equal True, 0.1 radians off after 400 tokens, attention 0.3 off'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ids = torch.randint(64, (1, 400))
eager = {"attn_implementation": "eager"}
with tempfile.TemporaryDirectory() as folder:
    made = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.5, **sizes))
    made.to(torch.bfloat16).save_pretrained(folder)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    ways = {
        "dtype=bfloat16": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **eager),
        ".to(bfloat16)": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager),
    }
with torch.no_grad():
    weights = exact(ids, output_attentions=True).attentions[0]
    ways[".to(bfloat16)"].to(torch.bfloat16)
    for way, model in ways.items():
        model.float()
        equal = all(map(torch.equal, exact.parameters(), model.parameters()))
        turn = 400 * (model.model.rotary_emb.inv_freq - exact.model.rotary_emb.inv_freq).abs().max()
        gap = (model(ids, output_attentions=True).attentions[0] - weights).abs().max()
        print(f"{way}: weights equal {equal}, {turn:.1f} radians off after 400 tokens, attention {gap:.1f} off")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
