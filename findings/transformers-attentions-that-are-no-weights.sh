#!/usr/bin/env bash
# transformers 5.23.0: what YOSO and Autoformer return as `attentions`.
#
# A good guess: weights, of (texts, heads, queries, keys), whose rows sum to 1: the documentation of the field says so for
# both.
#
# What it is: YOSO returns the output of its layer, (texts, tokens, width). Autoformer returns its aggregated values,
# (texts, heads, steps, width of a head), which are signed. A heatmap of either is drawn without an error.
set -euo pipefail
expected='yoso, 24 tokens, 4 heads: (1, 24, 32)
autoformer, 24 steps, 2 heads: (1, 2, 24, 16), negative values: True, sums of rows that are 1: 0'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformers import AutoformerConfig, AutoformerModel, YosoConfig, YosoModel

torch.manual_seed(0)
config = YosoConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=32,
    max_position_embeddings=64,
)
with torch.no_grad():
    out = YosoModel(config).eval()(torch.randint(3, 64, (1, 24)), output_attentions=True)
print("yoso, 24 tokens, 4 heads:", tuple(out.attentions[0].shape))

config = AutoformerConfig(
    prediction_length=4,
    context_length=24,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    lags_sequence=[1, 2],
    num_time_features=1,
)
past = config.context_length + max(config.lags_sequence)
with torch.no_grad():
    out = AutoformerModel(config).eval()(
        past_values=torch.randn(1, past),
        past_time_features=torch.randn(1, past, 1),
        past_observed_mask=torch.ones(1, past),
        future_values=torch.randn(1, 4),
        future_time_features=torch.randn(1, 4, 1),
        output_attentions=True,
    )
values = out.encoder_attentions[0]
ones = int(torch.isclose(values.sum(-1), torch.ones(())).sum())
shape = tuple(values.shape)
print(f"autoformer, 24 steps, 2 heads: {shape}, negative values: {bool((values < 0).any())}, sums of rows that are 1: {ones}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
