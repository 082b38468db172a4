#!/usr/bin/env bash
# transformers 5.23.0: the checkpoint of a LlamaForQuestionAnswering, loaded as AutoModel, as one loads any checkpoint to
# get its body.
#
# A good guess: the body's weights are found, as they are in a checkpoint of any other head of Llama's: classes share
# base_model_prefix.
#
# What it is: this class calls its body `transformer`, where all others of the family say `model`. None of the body's
# weights is found, all are random numbers, and only a table in the log says so. Mistral's class does not do this, Qwen2's
# does.
set -euo pipefail
expected='LlamaForSequenceClassification: base_model_prefix model, missing in AutoModel: 0
LlamaForQuestionAnswering: base_model_prefix transformer, missing in AutoModel: 11
MistralForQuestionAnswering: base_model_prefix model, missing in AutoModel: 0
Qwen2ForQuestionAnswering: base_model_prefix transformer, missing in AutoModel: 14'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import tempfile

import transformers as hf

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
for name in (
    "LlamaForSequenceClassification",
    "LlamaForQuestionAnswering",
    "MistralForQuestionAnswering",
    "Qwen2ForQuestionAnswering",
):
    kind = getattr(hf, name)
    config = kind.config_class(vocab_size=64, num_key_value_heads=2, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        _, report = hf.AutoModel.from_pretrained(folder, output_loading_info=True)
    missing = len(report["missing_keys"])
    print(f"{name}: base_model_prefix {kind.base_model_prefix}, missing in AutoModel: {missing}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
