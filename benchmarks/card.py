"""What inspecting costs on a card beside the plain forward pass, in one process: the model is made once.

    python3 benchmarks/card.py --tokens 8192,32768,2048,131072            # Llama-3.2-3B's shape in bfloat16
    python3 benchmarks/card.py --shape mistral --tokens 16384             # windows of 4,096
    python3 benchmarks/card.py --device cpu --shape tiny --tokens 64      # anywhere: whether it runs

A row is printed when it is measured, with who answered: on a card the tiles' time is none of the kernels', and the
script fails where they answered. Seconds are the median of the runs after a first one that compiles (at 100,000 tokens
and more one run); memory is the most that was allocated during them, the model's weights with it. `statistics` are the
metrics of rows; `heads` is all that the command of that name asks, with its table; `--out` adds the five strongest keys
of every query and the maps of all heads.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

METRICS = ["entropy", "sink", "previous_token", "distance", "effective_keys", "induction", "duplicate_token"]
LONG = 100_000  # tokens from which there is one run, and no other before it
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
WINDOWS = {"mistral": 4096, "tiny": 24}
OURS = ("statistics", "statistics and column sums", "what heads asks", "what heads --out asks")


def made(shape: str, device: str) -> Any:
    """A model of the shape with random weights, in bfloat16 from the beginning: float32 would be the peak of memory."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    window = WINDOWS.get(shape)
    more = {"sliding_window": window} if window else {}
    kind, config = (MistralForCausalLM, MistralConfig) if window else (LlamaForCausalLM, LlamaConfig)
    sizes = SHAPES[shape]
    width = 16 if shape == "tiny" else 128
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = kind(
                config(
                    vocab_size=1000,
                    num_key_value_heads=min(8, sizes["num_attention_heads"] // 2),
                    head_dim=width,
                    max_position_embeddings=131072,
                    attn_implementation="sdpa",
                    **sizes,
                    **more,
                )
            )
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def ways(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], set[str]]]:
    """What is timed; each says who answered."""
    from attnscope import Request
    from attnscope.attention.questions import Received
    from attnscope.hooks.engines import ENGINES
    from attnscope.hooks.listen import listen
    from attnscope.inputs.prompt import from_ids
    from attnscope.metrics.metrics import Texts, questions, stacked_means
    from attnscope.model.loading import load, wrap
    from attnscope.model.options import LoadOptions
    from attnscope.observe.collect import observe

    texts = Texts(ids, torch.tensor([ids.shape[1]], device=ids.device))
    loaded = wrap(model, load(LoadOptions(device="cpu")).tokenizer)
    prompt = from_ids(loaded.tokenizer, ids[0].tolist())

    def plain(backend: Any = None) -> set[str]:
        chosen = nullcontext() if backend is None else torch.nn.attention.sdpa_kernel(backend)
        with torch.no_grad(), chosen:
            model.model(ids, use_cache=False)
        return {"sdpa"}

    def asked(sums: bool) -> set[str]:
        more = [Received(texts.mean_BT)] if sums else []

        def on_call(call: Any) -> None:
            answers = call.P.together([*questions(METRICS, texts), *more])
            stacked_means(call.P, texts, answers, METRICS)

        return who(listen(model, ids, on_call, engine=ENGINES["fused"]).calls)

    def command(request: Any) -> set[str]:
        return who(observe(loaded, [prompt], request, engine=ENGINES["fused"])[0].report.calls)

    backends = torch.nn.attention.SDPBackend
    others = {"plain, cuDNN": backends.CUDNN_ATTENTION, "plain, flash": backends.FLASH_ATTENTION}
    heads = Request(), Request(relations=True, maps="all")
    return {
        "plain": plain,
        **({name: lambda one=one: plain(one) for name, one in others.items()} if ids.is_cuda else {}),
        OURS[0]: lambda: asked(sums=False),
        OURS[1]: lambda: asked(sums=True),
        **{name: lambda one=one: command(one) for name, one in zip(OURS[2:], heads, strict=True)},
    }


def who(calls: Any) -> set[str]:
    """Who answered the layers' questions; of the tiles why, where a kernel was refused."""
    return {way.replace("|", "/") for call in calls for way in call.answered_by.values()}


def measured(run: Callable[[], set[str]], runs: int, cuda: bool) -> tuple[float, int, set[str]]:
    """Seconds, bytes at the most, and who answered."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, answered = [], set()
    for _ in range(runs):
        start = time.perf_counter()
        answered |= run()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times), torch.cuda.max_memory_allocated() if cuda else 0, answered


def rows(model: Any, tokens: int, device: str, runs: int, only: Sequence[str] = ()) -> Iterator[tuple[str, bool]]:
    """A line of the table per way, and whether what should be measured was; only: of these, or of all."""
    cuda, base = device.startswith("cuda"), (0.0, 0)
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    for name, run in ways(model, ids).items():
        if only and name not in only:
            continue
        start = f"| {tokens:,} | {name} |"
        try:
            if tokens < LONG:
                run()  # compiles, and proves
            seconds, most, answered = measured(run, runs if tokens < LONG else 1, cuda)
        except Exception as error:  # the next way, and the next length, may still run
            first = (str(error).strip().splitlines() or [""])[0][:120].replace("|", "/")
            yield f"{start} {type(error).__name__}: {first} | | | | |", False
            if cuda:
                torch.cuda.empty_cache()
            continue
        base = (seconds, most) if name == "plain" else base
        slower, larger = (one / of if of else float("nan") for one, of in zip((seconds, most), base, strict=True))
        refused = "triton" not in answered or any(way.startswith("tiles:") for way in answered)
        held = not (cuda and name in OURS and refused)
        took = f"{seconds:.3f} | {slower:.2f} | {most / 1e9:.2f} GB | {larger:.2f}"
        yield f"{start} {took} | {', '.join(sorted(answered))} |", held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[8192])
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[], help="some of the rows, plain first")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    name = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else options.device
    from attnscope.model.libraries import silence_libraries

    silence_libraries(verbose=False)
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, {options.shape}.\n")
    print("| tokens | way | seconds | times plain | peak memory | times plain | answered by |")
    print("|---|---|---|---|---|---|---|", flush=True)
    model, failed = made(options.shape, options.device), False
    for tokens in options.tokens:
        for line, held in rows(model, tokens, options.device, options.runs, options.ways):
            print(line, flush=True)
            failed |= not held
    if failed:
        raise SystemExit("a way failed, or the tiles answered for a kernel that was refused")


if __name__ == "__main__":
    main()
