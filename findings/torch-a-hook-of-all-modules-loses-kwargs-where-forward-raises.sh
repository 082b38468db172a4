#!/usr/bin/env bash
# torch 2.13.0: a forward hook with with_kwargs=True and always_call=True, of one module and of all modules, where the
# module's forward raises.
#
# A good guess: the hook is called with the same four arguments as after a forward that returns (module, arguments,
# keyword arguments, output), and the output is None.
#
# What it is: that holds for Module.register_forward_hook. register_module_forward_hook takes the same two options, and
# its hook has four arguments while forward returns. Where forward raises, the hook is called without the keyword
# arguments. A hook that names its four arguments is not run then: its TypeError becomes a warning. So a hook that shall
# clean up after each call does so after all calls but those for which always_call is there.
set -euo pipefail
expected='one module, forward returns: called with 4 arguments
one module, forward raises: called with 4 arguments
all modules, forward returns: called with 4 arguments
all modules, forward raises: a TypeError in a warning'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import warnings

import torch
from torch.nn.modules.module import register_module_forward_hook


class Picky(torch.nn.Module):
    def forward(self, x, raises):
        if raises:
            raise ValueError
        return x


def hook(module, arguments, keywords, output) -> None:
    calls.append(f"called with {len([module, arguments, keywords, output])} arguments")


model = Picky()
for whose, register in (("one module", model.register_forward_hook), ("all modules", register_module_forward_hook)):
    handle = register(hook, with_kwargs=True, always_call=True)
    for raises in (False, True):
        calls = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                model(torch.ones(1), raises=raises)
            except ValueError:
                pass
        missing = any("missing 1 required positional argument: 'output'" in str(warning.message) for warning in warned)
        seen = calls + ["a TypeError in a warning"] * missing
        print(f"{whose}, forward {'raises' if raises else 'returns'}:", *seen)
    handle.remove()
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
