#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0: a Phi-3 in a GGUF file that states attention.sliding_window 8 (2047 in Phi-3-mini-4k).
#
# A good guess: the config has sliding_window 8, as that of a Gemma 2 or 3 would, and no query sees more than 8 keys.
#
# What it is: None, so that the last of 48 queries sees 48 keys. The table of keys (GGUF_CONFIG_MAPPING in
# integrations/ggml.py) has the window for the Gemmas alone. llama.cpp leaves it out for Phi-3 too, but says so.
set -euo pipefail
expected='the model that was written: window 8, the last query sees 8 keys
the model that was read: window None, the last query sees 48 keys'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "transformers==5.23.0" "torch==2.13.0" "gguf==0.19.0" "accelerate==1.15.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import sys

import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def in_gguf(name: str) -> str:
    stem, _, end = name.rpartition(".")
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.{end}" if layer.isdigit() else f"{NAMES[stem]}.{end}"


folder = sys.argv[1]
config = Phi3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=128,
    sliding_window=8, pad_token_id=0, attn_implementation="eager",
)  # fmt: skip
torch.manual_seed(0)
model = Phi3ForCausalLM(config).eval()
writer = GGUFWriter(f"{folder}/model.gguf", "phi3")
writer.add_block_count(2)
writer.add_context_length(128)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(4)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_rope_dimension_count(8)
writer.add_rope_freq_base(10000.0)
writer.add_rope_scaling_orig_ctx_len(128)
writer.add_sliding_window(8)
writer.add_vocab_size(64)
writer.add_pad_token_id(0)
for name, weight in model.named_parameters():
    writer.add_tensor(in_gguf(name), weight.detach().numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", attn_implementation="eager").eval()
ids = torch.arange(48)[None] % 61
for what, one in (("written", model), ("read", read)):
    with torch.no_grad():
        last = one(ids, output_attentions=True).attentions[0][0, 0, -1]
    keys = int((last > 0).sum())
    print(f"the model that was {what}: window {one.config.sliding_window}, the last query sees {keys} keys")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" "$place" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
