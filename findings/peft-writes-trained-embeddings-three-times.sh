#!/usr/bin/env bash
# peft 0.21.2 and transformers 5.23.0: an adapter that trains resized embeddings through modules_to_save.
#
# A good guess: the adapter's file holds each trained matrix once, and PEFT's own loader knows every key of it.
#
# What it is: each stands there three times, as the trained matrix under two names and as the one before training. The
# loader reads the first and calls the second unexpected, of a file that PEFT wrote itself. A tool that takes unexpected
# keys for an error refuses the adapter; one that adds up sizes counts a vocabulary three times.
set -euo pipefail
expected='base_model.model.model.embed_tokens.modules_to_save.weight
base_model.model.model.embed_tokens.original_module.weight
base_model.model.model.embed_tokens.weight
unexpected to its own loader: base_model.model.model.embed_tokens.modules_to_save.weight'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "peft==0.21.2" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import tempfile

from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(f"{folder}/base")
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    model.resize_token_embeddings(66)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(f"{folder}/adapter")
    with safe_open(f"{folder}/adapter/adapter_model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            if "embed_tokens" in name:
                print(name)
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    again.resize_token_embeddings(66)
    report = get_peft_model(again, config).load_adapter(f"{folder}/adapter", "again")
    print("unexpected to its own loader:", *(name for name in report.unexpected_keys if "embed" in name))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
