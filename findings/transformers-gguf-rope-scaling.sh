#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0: a Llama in a GGUF file whose positions are scaled (rope.scaling.type yarn, factor 4).
#
# A good guess: the config that transformers makes of the file says yarn, since the file does, and its config class has
# such a setting; or the file is refused, or there is a warning.
#
# What it is: the config says "default". The reader has names for a dozen keys of each architecture (GGUF_CONFIG_MAPPING
# in integrations/ggml.py), and the keys under rope.scaling are among them for gpt-oss alone; others are left out, with a
# line at the level of info. Weights of attention are those of other positions. The same holds of linear scaling and of
# every other architecture that this reader knows.
set -euo pipefail
expected='the model that was written: yarn 4.0
the model that was read: default None
largest difference of an attention weight: over 0.5'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "transformers==5.23.0" "torch==2.13.0" "gguf==0.19.0" "accelerate==1.15.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import sys

import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def in_gguf(name: str) -> str:
    parts = name.removesuffix(".weight").removeprefix("model.layers.").split(".", 1)
    return f"blk.{parts[0]}.{NAMES[parts[1]]}.weight" if parts[0].isdigit() else f"{NAMES[name[:-7]]}.weight"


folder = sys.argv[1]
rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=128, rope_parameters=rope, attn_implementation="eager",
)  # fmt: skip
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
writer = GGUFWriter(f"{folder}/model.gguf", "llama")
writer.add_block_count(2)
writer.add_context_length(128)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(4)
writer.add_head_count_kv(4)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_rope_dimension_count(8)
writer.add_rope_freq_base(10000.0)
writer.add_rope_scaling_type(RopeScalingType.YARN)
writer.add_rope_scaling_factor(4.0)
writer.add_rope_scaling_orig_ctx_len(32)
writer.add_vocab_size(64)
with torch.no_grad():
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.copy_(0.5 * torch.randn(weight.shape))
        x = weight.numpy()
        if "q_proj" in name or "k_proj" in name:  # the order in which llama.cpp turns pairs
            x = x.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        writer.add_tensor(in_gguf(name), x.copy())
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
    rope = one.config.rope_parameters
    print(f"the model that was {what}:", rope["rope_type"], rope.get("factor"))
print("largest difference of an attention weight:", "over 0.5" if apart > 0.5 else f"{apart:.2g}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" "$place" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
