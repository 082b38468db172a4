#!/usr/bin/env bash
# transformers 5.23.0: two checkpoints that cannot be read here. The config of one names a quantization method whose
# package is not installed, that of the other a method that transformers does not have (modelopt, NVIDIA's for FP8).
#
# A good guess: both are errors that name the method.
#
# What it is: the first is. For the second the method is passed over with a line in the log. The FP8 numbers are taken
# for weights, and their scales are unexpected keys. The loaded model answers, and is off by its scales.
set -euo pipefail
expected='compressed-tensors: ImportError
modelopt: loaded, largest weight of q_proj 448, was 0.0626
missing: 0 unexpected: 7'

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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
NAME = "model.layers.0.self_attn.q_proj.weight"
with tempfile.TemporaryDirectory() as place:
    folder = Path(place)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().max() / 448  # the largest number of float8_e4m3fn
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    plain = json.loads((folder / "config.json").read_text())
    for method in ("compressed-tensors", "modelopt"):
        config = {**plain, "quantization_config": {"quant_method": method, "quant_algo": "FP8"}}
        (folder / "config.json").write_text(json.dumps(config))
        try:
            loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            print(f"{method}: {type(error).__name__}")
            continue
        largest = [float(state.get_parameter(NAME).abs().max()) for state in (model, loaded)]
        print(f"{method}: loaded, largest weight of q_proj {largest[1]:.3g}, was {largest[0]:.3g}")
        print("missing:", len(report["missing_keys"]), "unexpected:", len(report["unexpected_keys"]))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
