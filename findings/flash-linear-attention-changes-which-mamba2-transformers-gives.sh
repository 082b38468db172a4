#!/usr/bin/env bash
# transformers 5.23.0 and flash-linear-attention 0.6.0: AutoModelForCausalLM with a config of Mamba-2, before and after
# the class of another model is imported in the same process.
#
# A good guess: it gives a class of transformers each time. Nothing but transformers is imported, and the config is the same.
#
# What it is: where the package is installed, the modelling file of Qwen3-Next imports it for its kernels. The import registers
# the package's own models for the types that transformers has, `mamba2` among them, and takes their places. From then on the
# same call gives another class, with code of its own that needs a GPU. Which it is depends on the imports before.
set -euo pipefail
expected='mamba2 before Qwen3-Next: transformers.models.mamba2.modeling_mamba2
mamba2 after Qwen3-Next: fla.models.mamba2.modeling_mamba2'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" "triton==3.7.1" \
    "fla-core==0.6.0" "flash-linear-attention==0.6.0"

cat > "$place/try.py" <<'PYTHON'
from transformers import AutoConfig, AutoModelForCausalLM


def home():
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "num_hidden_layers": 1}
    config = AutoConfig.for_model("mamba2", vocab_size=64, n_groups=1, **sizes)
    return type(AutoModelForCausalLM.from_config(config)).__module__


print("mamba2 before Qwen3-Next:", home())
from transformers import Qwen3NextForCausalLM  # noqa: E402, F401

print("mamba2 after Qwen3-Next:", home())
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
