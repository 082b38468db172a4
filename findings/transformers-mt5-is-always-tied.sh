#!/usr/bin/env bash
# transformers 5.23.0: an MT5Config with tie_word_embeddings=False, as mT5's own checkpoints have it.
#
# A good guess: the head has weights of its own. Loading a checkpoint of the body alone as a model with a head then
# reports lm_head.weight as missing.
#
# What it is: the argument is dropped, so that the config says True. Loading the body's checkpoint reports nothing, and
# the model writes text through its embeddings, which that head was never trained to be.
set -euo pipefail
expected='tie_word_embeddings: True
missing: []
the head is the embeddings: True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import tempfile

from transformers import MT5Config, MT5ForConditionalGeneration, MT5Model

sizes = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
config = MT5Config(vocab_size=64, tie_word_embeddings=False, **sizes)
print("tie_word_embeddings:", config.tie_word_embeddings)
with tempfile.TemporaryDirectory() as folder:
    MT5Model(config).save_pretrained(folder)
    model, report = MT5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
print("missing:", sorted(report["missing_keys"]))
print("the head is the embeddings:", model.lm_head.weight is model.shared.weight)
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
