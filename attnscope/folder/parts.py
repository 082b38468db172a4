"""Parts of a study that are kept in its folder, so that a study that was stopped goes on.

parts = claim(folder, "readings", "scan", facts, force=False)
loss_SK = parts.kept("some", {"loss_SK": Column((64, 3))}, lambda: {"loss_SK": measured()})["loss_SK"]

A part is what somebody may have written: its columns are those that are expected, in names, shapes and types, before
memory is taken for them. One that is damaged is read anew.
"""

from __future__ import annotations

import io
import logging
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnscope.errors import UsageError, first_line
from attnscope.files import read_small, refuse_links, save_json, whole_file
from attnscope.folder.claim import OVER, check, document, writable
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.geometry import Geometry
from attnscope.selection import everything, pairs

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

logger = logging.getLogger(__name__)
Columns = Mapping[str, np.ndarray]
LETTERS = 64  # of a word in a column


class Column(NamedTuple):
    """What a column has to be: its shape, and whether it holds float64 ("f"), int64 ("i") or words ("U")."""

    shape: tuple[int, ...]
    kind: str = "f"

    @property
    def item_bytes(self) -> int:
        """At most."""
        return 4 * LETTERS if self.kind == "U" else 8

    def is_of(self, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Whether it may be a column of this shape and type."""
        return shape == self.shape and dtype.kind == self.kind and dtype.itemsize <= self.item_bytes


@dataclass(frozen=True)
class Parts:
    """The parts of a study; folder: where they are kept, None where they are not."""

    folder: Path | None = None

    def kept(
        self,
        name: str,
        expected: Mapping[str, Column],
        read: Callable[[], Columns],
        *,
        fits: Callable[[Columns], bool] = lambda columns: True,
        skipped: Callable[[], object] = lambda: None,
    ) -> Columns:
        """The columns of a part that an earlier run left; else what `read` gives, which is kept.

        fits: whether what they say can be of this study. skipped: called where nothing has to be read.
        """
        if self.folder is None:
            return read()
        path = self.folder / f"{name}.npz"
        if (found := _left(path, expected, fits)) is not None:
            skipped()
            return found
        columns = read()
        with whole_file(path) as stream:
            np.savez_compressed(stream, **columns)  # type: ignore[arg-type]  # no column is called allow_pickle
        return columns


def _left(path: Path, expected: Mapping[str, Column], fits: Callable[[Columns], bool]) -> Columns | None:
    """What lies there; None where nothing does, or what does is damaged."""
    if not path.exists():
        return None
    try:
        data = read_small(path, 2**20 + 2 * sum(math.prod(one.shape) * one.item_bytes for one in expected.values()))
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            if sorted(packed.namelist()) != sorted(f"{name}.npy" for name in expected):
                raise ValueError("other columns than expected")
            found = {name: _column(packed, name, one) for name, one in expected.items()}
        if not fits(found):
            raise ValueError("not of this study")
        return found
    except UsageError:  # of the deadline's variable: the part may be whole
        raise
    except Exception as error:  # of zip, zlib and numpy, over any bytes
        logger.warning("%s is damaged and made again: %s", path, first_line(error))
        return None


def claim(folder: Path, readings: str, study: str, facts: Mapping[str, Any], force: bool) -> Parts:
    """The parts of a study in a folder, with what it is; those of an earlier run stay if that is the same.

    Raises UsageError where another fills it, or what says so is damaged, unless force says to write over it.
    """
    path = folder / readings / f"{study}.json"
    refuse_links([path.parent])
    before = document(path, "damaged", OVER, force=force)
    check(folder, study, before, facts, force)
    if before != facts:
        for left in sorted(path.parent.glob("*.npz")):
            left.unlink()
    with writable(folder):
        save_json(facts, path)
    return Parts(path.parent)


def with_weights(facts: Mapping[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """Facts whose `model` holds the sha256 of its weights, since another model may have its name."""
    return {
        **facts,
        "model": {**facts["model"], "weights_sha256": weights_sha256(loaded.source_folder, loaded.base_folder)},
    }


def of_heads(geometry: Geometry) -> tuple[Column, Callable[[Columns], bool]]:
    """The column `heads` of a part that has a number for every head, (layer, head) each, and whether it is of these."""
    expected = np.array(pairs(everything(geometry.heads_by_layer)))
    return Column(expected.shape, "i"), lambda columns: np.array_equal(columns["heads"], expected)


def _column(packed: zipfile.ZipFile, name: str, expected: Column) -> np.ndarray:
    """One column, whose header is read before its numbers. Raises ValueError for another than is expected."""
    with packed.open(f"{name}.npy") as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    if not expected.is_of(shape, dtype):
        raise ValueError(f"{name} is {dtype} {shape}, expected {expected.kind} {expected.shape}")
    with packed.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)
