"""docs/gallery.md: what every kind of picture shows, and the command that draws it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

IMAGES = "images/gallery"
BANK = '"the financial bank is located on river bank"'
STORY = "--file examples/story.txt"
HEAD = """# Gallery

Every picture here is of `demo`, the model inside the package, and is made by the command above it: no network, no GPU.
`python scripts/gallery.py` makes this page; a test runs its commands.
"""
VIEWER = Path(__file__).parents[2] / "attnscope" / "viewer"
RECORD = "page.sha256"  # with the pictures: of which program of the page those of the page are


def page_hash(folder: Path = VIEWER) -> str:
    """The hash of what draws the page: its bundled script and style."""
    parts = ((folder / name).read_bytes() for name in ("bundle.js", "bundle.css"))
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


@dataclass(frozen=True)
class Entry:
    """One picture: shows is the file that the command writes, `PAGE#state` of a page, or `terminal` for what it prints.

    columns: how wide the terminal is.
    """

    name: str
    title: str
    words: str
    command: str
    shows: str
    columns: int = 100

    @property
    def image(self) -> str:
        """The picture's path beside the page."""
        return f"{IMAGES}/{self.name}.png"

    @property
    def markdown(self) -> str:
        """The entry as it stands on the page."""
        return f"### {self.title}\n\n{self.words}\n\n    {self.command}\n\n![{self.title}]({self.image})\n"


FILES = (
    Entry(
        "overview",
        "All heads",
        "Every head of every layer as a thumbnail, framed by its role, on a passage that occurs twice.",
        f"attnscope draw {STORY} --out runs/overview",
        "runs/overview/overview.png",
    ),
    Entry(
        "layer",
        "One layer",
        "The heads of a layer side by side, on one colour scale.",
        f"attnscope draw {STORY} --select 3 --out runs/layer",
        "runs/layer/layers/L03.png",
    ),
    Entry(
        "head",
        "One head",
        "Tokens on both axes; numbers in the cells where there is room.",
        f"attnscope draw {BANK} --select L1H4 --out runs/head",
        "runs/head/heads/L01H04.png",
    ),
    Entry(
        "paper",
        "One head for a paper",
        "At the width of a column, with a font size and colours of your own ([how](paper-figure.md)).",
        f'attnscope draw {BANK} --select L1H4 --width column --font-size 7 --cmap "white,navy" --out runs/paper.png',
        "runs/paper.png",
    ),
    Entry(
        "sink",
        "Small weights",
        "A logarithmic scale, and the sink drawn as a strip of its own.",
        f"attnscope draw {STORY} --select L3H0 --scale log --sink mask --out runs/sink",
        "runs/sink/heads/L03H00.png",
    ),
    Entry(
        "part",
        "A part of a map",
        "The rows of some queries and the columns of some keys, never binned where they are few.",
        f"attnscope draw {BANK} --select L1H4 --query 5-8 --key 1-4 --out runs/part",
        "runs/part/heads/L01H04.png",
    ),
    Entry(
        "metrics",
        "Metrics",
        "Layers x heads, a panel per metric, with what uniform attention scores.",
        f"attnscope heatmap {STORY} -q --figures metrics --out runs/metrics",
        "runs/metrics/metrics.png",
    ),
    Entry(
        "mass",
        "Which heads look from here to there",
        "The mass of the chosen queries on the chosen keys, layers x heads.",
        f"attnscope draw {BANK} --query last --key bank#1 --figures mass --out runs/mass",
        "runs/mass/mass.png",
    ),
    Entry(
        "top",
        "The first heads",
        "A contact sheet of the heads that rank first, role and score in each title.",
        f"attnscope draw {STORY} --figures top --top 6 --out runs/top",
        "runs/top/top.png",
    ),
    Entry(
        "rollout",
        "Rollout",
        "Attention rolled out over all layers: which tokens each token is attributed to.",
        f"attnscope rollout {BANK} -q --out runs/rollout",
        "runs/rollout/rollout.png",
    ),
    Entry(
        "explain",
        "One head, step by step",
        "q and k, their products, scale, mask, softmax, the values, the output: each compared with the model's own.",
        f"attnscope explain {BANK} --head L1H4 --query last --out runs/explain.png",
        "runs/explain.png",
    ),
)
TERMINAL = (
    Entry(
        "heads",
        "The table of heads",
        "Ranked by mass from the last token to the first `bank`, above what uniform attention would give it.",
        f"attnscope heads {BANK} --query last --key bank#1 --top 8",
        "terminal",
    ),
    Entry(
        "relations",
        "Who looks at whom",
        "The strongest relations over all heads, without key 0 and self.",
        f"attnscope relations {BANK} --over heads --top 12",
        "terminal",
    ),
    Entry(
        "show",
        "Maps without a file",
        "`--show` draws the selected heads as half blocks, as many side by side as fit.",
        f"attnscope draw {BANK} --select L1H4,L2H1 --show",
        "terminal",
    ),
    Entry(
        "text",
        "The text itself",
        "Where a token looks, on the text as it reads: an induction head at what followed its first copy.",
        f"attnscope text {STORY} --query 80 --select L3H0",
        "terminal",
    ),
)
VIEWED = f"attnscope view {STORY} -o story.html"
PAGE = (
    Entry("page-model", "Model", "Every head; a click goes to it.", VIEWED, "story.html#view=model"),
    Entry(
        "page-metrics",
        "Metrics",
        "A map of any metric, and the table of heads, which sorts.",
        VIEWED,
        "story.html#view=metrics&metric=induction",
    ),
    Entry(
        "page-head",
        "Head",
        "Queries left, keys right; hover shows one token's row, a click pins it.",
        VIEWED,
        "story.html#view=head&at=3&head=0&query=80&pin=1",
    ),
    Entry(
        "page-matrix",
        "Matrix",
        "The heatmap, with crosshair, values, zoom and pan.",
        VIEWED,
        "story.html#view=matrix&at=3&head=0&query=80",
    ),
    Entry(
        "page-text",
        "Text",
        "The text itself, coloured by where a token looks, or by who looks at it.",
        VIEWED,
        "story.html#view=text&at=3&head=0&query=80",
    ),
    Entry(
        "page-token",
        "Token",
        "Layers x heads: the mass of one query on a key or span.",
        VIEWED,
        "story.html#view=token&at=3&head=0&query=80&key=20",
    ),
    Entry(
        "page-steps",
        "Steps",
        "The arithmetic of one query of a short text.",
        f"attnscope view {BANK} -o bank.html",
        "bank.html#view=steps&at=1&head=4&query=8",
    ),
    Entry(
        "page-compare",
        "Compare",
        "Two texts side by side, and the signed difference.",
        f'attnscope view {BANK} --compare-text "the muddy bank is located on river bank" -o both.html',
        "both.html#view=compare&at=1&head=4",
    ),
)
PARTS = {"Files": FILES, "The terminal": TERMINAL, "The page": PAGE}


def document() -> str:
    """The page."""
    parts = (f"## {title}\n\n" + "\n".join(one.markdown for one in part) for title, part in PARTS.items())
    return "\n".join((HEAD, *parts))
