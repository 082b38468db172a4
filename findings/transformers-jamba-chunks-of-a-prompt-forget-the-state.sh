#!/usr/bin/env bash
# transformers 5.23.0: generate of Jamba and of Bamba with prefill_chunk_size, and a prompt of 10 tokens: the logits of
# the first new token beside those of one forward pass over the prompt.
#
# A good guess: equal to rounding, with chunks of any length: they save memory and change no number.
#
# What it is: that holds for Bamba. In Jamba, a chunk of more than one token reads no state of the chunk before, though
# the convolution and the attention layers go on where that ended. The selective scan starts from zero and overwrites
# the state in the cache, so the Mamba layers have forgotten the prompt up to there. The last lines show it: a second
# pass of Jamba with a cache has the same logits where the state in the cache was set to zero. A chunk of one token is
# another branch, which reads the state. So chunks of 1 are right, and so are chunks of 9 here, as the second has one
# token.
set -euo pipefail
expected='JambaForCausalLM, chunks of 1: equal True
JambaForCausalLM, chunks of 5: equal False
JambaForCausalLM, chunks of 9: equal True
JambaForCausalLM, chunks of 10: equal True
BambaForCausalLM, chunks of 1: equal True
BambaForCausalLM, chunks of 5: equal True
BambaForCausalLM, chunks of 9: equal True
BambaForCausalLM, chunks of 10: equal True
JambaForCausalLM, second pass with the state set to zero: equal True
BambaForCausalLM, second pass with the state set to zero: equal False'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import BambaConfig, BambaForCausalLM, JambaConfig, JambaForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
sizes |= {"intermediate_size": 32, "num_hidden_layers": 2, "mamba_d_state": 8}
sizes |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
jamba = {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
bamba = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}
ids = torch.arange(3, 13)[None]
options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
options |= {"output_logits": True, "return_dict_in_generate": True}
passes = []
for kind, config in (
    (JambaForCausalLM, JambaConfig(**sizes, **jamba)),
    (BambaForCausalLM, BambaConfig(**sizes, **bamba)),
):
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.endswith("A_log"):
            torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        row = model(ids, use_cache=False).logits[0, -1]
        for size in (1, 5, 9, 10):
            chunks = model.generate(ids, prefill_chunk_size=size, **options).logits[0][0]
            print(f"{kind.__name__}, chunks of {size}: equal {torch.allclose(row, chunks, atol=1e-3)}")
        second = []
        for factor in (1, 0):
            cache = model(ids[:, :5], use_cache=True).past_key_values
            cache.layers[0].recurrent_states[0].mul_(factor)
            second.append(model(ids[:, 5:], past_key_values=cache, use_cache=True).logits)
    passes.append(f"{kind.__name__}, second pass with the state set to zero: equal {torch.equal(*second)}")
print("\n".join(passes))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
