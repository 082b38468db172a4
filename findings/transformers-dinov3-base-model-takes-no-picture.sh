#!/usr/bin/env bash
# transformers 5.23.0: base_model of three vision models, which is the way from a model with any head to the one without.
#
# A good guess: of a model that has no head it is the model itself, which takes pixel_values.
#
# What it is: so it is of ViT and DINOv2. Of DINOv3 it is the encoder inside, which takes embeddings: the prefix of the
# class is the name of that part. Code that strips heads through base_model fails there.
set -euo pipefail
expected='ViTModel: base_model is ViTModel, takes pixel_values: True
Dinov2Model: base_model is Dinov2Model, takes pixel_values: True
DINOv3ViTModel: base_model is DINOv3ViTEncoder, takes pixel_values: False'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import inspect

import transformers as hf

sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
for kind in (hf.ViTModel, hf.Dinov2Model, hf.DINOv3ViTModel):
    body = kind(kind.config_class(**sizes)).base_model
    takes = "pixel_values" in inspect.signature(body.forward).parameters
    print(f"{kind.__name__}: base_model is {type(body).__name__}, takes pixel_values: {takes}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
