"""Made-up maps for the tests of figures, and what a figure shows and says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from attnscope.figures import Maps, Style
from attnscope.figures.fonts import Fonts
from attnscope.figures.heads import HeadFigure, prepare_heads
from attnscope.figures.overview import figures_of
from attnscope.figures.writer import drawing

BANK = ("the", "financial", "bank", "is", "located", "on", "the", "river", "bank")


def causal(heads: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Rows that sum to 1 over the keys up to the query, spelled with loops."""
    draw, values = np.random.default_rng(seed), np.full((heads, tokens, tokens), np.nan, np.float32)
    for head in range(heads):
        for query in range(tokens):
            row = np.exp(2 * draw.normal(size=query + 1))
            values[head, query, : query + 1] = row / row.sum()
    return values


def bank_maps(heads: int = 4, layer: int = 27, seed: int = 0) -> Maps:
    """Made-up maps of a layer over nine tokens, two heads to a kv head."""
    groups = tuple(head // 2 for head in range(heads))
    return Maps(layer, tuple(range(heads)), causal(heads, 9, seed), BANK, BANK, kv_heads=groups)


def first_tokens(maps: Maps, count: int) -> Maps:
    """The same maps of a shorter text, which is quicker to draw."""
    values = maps.values_HQK[:, :count, :count]
    return replace(maps, values_HQK=values, labels_Q=maps.labels_Q[:count], labels_K=maps.labels_K[:count])


def numbered(tokens: int) -> tuple[str, ...]:
    """Labels of made-up tokens: `t0`, `t1`, ..."""
    return tuple(f"t{index}" for index in range(tokens))


def shown(maps: Maps, style: Style, index: int = 0) -> HeadFigure:
    """The figure of one head, as it stands before it is drawn."""
    heads = prepare_heads([(Path("x.png"), maps, i) for i in range(len(maps.heads))], style)
    first = next(head for head in heads if head.kind == heads[index].kind)  # whose figure the others share
    with drawing(Fonts()):
        figure = HeadFigure(first, style)
        figure.show(heads[index])
    return figure


def plain_drawing(figure: Figure) -> np.ndarray:
    """The colours of a figure that matplotlib draws whole, (height, width, 3); to be called within `drawing`."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba(), int)[..., :3]


def layer_figure(maps: Maps, style: Style) -> Figure:
    """The picture of one layer with all of its artists, as a vector file has it; to be called within `drawing`."""
    [(_, layer)] = figures_of([(Path("x.svg"), maps)], replace(style, image="svg"))
    return layer.figure


def words(ticks: list) -> list[str]:
    """What labels or texts of a picture say."""
    return [tick.get_text() for tick in ticks]


def pixels(path: Path) -> np.ndarray:
    """A picture's colours, (height, width, 3)."""
    return np.asarray(Image.open(path).convert("RGB"), int)


def places(prompt, word: str) -> list[int]:
    """The tokens that show a word."""
    return [place for place, text in enumerate(prompt.plain) if text.strip() == word]
