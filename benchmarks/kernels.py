"""One layer of Llama-3.2-3B's shape in bfloat16: each Triton kernel beside PyTorch's own attention and the tiles.

    python benchmarks/kernels.py --tokens 2048,8192,32768        # on a card

The blocks of `statistics` that spill nothing are timed one beside the other: which is fastest is not known without a
card. Milliseconds are the median of some batches of 20 launches between two events of the card, after a first launch
that compiles. A row that fails leaves the others.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from attnscope.attention.kernels_cuda import sweep, usable
from attnscope.attention.kernels_cuda.sweep import Blocks
from attnscope.attention.questions import (
    Back,
    EqualLabels,
    Features,
    GroupMass,
    MaxWeight,
    Question,
    Received,
    TopK,
    Window,
)
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention

HEADS, KV_HEADS, WIDTH = 24, 8, 128
FORMS = (Blocks(), Blocks(stages=3), Blocks(M=128, warps=8), Blocks(M=128, warps=8, stages=3))
LAUNCHES = 20  # between two events
SIDE = 200  # groups of a map
TILED = 32768  # tokens beyond which the tiles are not waited for


def layer(tokens: int, device: str) -> AttentionSpec:
    q, k, v = (
        torch.randn(1, tokens, heads, WIDTH, device=device).bfloat16().transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return AttentionSpec(q, k, v, WIDTH**-0.5, Visibility(tokens, tokens, device=torch.device(device)))


def ways(spec: AttentionSpec) -> dict[str, Callable[[], object]]:
    """What is timed: what is known of the rows is found before the kernels that read it."""
    tokens, device = spec.visible.keys, spec.device
    ids = torch.randint(0, 2000, (1, tokens), device=device)
    share = torch.full((1, tokens), 1 / tokens, device=device)
    known, received = sweep.Sweep(spec), Received(share)
    place = torch.arange(tokens, device=device)[None]
    of_runs, of_others = (GroupMass(group, group, (SIDE, SIDE)) for group in (place * SIDE // tokens, place % SIDE))
    asked: dict[str, Question] = {
        "previous token": Back(1),
        "last 32 keys": Window(32),
        "equal tokens": EqualLabels(ids, ids, 1),
        "column sums": received,
        "mass between 200 runs": of_runs,
        "mass between 200 other groups": of_others,
        "top 8 of one head": TopK(8, (0,)),
        "top 1 of all heads": TopK(1, None, True),
        "top 5 of all heads": TopK(5),
        "16 features": Features(torch.randn(tokens, 16, device=device)),
    }
    found: dict[str, Callable[[], object]] = {"PyTorch's own attention": known.output}
    for form in FORMS:
        found[f"statistics, {form.M} x {form.N}, {form.warps} warps, {form.stages} stages"] = in_form(spec, form)
    found |= {name: lambda question=question: known.answers([question]) for name, question in asked.items()}
    found["statistics with the top 5 of all heads"] = lambda: sweep.Sweep(spec, joins=True).answers([TopK(5)])
    found["column sums and mass between 200 runs"] = lambda: known.answers([received, of_runs])
    if tokens <= TILED:
        found["the tiles, statistics"] = lambda: TiledAttention(spec).ask(MaxWeight())
    return found


def in_form(spec: AttentionSpec, form: Blocks) -> Callable[[], object]:
    def run() -> None:
        with mock.patch.object(sweep, "blocks", return_value=form):
            sweep.Sweep(spec).answers([MaxWeight()])

    return run


def milliseconds(run: Callable[[], object], runs: int, device: str) -> float:
    """Of one run, the median of so many batches of runs after a first that compiles; on a card by its own clock."""
    each = LAUNCHES if device.startswith("cuda") else 1
    times = []
    for number in range(runs + 1):
        times.append(_on_card(run, each if number else 1) if each > 1 else _on_host(run))
    return statistics.median(times[1:])


def _on_card(run: Callable[[], object], count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / count


def _on_host(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[2048, 8192])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "Triton's interpreter"
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}.\n")
    print("| tokens | what | ms | of PyTorch's own attention |\n|---|---|---|---|", flush=True)
    failed: list[str] = []
    for tokens in options.tokens:
        spec, own = layer(tokens, options.device), 0.0
        if not usable(spec):
            raise SystemExit(f"the kernels cannot run on {options.device}")
        for what, run in ways(spec).items():
            try:
                taken = milliseconds(run, options.runs, options.device)
            except Exception as error:  # the next row may hold
                failed.append(what)
                first = (str(error).strip().splitlines() or [""])[0][:120].replace("|", "/")
                print(f"| {tokens:,} | {what} | {type(error).__name__}: {first} | |", flush=True)
                continue
            own = own or taken
            print(f"| {tokens:,} | {what} | {taken:.2f} | {taken / own:.2f} |", flush=True)
    if failed:
        raise SystemExit(f"not timed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
