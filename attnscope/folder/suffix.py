"""Which paths are names of files by their suffix, and which of folders: on the command line and in Python alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnscope.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".arrow")
OTHERS = (".json", ".html", ".htm", ".txt", ".md", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".eps", ".xlsx")
CORPORA = (*TABLES, ".json", ".txt")  # of corpora, by which datasets of them may be called


def suffix_of(path: Path | None, of_folders: Sequence[str] = ()) -> str:
    """The suffix of a path that is the name of a file, in small letters; "" for what is a folder, or to be one.

    of_folders: suffixes that a folder's name may have, too.
    """
    suffix = "" if path is None else path.suffix.lower()
    is_file = suffix in (*PICTURES, *TABLES, *OTHERS) and suffix not in of_folders
    return suffix if path and is_file and not path.is_dir() else ""


def refuse_file_name(folder: Path, of_folders: Sequence[str] = ()) -> None:
    """Raise UsageError where a folder, which is to be made, has the name of a file; of_folders: as for `suffix_of`."""
    if suffix_of(folder, of_folders):
        raise UsageError(f"{folder}: expected a folder", f"name one: {folder.with_suffix('')}")
