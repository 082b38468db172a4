"""Attention alone: PyTorch's own with nothing asked, and the tiles and the compiled kernel with everything asked.

    python benchmarks/attention.py 2048 8192 16384
    taskset -c 1 python benchmarks/attention.py 2048 --threads 1 --processor

The same q, k, v in turn in one process: 16 heads on 4 kv heads of 64, float32. Asked: the metrics of every head, what
each key receives, the 8 strongest keys of every query, and the output. The table gives medians over the turns, and of
the ratios to PyTorch of the same turn the median, the least and the most.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.questions import Received, TopK
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.metrics.metrics import METRICS, Texts, questions, stacked_means

HEADS, KV_HEADS, WIDTH, TOP = 16, 4, 64, 8


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if options.processor else time.perf_counter
    print("| tokens | way | seconds | times sdpa (least to most) |\n|---|---|---|---|")
    for tokens in options.tokens:
        found = timed(ways(tokens), options.turns, clock)
        for name, seconds in found.items():
            ratios = [one / plain for one, plain in zip(seconds, found["sdpa"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {tokens:,} | {name} | {statistics.median(seconds):.3f} | {spread} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor", action="store_true", help="processor time instead of time on the clock")
    return parser.parse_args()


def ways(tokens: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    torch.manual_seed(0)
    q_BHQD = torch.randn(1, HEADS, tokens, WIDTH) * 1.5
    k_BGKD, v_BGKD = torch.randn(2, 1, KV_HEADS, tokens, WIDTH)
    texts = Texts(torch.randint(3, 500, (1, tokens)), torch.tensor([tokens]))
    asked = [*questions(list(METRICS), texts), Received(texts.mean_BT), TopK(TOP)]

    def everything(operator: type[TiledAttention]) -> object:
        P = operator(AttentionSpec(q_BHQD, k_BGKD, v_BGKD, WIDTH**-0.5, Visibility(tokens, tokens)), with_output=True)
        answers = P.together(asked)
        return P.output(), stacked_means(P, texts, answers, list(METRICS))

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "sdpa": lambda: sdpa(q_BHQD, k_BGKD, v_BGKD, is_causal=True, enable_gqa=True),
        "numba": lambda: everything(CompiledAttention),
        "tiles": lambda: everything(TiledAttention),
    }


def timed(ways: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each way, turn by turn, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, run in ways.items():
            start = clock()
            run()
            if turn:
                found[name].append(clock() - start)
    return found


if __name__ == "__main__":
    main()
