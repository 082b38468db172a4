"""Atlases of one model's checkpoints side by side: one table, one picture. R revision, N head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from attnscope.figures import Course, Style, save_courses
from attnscope.model.selection import HeadIndex
from attnscope.studies.atlas import LEAST, Atlas
from attnscope.utils.display import head_name
from attnscope.utils.tables import save, words

TABLE, PICTURE = "checkpoints.parquet", "checkpoints"  # the picture without the suffix of its kind of file


def folder_of(out: Path, revision: str) -> Path:
    """Where a revision's scan goes: refs/pr/1 is one folder, not three."""
    return out / revision.replace("/", "_")


def stacked(
    atlases: Mapping[str, Atlas], heads: Sequence[HeadIndex] | None = None, probe: str | None = None
) -> pa.Table:
    """The rows of all atlases, with a first column `revision`; heads, probe: of some alone, see `Atlas.table`."""
    tables = []
    for revision, atlas in atlases.items():
        table = atlas.table(None if heads is None else [atlas.heads.index(head) for head in heads], probe)
        tables.append(table.add_column(0, "revision", words([revision] * len(table)).dictionary_encode()))
    return pa.concat_tables(tables)


def save_checkpoints(atlases: Mapping[str, Atlas], folder: Path, name: str, style: Style = Style()) -> None:
    """Write the table of all atlases and the picture of every probe over them; name: of the model."""
    save(stacked(atlases), folder / TABLE)
    draw_checkpoints(atlases, folder, name, style)


def draw_checkpoints(atlases: Mapping[str, Atlas], folder: Path, name: str, style: Style = Style()) -> Path:
    """Draw every probe over the checkpoints; name: of the model."""
    heads = list(dict.fromkeys(head for atlas in atlases.values() for head in atlas.heads))
    return save_courses(
        folder / f"{PICTURE}.{style.image}",
        courses(atlases, heads),
        style.of_model(name),
        heads=[head_name(*head) for head in heads],
        revisions=list(atlases),
        note=f"effect: score minus null; coloured: a lower bound for all heads at once of {LEAST} at some checkpoint",
    )


def courses(atlases: Mapping[str, Atlas], heads: list[tuple[int, int]]) -> list[Course]:
    """The effects of the first contrast of every probe, NaN where a checkpoint has none."""
    first: dict[str, str] = {}
    for atlas in atlases.values():
        for one in atlas.findings:
            first.setdefault(one.probe, one.against)
    found = []
    for probe, against in first.items():
        effect_RN, low_RN = (
            np.stack([_of(atlas, (probe, against), part, heads) for atlas in atlases.values()])
            for part in ("effect", "low_all")
        )
        named = np.flatnonzero((np.nan_to_num(low_RN, nan=-1.0) >= LEAST).any(0)).tolist()
        found.append(Course(probe, f"above {against}", effect_RN, named))
    return found


def _of(atlas: Atlas, contrast: tuple[str, str], part: str, heads: list[tuple[int, int]]) -> np.ndarray:
    """A part of one contrast's effects, (N,)."""
    value_N = np.full(len(heads), np.nan)
    places = [heads.index(head) for head in atlas.heads]
    for one in atlas.findings:
        if (one.probe, one.against) == contrast:
            value_N[places] = getattr(one.effects, part)
    return value_N
