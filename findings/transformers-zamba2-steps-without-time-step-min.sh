#!/usr/bin/env bash
# transformers 5.23.0: the last row of one pass and the same token as a step with a cache, of Zamba2 and Nemotron-H.
#
# A good guess: equal to rounding: a cache saves work and changes no number.
#
# What it is: that holds while no time step of the state space layers falls below time_step_min of the config. A pass
# raises smaller steps to it, a step with a cache does not, so that the two are different models where a model has
# learnt small steps. What generate writes is from both: the prompt is read by the one, the answer by the other.
set -euo pipefail
expected='Zamba2ForCausalLM, time_step_min 1e-08: equal True
Zamba2ForCausalLM, time_step_min 0.1: equal False
NemotronHForCausalLM, time_step_min 1e-08: equal True
NemotronHForCausalLM, time_step_min 0.1: equal False'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM, Zamba2Config, Zamba2ForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "chunk_size": 16}
zamba = {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]}
zamba |= {"n_mamba_heads": 4, "mamba_d_state": 16}
nemotron = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}
nemotron |= {"ssm_state_size": 16, "head_dim": 8, "intermediate_size": 32}
ids = torch.arange(3, 13)[None]
for kind, config, own in (
    (Zamba2ForCausalLM, Zamba2Config, zamba),
    (NemotronHForCausalLM, NemotronHConfig, nemotron),
):
    for smallest in (1e-8, 0.1):
        torch.manual_seed(0)
        model = kind(config(**sizes, **own, time_step_min=smallest)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                torch.nn.init.constant_(parameter, -4.0)  # steps of about 0.02
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        with torch.no_grad():
            row = model(ids, use_cache=False).logits[0, -1]
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            step = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]
        print(f"{kind.__name__}, time_step_min {smallest}: equal {torch.allclose(row, step, atol=1e-3)}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
