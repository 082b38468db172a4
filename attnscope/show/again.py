"""A finished scan, ablation or comparison drawn again from its folder, with other looks.

    redraw_study(Path("runs/atlas"), Path("pictures"), Style(cmap="magma"))   # probes.png, head_js.png

Folders are what somebody wrote: a table or a fact that is none is refused. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from attnscope.errors import InputError, visible
from attnscope.figures import About, Style
from attnscope.observe.atlas import columns_of
from attnscope.studies import ablation as effects
from attnscope.studies import atlas
from attnscope.studies.comparison import NAME as COMPARISON
from attnscope.utils.files import damaged

MOST = 1 << 12  # layers of a model, and heads of a layer: a number beyond is no place
LONGEST_NAME = 80


class Redrawn(NamedTuple):
    """The pictures that were drawn, and in words which of a folder's could not be."""

    paths: list[Path]
    notes: tuple[str, ...] = ()


def redraw_study(folder: Path, into: Path, style: Style = Style()) -> Redrawn | None:
    """Draw the pictures of a study from its folder into another; None for a folder that holds none.

    Raises InputError for a folder with damaged or missing tables.
    """
    draw = next((draw for name, draw in STUDIES.items() if (folder / name).exists()), None)
    return None if draw is None else draw(folder, into, style)


def _scan(folder: Path, into: Path, style: Style) -> Redrawn:
    from attnscope.show.atlas import HEAD_JS, save_head_js, save_probes
    from attnscope.studies.head_distances import kept_texts

    scan = atlas.load_atlas(folder)
    name = _name(scan.facts)
    _check(folder, scan.heads)
    paths = [save_probes(scan, into, name, style)]
    read = kept_texts(folder)
    if read is not None:
        _check(folder, read.heads)
        paths.append(save_head_js(read, scan, into / f"{HEAD_JS}.{style.image}", style.of_model(name)))
    return Redrawn(paths)


def _checkpoints(folder: Path, into: Path, style: Style) -> Redrawn:
    from attnscope.show.checkpoints import TABLE, draw_checkpoints, folder_of

    with damaged(f"{folder} holds no whole scans", "make them: attnscope scan MODEL --out DIR"):
        columns = columns_of(folder / TABLE, pa.schema([("revision", pa.string())]))
        revisions = list(dict.fromkeys(map(str, columns["revision"])))
    atlases = {visible(name): atlas.load_atlas(folder_of(folder, name)) for name in revisions}
    for scan in atlases.values():
        _check(folder, scan.heads)
    return Redrawn([draw_checkpoints(atlases, into, _name(next(iter(atlases.values())).facts), style)])


def _ablation(folder: Path, into: Path, style: Style) -> Redrawn:
    from attnscope.show.ablation import costs_of, save_ablation

    ablation = effects.kept_ablation(folder)
    heads = sorted({head for heads in ablation.effects for head in heads})
    _check(folder, heads)
    with damaged(f"{folder} holds no whole ablation", effects.AGAIN):
        costs = costs_of(columns_of(folder / effects.TABLE, effects.STORED, lists="heads"))
        if not all(isfinite(cost.value) for cost in costs):
            raise ValueError("an effect is no number")
    paths = save_ablation(ablation, into, heads, style=style, costs=costs)
    return Redrawn(
        paths, ("heads in no set, and scores of an atlas, are not drawn: they are not in the tables; ablate again",)
    )


def _comparison(folder: Path, into: Path, style: Style) -> Redrawn:
    from attnscope.show.comparison import save_differences
    from attnscope.studies.comparison import kept_comparison

    comparison, texts = kept_comparison(folder)
    _check(folder, comparison.heads)
    paths = list(save_differences(comparison, into, style.of(About(line=visible(texts), command=style.about.command))))
    return Redrawn(paths, ("layers/ is not drawn: no table holds the weights of both sides; compare again",))


STUDIES: Mapping[str, Callable[[Path, Path, Style], Redrawn]] = {
    atlas.NAME: _scan,
    "checkpoints.parquet": _checkpoints,
    effects.NAME: _ablation,
    COMPARISON: _comparison,
}


def _name(facts: Mapping[str, Any]) -> str:
    """The model's name as a picture says it."""
    return visible(str(facts["model"]["name"]))[:LONGEST_NAME]


def _check(folder: Path, heads: Iterable[tuple[int, int]]) -> None:
    """Raise InputError for heads that no model has: pictures have a row per layer, and a column per head."""
    if not all(type(place) is int and 0 <= place < MOST for head in heads for place in head):
        raise InputError(f"{folder} names heads that no model has", "name the folder of a finished study")
