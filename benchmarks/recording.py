"""What a recording costs: processor seconds of a pass and of a generation, plain and recorded, and of the statistics.

    python benchmarks/recording.py [--tokens 512,2048] [--new 16] [--processes 3] [--rounds 3] [--write]

Fresh processes, one thread each; of its rounds, in turn, each gives the least. A random model of the sizes of
SmolLM2-135M under sdpa. The statistics are those of `heads`, of every layer's q and k, which are there already.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from results import measured_here

SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048])
    parser.add_argument("--new", type=int, default=16, help="tokens that are generated")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.new, options.rounds)))
        return
    lines = [
        "| tokens | what | plain | recorded | its text | statistics | (recorded + text - plain) / statistics |",
        "|---|---|---|---|---|---|---|",
    ]
    for tokens in options.tokens:
        runs = [in_process(tokens, options) for _ in range(options.processes)]
        for what in runs[0]:
            shares = [
                (of["recorded"] + of["text"] - of["plain"]) / of["statistics"] for of in (run[what] for run in runs)
            ]
            middle = [statistics.median(run[what][part] for run in runs) for part in runs[0][what]]
            cells = " | ".join(f"{seconds:.2f}" for seconds in middle)
            spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
            lines.append(f"| {tokens} | {what} | {cells} | {spread} |")
            print(lines[-1], flush=True)
    text = f"Median of {options.processes} processes, processor seconds:\n\n" + "\n".join(lines)
    if options.write:
        measured_here("A recording", f"`python benchmarks/recording.py --new {options.new}`. {text}")


def in_process(tokens: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    more = ["--measure", str(tokens), "--new", str(options.new), "--rounds", str(options.rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, __file__, *more], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(output.stdout.splitlines()[-1])


def seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def measure(tokens: int, new: int, rounds: int) -> dict[str, dict[str, float]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import attnscope

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    ways = {
        "a forward": lambda: model(ids, logits_to_keep=1),
        f"generate, {new} new": lambda: model.generate(ids, max_new_tokens=new, do_sample=False),
    }
    return {what: least(attnscope, model, work, rounds) for what, work in ways.items()}


def least(attnscope, model, work: Callable[[], object], rounds: int) -> dict[str, float]:
    from attnscope.hooks import forwards, joining

    keep, every = attnscope.Request(), []
    for _ in range(rounds + 1):
        plain = seconds(work)
        with attnscope.recording(model, keep=keep) as seen:
            recorded = seconds(work)
        text = seconds(lambda seen=seen: seen.texts)
        again = attnscope.api.recording.Recording(seen.loaded, keep)
        ready = joining.joined(forwards.path(seen._kept.forwards[-1], 0))
        own = seconds(lambda again=again, ready=ready: again._observed(ready))
        every.append({"plain": plain, "recorded": recorded, "text": text, "statistics": own})
    return {part: min(of[part] for of in every[1:]) for part in every[0]}  # the first makes kernels and tables


if __name__ == "__main__":
    main()
