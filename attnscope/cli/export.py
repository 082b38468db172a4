"""What --out writes: tables, figures, the manifest. A path is made of layer and head numbers, never of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.cli import output
from attnscope.errors import AttnscopeError
from attnscope.figures import Maps, Style, save_head_maps, save_layer, save_metrics, save_overview
from attnscope.files import save_json
from attnscope.manifest import manifest
from attnscope.tables import save

if TYPE_CHECKING:
    from attnscope.cli.options import Writing
    from attnscope.model.loading import LoadedModel
    from attnscope.observe import Observation


def export(
    writing: Writing,
    loaded: LoadedModel,
    seen: Observation,
    names: Sequence[str],
    style: Style,
    min_weight: float | None,
    options: Mapping[str, Any],
) -> None:
    """Write heads.csv, relations.csv, overview, layers, heads, metrics and manifest.json into --out.

    names: the heads to draw one by one. Says on stderr what was written.
    """
    folder = writable(writing.out)
    written = [save(seen.table(), folder / "heads.csv"), save(seen.relations(min_weight), folder / "relations.csv")]
    written += draw(writing, seen, names, style)
    written.append(draw_metrics(seen, folder, style))
    finish(writing, loaded, seen, written, options)


def finish(
    writing: Writing, loaded: LoadedModel, seen: Observation, written: Sequence[Path], options: Mapping[str, Any]
) -> None:
    """Write the manifest last: where it lies, everything it names is whole."""
    folder = writable(writing.out)
    files = sorted(path.relative_to(folder).as_posix() for path in written)
    save_json(manifest(loaded, seen, options, files), folder / "manifest.json")
    output.talk(f"wrote {len(files) + 1} files to {folder}", writing.quiet)


def writable(folder: Path | None) -> Path:
    """The folder, made if need be. Raises UsageError where it cannot hold files."""
    from attnscope.errors import UsageError

    if folder is None:
        raise UsageError("nowhere to write", "name a folder with --out DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "name another folder with --out") from error
    return folder


def draw(writing: Writing, seen: Observation, names: Sequence[str], style: Style) -> list[Path]:
    """overview, layers/ of the selected layers, heads/ of the named heads."""
    folder, layers = writable(writing.out), layer_maps(seen, seen.view.by_kv)
    kept = {head.layer for head in seen.heads}
    jobs = head_jobs(folder, layers, names, style)
    drawn = [maps for maps in layers if maps.layer in kept]
    with output.progress("drawing", len(drawn) + len(jobs) + 1, writing.quiet) as advance:
        written = [save_overview(folder / f"overview.{style.image}", layers, style)]
        advance(1)
        for maps in drawn:
            written.append(save_layer(folder / "layers" / f"L{maps.layer:02d}.{style.image}", maps, style))
            advance(1)
        done = [0]

        def count(files: int) -> None:
            advance(files - done[0])
            done[0] = files

        return written + save_head_maps(jobs, style, workers=None, progress=count)


def head_jobs(folder: Path, layers: Sequence[Maps], names: Sequence[str], style: Style) -> list[tuple[Path, Maps, int]]:
    """A file a named head, in the model's order: heads/L27H03.png, heads/L27KV03.png."""
    mark, wanted = ("KV" if layers and layers[0].by_kv else "H"), set(names)
    return [
        (folder / "heads" / f"L{maps.layer:02d}{mark}{head:02d}.{style.image}", maps, index)
        for maps in layers
        for index, head in enumerate(maps.heads)
        if f"L{maps.layer}{mark}{head}" in wanted
    ]


def layer_maps(seen: Observation, by_kv: bool) -> list[Maps]:
    """The observation's matrices as figures take them: with labels, bins and kv heads."""
    found = seen.maps
    if found is None:
        raise AttnscopeError("this observation kept no maps", "ask with Request(maps=...)")
    rule = "sum over keys, mean over queries" if found.rule == "sum" else "largest entry"
    labels_Q, labels_K = (bin_labels(seen.prompt.labels, sizes) for sizes in (found.rows, found.columns))
    return [
        Maps(
            layer,
            tuple(found.heads[layer]),
            values,
            labels_Q,
            labels_K,
            found.bin_size,
            rule if found.bin_size > 1 else "",
            () if by_kv else tuple(seen.kv_head(layer, head) for head in found.heads[layer]),
            by_kv,
            "logit" if found.view.weights == "scores" else "weight",
        )
        for layer, values in found.values.items()
    ]


def bin_labels(labels: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Token labels, or the positions that each bin spans."""
    if all(size == 1 for size in sizes):
        return tuple(labels)
    starts = np.cumsum([0, *sizes[:-1]])
    return tuple(
        f"{start}" if size == 1 else f"{start}–{start + size - 1}" for start, size in zip(starts, sizes, strict=True)
    )


def draw_metrics(seen: Observation, folder: Path, style: Style) -> Path:
    """metrics.png: one layer x head panel a metric."""
    layers = sorted({head.layer for head in seen.heads})
    width = 1 + max(head.kv_head if head.head is None else head.head for head in seen.heads)
    values = {name: np.full((len(layers), width), np.nan) for name in seen.heads[0].score}
    for head in seen.heads:
        at = layers.index(head.layer), head.kv_head if head.head is None else head.head
        for name, score in head.score.items():
            values[name][at] = score
    return save_metrics(
        folder / f"metrics.{style.image}", values, style, layer_labels=[f"L{layer}" for layer in layers]
    )
