"""What is wrong with how a try ended, whatever its kind."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from attnscope import errors as shown
from fuzzing.trying import NETWORK, Ended, Try
from fuzzing.words import TRAPPED

CODES = {0, 1, 2, 3, 4, 5}
ERRORS = {2, 3, 4, 5}
MEMORY = 9 * 2**29  # bytes: more than `attnscope.utils.isolation` lets the programs of others take
LONGEST_LINE = shown.MESSAGE + len("attnscope: ")
OWN = "home/.cache/attnscope"  # where the command may keep what it likes
NAMES = ("kept.txt", "heads.csv", ".heads.csv.0123abcd", "part-000000000.csv", ".part-000000000.csv", "000000000/x.csv")
PLACE = re.compile(r"line \d+ of .* failed, exit code \d+")


def lay_out(place: Path) -> Path:
    """The folder of a try, and beside it a home, a temporary folder and what no command may touch."""
    for name in NAMES:
        path = place / "outside" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    for name in ("here", OWN, "tmp"):
        (place / name).mkdir(parents=True)
    return place / "here"


def beside(folder: Path) -> dict[str, str]:
    """All files beside the folder of a try but attnscope's own cache, and what each holds."""
    found, place = {}, folder.parent
    for at, folders, files in os.walk(place):
        inside = Path(at).relative_to(place)
        folders[:] = [name for name in folders if str(inside / name) not in (folder.name, OWN)]
        for name in [*folders, *files]:
            path = Path(at) / name
            whole = path.is_file() and not path.is_symlink()
            found[str(inside / name)] = hashlib.sha256(path.read_bytes()).hexdigest() if whole else ""
    return found


def faults(one: Try, ended: Ended, folder: Path, before: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with how a try ended; before: what was beside its folder."""
    found = [*_of_its_end(ended), *_of_its_words(one, ended), *ended.heard, *one.after(ended)]
    if (folder / TRAPPED).exists():
        found.append("code of a file was run")
    if ended.read and "-" not in one.arguments:
        found.append(f"{ended.read} bytes of stdin were read")
    if before is not None and (changed := dict(before.items() ^ beside(folder).items())):
        found.append(f"changed {', '.join(sorted(changed)[:3])}, which is not its own")
    return found


def _of_its_end(ended: Ended) -> list[str]:
    found = []
    if ended.code not in CODES | {NETWORK}:
        found.append("took too long" if ended.code is None else f"left with {ended.code}")
    if ended.memory > MEMORY:
        found.append(f"took {ended.memory / 2**30:.1f} GiB")
    elif b"attnscope: out of memory" in ended.err:
        found.append("took all the memory that it was given")
    return found


def _of_its_words(one: Try, ended: Ended) -> list[str]:
    err = ended.err.decode(errors="surrogateescape")
    # `run FILE` says which line failed, after the command's own words.
    lines, found = [line for line in err.splitlines() if not ("run" in one.arguments[:1] and PLACE.fullmatch(line))], []
    if "Traceback" in err or "internal error" in err or "panicked" in err:
        found.append("a traceback or an internal error")
    if steering := steers(err) or (steers(_on_screen(one, ended)) if one.terminal else []):
        found.append(f"sent {', '.join(steering)}")
    if ended.code in ERRORS and 2 not in one.closed and (len(lines) != 1 or not err.startswith("attnscope: ")):
        found.append(f"{len(lines)} lines of error")
    if ended.code == 0 and lines and "-q" in one.arguments:
        found.append("talk under -q")
    if any(len(line) > LONGEST_LINE for line in lines):
        found.append(f"a line of {max(map(len, lines))} characters")
    return found


def _on_screen(one: Try, ended: Ended) -> str:
    """What a terminal is given; in tables for programs a tab is between two cells, or part of one."""
    text = ended.out.decode(errors="surrogateescape")
    return text.replace("\t", " ") if {"csv", "tsv"} & {*one.arguments} else text


def steers(text: str) -> list[str]:
    """The characters of a text that steer a terminal, as code points; a joiner is part of an emoji."""
    found = {char for char in text if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}} - {"\n"}
    return sorted(f"U+{ord(char):04X}" for char in found) if shown.visible(text, shown.LINES) != text else []
