"""What a knockout costs: of a long text compared with two plain forwards, and per set with a batched forward.

    python benchmarks/knockout.py [--tokens 8192] [--runs 5] [--write]

Long: one set, all heads, one key of the last row, on the shape of `engines.py`; the plain forward is the backbone under
sdpa, of one row and of two, as many as a knockout's pass has. Each way runs in fresh processes, in turn: the median of
the runs, and the peak memory of the process. Per set: CPU time of every head alone on the demo's shape, with layers
shared below, without other keys and with up to ten draws of each null, over that of a row of a plain batched forward.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from engines import build, prepare_attnscope, prepare_plain
from results import measured_here

WAYS = {
    "plain": "plain forward, sdpa",
    "two": "plain forward of two rows",
    "fused": "heads --engine fused",
    "knockout": "knockout of one set",
}
SHORT = 64  # tokens of the text whose heads are cut one by one
DRAWS = (0, 10)  # of each null


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes of each way")
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens)))
        return
    found = {way: [] for way in WAYS}
    for _ in range(options.runs):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--tokens", str(options.tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    text = table(found, options.tokens) + "".join(per_set(options.runs, draws) for draws in DRAWS)
    print(text)
    if options.write:
        measured_here("Knockout", text)


def measure(way: str, tokens: int) -> dict[str, float]:
    """The time of a pass after a first one, and the peak memory of the process in bytes."""
    run = prepare(way, tokens)
    run()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def prepare(way: str, tokens: int):
    if way == "plain":
        return prepare_plain(way, tokens, "cpu", False)
    if way == "fused":
        return prepare_attnscope(way, tokens, "cpu", False)
    if way == "two":
        return two_rows(tokens)
    loaded, ids = long_model(tokens)
    from attnscope import knockout

    asked = {"key": tokens // 2, "answer": [5], "random": 0}
    return lambda: knockout(loaded, ids, **asked)


def two_rows(tokens: int):
    model, ids = build("plain", tokens, "cpu", False)

    def run() -> None:
        with torch.no_grad():
            model.model(ids.repeat(2, 1), use_cache=False)

    return run


def long_model(tokens: int):
    """The model of `engines.py` with the demo's tokenizer, and a text of so many ids."""
    import attnscope
    from attnscope.model.loading import wrap

    model, ids = build("fused", tokens, "cpu", False)[:2]
    return wrap(model, attnscope.load("demo", device="cpu").tokenizer), ids[0].tolist()


def table(found: dict[str, list[dict[str, float]]], tokens: int) -> str:
    """A row per way: median seconds, over two plain forwards, peak memory, over that of heads."""
    seconds = {way: statistics.median(one["seconds"] for one in runs) for way, runs in found.items()}
    memory = {way: statistics.median(one["memory"] for one in runs) for way, runs in found.items()}
    lines = [f"One set of {tokens:,} tokens, median of {len(found['plain'])}:\n"]
    lines += ["| way | s | of two plain forwards | GB | of heads |", "|---|---:|---:|---:|---:|"]
    for way, name in WAYS.items():
        times, room = seconds[way] / seconds["plain"] / 2, memory[way] / memory["fused"]
        lines.append(f"| {name} | {seconds[way]:.2f} | {times:.2f} | {memory[way] / 1e9:.2f} | {room:.2f} |")
    return "\n".join(lines) + "\n"


def per_set(runs: int, draws: int) -> str:
    """CPU time per set of every head alone and of so many draws, over that of a row of a plain batched forward."""
    import attnscope

    demo = attnscope.load("demo", device="cpu")
    ids = torch.randint(100, 900, (SHORT,), generator=torch.Generator().manual_seed(0)).tolist()
    heads = sum(demo.geometry.heads_by_layer.values())

    def cut():
        return attnscope.knockout(demo, ids, key=SHORT // 2, answer=[5], over="heads", random=draws)

    def plain() -> None:
        with torch.no_grad():
            demo.model(torch.tensor([ids] * heads), logits_to_keep=1, use_cache=False)

    sets = len(cut().effects)
    knockout, forward = (statistics.median(cpu_seconds(run) for _ in range(runs)) for run in (cut, plain))
    each, row = 1e3 * knockout / sets, 1e3 * forward / heads
    return (
        f"\n{heads} heads of the demo alone, {draws} draws of each null, {sets} sets, {SHORT} tokens: {each:.1f} ms of "
        f"CPU time per set, reading and check included. A row of a batched plain forward takes {row:.1f} ms: "
        f"{each / row:.2f} times.\n"
    )


def cpu_seconds(run) -> float:
    run()
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
