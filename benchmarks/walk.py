"""How far one text walks through the package: `python benchmarks/walk.py`.

Files of attnscope that a capture of one text enters, and the calls that go from one of its files to another, counted
with `sys.setprofile` on the demo, after a first capture has imported everything. No seconds are measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import attnscope

PACKAGE = str(Path(attnscope.__file__).parent)
TEXT = "the financial bank is located on river bank"


def walk(engine: str) -> tuple[Counter[str], int]:
    """{file: calls into it from another file of the package}, and how many files were entered at all."""
    model = attnscope.load("demo", device="cpu")
    attnscope.capture(model, TEXT, engine=engine)
    crossed: Counter[str] = Counter()
    entered: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE):
            return
        entered.add(path)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != path:
            crossed[path.removeprefix(PACKAGE + "/")] += 1

    sys.setprofile(profile)
    try:
        attnscope.capture(model, TEXT, engine=engine)
    finally:
        sys.setprofile(None)
    return crossed, len(entered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files too")
    asked = parser.parse_args()
    for engine in ("eager", "fused"):
        crossed, entered = walk(engine)
        print(f"{engine}: {entered} files, {crossed.total()} calls from one to another")
        for path, count in crossed.most_common() if asked.files else ():
            print(f"  {count:5} {path}")


if __name__ == "__main__":
    main()
