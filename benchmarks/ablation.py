"""What taking every head away once costs: one pass for many heads, a batched pass per head, a pass per head and text.

All three replace the same outputs at the same seam, by zeros, and read the same losses; they are compared. A pass of
the first two has about as many tokens. Llamas of random weights, 192 wide, 6 heads per layer, and the embedded model;
CPU time of one process, the ways in turn.

    python benchmarks/ablation.py                       # the demo and 4, 8, 16 layers, median of 5
    python benchmarks/ablation.py --sequences 2 --layers 4 --runs 1
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from results import measured_here
from transformers import LlamaConfig, LlamaForCausalLM

from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.interventions.passes import CPU_TOKENS, ignore_call, prepared
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load, wrap
from attnscope.model.options import LoadOptions
from attnscope.studies.ablation import copy

WAYS = {
    "shared": "shared passes, many heads each",
    "batched": "a batched pass per head",
    "apart": "a pass per head and text",
}
Way = Callable[[LoadedModel, Task, Sequence[HeadSet]], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 16])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    demo = load(LoadOptions(device="cpu"))
    task = copy(demo, sequences=options.sequences)
    models = {"demo": demo} | {f"{layers} layers": random_model(demo, layers) for layers in options.layers}
    text = table({name: measured(loaded, task, options.runs) for name, loaded in models.items()}, models)
    print(text)
    if options.write:
        how = (
            f"`python benchmarks/ablation.py`, {time.strftime('%Y-%m-%d')}; {len(task)} sequences of {task.lengths[0]} "
            f"tokens, median of {options.runs} (least to most), {torch.get_num_threads()} of {os.cpu_count()} cores."
        )
        measured_here("Ablation", f"{how}\n\n{text}")


def random_model(demo: LoadedModel, layers: int) -> LoadedModel:
    """The demo's shape with more layers."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**demo.model.config.to_dict(), "num_hidden_layers": layers, "attn_implementation": "eager"})
    return wrap(LlamaForCausalLM(config).eval().requires_grad_(False), demo.tokenizer)


def measured(loaded: LoadedModel, task: Task, runs: int) -> dict[str, list[float]]:
    """CPU seconds of every way, in turn; all have to find the same losses."""
    ways: dict[str, Way] = {"shared": shared, "batched": batched, "apart": apart}
    heads = loaded.geometry.heads_by_layer
    sets = [HeadSet(f"L{layer}H{head}", ((layer, head),)) for layer in heads for head in range(heads[layer])]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        found = {}
        for name, way in ways.items():
            start = time.process_time()
            found[name] = way(loaded, task, sets)
            seconds[name].append(time.process_time() - start)
        for name in ways:
            np.testing.assert_allclose(found[name], found["shared"], atol=1e-4)
    return seconds


def shared(loaded: LoadedModel, task: Task, sets: Sequence[HeadSet]) -> np.ndarray:
    """Ours, the trial on the first text counted."""
    passes = prepared(loaded, task, sets, "zero")
    assert not passes.why_not
    return passes.measured(sets)


def batched(loaded: LoadedModel, task: Task, sets: Sequence[HeadSet]) -> np.ndarray:
    """As many texts in a pass as ours has rows."""
    return one_by_one(loaded, task, sets, CPU_TOKENS // task.lengths[0])


def apart(loaded: LoadedModel, task: Task, sets: Sequence[HeadSet]) -> np.ndarray:
    return one_by_one(loaded, task, sets, 1)


def one_by_one(loaded: LoadedModel, task: Task, sets: Sequence[HeadSet], texts: int) -> np.ndarray:
    """The task without any head replaced, then without one after another; so many texts in a pass."""
    columns = []
    for one in [HeadSet("intact", ()), *sets]:
        batches = [range(start, min(start + texts, len(task))) for start in range(0, len(task), texts)]
        columns.append(np.concatenate([losses(loaded, task, batch, one) for batch in batches]))
    return np.stack(columns, 1)


def losses(loaded: LoadedModel, task: Task, batch: Sequence[int], one: HeadSet) -> np.ndarray:
    def change(place, output_BTHV):
        heads = [head for layer, head in one.heads if layer == place.layer]
        return output_BTHV.index_fill(2, torch.tensor(heads), 0.0) if heads else output_BTHV

    ids, rows = torch.tensor([task.ids[place] for place in batch]), list(task.rows[0])
    logits = listen(loaded.model, ids, ignore_call, engine=replace(UNCHECKED, change=change), logits_at=rows).logits
    right = ids[:, [row + 1 for row in rows], None]
    return -logits.log_softmax(-1).gather(-1, right)[..., 0].double().mean(-1).numpy()


def table(seconds: dict[str, dict[str, list[float]]], models: dict[str, LoadedModel]) -> str:
    lines = [
        "| model | heads | way | CPU seconds | of batched | of apart | (L + 1) / 2L |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ways in seconds.items():
        layers = len(models[name].geometry.layers)
        middle = {way: statistics.median(found) for way, found in ways.items()}
        for way, found in ways.items():
            ratios = f"{middle[way] / middle['batched']:.2f} | {middle[way] / middle['apart']:.2f}"
            expected = f"{(layers + 1) / 2 / layers:.2f}" if way == "shared" else ""
            spread = f"{middle[way]:.2f} ({min(found):.2f} to {max(found):.2f})"
            heads = sum(models[name].geometry.heads_by_layer.values())
            lines.append(f"| {name} | {heads} | {WAYS[way]} | {spread} | {ratios} | {expected} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
