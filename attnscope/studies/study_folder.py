"""Parts of a study that are kept in its folder, so that a study that was stopped resumes; and the record of a study.

    parts = claim(folder, "readings", "scan", facts, force=False)
    loss_SK = parts.kept("some", {"loss_SK": Column((64, 3))}, lambda: {"loss_SK": measured()})["loss_SK"]

Where a part is of many batches of sequences, each batch is a file until all are read; then the part is one file. A part
is what somebody may have written: its columns are those that are expected, in names, shapes and types, before memory is
taken for them. One that is damaged is read again.

A record has a line, a table, and what tells it from another, in two files of the folder. It is known without torch: who
prints, draws or sends a record needs no model.
"""

from __future__ import annotations

import io
import logging
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from attnscope.errors import UsageError, first_line
from attnscope.interventions.spec import HeadSet
from attnscope.model.selection import DECODER, LINEAR, HeadIndex, StackLayer, is_linear, stack_columns, stack_of
from attnscope.utils.files import read_small, refuse_links, save_json, whole_file
from attnscope.utils.folders import OVER, check, document, refuse_other_kind, writable
from attnscope.utils.signals import Stopped
from attnscope.utils.tables import TableRecord, save

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


@dataclass
class Parts:
    """The parts of a study; folder: where they are kept, None where they are not.

    count: how many batches of a study are kept, of how many in total; unit: what they are called.
    """

    folder: Path | None = None
    count: int = 0
    total: int = 0
    unit: str = "batches"

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """A signal that stops the block says what is kept."""
        try:
            yield
        except Stopped as stopped:
            if self.folder is None:
                stopped.kept = "nothing is kept without a folder"
            elif not self.count:
                stopped.kept = "the same command starts again"
            else:
                counts = f"{self.count:,} of {self.total:,} {self.unit} are kept in {self.folder.parent}; "
                stopped.kept = f"{counts * bool(self.total)}the same command resumes from there"
            raise

    def expect(self, total: int, unit: str = "batches") -> None:
        """That the study has so many batches, or so many more of them."""
        self.total, self.unit = self.total + total, unit

    def kept(
        self,
        name: str,
        expected: Mapping[str, Column],
        read: Callable[[], Columns],
        *,
        fits: Callable[[Columns], bool] = lambda columns: True,
        skipped: Callable[[], object] = lambda: None,
        batches: int | None = None,
    ) -> Columns:
        """The columns of a part that an earlier run left; else what `read` gives, which is kept.

        fits: whether what they say can be of this study. skipped: called where nothing has to be read. batches: how
        many `batch` keeps while `read` runs, which the part replaces.
        """
        if self.folder is None:
            return read()
        path, before = self.folder / f"{name}.npz", self.count
        columns = _left(path, expected, fits)
        if columns is not None:
            skipped()
        else:
            columns = read()
            with whole_file(path) as stream:
                np.savez_compressed(stream, **columns)  # type: ignore[arg-type]  # no column is called allow_pickle
        self.count = before + (batches or 1)
        for left in self.folder.glob(f"{name}.*.npz") if batches else ():  # also those of a run that was killed here
            left.unlink()
        return columns

    def batch(
        self, name: str, rows: Sequence[int], expected: Mapping[str, Column], read: Callable[[], Columns], **how: Any
    ) -> Columns:
        """The columns of some rows of the part `name`, kept until the part is whole; how: as for `kept`."""
        row_B = np.array(rows, np.int64)
        return self.kept(
            f"{name}.{rows[0]:06}",
            {"row": Column(row_B.shape, "i"), **expected},
            lambda: {"row": row_B, **read()},
            fits=lambda columns: np.array_equal(columns["row"], row_B),
            **how,
        )


def _left(path: Path, expected: Mapping[str, Column], fits: Callable[[Columns], bool]) -> Columns | None:
    """What lies there; None where nothing does, or what does is damaged."""
    if not path.exists():
        return None
    try:
        size = sum(math.prod(column.shape) * column.item_bytes for column in expected.values())
        data = read_small(path, 2**20 + 2 * size)
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            if sorted(packed.namelist()) != sorted(f"{name}.npy" for name in expected):
                raise ValueError("other columns than expected")
            columns: dict[str, np.ndarray] = {}
            for name, column in expected.items():
                # The header is read before the numbers, so that no more memory is taken than is expected.
                with packed.open(f"{name}.npy") as stream:
                    np.lib.format.read_magic(stream)
                    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                if shape != column.shape or dtype.kind != column.kind or dtype.itemsize > column.item_bytes:
                    raise ValueError(f"{name} is {dtype} {shape}, expected {column.kind} {column.shape}")
                with packed.open(f"{name}.npy") as stream:
                    columns[name] = np.lib.format.read_array(stream, allow_pickle=False)
        if not fits(columns):
            raise ValueError("not of this study")
        return columns
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
    refuse_other_kind(folder, f"{readings}/{study}.json", force)
    before = document(path, "damaged", OVER, force=force)
    check(folder, study, before, facts, force)
    if before != facts:
        for left in sorted(path.parent.glob("*.npz")):
            left.unlink()
    with writable(folder):
        save_json(facts, path)
    return Parts(path.parent)


def stacks_of(sets: Iterable[HeadSet]) -> str:
    """The stack that the heads of some sets are of; of several each, as `decoder, linear`."""
    stacks = {stack_of(layer, DECODER) for heads in sets for layer, _ in heads.heads}
    return ", ".join(sorted(stacks)) or DECODER


def of_heads(heads: Sequence[HeadIndex]) -> tuple[Column, Callable[[Columns], bool]]:
    """The column `heads` of a part that has a number for every head, (layer, head) each, and whether it is of these."""
    expected = head_array(heads)
    return Column(expected.shape, "i"), lambda columns: np.array_equal(columns["heads"], expected)


def head_array(heads: Sequence[HeadIndex]) -> np.ndarray:
    """Heads as numbers: (layer, head), and where any is of a linear layer, 1 for such a head and 0 for the others."""
    linear = [is_linear(stack_of(layer)) for layer, _ in heads]
    places = [(int(layer), head) for layer, head in heads]
    return np.array([(*place, own) for place, own in zip(places, linear, strict=True)] if any(linear) else places)


def head_columns(heads: Sequence[HeadIndex]) -> dict[str, Any]:
    """The columns `layer` and `head` of a table with a row per head; `stack` where any is of a linear layer."""
    layer, head = np.array(heads, np.int32).reshape(-1, 2).T
    return {"layer": layer, "head": head, **stack_columns([heads])}


def heads_in(array: np.ndarray) -> tuple[HeadIndex, ...]:
    """The heads of such numbers."""
    return tuple((StackLayer(layer, LINEAR) if any(linear) else layer, head) for layer, head, *linear in array.tolist())


class StudyRecord(TableRecord):
    """What a study measured. stem: the name of its two files, of the table and of the facts, without a suffix.

    A record is a frozen dataclass with a field `facts`, and says its `line` and its `table`.
    """

    stem: ClassVar[str]
    facts: Mapping[str, Any]

    @property
    def unit(self) -> str:
        """Of the effects, such as nats."""
        return str(self.facts["measure"]["unit"])

    def save(self, folder: Path) -> None:
        """Write the table, and the facts."""
        save(self.table(), folder / f"{self.stem}.parquet")
        save_json(self.facts, folder / f"{self.stem}.json")
