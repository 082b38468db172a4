"""What parity costs against a plain forward pass of the same model, at most 10 times at 256 tokens.

Parity is the forward pass that it listens to, the oracle in float64, and the comparison; in half precision also a
float32 copy of each layer's module. Everything under the model's own eager attention.

    python benchmarks/parity.py [--tokens 256] [--model demo] [--write]
    python benchmarks/parity.py --large --device cuda      # of Llama-3.2-3B's shape in bfloat16, and its weights' bits
"""

import argparse
import time
from collections.abc import Callable

import torch
from engines import build
from results import measured_here

from attnscope.certificate.check import check_parity
from attnscope.hooks.listen import listen
from attnscope.model.libraries import silence_libraries
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load, wrap
from attnscope.model.options import LoadOptions

TARGET = 10.0


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some runs, after one that warms up."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def measure(loaded: LoadedModel, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds of a forward pass, of one that is listened to, and of parity."""
    vocabulary = loaded.geometry.vocab_size
    ids_BT = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(loaded.device)

    def forward() -> None:
        with torch.no_grad():
            loaded.model(ids_BT, use_cache=False)

    return {
        "forward pass": best(forward, repeats),
        "listened to": best(lambda: listen(loaded.model, ids_BT, lambda call: None), repeats),
        "parity": best(lambda: check_parity(loaded, ids_BT), repeats),
    }


def large(device: str, tokens: int, repeats: int) -> None:
    """What a visit to a card shows of a model as large as those that are asked about, with random weights."""
    model, ids_BT = build("eager", tokens, device, large=True)
    loaded = wrap(model, load(LoadOptions()).tokenizer)
    print("| what | seconds | holds |", "|---|---|---|", sep="\n")
    found = check_parity(loaded, ids_BT)
    taken = best(lambda: check_parity(loaded, ids_BT), repeats)
    print(f"| parity, {len(found.layers)} layers, {tokens} tokens | {taken:.2f} | {'yes' if found.holds else 'no'} |")
    mine: list[torch.Tensor | None] = []
    taken = best(lambda: (mine.clear(), listen(model, ids_BT, lambda call: mine.append(call.weights_BHQK))), repeats)
    with torch.no_grad():
        own = model.model(ids_BT, use_cache=False, output_attentions=True).attentions
    same = all(one is not None and torch.equal(one, other) for one, other in zip(mine, own, strict=True))
    print(f"| `output_attentions`, bit for bit | {taken:.2f} | {'yes' if same else 'no'} |")
    if not (same and found.holds):
        raise SystemExit("something does not hold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    parser.add_argument("--large", action="store_true", help="Llama-3.2-3B's shape in bfloat16, with random weights")
    parser.add_argument("--device", default="cpu", help="of --large")
    options = parser.parse_args()
    if options.large:
        large(options.device, options.tokens, options.repeats)
        return
    silence_libraries(False)
    lines = ["| model | what | ms | of the forward pass | at most |", "|---|---|---|---|---|"]
    slow = []
    for dtype in options.dtypes.split(","):
        loaded = load(LoadOptions(model=options.model, dtype=dtype))
        found = measure(loaded, options.tokens, options.repeats)
        for what, seconds in found.items():
            ratio, most = seconds / found["forward pass"], f"{TARGET:.0f}" if what == "parity" else ""
            lines.append(f"| {loaded.name}, {dtype} | {what} | {1000 * seconds:.1f} | {ratio:.1f} | {most} |")
        slow += [dtype] if found["parity"] > TARGET * found["forward pass"] else []
    text = "\n".join(lines)
    print(text)
    if options.write:
        how = f"`python benchmarks/parity.py`; {options.tokens} tokens, best of {options.repeats} runs, "
        measured_here("Parity", f"{how}{torch.get_num_threads()} threads.\n\n{text}")
    if slow:
        raise SystemExit(f"slower than meant: {', '.join(slow)}")


if __name__ == "__main__":
    main()
