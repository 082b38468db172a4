#!/usr/bin/env bash
# transformers 5.23.0: generate of a model whose own generation config suppresses a token, with a GenerationConfig of
# the caller in which nothing is suppressed.
#
# A good guess: the caller's config is the one in force. The token is written again, as it is with suppress_tokens=None
# as an argument of generate.
#
# What it is: fields of the caller's config that are None are filled from the model's. None is what most settings are
# that are off, so that such a config cannot turn off what the model's has turned on. An argument can, and an empty list
# where the setting takes one.
set -euo pipefail
expected='no config: writes the likeliest token False
a config with None: writes the likeliest token False
a config with []: writes the likeliest token True
an argument of None: writes the likeliest token True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.3, **sizes)).eval()
ids = torch.arange(3, 13)[None]
with torch.no_grad():
    likeliest = int(model(ids).logits[0, -1].argmax())
model.generation_config.suppress_tokens = [likeliest]
short = {"max_new_tokens": 1, "do_sample": False}
for title, settings in (
    ("no config", short),
    ("a config with None", {"generation_config": GenerationConfig(**short, suppress_tokens=None)}),
    ("a config with []", {"generation_config": GenerationConfig(**short, suppress_tokens=[])}),
    ("an argument of None", {**short, "suppress_tokens": None}),
):
    made = int(model.generate(ids, **settings)[0, -1])
    print(f"{title}: writes the likeliest token {made == likeliest}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
