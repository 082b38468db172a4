"""A comparison as tables and pictures, and the folder that holds them.

    heads_table(found)                                  # a row per head, largest divergence first
    save(found, Path("runs/swapped"), Style(), {...})   # tables, pictures, compare.json

Shapes: N head of all layers, L layer, H head, Q, K cell of a map.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.errors import UsageError
from attnscope.figures import Maps, Panel, Style, save_layers, save_metrics
from attnscope.files import jsonable, read_json, refuse_links, save_json, sha256_of
from attnscope.measure.metrics import METRICS, Metric, of_kind
from attnscope.model.libraries import versions
from attnscope.shown import visible
from attnscope.stacks import KINDS, SOFTMAX
from attnscope.tables import as_table, numbers, words
from attnscope.tables import save as save_table

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.study.comparison import Comparison, Pair, Shared

SCHEMA, NAME = "compare/1", "compare.json"
STACK = f"(?:(?:{'|'.join(SOFTMAX)})/)?"
OF_STACKS = re.compile(rf"{STACK}(?:layers/L[0-9]+|differences)\.(?:png|svg|pdf)")
LONGEST_TEXT = 40  # letters at the foot of a picture
Places = Sequence[int] | None


def heads_table(found: Comparison, places: Places = None) -> pa.Table:
    """A row per head, largest divergence first: js and its interval, lost mass, rows, and each metric's difference.

    places: of the heads that are listed, in their order.
    """
    order = found.order if places is None else list(places)
    columns = {name: getattr(found.js, part)[order] for name, part in JS.items()}
    lost = {name: getattr(found, f"{name}_SN").mean(0)[order] for name in ("lost", "other_lost")}
    return as_table(
        {
            **_which(found, order),
            **{name: numbers(value) for name, value in (columns | lost).items()},
            "rows": found.rows_SN.sum(0)[order].astype(np.int64),
            "texts": np.full(len(order), found.texts, np.int32),
            **{f"{name}_difference": numbers(found.metric(name).effect[order]) for name in METRICS},
            "kind": _kinds(found, order),
        }
    )


JS = {"js": "effect", "js_low": "low", "js_high": "high"}
SIDES = {"first": "null", "other": "score", "difference": "effect", "low": "low", "high": "high"}


def metrics_table(found: Comparison, places: Places = None) -> pa.Table:
    """A row per metric and head: the metric on both sides, its difference with an interval, and the texts behind it."""
    order = found.order if places is None else list(places)
    effects = [found.metric(name) for name in METRICS]

    def column(part: str) -> np.ndarray:
        return np.concatenate([getattr(one, part)[order] for one in effects])

    which = {name: np.tile(values, len(METRICS)) for name, values in _which(found, order).items()}
    metric = words([name for name in METRICS for _ in order])
    values = {name: numbers(column(part)) for name, part in SIDES.items()}
    texts, kind = column("n").astype(np.int32), _kinds(found, order * len(METRICS))
    return as_table({**which, "metric": metric.dictionary_encode(), **values, "texts": texts, "kind": kind})


def tokens_table(pair: Pair) -> pa.Table:
    """A row per unit that two texts share, then one per token without a partner; `unit` is null for those.

    read_by: the stack that reads the text, `encoder` and `decoder` of an encoder-decoder.
    """
    return pa.concat_tables([_tokens_of(one) for one in pair.texts])


def _tokens_of(text: Shared) -> pa.Table:
    nobody, (first, other) = list[int](), text.units.alone
    rows = list(zip(*text.units.members, strict=True))
    rows += [*(([token], nobody) for token in first), *((nobody, [token]) for token in other)]
    number = np.arange(len(rows), dtype=np.int32)
    columns: dict[str, Any] = {"unit": numbers(number, number >= text.units.size)}
    for side, (name, prompt) in enumerate((("first", text.first), ("other", text.other))):
        columns[f"{name}_position"] = words([",".join(map(str, row[side])) or None for row in rows])
        columns[f"{name}_text"] = words(["".join(prompt.tokens[at] for at in row[side]) or None for row in rows])
    return as_table({**columns, "read_by": words([text.stack] * len(rows))})


def panels(found: Comparison, kind: str | None = None) -> tuple[tuple[int, ...], list[Panel]]:
    """The layers, and a layers x heads panel of the divergence and of each metric's difference, centred on 0.

    kind: of which stack; the first without it.
    """
    kind = kind or found.kinds[0]
    places = found.stacks[kind]
    layers = tuple(dict.fromkeys(found.heads[place][0] for place in places))
    row, head = np.array([(layers.index(layer), head) for layer, head in (found.heads[at] for at in places)]).T

    def placed(values: np.ndarray) -> np.ndarray:
        values_LH = np.full((len(layers), head.max() + 1), np.nan)
        values_LH[row, head] = values[places]
        return values_LH

    js_LH = placed(found.js.effect)
    divergence = Panel("Jensen-Shannon divergence", js_LH, 0.0, _largest(js_LH) or 1.0, "bits")
    signed = [_signed(METRICS[id], placed(found.metric(id).effect)) for id in of_kind(list(METRICS), kind)]
    return layers, [divergence, *signed]


def signed_maps(pair: Pair, kind: str | None = None, stack: str = "") -> list[Maps]:
    """The other side minus the first, a layer each, between the units that the texts share.

    kind: of which stack; the first without it. stack: what stands before a layer's number.
    """
    kind = kind or next(iter(pair.drawn), "")
    if kind not in pair.drawn:
        return []
    drawn, axes = pair.drawn[kind], pair.axes(kind)
    labels = [tuple(_label(one, unit) for unit in cells.starts) for one, cells in zip(axes, drawn.cells, strict=True)]
    starts = [
        tuple(one.units.members[0][unit][0] for unit in cells.starts)
        for one, cells in zip(axes, drawn.cells, strict=True)
    ]
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
            name=f"{stack}layer {layer}: the other side minus the first".capitalize(),
            starts_Q=starts[0],
            starts_K=starts[1],
            stack=stack,
        )
        for layer, values_hQK in drawn.values.items()
    ]


def about(models: Sequence[LoadedModel], texts: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a comparison from another: the models, a hash of all texts, and what was asked for."""
    said = [{"name": one.name, "revision": one.revision, "dtype": one.dtype, "device": one.device} for one in models]
    digest = hashlib.sha256("\0".join(texts).encode(errors="backslashreplace")).hexdigest()
    found: dict[str, Any] = jsonable({"models": said, "texts_sha256": digest, "options": options})
    return found


def check_folder(folder: Path, asked: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError for a folder that holds another comparison, or that another run fills, unless force is given."""
    before = _before(folder)
    told = [] if before is None else [name for name in asked if before.get("asked", {}).get(name) != asked[name]]
    other = "another run" if before is None and (folder / "manifest.json").exists() else ""
    if (told or other) and not force:
        what = other or f"another comparison: {', '.join(told)} differ"
        raise UsageError(f"{folder} holds {what}", "name another folder, or write over it with {force}")


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
    _clear(folder)
    tables = {"heads": heads_table(found, places), "metrics": metrics_table(found, places)}
    tables |= {"tokens": tokens_table(found.pair)} if found.pair else {}
    try:
        written = [save_table(one, folder / f"{name}.csv", spreadsheet=spreadsheet) for name, one in tables.items()]
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "name another folder") from error
    for path in _pictures(found, folder, style):
        written.append(path)
        advance(1)
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in written}
    said = {"schema": SCHEMA, "asked": asked, "versions": versions(), "texts": found.texts, "files": hashes}
    return [*written, save_json({**said, "failures": list(found.failures)}, folder / NAME)]


def _before(folder: Path) -> dict[str, Any] | None:
    """What the compare.json of a folder says; None without one. Raises UsageError for a damaged one, and links."""
    path, stacks = folder / NAME, [folder / kind for kind in KINDS]
    refuse_links([*stacks, *(one / "layers" for one in (folder, *stacks))])
    try:
        found = read_json(path) if path.exists() else None
    except (OSError, ValueError):
        found = []
    if found is not None and not (isinstance(found, dict) and _is_ours(found)):
        raise UsageError(f"{path} is not what a comparison wrote, or damaged", "name another folder, or remove it")
    return found


def _is_ours(found: Mapping[str, Any]) -> bool:
    parts = found.get("asked", {}), found.get("files", {})
    return str(found.get("schema")).startswith("compare/") and all(isinstance(one, dict) for one in parts)


def _clear(folder: Path) -> None:
    """Take away the layers of the comparison before, which may have been others; first the file that lists them."""
    before = _before(folder) or {}
    (folder / NAME).unlink(missing_ok=True)
    for name in before.get("files", ()):
        if OF_STACKS.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def _pictures(found: Comparison, folder: Path, style: Style) -> Iterator[Path]:
    """Those of every stack, in a folder of its own where there are several."""
    style, several = replace(style, about=replace(style.about, line=_line(found))), len(found.stacks) > 1
    for kind, places in found.stacks.items():
        into, (layers, drawn) = folder / (kind if several else ""), panels(found, kind)
        title = style.headed(f"Differences of {len(places)} {f'{kind} ' * several}heads in {len(layers)} layers")
        path, note = into / f"differences.{style.image}", "metrics: the other side minus the first"
        yield save_metrics(path, drawn, style, layer_labels=layers, title=title, note=note)
        if found.pair:
            maps = signed_maps(found.pair, kind, found.stack_name(kind))
            yield from save_layers([(into / "layers" / f"L{one.layer:02d}.{style.image}", one) for one in maps], style)


def _line(found: Comparison) -> str:
    """What stands at the foot of a picture: of one pair the models and texts, else how many texts."""
    if found.pair is None:
        return f"{found.texts} texts"
    texts = [[f"“{shorten(one.text, LONGEST_TEXT)}”" for one in text[2:4]] for text in reversed(found.pair.texts)]
    sides = zip(found.pair[:2], zip(*texts, strict=True), strict=True)
    said = [f"{one.loaded.name}, {' ← '.join(quoted)}" for one, quoted in sides]
    return visible(" beside ".join(dict.fromkeys(said)))


def _which(found: Comparison, order: Sequence[int]) -> dict[str, np.ndarray]:
    layer, head = np.array([found.heads[place] for place in order], np.int32).reshape(-1, 2).T
    return {"layer": layer, "head": head}


def _kinds(found: Comparison, order: Sequence[int]) -> Any:
    return words([found.kinds[place] for place in order]).dictionary_encode()


def _label(text: Shared, unit: int) -> str:
    """`·the`, or `·Mary/·Anna` where a word stands for another."""
    sides = zip((text.first, text.other), text.units.members, strict=True)
    labels = ["".join(prompt.labels[at] for at in members[unit]) for prompt, members in sides]
    return labels[0] if labels[0].lstrip("·") == labels[1].lstrip("·") else "/".join(labels)


def _signed(metric: Metric, values_LH: np.ndarray) -> Panel:
    reach = _largest(np.abs(values_LH)) or 1.0
    return Panel(metric.title, values_LH, -reach, reach, metric.unit, quantity="difference")


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0
