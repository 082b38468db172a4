#!/usr/bin/env bash
# transformers 5.23.0: asking a config of Gemma 4 for head_dim, a field that its own class has.
#
# A good guess: a number (256), or an AttributeError, so that hasattr and getattr with a default go on.
#
# What it is: an error that is no AttributeError, from getattr with a default and from hasattr too, since layers differ
# in it. Other fields of the same config answer. So code that probes a config by name, as most tools do, fails in the
# probe.
set -euo pipefail
expected='num_attention_heads: True
head_dim: AmbiguousGlobalPerLayerAttributeError, is an AttributeError: False
head_dim of the layers: [256, 512]'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
from transformers import Gemma4TextConfig

config = Gemma4TextConfig()
for name in ("num_attention_heads", "head_dim"):
    try:
        print(f"{name}:", hasattr(config, name))
    except Exception as error:
        print(f"{name}: {type(error).__name__}, is an AttributeError: {isinstance(error, AttributeError)}")
print("head_dim of the layers:", sorted({layer.head_dim for layer in config.per_layer_config}))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
