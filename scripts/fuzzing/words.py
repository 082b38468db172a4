"""Hostile words, numbers and documents, and how a file is damaged with them."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEXT = "the river bank and the river"
TRAPPED = "trapped"  # the folder that hostile code makes where the command runs
CODE = f"""import os
os.makedirs({TRAPPED!r}, exist_ok=True)
class Evil:
    def __init__(self, *args, **kwargs): pass
    @classmethod
    def from_pretrained(cls, *args, **kwargs): return cls()
"""

# Words that are hostile anywhere.
NASTY = (
    "\x1b[2J\x1b]0;owned\x07", "a\x00b", "\u202egnp.exe", "a\u200bb\u200d\ufeff", "\x9b31m\x85", "a\u2028b\u2029c",
    "a\rb\tc\nd", "\ud800", "[bold red]x[/x]", "[/]", "{model=x}", "{0}{a!r}", "%s%n", "../../etc/passwd",
    "/etc/passwd", "~nouser/x", "~", "..", "-", "--", "", " ", "'", '"', "²", "٣", "a" * 5000, "a b " * 2000,
    "'" + "x y " * 400 + "'", "日本👩‍👩‍👧é", "a/b..c", "a--b", "a/b/c", ".git", "refs/../x", "\\", "nul", "*",
    "**/*", "[", "{",
)  # fmt: skip
NUMBERS = (
    "1e999GB", "1e999", "9" * 400, "9" * 5000, "1" + "0" * 400, "-1", "0", "²", "٣", "nan", "inf", "-inf", "1e400",
    "0x10", "1_000", "+5", " 5", "5 ", "", "1.5", "1e5", "99999999999999999999", "2147483648", "-99999999999999999999",
    "9" * 18, "1GB", "1e-9TB", "٣GB",
)  # fmt: skip
JSONS: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, 10**400, 1e308, "", "x", "²", NASTY[0], [], [1], [[]], ["x"] * 3, {}, {"a": 1},
    {"a": {"a": {}}},
)  # fmt: skip
RAW_JSON = (
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": NaN, "a": Infinity}', b'{"\\ud800": "\\u0000"}', b"\x00" * 64,
    b'{"a"\x1b[2J: 1}',
)  # fmt: skip
REGEXES = (r"((\w+\.?)+)+@", "(.*.*)*x", "(a|a|a)*b", "(?:x+x+)+y", "(", "[", "(?<=a+)b", r"\p{Nope}", "", "*", "^.*$")


def word(rng: random.Random) -> str:
    """A hostile word that can be an argument: no NUL, and a byte that is no UTF-8 as Python has it."""
    return rng.choice(NASTY).replace("\x00", "\x01").replace("\ud800", "\udcff")


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the object in a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8", errors="surrogatepass")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON document, the first of a long list alone."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in list(entries)[:40]:
        yield (*path, key)
        yield from places(inner, (*path, key))


def damage(rng: random.Random, path: Path) -> None:
    """A JSON file with one of its values replaced, removed or moved; or all of it."""
    if rng.random() < 0.2:
        path.write_bytes(rng.choice(RAW_JSON))
        return

    def change(values: dict[str, Any]) -> None:
        for _ in range(rng.choice((1, 1, 2))):
            *way, last = rng.choice(list(places(values)))
            holder: Any = values
            for step in way:
                holder = holder[step]
            if rng.random() < 0.2:
                del holder[last]
            else:
                holder[last] = copy.deepcopy(rng.choice(JSONS))  # what is put there may be changed, too

    try:
        edit(path, change)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ):  # damaged before, or by the first change
        path.write_bytes(rng.choice(RAW_JSON))


def spoil(rng: random.Random, path: Path) -> None:
    """Any file with a bit flipped, cut short, emptied, made longer, or with other content; not an odd file."""
    if not path.is_file() or path.stat().st_size > 2**26:
        return
    content = path.read_bytes()
    at = rng.randrange(max(len(content), 1))
    flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :] if content else b"\0"
    path.write_bytes(rng.choice((flipped, flipped, content[:at], b"", bytes(len(content)), content * 2, *RAW_JSON[:6])))


def odd_file(rng: random.Random, path: Path, waits: bool = True) -> None:
    """No regular file of a sensible size at the path; waits: it may be one that is never written to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.before"))
    path.unlink(missing_ok=True)
    what = rng.choice(("fifo",) * 2 * waits + ("zero", "zero", "nowhere", "itself", "folder", "large", "full"))
    targets = {"zero": "/dev/zero", "nowhere": "nowhere", "itself": path.name, "full": "/dev/full"}
    if what in targets:
        path.symlink_to(targets[what])
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 8 * 2**30)  # sparse: it takes no room
