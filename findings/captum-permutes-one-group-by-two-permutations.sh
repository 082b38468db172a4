#!/usr/bin/env bash
# captum 0.9.0: FeaturePermutation of a group that lies in two tensors (a head's query and key, say), against the same group
# in one tensor. The model is the squared difference of the two, which are equal for every example.
#
# A good guess: 0 in both cases. A group is shuffled together, across tensors too, as the class's description says: every
# example gets the group of another one, in which the two are equal as well.
#
# What it is: 0 in one tensor. Across tensors each tensor is given a permutation of its own, so that what is measured is
# also that the parts no longer belong together. There the importance is as large as that of either part alone, and
# which it is depends on how the inputs were cut into tensors. A perm_func that keeps its permutation for one pass helps.
set -euo pipefail
expected='one tensor: mean importance 0.0
two tensors: mean importance not 0: True
two tensors, one permutation kept by perm_func: mean importance 0.0'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "captum==0.9.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import torch
from captum.attr import FeaturePermutation

values = torch.arange(64.0)[:, None]
group = torch.tensor([[0]])


def model(query, key):
    return ((query - key) ** 2).sum(1)


def rolled(values, mask):
    return torch.where(mask, values.roll(1, 0), values)


torch.manual_seed(0)
joined = FeaturePermutation(lambda both: model(both[:, :1], both[:, 1:]))
[one] = joined.attribute((torch.cat([values, values], 1),), feature_mask=(torch.tensor([[0, 0]]),))
print("one tensor: mean importance", abs(float(one.mean())))
[two, _] = FeaturePermutation(model).attribute((values, values), feature_mask=(group, group))
print("two tensors: mean importance not 0:", abs(float(two.mean())) > 1)
[kept, _] = FeaturePermutation(model, perm_func=rolled).attribute((values, values), feature_mask=(group, group))
print("two tensors, one permutation kept by perm_func: mean importance", abs(float(kept.mean())))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
