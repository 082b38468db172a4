#!/usr/bin/env bash
# transformers 5.23.0: the logits of generate, of a RoBERTa that is a decoder, beside those of one pass over the same
# ids.
#
# A good guess: equal to rounding. generate calls the model step by step, and the model numbers its tokens itself, from
# behind the padding id, as RoBERTa always does.
#
# What it is: they are those of other positions. generate makes position ids for every decoder, from 0, and hands them
# on. A pass without them begins at 2, as training did. So an answer that was made can be unlikely when it is scored. A
# pass that is given positions from 0 agrees with generate. CamemBERT does the same; GPT-2 counts from 0 in both.
set -euo pipefail
expected='RobertaForCausalLM: one pass is equal False, one pass with positions from 0 is equal True
CamembertForCausalLM: one pass is equal False, one pass with positions from 0 is equal True
GPT2LMHeadModel: one pass is equal True, one pass with positions from 0 is equal True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import CamembertConfig, CamembertForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers import RobertaConfig, RobertaForCausalLM

ids = torch.arange(6, 12)[None]
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
sizes |= {"intermediate_size": 32, "is_decoder": True, "eos_token_id": None}
models = (
    (RobertaForCausalLM, RobertaConfig(**sizes)),
    (CamembertForCausalLM, CamembertConfig(**sizes)),
    (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, eos_token_id=None)),
)
for kind, config in models:
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made = model.generate(
        ids, max_new_tokens=4, do_sample=False, pad_token_id=1, output_logits=True, return_dict_in_generate=True
    )
    step_logits = torch.cat(made.logits)
    with torch.no_grad():
        numbered = model(made.sequences).logits[0, 5:-1]
        from_zero = model(made.sequences, position_ids=torch.arange(10)[None]).logits[0, 5:-1]
    same = [torch.allclose(step_logits, logits, atol=1e-4) for logits in (numbered, from_zero)]
    print(f"{kind.__name__}: one pass is equal {same[0]}, one pass with positions from 0 is equal {same[1]}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
