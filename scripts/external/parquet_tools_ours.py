"""The Parquet files of the judge tables with attnscope's own reading, for the judge parquet_tools.

    python -m external.parquet_tools_ours FOLDER

The project's own Python writes them: FOLDER/tables.json is {name: {path, columns, types}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

from external.tables import COMMANDS, OTHER, batch, own, printed


def main(folder: Path) -> None:
    """Write the tables, and `other`, the heads of another text."""
    paths = {name: printed(folder / f"{name}.parquet", command) for name, command in COMMANDS.items()}
    paths |= {"other": printed(folder / "other.parquet", ("heads", OTHER))} | batch(folder, "parquet")
    found = {
        name: {
            "path": str(path),
            "columns": own(path),
            "types": {one.name: str(one.type) for one in pq.read_schema(path)},
        }
        for name, path in paths.items()
    }
    (folder / "tables.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
