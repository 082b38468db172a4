#!/usr/bin/env bash
# statsmodels 0.15.0 and scipy 1.17.1: multipletests of four heads, two of which are found by every method, and of the same
# with a fifth head whose effect is 0 on every text. scipy's t test gives that one NaN.
#
# A good guess: the fifth is no test and is left out, as pingouin does; or all methods refuse it, as scipy's
# false_discovery_control does.
#
# What it is: it depends on the method. Bonferroni and the two of Holm count it as a test and keep the four. The steps that
# begin at the largest p begin at NaN: Hochberg and Benjamini-Hochberg still reject two, with an adjusted p of NaN for all
# five, so that code which asks for adjusted p below 0.05 finds none where code that asks for reject finds two. Hommel and
# fdr_gbs find none. No method prints a warning.
set -euo pipefail
expected='p of the fifth: nan
bonferroni: rejects 2, then 2; adjusted p that are numbers: 4, then 4
holm-sidak: rejects 2, then 2; adjusted p that are numbers: 4, then 4
holm: rejects 2, then 2; adjusted p that are numbers: 4, then 4
simes-hochberg: rejects 2, then 2; adjusted p that are numbers: 4, then 0
fdr_bh: rejects 2, then 2; adjusted p that are numbers: 4, then 0
fdr_tsbky: rejects 2, then 2; adjusted p that are numbers: 4, then 0
hommel: rejects 2, then 0; adjusted p that are numbers: 4, then 0
fdr_gbs: rejects 2, then 0; adjusted p that are numbers: 4, then 0
false_discovery_control: ValueError'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "statsmodels==0.15.0" "scipy==1.17.1" "numpy==2.4.6" "pandas==3.1.1"

cat > "$place/try.py" <<'PYTHON'
import numpy as np
from scipy.stats import false_discovery_control, ttest_1samp
from statsmodels.stats.multitest import multipletests

four = np.array([0.001, 0.002, 0.2, 0.3])
five = np.append(four, ttest_1samp(np.zeros(8), 0).pvalue)
print("p of the fifth:", five[-1])
for method in ("bonferroni", "holm-sidak", "holm", "simes-hochberg", "fdr_bh", "fdr_tsbky", "hommel", "fdr_gbs"):
    seen = [multipletests(p, method=method)[:2] for p in (four, five)]
    rejects = ", then ".join(str(rejected.sum()) for rejected, _ in seen)
    numbers = ", then ".join(str(np.isfinite(adjusted).sum()) for _, adjusted in seen)
    print(f"{method}: rejects {rejects}; adjusted p that are numbers: {numbers}")
try:
    print("false_discovery_control:", false_discovery_control(five))
except ValueError:
    print("false_discovery_control: ValueError")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
