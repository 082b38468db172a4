"""A comparison in a folder: its tables, and its pictures.

    save(found, Path("runs/swapped"), {...})   # tables, pictures, compare.json

Shapes: L layer, H head, Q, K cell of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import visible
from attnscope.figures import Maps, Panel, Style, save_layers, save_metrics
from attnscope.inputs.spans import WORDS
from attnscope.metrics.metrics import METRICS, Metric, metrics_for
from attnscope.model.libraries import versions
from attnscope.studies.comparison import NAME, SCHEMA, Places, clear, heads_table, metrics_table, tokens_table
from attnscope.utils.display import model_name
from attnscope.utils.files import save_json, sha256_of
from attnscope.utils.folders import writable
from attnscope.utils.tables import save as save_table

if TYPE_CHECKING:
    from attnscope.studies.comparison import Comparison, Pair, Shared

LONGEST_TEXT, LONGEST_SIDE = 40, 28  # letters at the foot of a picture, and of a side in a title


def save(
    found: Comparison,
    folder: Path,
    asked: Mapping[str, Any],
    style: Style = Style(),
    *,
    places: Places = None,
    spreadsheet: bool = False,
    advance: Callable[[int], object] = lambda pictures: None,
) -> list[Path]:
    """Write tables, pictures and last compare.json; returns the paths. asked: what tells this comparison from another.

    >>> save(found, Path("runs/swapped"), {"text": "..."})
    """
    clear(folder)
    tables = {"heads": heads_table(found, places), "metrics": metrics_table(found, places)}
    tables |= {"tokens": tokens_table(found.pair)} if found.pair else {}
    with writable(folder):
        written = [save_table(one, folder / f"{name}.csv", spreadsheet=spreadsheet) for name, one in tables.items()]
    for path in save_differences(found, folder, style.of(replace(style.about, line=_line(found)))):
        written.append(path)
        advance(1)
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in written}
    said = {"schema": SCHEMA, "asked": asked, "versions": versions(), "texts": found.texts, "files": hashes}
    said |= {"aligned": {one.stack: one.by for one in found.pair.texts}} if found.pair else {}
    return [*written, save_json({**said, "failures": list(found.failures)}, folder / NAME)]


def panels(found: Comparison, stack: str | None = None) -> tuple[tuple[int, ...], list[Panel]]:
    """The layers, and a layers x heads panel of the divergence and of each metric's difference, centred on 0.

    stack: of which stack; the first without it.
    """
    stack = stack or found.head_stacks[0]
    places = found.stacks[stack]
    layers = tuple(dict.fromkeys(found.heads[place][0] for place in places))
    row, head = np.array([(layers.index(layer), head) for layer, head in (found.heads[at] for at in places)]).T

    def placed(values: np.ndarray) -> np.ndarray:
        values_LH = np.full((len(layers), head.max() + 1), np.nan)
        values_LH[row, head] = values[places]
        return values_LH

    js_LH = placed(found.js.effect)
    divergence = Panel("Jensen-Shannon divergence", js_LH, 0.0, _largest(js_LH) or 1.0, "bits")
    signed = [_signed(METRICS[id], placed(found.metric(id).effect)) for id in metrics_for(list(METRICS), stack)]
    return layers, [divergence, *signed]


def signed_maps(pair: Pair, stack: str | None = None, prefix: str = "") -> list[Maps]:
    """The other side minus the first, a layer each, between the units that the texts share.

    stack: of which stack; the first without it. prefix: the words before a layer's number.
    """
    stack = stack or next(iter(pair.drawn), "")
    if stack not in pair.drawn:
        return []
    # A cell is named by the first unit that it holds.
    drawn, axes = pair.drawn[stack], pair.axes(stack)
    labels = [tuple(_label(one, unit) for unit in cells.starts) for one, cells in zip(axes, drawn.cells, strict=True)]
    starts = [
        tuple(one.units.members[0][unit][0] for unit in cells.starts)
        for one, cells in zip(axes, drawn.cells, strict=True)
    ]
    # One size of cells is said of both axes, the larger: the other has as many units or fewer.
    size = max(cells.size for cells in drawn.cells)
    return [
        Maps(
            layer=layer,
            heads=tuple(drawn.heads[layer]),
            values_HQK=values_hQK,
            labels_Q=labels[0],
            labels_K=labels[1],
            bin_size=size,
            bin_rule="sum over keys, mean over queries" if size > 1 else "",
            quantity="difference",
            name=f"{f'{prefix}layer {layer}'.capitalize()}: {minus(pair)}",
            starts_Q=starts[0],
            starts_K=starts[1],
            stack=prefix,
        )
        for layer, values_hQK in drawn.values.items()
    ]


def save_differences(found: Comparison, folder: Path, style: Style) -> Iterator[Path]:
    """The pictures of every stack, in a folder of its own where there are several; style: what they are of, too."""
    several = len(found.stacks) > 1
    for stack, places in found.stacks.items():
        into, (layers, drawn) = folder / (stack if several else ""), panels(found, stack)
        title = f"Differences of {len(places)} {f'{stack} ' * several}heads in {len(layers)} layers"
        which = minus(found.pair) if found.pair else "the other side − the first"
        path, note = into / f"differences.{style.image}", f"metrics: {which}"
        yield save_metrics(path, drawn, style, layer_labels=layers, title=title, note=note)
        if found.pair:
            maps = signed_maps(found.pair, stack, found.stack_name(stack))
            yield from save_layers([(into / "layers" / f"L{one.layer:02d}.{style.image}", one) for one in maps], style)


def minus(pair: Pair) -> str:
    """`“Anna gave John …” − “Mary gave John …”`, or the models where these differ: what a signed map shows."""
    first, other = (model_name(one.loaded.name) for one in pair[:2])
    if first == other:
        read = next(iter(pair.texts), None)
        first, other = _apart(*(one.text for one in read[2:4])) if read else (first, other)
    return visible(f"{other} − {first}") if first != other else "the other side − the first"


def _apart(first: str, other: str) -> tuple[str, str]:
    """Two texts in quotes, from a little before they differ where that is not near their beginning."""
    pairs = enumerate(zip(first, other, strict=False))
    same = next((place for place, (one, two) in pairs if one != two), min(len(first), len(other)))
    start = first.rfind(" ", 0, max(0, same - LONGEST_SIDE // 3)) + 1 if same > LONGEST_SIDE // 2 else 0
    one, two = (
        f"“{'… ' * bool(start)}{shorten(text[start:], LONGEST_SIDE, placeholder=' …')}”" for text in (first, other)
    )
    return one, two


def _line(found: Comparison) -> str:
    """The line at the foot of a picture: of one pair the models and texts, else how many texts."""
    if found.pair is None:
        return f"{found.texts} texts"
    texts = [[f"“{shorten(one.text, LONGEST_TEXT)}”" for one in text[2:4]] for text in reversed(found.pair.texts)]
    sides = zip(found.pair[:2], zip(*texts, strict=True), strict=True)
    said = [f"{model_name(one.loaded.name)}, {' ← '.join(quoted)}" for one, quoted in sides]
    by = ", ".join(dict.fromkeys(WORDS[one.by] for one in found.pair.texts))
    return visible(f"{' compared with '.join(dict.fromkeys(said))}, {by}")


def _label(text: Shared, unit: int) -> str:
    """`·the`, or `·Mary/·Anna` where a word replaces another."""
    sides = zip((text.first, text.other), text.units.members, strict=True)
    labels = ["".join(prompt.labels[at] for at in members[unit]) for prompt, members in sides]
    return labels[0] if labels[0].lstrip("·") == labels[1].lstrip("·") else "/".join(labels)


def _signed(metric: Metric, values_LH: np.ndarray) -> Panel:
    reach = _largest(np.abs(values_LH)) or 1.0
    return Panel(metric.title, values_LH, -reach, reach, metric.unit, quantity="difference")


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0
