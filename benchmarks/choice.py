"""From which length on a text is read faster without its matrices: what `--engine auto` goes by.

    python benchmarks/choice.py                                  # the demo and a larger Llama, all that is asked
    python benchmarks/choice.py --models demo --asked heads --tokens 512,1024 --turns 9 --write

A process for each reading, in turn, forked from one that has loaded the model: its times count what a first reading
costs (loading the kernel, the comparison with eager), and not the start of Python. Shown are medians, and the medians
of eager's time over each other engine's in the same turn, from processor seconds and from the clock.
"""

import argparse
import json
import os
import statistics
import sys
import time

from results import measured_here

ENGINES = ("eager", "numba", "tiles")
LENGTHS = [128, 256, 512, 1024, 2048, 4096]
LARGER = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
ASKED = {
    "heads": {},
    "heads --out": {"relations": True, "maps": "all"},
    "relations": {"relations": True, "metrics": ()},
    "relations --top-k all": {"relations": True, "metrics": (), "top_k": None},
    "relations --query": {"relations": True, "metrics": (), "query": "-1"},
    "heatmap": {"maps": "kept", "metrics": ()},
    "rollout": {"rollout": "bins", "metrics": ()},
    "keys": {"per_token": True},
    "words": {"relations": True, "group": "words", "metrics": ()},
    "scores": {"relations": True, "maps": "all", "weights": "scores"},
    "value": {"relations": True, "maps": "all", "weights": "value"},
    "matrices": {"weights_kept": True, "metrics": ()},
}


def main() -> None:
    options = parse()
    lines = ["| model | asked | tokens | eager, s | " + " | ".join(f"of {name}" for name in options.engines[1:]) + " |"]
    lines.append("|---" * (3 + len(options.engines)) + "|")
    print("\n".join(lines), flush=True)
    for name in options.models:
        loaded = model(name, max(options.tokens))
        for asked in options.asked:
            for tokens in options.tokens:
                found = [turn(loaded, asked, tokens, options) for _ in range(options.turns)]
                lines.append(row(name, asked, tokens, found, options.engines))
                print(lines[-1], flush=True)
    if options.write:
        measured_here("Which engine auto takes (cpu)", "\n".join(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=names, default=["demo", "larger"])
    parser.add_argument("--asked", type=names, default=list(ASKED))
    parser.add_argument("--engines", type=names, default=list(ENGINES))
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=LENGTHS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    return parser.parse_args()


def model(name: str, tokens: int):
    """The model, loaded, with room for so many tokens; nothing was computed on several threads yet."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from attnscope.model.loading import load, wrap
    from attnscope.model.options import LoadOptions
    from attnscope.observe.request import CaptureSpec, Request
    from attnscope.observe.run import read

    torch.set_num_threads(1)  # a process that has threads is not to be forked
    loaded = load(LoadOptions(attention="sdpa", positions=max(512, tokens)))
    if name == "larger":
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=2000, num_key_value_heads=4, max_position_embeddings=131072, **LARGER)
        loaded = wrap(LlamaForCausalLM(config).eval().requires_grad_(False), loaded.tokenizer)
    for engine in ("eager", "tiles"):  # which imports what every reading needs
        read(loaded, CaptureSpec(list(range(16)), Request(relations=True, maps="all"), engine=engine))
    return loaded


def turn(loaded, asked: str, tokens: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    return {engine: apart(loaded, asked, tokens, engine, options.threads) for engine in options.engines}


def apart(loaded, asked: str, tokens: int, engine: str, threads: int) -> dict[str, float]:
    """The seconds of one reading in a process of its own."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writer, json.dumps(measured(loaded, asked, tokens, engine, threads)).encode())
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    return json.loads(said)


def measured(loaded, asked: str, tokens: int, engine: str, threads: int) -> dict[str, float]:
    import torch

    from attnscope.observe.request import CaptureSpec, Request, View
    from attnscope.observe.run import read

    torch.set_num_threads(threads)
    how = dict(ASKED[asked])
    view, kept = View(weights=how.pop("weights", "softmax")), how.pop("weights_kept", False)
    ids = torch.randint(10, 2000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    request = Request(view=view, weights=kept, **how)
    clock, processor = time.perf_counter(), time.process_time()
    read(loaded, CaptureSpec(ids, request, engine=engine))
    return {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}


def row(name: str, asked: str, tokens: int, found: list[dict[str, dict[str, float]]], engines: list[str]) -> str:
    """One line of the table: eager's processor seconds, and its times over the others' (processor; clock)."""
    first, *others = engines
    cells = [f"{statistics.median(one[first]['processor'] for one in found):.2f}"]
    for other in others:
        ratios = {what: sorted(one[first][what] / one[other][what] for one in found) for what in ("processor", "clock")}
        processor, clock = ratios["processor"], ratios["clock"]
        middle = statistics.median(processor)
        cells.append(f"{middle:.2f} ({processor[0]:.2f} to {processor[-1]:.2f}; clock {statistics.median(clock):.2f})")
    return f"| {name} | {asked} | {tokens:,} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
