#!/usr/bin/env bash
# kvpress 0.5.5 and transformers 5.2.0: the weights by which SnapKV scores the keys of a Mistral with a sliding window of 4.
#
# A good guess: they are those of the layer, under whichever attention it runs: SnapKV is about what the last queries look at,
# and Mistral is in the list of models that the package is tested with.
#
# What it is: under eager they are the model's own. Under sdpa, the default, the package computes them again and masks by the
# order of tokens alone. Keys outside the window, which no query of the layer can see, get over half of the weight, and are
# kept in the cache in the place of others, without a warning.
set -euo pipefail
expected='eager: weight on keys outside the window 0.0
sdpa: weight on keys outside the window over 0.5'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.2.0" "kvpress==0.5.5" "pandas==2.3.3"

cat > "$place/try.py" <<'PYTHON'
import torch
from kvpress import SnapKVPress
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

TOKENS, LAST, WINDOW = 24, 8, 4
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
config = MistralConfig(vocab_size=64, num_key_value_heads=4, sliding_window=WINDOW, initializer_range=0.3, **sizes)
ids = torch.arange(TOKENS)[None] + 10
queries, keys = torch.arange(TOKENS - LAST, TOKENS), torch.arange(TOKENS - LAST)
outside = queries[:, None] - keys[None] >= WINDOW


class Listening(SnapKVPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        if attentions is not None:
            self.weights = attentions[..., -LAST:, :-LAST]
        return super().score(module, hidden_states, keys, values, attentions, kwargs)

    def compute_window_attention(self, *given):
        self.weights = SnapKVPress.compute_window_attention(*given)
        return self.weights


for implementation in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(config, attn_implementation=implementation).eval()
    press = Listening(0.5, LAST)
    with torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache(), use_cache=True)
    largest = float((press.weights[0] * outside).max())
    print(f"{implementation}: weight on keys outside the window", "over 0.5" if largest > 0.5 else largest)
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
