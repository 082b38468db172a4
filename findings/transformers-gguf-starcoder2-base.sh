#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0: a StarCoder2 in a GGUF file with rope.freq_base 1e6, as all of them have it (about).
#
# A good guess: rope_theta is 1e6, as it is for a Llama, a Qwen or a Gemma in a GGUF file.
#
# What it is: 10000, the default of the class. The table of keys (GGUF_CONFIG_MAPPING in integrations/ggml.py) has
# rope.freq_base for most architectures, but not for starcoder2 and stablelm. Nothing is said, and attention is another.
set -euo pipefail
expected='the model that was written: 1000000.0
the model that was read: 10000.0
largest difference of an attention weight: over 0.5'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "transformers==5.23.0" "torch==2.13.0" "gguf==0.19.0" "accelerate==1.15.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import sys

import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def in_gguf(name: str) -> str:
    stem, _, end = name.rpartition(".")
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.{end}" if layer.isdigit() else f"{NAMES[stem]}.{end}"


folder = sys.argv[1]
config = Starcoder2Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, attn_implementation="eager",
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
torch.manual_seed(0)
model = Starcoder2ForCausalLM(config).eval()
writer = GGUFWriter(f"{folder}/model.gguf", "starcoder2")
writer.add_block_count(2)
writer.add_context_length(128)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(4)
writer.add_head_count_kv(2)
writer.add_layer_norm_eps(config.norm_epsilon)
writer.add_rope_freq_base(1e6)
writer.add_tokenizer_model("gpt2")
writer.add_token_list([str(number) for number in range(64)])
with torch.no_grad():
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.copy_(torch.randn(weight.shape))
        writer.add_tensor(in_gguf(name), weight.numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", attn_implementation="eager").eval()
ids = torch.arange(48)[None] % 61
with torch.no_grad():
    both = [one(ids, output_attentions=True).attentions for one in (model, read)]
apart = max(float((one - other).abs().max()) for one, other in zip(*both))
for what, one in (("written", model), ("read", read)):
    print(f"the model that was {what}:", one.config.rope_parameters["rope_theta"])
print("largest difference of an attention weight:", "over 0.5" if apart > 0.5 else f"{apart:.2g}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" "$place" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
