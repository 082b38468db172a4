"""The page beside BertViz's head_view: bytes and seconds from attention in memory to a file, and what Chromium does.

    python benchmarks/view.py                # BertViz where it is installed: pip install --no-deps bertviz ipython
    python benchmarks/view.py --write        # into RESULTS.md

Each shape is a random Llama; both pages are of the same matrices. In Chromium, through Playwright: milliseconds to the
first paint and until the view stands there, then frames while the text view is scrolled for two seconds.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import measured_here
from transformers import LlamaConfig, LlamaForCausalLM

import attnscope
from attnscope.viewer.page import Plan

SHAPES = {"8 x 16 heads, 256 tokens": (8, 16, 256), "28 x 24 heads, 128 tokens": (28, 24, 128)}
LONG = "4 x 6 heads, 4,000 tokens"
SCROLLED = 2.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(Path(folder), options.runs))
    text = "\n".join(
        [
            "| attention | page | MB | seconds | first paint, ms | ready, ms | frames/s scrolled |",
            "|" + "---|" * 7,
            *rows,
        ]
    )
    text = f"`python benchmarks/view.py`; {torch.get_num_threads()} threads, median of {options.runs}.\n\n{text}"
    print(text)
    if options.write:
        measured_here("The page", text)


def measured(folder: Path, runs: int) -> Iterator[str]:
    """The rows of the table."""
    path = folder / "page.html"
    with browser() as chromium:
        for name, shape in SHAPES.items():
            seen = captured(*shape, attnscope.Request(weights=True))
            yield row(name, "attnscope", path, timed(partial(save, seen, path), runs), looked_at(chromium, path))
            if bertviz := head_view(seen, path):
                yield row(name, "BertViz head_view", path, timed(bertviz, min(runs, 2)), None)
        wanted = Plan().request(loaded(4, 6).geometry.attention_layers, 4000)
        seen = captured(4, 6, 4000, attnscope.Request(**wanted))
        yield row(LONG, "attnscope", path, timed(partial(save, seen, path), runs), looked_at(chromium, path))


def save(seen: attnscope.Observation, path: Path) -> None:
    """What was seen into a file."""
    seen.page().save(path)


def loaded(layers: int, heads: int) -> attnscope.LoadedModel:
    """A random Llama with the demo's tokenizer, whose heads are sharp enough to be told apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=4096,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    return attnscope.wrap(LlamaForCausalLM(config).eval(), attnscope.load("demo").tokenizer)


def captured(layers: int, heads: int, tokens: int, request: attnscope.Request) -> attnscope.Observation:
    """One text of random tokens through it."""
    ids = torch.randint(3, 2000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return attnscope.capture(loaded(layers, heads), ids, request=request)


def head_view(seen: attnscope.Observation, path: Path) -> Callable[[], object] | None:
    """BertViz's page of the same matrices into a file; None where it is not installed."""
    try:
        from bertviz import head_view as made
    except ImportError:
        return None
    attention = [weights[None] for weights in seen.weights.values()]
    tokens = list(seen.prompt.tokens)
    return lambda: path.write_text(made(attention, tokens, html_action="return").data, encoding="utf-8")


def timed(work: Callable[[], object], runs: int) -> float:
    """The median of some runs, in seconds."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def row(name: str, page: str, path: Path, seconds: float, looked: dict[str, float] | None) -> str:
    """A line of the table."""
    cells = [f"{looked[part]:.0f}" for part in ("paint", "ready", "frames")] if looked else ["", "", ""]
    return f"| {name} | {page} | {path.stat().st_size / 1e6:.1f} | {seconds:.2f} | {' | '.join(cells)} |"


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, or None where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        yield None
        return
    where = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started:
        there = started.chromium.launch(executable_path=where, args=["--no-sandbox"])
        yield there
        there.close()


PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
COUNT = (
    """() => { window.frames_ = 0; const next = () => { window.frames_++; requestAnimationFrame(next); }; next(); }"""
)


def looked_at(chromium: Any, path: Path) -> dict[str, float] | None:
    """Milliseconds to the first paint and until a view stands there, and frames a second while the text is scrolled."""
    if chromium is None:
        return None
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    start = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("main [data-view], [data-view] canvas")
    ready = 1000 * (time.perf_counter() - start)
    page.wait_for_function(f"() => ({PAINTED}) !== null")
    paint = page.evaluate(PAINTED)
    page.goto(f"{path.as_uri()}#view=text")
    page.reload()
    page.wait_for_selector("[data-token]")
    page.mouse.move(640, 500)
    page.evaluate(COUNT)
    start = time.perf_counter()
    while time.perf_counter() - start < SCROLLED:
        page.mouse.wheel(0, 120)
        page.wait_for_timeout(30)
    frames = page.evaluate("window.frames_") / (time.perf_counter() - start)
    page.close()
    return {"paint": paint, "ready": ready, "frames": frames}


if __name__ == "__main__":
    main()
