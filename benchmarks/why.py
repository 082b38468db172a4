"""What a logit taken apart costs, of 28 layers of 24 heads, beside the plain forward pass.

    python benchmarks/why.py [--tokens 512] [--runs 5] [--write]

The shape of Llama-3.2-3B cut to width 512, random weights in float32; head 0 of the last layer, the last token, one
key. The plain forward is the backbone under sdpa, without a cache and without logits. Each way runs in fresh processes,
in turn: the first pass of each, with what it imports, and the median of those after it; seconds and CPU seconds.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from results import measured_here
from transformers import MistralConfig, MistralForCausalLM

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1365,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
WAYS = {  # what `why` is asked for
    "plain": {},
    "key": {},
    "query": {"side": "query"},
    "both": {"side": "both"},
    "tokens": {"by": "tokens"},
    "verify": {"verify": True},
}
NAMES = {
    "plain": "plain forward, sdpa",
    "key": "`why`",
    "query": "`--side query`",
    "both": "`--side both`",
    "tokens": "`--by tokens`",
    "verify": "`--verify`",
}
LATER = 3  # passes after the first
TIMES = ("first", "later", "cpu_first", "cpu_later")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes of each way")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens)))
        return
    found = {way: [] for way in options.ways}
    for _ in range(options.runs):
        for way in options.ways:
            command = [sys.executable, __file__, "--way", way, "--tokens", str(options.tokens)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    text = f"`python benchmarks/why.py`: {options.tokens} tokens, {options.runs} processes.\n\n{table(found)}"
    print(text)
    if options.write:
        measured_here("Why", text)


def measure(way: str, tokens: int) -> dict[str, float]:
    """Seconds and CPU seconds of a first pass and of the later ones, and the process's peak memory in bytes."""
    run = prepare(way, tokens)
    times = [timed(run) for _ in range(1 + LATER)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    later = [statistics.median(one) for one in zip(*times[1:], strict=True)]
    return {"first": times[0][0], "cpu_first": times[0][1], "later": later[0], "cpu_later": later[1], "memory": memory}


def timed(run: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def prepare(way: str, tokens: int) -> Callable[[], object]:
    """What is timed; the model is made before."""
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=2000, sliding_window=None, attn_implementation="sdpa", **SHAPE)
    model = MistralForCausalLM(config).eval().requires_grad_(False)
    ids_BT = torch.randint(0, 2000, (1, tokens))
    if way == "plain":
        return lambda: plain(model, ids_BT)
    import attnscope
    from attnscope.model.loading import wrap

    loaded = wrap(model, attnscope.load("demo", device="cpu").tokenizer)
    head, asked = f"L{SHAPE['num_hidden_layers'] - 1}H0", {"key": tokens // 2, **WAYS[way]}
    return lambda: attnscope.why(loaded, ids_BT[0].tolist(), head, **asked)


@torch.no_grad()
def plain(model: MistralForCausalLM, ids_BT: torch.Tensor) -> None:
    model.model(ids_BT, use_cache=False)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """A row per way, each time beside the plain forward of the same turn."""
    lines = [
        "| way | first, s | times plain | later, s | times plain | CPU s, later | times plain | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, runs in found.items():
        cells = [NAMES[way]]
        for name in ("first", "later", "cpu_later"):
            cells += [spread([one[name] for one in runs]), ratio(runs, found["plain"], name)]
        memory = statistics.median(one["memory"] for one in runs)
        lines.append(f"| {' | '.join(cells)} | {memory / 1e9:.2f} GB |")
    return "\n".join(lines) + "\n"


def ratio(runs: list[dict[str, float]], plain: list[dict[str, float]], name: str) -> str:
    return spread([one[name] / other[name] for one, other in zip(runs, plain, strict=True)])


def spread(values: list[float]) -> str:
    """The median, and from which to which they go."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
