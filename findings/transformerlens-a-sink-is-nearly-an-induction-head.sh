#!/usr/bin/env bash
# transformer-lens 4.3.0: the score of its head detector for induction, with error_measure="abs" and exclude_bos=True, of
# four patterns made by hand on 20 tokens, the first of them BOS. Two words come a second time, so that 2 rows show induction.
#
# A good guess: 1 for a head that copies, and about 0 for one that looks at BOS alone: it does nothing that was asked for,
# and BOS was left out. "abs" is what is recommended for precise examinations, with 1 as the perfect match.
#
# What it is: 0.9 for the head that looks at BOS, where one that spreads its weight evenly has 0.1. The difference is
# divided by all rows, and rows where nothing is looked for agree with a head that puts nothing there. On a text without
# any repetition the sink is a perfect induction head. Leaving the own token out does the same for a head that looks at
# itself. "mul" has no number for the sink (0 / 0, which is NaN), and cannot tell the first two heads from each other.
set -euo pipefail
expected='two words again: copies abs 1.00 mul 1.00
two words again: half on BOS abs 0.95 mul 1.00
two words again: BOS alone abs 0.90 mul nan
two words again: even abs 0.10 mul 0.01
no word again: BOS alone abs 1.00 mul nan
no word again: even abs 0.18 mul 0.00'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "transformer-lens==4.3.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from transformer_lens.head_detector import compute_head_attention_similarity_score, get_induction_head_detection_pattern

TOKENS = 20
sink = torch.zeros(TOKENS, TOKENS)
sink[:, 0] = 1
even = torch.tril(torch.ones(TOKENS, TOKENS))
even /= even.sum(1, keepdim=True)
again = torch.tensor([[0, *range(1, 11), 5, 6, *range(11, 18)]])
none = torch.arange(TOKENS)[None]

wanted = get_induction_head_detection_pattern(again)
copies = torch.where(wanted.sum(1, keepdim=True) > 0, wanted, sink)  # where there is nothing to copy it looks at BOS
texts = {
    "two words again": (again, {"copies": copies, "half on BOS": (copies + sink) / 2, "BOS alone": sink, "even": even}),
    "no word again": (none, {"BOS alone": sink, "even": even}),
}
for text, (tokens, heads) in texts.items():
    wanted = get_induction_head_detection_pattern(tokens)
    for head, pattern in heads.items():
        scores = [
            compute_head_attention_similarity_score(
                pattern, wanted, exclude_bos=True, exclude_current_token=False, error_measure=measure
            )
            for measure in ("abs", "mul")
        ]
        print(f"{text}: {head} abs {scores[0]:.2f} mul {scores[1]:.2f}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
