#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0: a Gemma 4 in a GGUF file, written as llama.cpp's converter writes it.
#
# A good guess: layer_scalar, which the output of each layer is multiplied by, is that of the file
# (blk.N.layer_output_scale.weight), as other weights are; or the file is refused.
#
# What it is: 1, what a new model begins with. The reader asks the gguf package for the name of every entry of the model's
# state dict, and layer_scalar is a buffer whose name has no ".weight" behind it, where the tensor's name has. Every layer
# behind the first then gets other inputs. A report of missing keys is all that is said.
set -euo pipefail
expected='the model that was written: 0.5 0.5
the model that was read: 1.0 1.0'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "transformers==5.23.0" "torch==2.13.0" "gguf==0.19.0" "accelerate==1.15.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import sys

import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}


def in_gguf(name: str) -> str:
    stem = name.removesuffix(".weight")
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.weight" if layer.isdigit() else f"{NAMES[stem]}.weight"


folder = sys.argv[1]
config = Gemma4TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=256, global_head_dim=512, hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
model = Gemma4ForCausalLM(config).eval()
writer = GGUFWriter(f"{folder}/model.gguf", "gemma4")
writer.add_block_count(2)
writer.add_context_length(131072)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(4)
writer.add_head_count_kv(2)
writer.add_key_length(512)
writer.add_value_length(512)
writer.add_key_length_swa(256)
writer.add_value_length_swa(256)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_sliding_window(512)
writer.add_sliding_window_pattern([True, False])
writer.add_vocab_size(64)
scales = {name: one for name, one in model.named_buffers() if name.endswith("layer_scalar")}
for name, weight in {**dict(model.named_parameters()), **scales}.items():
    if name in scales:
        weight.fill_(0.5)
    writer.add_tensor(in_gguf(name), weight.detach().numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype="float32").eval()
for what, one in (("written", model), ("read", read)):
    print(f"the model that was {what}:", *(float(layer.layer_scalar) for layer in one.model.layers))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" "$place" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
