#!/usr/bin/env bash
# transformers 5.23.0: two texts packed in one row, told apart by position_ids that start again at 0.
#
# A good guess: rows of the second text see no token of the first, as the position ids say where it begins. That is how
# packing is described, and it is what happens when a trainer calls the model.
#
# What it is: position ids are asked only where there is no cache and no attention mask. use_cache is True by default,
# and so are the masks that tokenizers return, of ones. In both cases rows of the second text put 0.65 of their weight on
# the first, without a word. OPT never asks: there the texts leak in every case.
set -euo pipefail
expected='llama, as it comes: 0.65
llama, use_cache=False: 0.00
llama, use_cache=False and a mask of ones: 0.65
opt, as it comes: 0.65
opt, use_cache=False: 0.65
opt, use_cache=False and a mask of ones: 0.65'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
sizes["max_position_embeddings"] = 64
configs = {
    "llama": LlamaConfig(**sizes, intermediate_size=32),
    "opt": OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32),
}
ids = torch.arange(3, 13)[None]
positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
for name, config in configs.items():
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    without = {"use_cache": False}
    ways = {
        "as it comes": {},
        "use_cache=False": without,
        "use_cache=False and a mask of ones": {**without, "attention_mask": torch.ones_like(ids)},
    }
    for way, given in ways.items():
        with torch.no_grad():
            out = model(ids, position_ids=positions, output_attentions=True, **given)
        leaked = out.attentions[0][0, :, 5:, :5].sum(-1).mean()
        print(f"{name}, {way}: {float(leaked):.2f}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
