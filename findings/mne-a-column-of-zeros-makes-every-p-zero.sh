#!/usr/bin/env bash
# mne 1.13.2: permutation_t_test of 24 columns of noise (a head each, 32 texts), and of the same table where one head's
# effect is 0 on every text, as that of a pruned head is.
#
# A good guess: the column of zeros has no t, so its p is NaN or 1. The others are noise as before, and the smallest of
# their p, which are corrected for all columns by the largest |t|, stays near 0.5.
#
# What it is: p is 0.0 for all 24, which no permutation test can give: without the zeros the smallest possible is 0.001.
# The t of the zeros is 0 / 0, the largest |t| of every permutation is NaN, and a p is the share of those that reach the
# observed one. No comparison with NaN is true. The only sign is a warning of numpy about a division.
set -euo pipefail
expected='noise: smallest p 0.49, at most 0.05: 0 of 24
one column of zeros: smallest p 0.00, at most 0.05: 24 of 24
without that column: smallest p 0.48, at most 0.05: 0 of 23'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "mne==1.13.2" "numpy==2.4.6" "scipy==1.17.1"

cat > "$place/try.py" <<'PYTHON'
import numpy as np
from mne.stats import permutation_t_test

noise = np.random.default_rng(0).normal(size=(32, 24))
zeros = noise.copy()
zeros[:, 3] = 0
tables = {"noise": noise, "one column of zeros": zeros, "without that column": np.delete(noise, 3, axis=1)}
for name, table in tables.items():
    _, p, _ = permutation_t_test(table, n_permutations=1000, rng=0, verbose="error")
    print(f"{name}: smallest p {p.min():.2f}, at most 0.05: {(p <= 0.05).sum()} of {len(p)}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
