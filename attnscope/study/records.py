"""What every study leaves: a record with a line, a table, and what tells it from another, in two files of its folder.

Known without torch: who prints, draws or sends a record needs no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from attnscope.utils.files import save_json
from attnscope.utils.tables import TableRecord, save


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
