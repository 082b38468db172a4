"""What a labelled, annotated 9-token heatmap costs: ours against the notebook way, in one run.

The notebook way: 24 `sns.heatmap(annot=True)` subplots in one tall figure, `tight_layout()`, `savefig`.
Ours: `save_head_maps`, one file per head, the start and the imports of its worker processes counted in the wall time.

    python benchmarks/figures.py [--heads 672] [--write]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from results import measured_here

TOKENS = ("the", "financial", "bank", "is", "located", "on", "the", "river", "bank")
HEADS_PER_LAYER = 24


def random_layer(layer: int) -> np.ndarray:
    """24 causal softmax matrices, NaN above the diagonal."""
    tokens = len(TOKENS)
    logits = np.random.default_rng(layer).normal(size=(HEADS_PER_LAYER, tokens, tokens)) * 2
    weights = np.exp(logits) * np.tril(np.ones((tokens, tokens)))
    weights /= weights.sum(-1, keepdims=True)
    return np.where(np.tril(np.ones((tokens, tokens))) > 0, weights, np.nan).astype(np.float32)


def notebook_way(folder: Path) -> float:
    """Seconds per head; imports are not counted against it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    weights_HQK = random_layer(0)
    start = time.perf_counter()
    figure, axes = plt.subplots(HEADS_PER_LAYER, 1, figsize=(8, 7 * HEADS_PER_LAYER))
    for head, ax in enumerate(axes):
        labels = {"xticklabels": TOKENS, "yticklabels": TOKENS}
        sns.heatmap(weights_HQK[head], annot=True, fmt=".2f", cmap="viridis", ax=ax, **labels)
        ax.set_title(f"Head {head}")
    plt.tight_layout()
    figure.savefig(folder / "notebook.png")
    plt.close(figure)
    return (time.perf_counter() - start) / HEADS_PER_LAYER


def our_way(folder: Path, heads: int) -> float:
    """Seconds per head: imports in this process, workers and their imports counted."""
    start = time.perf_counter()
    from attnscope.figures import Maps, Style, save_head_maps

    numbers = tuple(range(HEADS_PER_LAYER))
    groups = tuple(head // 3 for head in numbers)
    layers = -(-heads // HEADS_PER_LAYER)
    maps = [Maps(layer, numbers, random_layer(layer), TOKENS, TOKENS, kv_heads=groups) for layer in range(layers)]
    jobs = [(folder / f"L{m.layer:02}H{head:02}.png", m, head) for m in maps for head in numbers][:heads]
    written = save_head_maps(jobs, Style(), workers=None)
    seconds = time.perf_counter() - start
    assert len(set(written)) == heads
    assert all(path.stat().st_size > 0 for path in written)
    return seconds / heads


def table(heads: int, ours: float, few: float, notebook: float) -> str:
    return "\n".join(
        (
            f"| way | seconds a head | all | times as fast ({os.cpu_count()} cores) |",
            "|---|---|---|---|",
            f"| notebook, 24 subplots in one figure | {notebook:.3f} | {notebook * HEADS_PER_LAYER:.1f} s for 24 | 1 |",
            f"| attnscope, 24 files | {few:.4f} | {few * HEADS_PER_LAYER:.2f} s for 24 | {notebook / few:.0f} |",
            f"| attnscope, {heads} files | {ours:.4f} | {ours * heads:.1f} s for {heads} | {notebook / ours:.0f} |",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=672)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        # ours first: it pays for every import, and the notebook finds them done
        ours = our_way(Path(name), options.heads)
        few = our_way(Path(name), HEADS_PER_LAYER)
        notebook = notebook_way(Path(name))
    text = table(options.heads, ours, few, notebook)
    print(text)
    if options.write:
        how = "`python benchmarks/figures.py`; worker processes and their imports are counted."
        measured_here("Figures", f"{how}\n\n{text}")
    if notebook / ours < 20:
        raise SystemExit(f"expected at least 20 times the notebook way, got {notebook / ours:.1f}")


if __name__ == "__main__":
    main()
