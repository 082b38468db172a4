#!/usr/bin/env bash
# torch 2.13.0: torch.compiler.set_stance as a context manager, in two threads whose blocks overlap.
#
# A good guess: each block ends with the stance that was in force before the first of them, "default", as the manager
# puts back what it found; or the stance is a thread's own, as that of torch.inference_mode is.
#
# What it is: the stance is the process's, and each block puts back what it read itself. When the first block ends, it
# puts back "default" within the second, where models are compiled again. The second block read "force_eager" from the
# first, and puts that back when it ends. From then on nothing in the process is compiled, without a word. A library
# that forces eager mode for the time of a call has to count its callers.
set -euo pipefail
expected='before: compiled
within the second block, once the first has ended: compiled
after both blocks: not compiled
after set_stance("default"): compiled'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "torch==2.13.0" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import threading

import torch

first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()


def is_compiled() -> str:
    """Whether a function that is called for the first time reaches the compiler's backend."""
    reached = []

    def backend(graph, inputs):
        reached.append(1)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    return "compiled" if reached else "not compiled"


def first() -> None:
    with torch.compiler.set_stance("force_eager"):
        first_in.set()
        second_in.wait()
    first_out.set()


def second() -> None:
    first_in.wait()
    with torch.compiler.set_stance("force_eager"):
        second_in.set()
        first_out.wait()
        print("within the second block, once the first has ended:", is_compiled())


print("before:", is_compiled())
threads = [threading.Thread(target=target) for target in (first, second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("after both blocks:", is_compiled())
torch.compiler.set_stance("default")
print('after set_stance("default"):', is_compiled())
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2
