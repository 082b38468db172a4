"""What statistics of linear layers cost: of a layer beside PyTorch's attention, of a hybrid beside its forward.

    python benchmarks/linear.py                                   # both tables
    python benchmarks/linear.py --tokens 8192 --model-tokens "" --decay 0.1

The layer has 32 heads of 128 under the gated delta rule of transformers. Asked of it are all metrics of such a layer,
the strongest relation, and what each key receives. The hybrid is a random model, three linear layers to one with a
softmax.
Without a decay no state is forgotten and no part of the map left out: that takes longest. Fresh processes in turn, one
thread each; the table has medians of processor seconds of a first pass, and of the ratios to the first way of the same
turn the median, the least and the most. Memory is the peak of the process on top of what its inputs and model take.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

from results import measured_here

HEADS, WIDTH = 32, 128
LAYER = {
    "sdpa": "PyTorch's attention of that shape",
    "rule": "the layer's own rule",
    "statistics": "all statistics",
}
MODEL = {"forward": "forward of the hybrid", "capture": "`capture` of the hybrid"}
HYBRID = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [0, 1, 2, 3],
    "vocab_size": 1000,
}


def main() -> None:
    options = parse()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens[0], options.decay)))
        return
    lines = [
        "| what | processor seconds | ratio to the first (least to most) | memory on top, MB |",
        "|---|---|---|---|",
    ]
    for ways, lengths in ((LAYER, options.tokens), (MODEL, options.model_tokens)):
        for tokens in lengths:
            lines += rows(ways, tokens, options)
    shape = ", ".join(f"{name} {size}" for name, size in HYBRID.items() if isinstance(size, int))
    command = " ".join(["python", "benchmarks/linear.py", *sys.argv[1:]])
    sizes = textwrap.fill(f"The layer: {HEADS} heads of {WIDTH}. The hybrid: {shape}.", 118)
    text = "\n".join([f"`{command}`, {options.processes} turns.", "", *lines, "", sizes])
    print(text)
    if options.write:
        measured_here("Linear layers", text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = {"type": lambda text: [int(part) for part in text.split(",") if part]}
    parser.add_argument("--tokens", **several, default=[2048, 8192], help="of the layer")
    parser.add_argument("--model-tokens", **several, default=[2048], help="of the hybrid")
    parser.add_argument(
        "--decay", type=float, default=0.0, help="the most that a token takes off the state's logarithm"
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser.parse_args()


def rows(ways: dict[str, str], tokens: int, options: argparse.Namespace) -> list[str]:
    """Lines of the table at one length."""
    results: dict[str, list[dict]] = {way: [] for way in ways}
    for _ in range(options.processes):
        for way in ways:
            command = [sys.executable, __file__, "--way", way, "--tokens", str(tokens), "--decay", str(options.decay)]
            printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results[way].append(json.loads(printed.splitlines()[-1]))
    first, lines = next(iter(ways)), []
    for way, runs in results.items():
        ratios = [run["seconds"] / plain["seconds"] for run, plain in zip(runs, results[first], strict=True)]
        seconds, memory = (statistics.median(run[name] for run in runs) for name in ("seconds", "memory"))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if way != first else "1.00"
        lines.append(f"| {ways[way]}, {tokens:,} tokens | {seconds:.2f} | {spread} | {memory / 1e6:,.0f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def measure(way: str, tokens: int, decay: float) -> dict[str, float]:
    """Processor seconds of a first pass, and the bytes that it takes on top."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = of_layer(way, tokens, decay) if way in LAYER else of_model(way, tokens)
    before, start = peak(), time.process_time()
    with torch.no_grad():
        run()
    return {"seconds": time.process_time() - start, "memory": peak() - before}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def of_layer(way: str, tokens: int, decay: float) -> Callable[[], object]:
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    from attnscope.attention.linear import LinearMap
    from attnscope.attention.questions import Received, TopK
    from attnscope.hooks.mixers import delta_rule
    from attnscope.metrics.metrics import METRICS, SIGNED, Texts, metrics_for, questions, stacked_means
    from attnscope.model.selection import LINEAR

    query, key, value = torch.randn(3, 1, tokens, HEADS, WIDTH)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "g": -decay * torch.rand(1, tokens, HEADS),
        "beta": torch.rand(1, tokens, HEADS),
        "use_qk_l2norm_in_kernel": True,
    }
    texts = Texts(torch.randint(0, 500, (1, tokens)), torch.tensor([tokens]), stack=LINEAR)
    names = metrics_for([*METRICS, *SIGNED], LINEAR)

    def everything() -> object:
        P = LinearMap(delta_rule(torch_chunk_gated_delta_rule, arguments))
        answers = P.together([*questions(names, texts), Received(texts.mean_BT), TopK(1, skip_key0=True)])
        return stacked_means(P, texts, answers, names)

    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    return {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "rule": lambda: torch_chunk_gated_delta_rule(**arguments),
        "statistics": everything,
    }[way]


def of_model(way: str, tokens: int) -> Callable[[], object]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import attnscope
    from attnscope.model.loading import load, wrap
    from attnscope.model.options import LoadOptions

    config = AutoConfig.for_model("qwen3_next", num_experts=2, num_experts_per_tok=1, **HYBRID)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    loaded = wrap(model, load(LoadOptions(device="cpu")).tokenizer)
    if way == "forward":
        return lambda: model.model(ids, use_cache=False)
    return lambda: attnscope.capture(loaded, ids[0].tolist(), request=attnscope.Request())


if __name__ == "__main__":
    main()
