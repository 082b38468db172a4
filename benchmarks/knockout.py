"""What a knockout, a patch and an ablation cost: of a long text in plain forwards, and per set beside a batched one.

    python benchmarks/knockout.py [--tokens 8192] [--runs 5] [--write]

Long: one set on the shape of `engines.py`. A knockout cuts one key from the last row of all heads. A patch moves what
all heads give for one token. An ablation replaces one head by its mean over two texts. The plain forward is the
backbone under sdpa, of one row and of two. Each way runs once in fresh processes, in turn: the median of the processor
seconds, and the peak memory of the process. Per set: CPU time of every head alone on the demo's shape, with layers
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
    "patch": "patch of one set, a pair",
    "ablation": "ablation of one set, two texts",
}
# Texts that are read: of a patch the pair as it is, patched, and for the spread of its logits; of an ablation both for
# their means, both as they are, and both changed.
ROWS = {"two": 2, "knockout": 2, "patch": 6, "ablation": 6}
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
    """The processor seconds of a first pass, and the peak memory of the process in bytes."""
    run = prepare(way, tokens)
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    return {"seconds": seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def prepare(way: str, tokens: int):
    if way == "plain":
        return prepare_plain(way, tokens, "cpu", False)
    if way == "fused":
        return prepare_attnscope(way, tokens, "cpu", False)
    if way == "two":
        return two_rows(tokens)
    loaded, ids = long_model(tokens)
    if way == "patch":
        return patched(loaded, ids)
    if way == "ablation":
        return ablated(loaded, ids)
    from attnscope import knockout

    asked = {"key": tokens // 2, "answer": [5], "random": 0}
    return lambda: knockout(loaded, ids, **asked)


def two_rows(tokens: int):
    model, ids = build("plain", tokens, "cpu", False)

    def run() -> None:
        with torch.no_grad():
            model.model(ids.repeat(2, 1), use_cache=False)

    return run


def patched(loaded, ids: list[int]):
    from attnscope.studies.patching import AskedPair, PatchPlan, PatchStudy, pairs_of

    middle = len(ids) // 2
    corrupted = [*ids[:middle], (ids[middle] + 1) % 2000, *ids[middle + 1 :]]
    question = AskedPair(ids, corrupted=corrupted, answer=[5], at=str(middle))
    return lambda: PatchStudy(loaded, pairs_of(loaded, [question]), PatchPlan(random=0)).run()


def ablated(loaded, ids: list[int]):
    from attnscope.interventions.passes import prepared
    from attnscope.interventions.spec import HeadSet, Task

    task = Task("texts", (tuple(ids), tuple(reversed(ids))), ((len(ids) - 2,),) * 2)
    sets = [HeadSet("one", ((3, 0),))]
    return lambda: prepared(loaded, task, sets, "mean", shared=False).measured(sets)


def long_model(tokens: int):
    """The model of `engines.py` with the demo's tokenizer, and a text of so many ids."""
    import attnscope
    from attnscope.model.loading import wrap

    model, ids = build("fused", tokens, "cpu", False)[:2]
    return wrap(model, attnscope.load("demo", device="cpu").tokenizer), ids[0].tolist()


def table(found: dict[str, list[dict[str, float]]], tokens: int) -> str:
    """A row per way: median seconds, over plain forwards of as many texts, peak memory, over that of heads."""
    seconds = {way: statistics.median(one["seconds"] for one in runs) for way, runs in found.items()}
    memory = {way: statistics.median(one["memory"] for one in runs) for way, runs in found.items()}
    lines = [f"One set of {tokens:,} tokens, median of {len(found['plain'])}:\n"]
    lines += ["| way | processor s | of as many plain forwards | GB | of heads |", "|---|---:|---:|---:|---:|"]
    for way, name in WAYS.items():
        times, room = seconds[way] / seconds["plain"] / ROWS.get(way, 1), memory[way] / memory["fused"]
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
