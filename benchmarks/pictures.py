"""What `heads --out` costs at a large model's size: its pictures alone, and the whole run against a plain script.

The script loads the same folder with transformers, reads the same text and prints the shapes of `output_attentions`.
Fresh processes in turn. `--make DIR` writes a checkpoint of Llama-3.2-3B's shape with random bf16 weights first (6 GB).

    python benchmarks/pictures.py DIR [--make] [--runs 5] [--write]
"""

import argparse
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from results import measured_here

PR_SET_CHILD_SUBREAPER = 36
TEXT = "the financial bank is located on river bank"
SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="eager")
with torch.no_grad():
    seen = model.eval()(**tokenizer(sys.argv[2], return_tensors="pt"), output_attentions=True)
for weights in seen.attentions:
    print(tuple(weights.shape))
"""
DRAW = """
import sys
from pathlib import Path
import numpy as np
from attnscope.export.drawing import Drawing
from attnscope.figures import Maps, Panel
rng, layers, heads, tokens = np.random.default_rng(0), 28, tuple(range(24)), tuple(f"t{i}" for i in range(9))
logits = np.where(np.tri(9, dtype=bool), 3 * rng.normal(size=(28, 24, 9, 9)), -np.inf)
weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
weights = np.where(np.tri(9, dtype=bool), weights, np.nan).astype(np.float32)
maps = tuple(Maps(n, heads, weights[n], tokens, tokens, kv_heads=tuple(h // 3 for h in heads)) for n in range(layers))
few = (True,) * layers
panels = tuple(Panel(f"metric {n}", rng.random((28, 24)), 0, 1 + n % 3, "unit", (0.3,), few) for n in range(12))
Drawing(maps, tuple(f"L{n}H{n % 24}" for n in range(20)), tuple(range(layers)), panels).draw(Path(sys.argv[1]))
"""


def make(folder: Path) -> None:
    """A checkpoint of the shape, with the demo model's tokenizer; a shard per layer, so that little is held at once."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    demo = Path(__file__).parents[1] / "attnscope" / "demo"
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    config = LlamaConfig(
        vocab_size=json.loads((demo / "config.json").read_text())["vocab_size"],
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = {name: one.shape for name, one in LlamaForCausalLM(config).named_parameters()}
    shards: dict[str, list[str]] = {}
    for name in names:
        shards.setdefault(f"{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors", []).append(name)
    torch.manual_seed(0)
    for shard, there in shards.items():
        made = {
            name: 0.02 * torch.randn(names[name]) if "norm" not in name else torch.ones(names[name]) for name in there
        }
        save_file({name: one.bfloat16() for name, one in made.items()}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, there in shards.items() for name in there}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def spent(command: Sequence[str]) -> tuple[float, float]:
    """Wall and processor seconds of a fresh process, with those that it leaves behind to end by themselves."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall = time.perf_counter() - start
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def adopt() -> None:
    """Become the parent of what a process leaves behind, so that its time is counted too (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ways(model: str) -> dict[str, Callable[[str], list[str]]]:
    """Each way's command, told an empty folder."""
    heads = ["-m", "attnscope", "heads", "--model", model, "--dtype", "bfloat16", "--text", TEXT]
    return {
        "the script": lambda folder: ["-c", SCRIPT, model, TEXT],
        "`heads`, tables only": lambda folder: heads,
        "`heads --out`": lambda folder: [*heads, "--out", f"{folder}/run"],
        "its 50 pictures alone, imports counted": lambda folder: ["-c", DRAW, folder],
    }


def measured(model: str, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds per way, in turn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(runs):
        for name, command in ways(model).items():
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(spent([sys.executable, *command(folder)]))
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    rows = [
        "| what | seconds (least to most) | processor seconds | of the script's, pair by pair |",
        "|---|---|---|---|",
    ]
    script = found["the script"]
    for name, pairs in found.items():
        walls, busy = zip(*pairs, strict=True)
        ratios = [one / other for (one, _), (other, _) in zip(pairs, script, strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(
            f"| {name} | {statistics.median(walls):.1f} ({min(walls):.1f} to {max(walls):.1f}) | "
            f"{statistics.median(busy):.1f} ({min(busy):.1f} to {max(busy):.1f}) | {shown} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--make", action="store_true", help="write the checkpoint first")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    adopt()
    if options.make:
        make(options.model)
    text = table(measured(str(options.model), options.runs))
    how = (
        "`python benchmarks/pictures.py DIR --make`: Llama-3.2-3B's shape (28 layers x 24 heads), random bf16 weights, "
        f"nine tokens; medians of {options.runs} fresh processes in turn."
    )
    print(f"{how}\n\n{text}")
    if options.write:
        measured_here("Pictures of a large model", f"{how}\n\n{text}")


if __name__ == "__main__":
    main()
