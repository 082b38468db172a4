#!/usr/bin/env bash
# transformers 5.23.0: an FP8 checkpoint (quant_method fp8) loaded with dequantize=True, saved, and loaded again.
#
# A good guess: what was unpacked is saved as plain weights, so that the copy is the model again, in a file of twice the
# size.
#
# What it is: saving packs the weights into FP8 again, with scales beside them, and writes a config that no longer says
# so. Loading the copy takes the packed numbers for weights and leaves the scales unused. Weights are off by their
# scale, here by a factor of 7,000, and only a table in the log says that keys were unexpected.
set -euo pipefail
expected='saved as: torch.float8_e4m3fn
the saved config has a quantization_config: False
unexpected when loaded again: 9
loaded: largest weight of q_proj 0.0625
saved and loaded again: largest weight of q_proj 448'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "accelerate==1.15.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
NAME = "model.layers.0.self_attn.q_proj.weight"
with tempfile.TemporaryDirectory() as place:
    packed, saved = Path(place, "packed"), Path(place, "saved")
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    model.save_pretrained(packed)
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().max() / 448  # the largest number of float8_e4m3fn
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    config["quantization_config"] = method
    (packed / "config.json").write_text(json.dumps(config))

    unpack = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    once = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16, quantization_config=unpack)
    once.save_pretrained(saved)
    twice, report = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16, output_loading_info=True)
    says = json.loads((saved / "config.json").read_text())
    print("saved as:", load_file(saved / "model.safetensors")[NAME].dtype)
    print("the saved config has a quantization_config:", "quantization_config" in says)
    print("unexpected when loaded again:", len(report["unexpected_keys"]))
    for title, state in (("loaded", once), ("saved and loaded again", twice)):
        print(f"{title}: largest weight of q_proj {float(state.get_parameter(NAME).abs().max()):.3g}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
