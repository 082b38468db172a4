#!/usr/bin/env bash
# mne 1.13.2 and scipy 1.17.1: permutation_t_test of one head's effects on 10 texts, exact, with tail=0, 1 and -1, and the
# same test by scipy's permutation_test.
#
# A good guess: the p of the upper tail is half that of both tails where the mean is positive, as half of the flips that
# reach |t| reach t. The documentation says of tail=1 that the alternative is a mean greater than 0.
#
# What it is: it is that of both tails. Whatever the tail, an effect is compared with the largest |t| of each permutation and
# not with the largest t. So a test of one side finds less than was asked for, at half the level, and with tail=-1 a
# positive mean has a p of exactly 1. H0, which would be signed, has no negative number.
set -euo pipefail
expected='two-sided: mne 0.04, scipy 0.04; H0 of mne has a negative t: False
greater: mne 0.04, scipy 0.02; H0 of mne has a negative t: False
less: mne 1.00, scipy 0.98; H0 of mne has a negative t: False'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "mne==1.13.2" "numpy==2.4.6" "scipy==1.17.1"

cat > "$place/try.py" <<'PYTHON'
import numpy as np
from mne.stats import permutation_t_test
from scipy.stats import permutation_test


def t(effects, axis):
    return effects.mean(axis) / effects.std(axis, ddof=1)


effects = np.array([0.9, 1.1, 0.2, 1.4, -0.3, 0.8, 0.6, -0.1, 0.5, -0.35])
for tail, side in ((0, "two-sided"), (1, "greater"), (-1, "less")):
    _, [of_mne], null = permutation_t_test(effects[:, None], n_permutations="all", tail=tail, verbose="error")
    of_scipy = permutation_test((effects,), t, vectorized=True, permutation_type="samples", alternative=side).pvalue
    print(f"{side}: mne {of_mne:.2f}, scipy {of_scipy:.2f}; H0 of mne has a negative t: {bool((null < 0).any())}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
