"""What a corpus is: files, folders and globs -> the files to read, in a fixed order, each with its format."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, UsageError

FORMATS = ("txt", "json", "jsonl", "csv", "tsv", "parquet")
PACKED = (".gz", ".zst")
STDIN = "-"
GIVEN = "given"  # how messages call texts in memory


@dataclass(frozen=True)
class Corpus:
    """What to read, and how.

    sources: files, folders, globs, or `-`. format: of what has no telling suffix (stdin). whole: a .txt file is one
    text, not one text per line. text_field, id_field: where records hold them, `doc.question` in a field of a field;
    None takes `text` (under chat `messages` or `conversations`, where there is one), and `id`, where there is one.
    audio_field: where records name a sound, which is read instead of the text. given: texts and records in memory,
    which are read instead of sources.
    """

    sources: tuple[str, ...]
    format: str | None = None
    whole: bool = False
    text_field: str | None = None
    id_field: str | None = None
    audio_field: str | None = None
    chat: bool = False
    given: tuple[str | Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class CorpusFile:
    """One file to read and its format."""

    path: str
    format: str

    @property
    def name(self) -> str:
        """How tables and messages call it."""
        return "stdin" if self.path == STDIN else self.path

    @property
    def size(self) -> int | None:
        """Bytes on disk; None where that is not known."""
        with suppress(OSError):
            return None if self.path == STDIN else Path(self.path).stat().st_size
        return None


def find_files(corpus: Corpus) -> list[CorpusFile]:
    """The files of a corpus in a fixed order: as given, folders and globs sorted.

    Raises UsageError for a path that is not there, for a file of unknown format, and where a field was named
    and no file has records.

        >>> find_files(Corpus(("corpus/", "more.jsonl.gz")))
    """
    if corpus.given:
        return []
    files = [CorpusFile(path, _format(path, corpus)) for name in corpus.sources for path in _expand(name)]
    if not files:
        raise UsageError("there is nothing to read", "name a file, a folder, a glob, or - for standard input")
    named = [name for name in ("text_field", "id_field") if getattr(corpus, name) is not None]
    if named and all(file.format == "txt" for file in files):
        records = "say that it holds records with {input_format=jsonl}, or " * (files[0].path == STDIN)
        raise UsageError(f"{files[0].name} is plain text, which has no fields", f"{records}leave out {{{named[0]}}}")
    return files


def _expand(name: str) -> list[str]:
    """The files that a source means: itself, those of a folder, or a glob's."""
    path = Path(name)
    if name == STDIN or path.is_file():
        return [name]
    if path.is_dir():
        # Files of a known format, also of folders in it, but for hidden ones; a .json next to others describes those.
        files = [inner for inner in sorted(path.rglob("*")) if inner.is_file() and _suffix(inner.name) in FORMATS]
        files = [inner for inner in files if _suffix(inner.name) != "json"] or files
        names = [str(inner) for inner in files if not any(part[0] == "." for part in inner.relative_to(path).parts)]
        if not names:
            raise UsageError(f"{path} holds no file that ends in .{', .'.join(FORMATS)}", "name another folder or file")
        return names
    matches = sorted(match for match in glob.glob(name, recursive=True) if Path(match).is_file())
    if not matches:
        raise UsageError(f"there is no file {name}", "check the path; quote a glob")
    return matches


def _suffix(name: str) -> str:
    path = Path(name)
    return (Path(path.stem).suffix if path.suffix in PACKED else path.suffix).lstrip(".").lower()


def _format(path: str, corpus: Corpus) -> str:
    """The format of a file. Raises UsageError for what cannot be read in it here."""
    suffix = _suffix(path) if path != STDIN else corpus.format or "txt"
    kind = suffix if suffix in FORMATS else corpus.format
    if kind is None:
        raise UsageError(
            f"{path}: its suffix does not say what it is",
            f"name a file that ends in .{', .'.join(FORMATS)}, or give {{input_format={FORMATS[0]}}}",
        )
    if path == STDIN and sys.stdin is None:
        raise InputError("standard input is closed", "pipe a corpus into it, or name a file")
    if path == STDIN and sys.stdin.isatty():
        raise UsageError("standard input is a terminal", "pipe a corpus into it, or name a file")
    if path.endswith(".zst"):
        import pyarrow as pa

        if not pa.Codec.is_available("zstd"):
            raise UsageError(f"{path}: this pyarrow reads no zstd", "pip install -U pyarrow, or unpack the file")
    if kind == "parquet" and (path == STDIN or path.endswith(PACKED)):
        raise UsageError(f"{path}: Parquet is read from its end", "give it as an uncompressed file")
    return kind
