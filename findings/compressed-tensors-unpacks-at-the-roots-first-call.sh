#!/usr/bin/env bash
# transformers 5.23.0, compressed-tensors 0.20.0: the body of a checkpoint whose weights are stored as int8, called
# before and after the model around it.
#
# A good guess: from_pretrained gives a model any part of which can be called, as it does without quantization; or
# weights are unpacked layer by layer, when a layer is called.
#
# What it is: they are unpacked by a hook of the outermost module, at its first call. model.model(ids) before that
# raises an error about types or a missing weight, by the scheme, and works once model(ids) was called. Code that calls
# the body alone, for its hidden states, has to call the model first, or to load with dequantize=True, which gives layers
# that no longer round what enters them.
set -euo pipefail
expected='the body, first: RuntimeError
the model: works
the body, then: works
the body, loaded with dequantize=True: works'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "compressed-tensors==0.20.0" "accelerate==1.15.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
ids = torch.arange(3, 13)[None]


def call(title, part):
    try:
        with torch.no_grad():
            part(ids)
        print(f"{title}: works")
    except Exception as error:
        print(f"{title}: {type(error).__name__}")


with tempfile.TemporaryDirectory() as place:
    folder = Path(place)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**shared, "strategy": "channel"},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }
    (folder / "config.json").write_text(json.dumps(config))

    model = AutoModelForCausalLM.from_pretrained(folder)
    call("the body, first", model.model)
    call("the model", model)
    call("the body, then", model.model)
    unpacked = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=unpacked)
    call("the body, loaded with dequantize=True", model.model)
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
