"""What inspecting costs beside the plain forward pass: both engines, output_attentions and TransformerLens.

    python benchmarks/engines.py                      # the table at 2,048 and 8,192 tokens
    python benchmarks/engines.py --tokens 16384 --ways plain,fused --runs 1 --rows rows.json
    python benchmarks/engines.py --ways plain,tiles,numba --first --processes 9    # one pass each
    python benchmarks/engines.py --rows rows.json --tokens "" --write --plot docs/images/engines.png

Each way runs in fresh processes, in turn; the table gives the median of their medians (with `--first`, of their first
passes), the median ratio to the plain forward of the same turn, and the peak memory of the process. The job: entropy,
sink, previous-token, distance, effective keys, induction, duplicate-token, what each key receives, and the 8 strongest
keys of every query, for every layer and head. The plain forward is the backbone under sdpa, without logits.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from results import measured_here

METRICS = ["entropy", "sink", "previous_token", "distance", "effective_keys", "induction", "duplicate_token"]
TOP = 8
WAYS = {
    "plain": "plain forward, sdpa",
    "fused": "fused (answers, default)",
    "tiles": "tiles (PyTorch)",
    "numba": "numba",
    "fused-statistics": "fused, without top keys",
    "fused-24-heads": "fused, top keys of 24 heads",
    "fused-listening": "fused, the model's own sdpa beside it",
    "numba-listening": "numba, the model's own sdpa beside it",
    "eager": "eager, a layer at a time",
    "output_attentions-alone": "output_attentions=True, the call alone",
    "output_attentions": "output_attentions=True, then the same",
    "transformer_lens": "TransformerLens cache, then the same",
}
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
LARGE = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
}


def main() -> None:
    options = parse()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens[0], options.runs, options.device, options.large)))
        return
    rows = kept(options.rows, [row for tokens in options.tokens for row in compare(tokens, options)])
    text = table(rows, options.device)
    print(text)
    if options.write:
        measured_here(f"Engines ({options.device})", text)
    if options.plot:
        plot(rows, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",") if part], default=[2048, 8192]
    )
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--runs", type=int, default=3, help="timed passes in a process, after a first one")
    parser.add_argument("--first", action="store_true", help="time the first pass of each process instead")
    parser.add_argument("--processes", type=int, default=2, help="fresh processes a way, in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true", help="the shape of Llama-3.2-3B in bfloat16")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which a way is given up")
    parser.add_argument("--rows", type=Path, help="a file that gathers what several calls measure")
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser.parse_args()


def kept(path: Path | None, rows: list[dict]) -> list[dict]:
    """These rows and those that earlier calls left in the file, by length."""
    if path is None:
        return rows
    known = {(row["tokens"], row["way"]): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    known |= {(row["tokens"], row["way"]): row for row in rows}
    order = list(WAYS)
    found = sorted(known.values(), key=lambda row: (row["tokens"], order.index(row["way"])))
    path.write_text(json.dumps(found, indent=1))
    return found


def compare(tokens: int, options: argparse.Namespace) -> list[dict]:
    """Every way at one length, its processes in turn, so that a drifting machine drifts for all."""
    found: dict[str, list[dict]] = {way: [] for way in options.ways}
    for _ in range(options.processes):
        for way in options.ways:
            if not any("error" in one for one in found[way]):
                found[way].append(in_process(way, tokens, options))
    return [summary(way, tokens, runs) for way, runs in found.items()]


def in_process(way: str, tokens: int, options: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--way", way, "--tokens", str(tokens), "--runs"]
    command += [str(0 if options.first else options.runs)]
    command += ["--device", options.device] + ["--large"] * options.large
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {options.limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"error": "out of memory" if "memory" in last.lower() else last[:80]}
    return json.loads(done.stdout.splitlines()[-1])


def summary(way: str, tokens: int, runs: list[dict]) -> dict:
    error = next((run["error"] for run in runs if "error" in run), None)
    if error:
        return {"way": way, "tokens": tokens, "error": error}
    seconds = [run["seconds"] for run in runs]
    return {
        "way": way,
        "tokens": tokens,
        "seconds": statistics.median(seconds),
        "spread": (min(seconds), max(seconds)),
        "each": seconds,
        "memory": max(run["memory"] for run in runs),
    }


def measure(way: str, tokens: int, runs: int, device: str, large: bool) -> dict:
    """In a process of its own: the median time of a pass after the first, and the process's peak memory in bytes.

    Without a run after it, the time of the first.
    """
    import torch

    cuda, times = device.startswith("cuda"), []
    if not cuda:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (memory * 9 // 10,) * 2)  # what needs more fails, and alone
    run = PREPARE.get(way.partition("-")[0], prepare_attnscope)(way, tokens, device, large)
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # of the model's making
    for _ in range(runs + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": statistics.median(times[1:] or times),
        "memory": torch.cuda.max_memory_allocated() if cuda else resident,
    }


def build(way: str, tokens: int, device: str, large: bool):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dense = way.partition("-")[0] in ("eager", "output_attentions", "transformer_lens")
    shape = LARGE if large else SHAPE
    config = LlamaConfig(
        vocab_size=2000,
        num_key_value_heads=8 if large else 4,
        max_position_embeddings=131072,
        attn_implementation="eager" if dense else "sdpa",
        **shape,
    )
    torch.set_default_dtype(torch.bfloat16 if large else torch.float32)  # made so: float32 would take twice the memory
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    return model, torch.randint(0, 2000, (1, tokens), device=device)


def prepare_attnscope(way: str, tokens: int, device: str, large: bool) -> Callable[[], object]:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.hooks.engines import engine_named
    from attnscope.hooks.listen import listen

    model, ids = build(way, tokens, device, large)
    name, _, how = way.partition("-")
    engine = engine_named(name, listen=how == "listening")

    def on_call(call: AttentionCall) -> None:
        job(call.P, ids, top_keys(way, call.layer))

    return lambda: listen(model, ids, on_call, engine=engine)


def prepare_plain(way: str, tokens: int, device: str, large: bool) -> Callable[[], object]:
    import torch

    model, ids = build(way, tokens, device, large)

    def run() -> None:
        with torch.no_grad():
            model.model(ids, use_cache=False)

    return run


def prepare_output_attentions(way: str, tokens: int, device: str, large: bool) -> Callable[[], object]:
    import torch

    model, ids = build(way, tokens, device, large)

    def run() -> None:
        with torch.no_grad():
            layers = model.model(ids, use_cache=False, output_attentions=True).attentions
        if not way.endswith("-alone"):
            for weights_BHQK in layers:
                dense_job(weights_BHQK, ids)

    return run


def prepare_transformer_lens(way: str, tokens: int, device: str, large: bool) -> Callable[[], object]:
    """The same model behind a TransformerLens bridge: the patterns cached, no other hook, one row of logits."""
    import torch
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model, ids = build(way, tokens, device, large)
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.config.num_hidden_layers)]

    def run() -> None:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(
                ids, names_filter=patterns, return_type=None, use_cache=False, logits_to_keep=1
            )
        for name in patterns:
            dense_job(cache[name], ids)

    return run


PREPARE = {
    "plain": prepare_plain,
    "output_attentions": prepare_output_attentions,
    "transformer_lens": prepare_transformer_lens,
}


def top_keys(way: str, layer: int) -> list:
    """Whose strongest keys a layer is asked for: of all heads, of none, or of the first head in 24 layers."""
    from attnscope.attention.questions import TopK

    if way == "fused-24-heads":
        return [TopK(TOP, (0,))] if layer < 24 else []
    return [] if way == "fused-statistics" else [TopK(TOP)]


def job(P, ids, top) -> list:
    """All that is asked of a layer, in one pass."""
    import torch

    from attnscope.attention.questions import Received
    from attnscope.metrics.metrics import Texts, questions, stacked_means

    texts = Texts(ids, torch.tensor([ids.shape[1]], device=ids.device))
    asked = [Received(texts.mean_BT), *top]
    answers = P.together([*questions(METRICS, texts), *asked])
    return [stacked_means(P, texts, answers, METRICS), *(answers[question] for question in asked)]


def dense_job(weights_BHQK, ids) -> list:
    """The same statistics as a person writes them over a whole matrix."""
    import torch

    n = ids.shape[1]
    position = torch.arange(n, device=ids.device, dtype=weights_BHQK.dtype)
    same = (ids[0, :, None] == ids[0]).tril(-1).to(weights_BHQK.dtype)
    after = torch.nn.functional.pad(same[:, :-1], (1, 0)).tril(-2)
    return [
        torch.special.entr(weights_BHQK).sum(-1).mean(-1),
        weights_BHQK[..., 0].mean(-1),
        weights_BHQK.diagonal(-1, -2, -1).mean(-1),
        (position - weights_BHQK @ position).mean(-1),
        (1 / weights_BHQK.square().sum(-1)).mean(-1),
        (weights_BHQK * same).sum(-1).mean(-1),
        (weights_BHQK * after).sum(-1).mean(-1),
        weights_BHQK.mean(-2),
        weights_BHQK.topk(TOP, dim=-1),
    ]


def table(rows: list[dict], device: str) -> str:
    """A Markdown table, each row beside the plain forward of its length."""
    import torch
    import transformers

    plain = {row["tokens"]: row for row in rows if row["way"] == "plain" and "seconds" in row}
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {card(device)}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}{lens()}.",
        "",
        "| tokens | way | seconds (least to most) | times plain | peak memory | of its memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        base, name = plain.get(row["tokens"]), WAYS[row["way"]]
        if "error" in row:
            lines.append(f"| {row['tokens']:,} | {name} | {row['error']} | | | |")
            continue
        low, high = row["spread"]
        lines.append(
            f"| {row['tokens']:,} | {name} | {row['seconds']:.2f} ({low:.2f} to {high:.2f}) | {times(row, base)} | "
            f"{row['memory'] / 1e9:.2f} GB | {row['memory'] / base['memory'] if base else float('nan'):.2f} |"
        )
    return "\n".join(lines)


def times(row: dict, base: dict | None) -> str:
    """The median ratio to the plain forward of the same turn, and from which to which it went."""
    if not base or len(row.get("each", ())) != len(base.get("each", ())):
        return f"{row['seconds'] / base['seconds']:.2f}" if base else "nan"
    ratios = [one / plain for one, plain in zip(row["each"], base["each"], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def lens() -> str:
    try:
        return f", TransformerLens {version('transformer_lens')}"
    except PackageNotFoundError:
        return ""


def card(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def looks() -> Iterator[tuple[str, str]]:
    """A marker and a kind of line for each way, which hue alone does not tell apart; no two are alike."""
    markers = "osD^vP"
    return ((marker, line) for line in ("-", "--", ":") for marker in markers)


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory against the text's length, every way a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(10, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    lengths = sorted({row["tokens"] for row in rows})
    drawn = [(way, name) for way, name in WAYS.items() if any(row["way"] == way for row in rows)]
    for axes, key, label, unit in zip(
        panels, ("seconds", "memory"), ("seconds", "peak memory, GB"), (1, 1e9), strict=True
    ):
        for (way, name), (marker, line) in zip(drawn, looks(), strict=False):
            points = [(row["tokens"], row[key] / unit) for row in rows if row["way"] == way and key in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, linestyle=line, markersize=5, label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
