#!/usr/bin/env bash
# transformer-lens 4.3.0 and transformers 5.23.0: `compute_effective_attention` of a Mamba-2, after `run_with_cache` of the same
# bridge on a text.
#
# A good guess: it gives the map, as its documentation says: its cache comes "from run_with_cache".
#
# What it is: it raises, and asks for `run_with_cache()`, which was run. transformers hands the weight of `conv1d` to a function
# and never calls that module, so that its hook does not fire. `use_cache=False` changes nothing. With `eager_scan`, meant for
# changes of the state, and with `use_cache=False` the bridge runs its own code, which calls the module: then there is a map.
set -euo pipefail
expected='plain: needs in_proj and conv1d in cache, has in_proj: "Run `run_with_cache()`"
use_cache=False: needs in_proj and conv1d in cache, has in_proj: "Run `run_with_cache()`"
eager_scan: needs in_proj and conv1d in cache, has in_proj: "Run `run_with_cache()`"
eager_scan, use_cache=False: a map of (1, 4, 20, 20)'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "transformer-lens==4.3.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import itertools
import tempfile

import torch
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "num_hidden_layers": 1}
tokens = {"vocab_size": 64, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
torch.manual_seed(0)
model = Mamba2ForCausalLM(Mamba2Config(**tokens, **sizes)).eval()
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1").save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
mixer = bridge.blocks[0].mixer
for eager, plain in itertools.product((False, True), (True, False)):
    name = ", ".join(["eager_scan"] * eager + ["use_cache=False"] * (not plain)) or "plain"
    mixer.eager_scan = eager
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.arange(10, 30)[None], **({} if plain else {"use_cache": False}))
    try:
        print(f"{name}: a map of {tuple(mixer.compute_effective_attention(cache, layer_idx=0).shape)}")
    except RuntimeError as error:
        parts = ("in_proj", "conv1d")
        needs = " and ".join(part for part in parts if f"{part}.hook_out" in str(error))
        has = " and ".join(part for part in parts if f"blocks.0.mixer.{part}.hook_out" in cache)
        asked = "Run `run_with_cache()`" if "Run `run_with_cache()` on the bridge" in str(error) else str(error)
        print(f'{name}: needs {needs} in cache, has {has}: "{asked}"')
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
