"""Parts of a visit to a card, each a table: what is there, the commands, the kernels, parity. See gpu.sh.

python benchmarks/gpu.py environment --device cuda
python benchmarks/gpu.py commands --device cuda              # every command there against the CPU
python benchmarks/gpu.py kernels --device cuda --large       # every engine beside PyTorch's own attention
python benchmarks/gpu.py parity --device cuda --large        # of the shape of Llama-3.2-3B, in bfloat16
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from engines import build, card, job, top_keys

from attnscope.attention.spec import AttentionSpec
from attnscope.attention.visibility import Visibility
from attnscope.model.loading import LoadOptions, load, wrap
from attnscope.parity import check_parity
from attnscope.seam.engines import ENGINES, Eager, Tiled
from attnscope.seam.listen import listen

TEXT = "the financial bank is located on the river bank"
READ = ("--text", TEXT)
COMMANDS = (
    ("heads", *READ, "--engine", "eager"),
    ("heads", *READ, "--engine", "fused"),
    ("heads", *READ, "--dtype", "bfloat16"),
    ("heads", *READ, "--weights", "value"),
    ("relations", *READ, "--query", "bank", "--engine", "fused"),
    ("relations", *READ, "--group", "words"),
    ("keys", *READ),
    ("text", *READ, "--query", "last"),
    ("rollout", *READ),
    ("explain", *READ, "--head", "3.1"),
    ("parity", *READ),
    ("parity", *READ, "--dtype", "bfloat16"),
    ("ablate", "--select", "3.0", "--sequences", "4"),
    ("scan", "--probe", "induction p25", "--sequences", "32"),
    ("compare", TEXT, "the river bank is located on the financial bank"),
)
NEAR = {"float32": 1e-4, "bfloat16": 5e-2}  # how far a number may be from the CPU's, of 1 + its size
SHAPES = {False: (16, 4, 64, (256,)), True: (24, 8, 128, (2048, 8192))}  # heads, kv heads, width, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--large", action="store_true", help="the shape of Llama-3.2-3B in bfloat16")
    options = parser.parse_args()
    held = True
    for line in PARTS[options.part](options.device, options.large):
        print(line, flush=True)
        held = held and "does not hold" not in line
    sys.exit(not held)


def environment(device: str, large: bool) -> Iterator[str]:
    yield from ("| what | here |", "|---|---|")
    yield f"| date | {time.strftime('%Y-%m-%d')} |"
    yield f"| device | {card(device)} |"
    yield f"| machine | {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()} |"
    for name in ("torch", "transformers", "accelerate", "triton", "numba"):
        yield f"| {name} | {installed(name)} |"
    if device.startswith("cuda"):
        found = torch.cuda.get_device_properties(device)
        yield f"| CUDA | {torch.version.cuda}, compute capability {found.major}.{found.minor} |"
        yield f"| memory | {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors |"


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commands(device: str, large: bool) -> Iterator[str]:
    """Each command's numbers on the device beside those on the CPU, by the largest relative difference."""
    yield from ("| command | seconds | numbers | furthest from the CPU's | |", "|---|---|---|---|---|")
    for command in COMMANDS:
        here, seconds = numbers_of((*command, "--device", "cpu"))
        there, seconds = numbers_of((*command, "--device", device))
        far = math.inf if len(here) != len(there) or not here else furthest(here, there)
        near = NEAR["bfloat16" if "bfloat16" in command else "float32"]
        verdict = "holds" if far <= near else "does not hold"
        name = " ".join(command).replace(TEXT, "...")
        yield f"| `attnscope {name}` | {seconds:.1f} | {len(there)} | {far:.1e} | {verdict} |"


def furthest(here: Sequence[float], there: Sequence[float]) -> float:
    return max(abs(a - b) / (1 + abs(a)) for a, b in zip(here, there, strict=True))


def numbers_of(command: Sequence[str]) -> tuple[list[float], float]:
    """Every number that a command prints, in order, and its seconds; none where it failed."""
    start = time.perf_counter()
    whole = [sys.executable, "-m", "attnscope", *command, "--format", "jsonl", "-q"]
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    found = [number for line in lines for number in numbers_in(json.loads(line))]
    return found, time.perf_counter() - start


def numbers_in(value: Any) -> Iterator[float]:
    """The numbers anywhere in a record but p-values, errors of rounding and seconds, which are the machine's own."""
    if isinstance(value, dict):
        for name, part in value.items():
            if not any(word in name for word in ("error", "second", "difference", "device")):
                yield from numbers_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def kernels(device: str, large: bool) -> Iterator[str]:
    """One layer's attention with all statistics, by every engine that is there, beside PyTorch's own alone."""
    H, G, D, lengths = SHAPES[large]
    yield "| tokens | attention | ms (first) | times PyTorch's own | answered by | furthest from the tiles |"
    yield "|---|---|---|---|---|---|"
    for tokens in lengths:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if large else torch.float32
        q, k, v = (torch.randn(1, heads, tokens, D, device=device, dtype=dtype) for heads in (H, G, G))
        spec = AttentionSpec(q, k, v, D**-0.5, Visibility(tokens, tokens, device=q.device))
        own = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        base, first, _ = timed(own, device)
        yield f"| {tokens:,} | PyTorch's own | {base * 1e3:.2f} ({first * 1e3:.1f}) | 1.00 | | |"
        for row in engines_beside(spec, device, base):
            yield f"| {tokens:,} | {row} |"


def engines_beside(spec: AttentionSpec, device: str, base: float) -> Iterator[str]:
    """The tiles first, then every other engine of ours, forced."""
    ids = torch.randint(0, 500, (1, spec.visible.keys), device=spec.device)
    ours = {name: engine for name, engine in ENGINES.items() if isinstance(engine, Tiled) and name != "fused"}
    expected: dict[str, torch.Tensor] = {}
    for name in sorted(ours, key=lambda name: name != "tiles"):
        P = ours[name].operator(spec)
        try:
            seconds, first, (found, *_) = timed(partial(job, P, ids, top_keys("fused", 0)), device)
        except Exception as error:
            yield f"{name} | {type(error).__name__}: {str(error)[:80]} | | |"
            continue
        expected = expected or found
        far = max(float((found[metric] - expected[metric]).abs().max()) for metric in expected)
        who = ", ".join(sorted(set(P.answered_by.values())))
        yield f"{name} | {seconds * 1e3:.2f} ({first * 1e3:.1f}) | {seconds / base:.2f} | {who} | {far:.1e}"


def timed(work: Callable[[], Any], device: str, runs: int = 5) -> tuple[float, float, Any]:
    """The median of some runs in seconds, the first run's, and what the last returned."""
    times, found = [], None
    for _ in range(runs + 1):
        wait(device)
        start = time.perf_counter()
        found = work()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), times[0], found


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def parity(device: str, large: bool) -> Iterator[str]:
    """Parity of a model of the large shape, or a small one, on random ids; and eager against `output_attentions`."""
    model, ids = build("eager", 64, device, large)
    loaded = wrap(model, load(LoadOptions()).tokenizer)
    start = time.perf_counter()
    found = check_parity(loaded, ids)
    verdict = "holds" if found.holds else "does not hold"
    yield from ("| what | verdict | |", "|---|---|---|")
    yield f"| parity, {len(found.layers)} layers | {verdict} | {time.perf_counter() - start:.1f} s |"
    mine: list[torch.Tensor] = []
    listen(model, ids, lambda call: mine.append(call.weights_BHQK), engine=Eager())
    with torch.no_grad():
        theirs = model.model(ids, use_cache=False, output_attentions=True).attentions
    same = all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    yield f"| eager against `output_attentions` | {'holds, bit for bit' if same else 'does not hold'} | |"


PARTS = {"environment": environment, "commands": commands, "kernels": kernels, "parity": parity}

if __name__ == "__main__":
    main()
