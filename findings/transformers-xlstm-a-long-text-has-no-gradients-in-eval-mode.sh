#!/usr/bin/env bash
# transformers 5.23.0: which parameters of an xLSTM get a gradient, by the model's mode and the length of the text.
#
# A good guess: all of them. `eval()` turns dropout off and leaves gradients as they are, and how many tokens are read at
# once is a matter of memory.
#
# What it is: in eval mode a text of more than `max_inference_chunksize` tokens (16,384 unless the config says otherwise)
# goes through all blocks without gradients. The loss has a graph all the same, of the last norm and the head, so that
# `backward` warns of nothing. Asked for hidden states as well, the same text takes another way, with gradients in all
# blocks. Attributions by gradient want train mode or `output_hidden_states=True` there.
set -euo pipefail
expected='train, 12 tokens: embeddings True, blocks 30 of 30, head True
eval, 8 tokens: embeddings True, blocks 30 of 30, head True
eval, 12 tokens: embeddings False, blocks 0 of 30, head True
eval, 12 tokens, output_hidden_states=True: embeddings True, blocks 30 of 30, head True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "num_blocks": 2, "vocab_size": 100}
model = xLSTMForCausalLM(xLSTMConfig(max_inference_chunksize=8, **sizes))
ids = torch.randint(0, 100, (1, 12))
runs = ("train", 12, {}), ("eval", 8, {}), ("eval", 12, {}), ("eval", 12, {"output_hidden_states": True})
for mode, tokens, more in runs:
    getattr(model, mode)()
    model.zero_grad()
    model(ids[:, :tokens], labels=ids[:, :tokens], use_cache=False, **more).loss.backward()
    has = {name: weight.grad is not None for name, weight in model.named_parameters()}
    blocks = [value for name, value in has.items() if "blocks" in name]
    words = "".join(f", {name}={value}" for name, value in more.items())
    ends = has["backbone.embeddings.weight"], has["lm_head.weight"]
    print(f"{mode}, {tokens} tokens{words}: embeddings {ends[0]}, blocks {sum(blocks)} of {len(blocks)}, head {ends[1]}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
