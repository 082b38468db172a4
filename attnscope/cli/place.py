"""What --out names: a folder, or, where a command makes one table or one picture, a file of that format."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.groups import DRAWN, parameters
from attnscope.errors import UsageError
from attnscope.utils.folders import PICTURES, TABLES, suffix_of
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    import pyarrow as pa

MOST_MADE = 3  # folders, one in the other, that --out makes

# Of what one picture is: of a text, and of a study.
ONE_PICTURE = "choose a head with {select=L1H4}, or a figure with {figures=overview}"
ONE_BY_ONE = "take heads or layers one by one with {over=heads}"


def check_out(out: Path, suffix: str, files: Sequence[str]) -> None:
    """Raise UsageError for a path that cannot be written, before a model is loaded; make nothing yet.

    suffix: see `suffix_of`. files: the suffixes of files that may be given for a folder.
    """
    if suffix and suffix not in files:
        others = f", or a file in {', '.join(files)}" * bool(files)
        more = f" --image {suffix[1:]}" * (suffix in PICTURES and not files)
        if files and suffix in (*PICTURES, *TABLES):
            kind, command = ("picture", "heatmap") if suffix in PICTURES else ("table", "heads")
            more += f", or make a {kind}: attnscope {command} TEXT --out {out}"
        more += f", or send the table there: --format {suffix[1:]} > {out}" * (suffix in TABLES and not files)
        raise UsageError(f"--out {out}: expected a folder{others}", f"write --out {out.with_suffix('')}{more}")
    check_writable(out.parent if suffix else out)


def check_file(path: Path, example: str) -> None:
    """Raise UsageError for a path that cannot be a file such as the example, `page.html`, before a model is loaded."""
    expected = Path(example).suffix
    suffixes = (expected, ".htm") if expected == ".html" else (expected,)
    if path.is_dir() or not path.suffix:
        raise UsageError(f"{path} is not the name of a file", f"name one: {path / example}")
    if suffix_of(path) not in ("", *suffixes):
        raise UsageError(f"{path}: expected a file in {expected}", f"name one: {path.with_suffix(expected)}")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Raise UsageError for a folder that cannot be made or written, before a model is loaded; make nothing yet.

    A mistyped path is no place: at most three levels are made, and none at the root.
    """
    levels = (folder, *folder.absolute().parents)
    missing, there = next((count, path) for count, path in enumerate(levels) if os.path.lexists(path))
    if not there.is_dir():
        raise UsageError(f"cannot write to {folder}: {there} is no folder", "name another folder with --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {folder}: {there} is not writable", "name another folder with --out")
    if missing > MOST_MADE or (missing and there == Path(there.anchor)):
        above = folder if missing == 1 else folder.parent
        raise UsageError(f"there is no folder {above}", f"check the path, or make it: mkdir -p {above}")


def write_file(
    file: Path,
    table: Callable[[], pa.Table],
    draw: Callable[[Path], Sequence[Path | None]],
    quiet: bool,
    hint: str = "name a folder",
    spreadsheet: bool = False,
) -> None:
    """Write the table to the file that --out names, or the picture that is drawn into a folder, and say so."""
    from attnscope.export.export import write_alone

    with unwinding(), output.progress("drawing", None, quiet):
        write_alone(file, table, draw, hint, spreadsheet)
    output.talk(f"wrote {file}", quiet)


def settle_figures(groups: tuple[type, ...], given: Mapping[str, Any], typed: Collection[str]) -> dict[str, str]:
    """The format of pictures, by field, where --out names a picture.

    given: the options, by field; typed: those that the command line gives. Raises UsageError for another --image, and
    for options of pictures where none is written.
    """
    out, options = given.get("out"), parameters(*groups)
    of_folders = next((group.of_folders for group in groups if hasattr(group, "of_folders")), ())
    suffix = suffix_of(out, of_folders)
    idle = [one for name, one in options.items() if DRAWN in one.extra and name in typed]
    if idle and "out" in options and (out is None or suffix in TABLES):
        raise UsageError(f"--{idle[0].spelled} is about pictures, and none is written", "name a folder with --out DIR")
    if suffix not in PICTURES or "image" not in options:
        return {}
    if "image" in typed and f".{given['image']}" != suffix:
        raise UsageError(f"--out {out} and --image {given['image']} name two formats", "leave out --image")
    return {"image": suffix[1:]}
