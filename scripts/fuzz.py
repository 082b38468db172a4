"""Hostile input of many kinds, tried on the command line: `python scripts/fuzz.py --tries 5000 --seed 1`.

One process imports everything and forks for each try. Whatever a try does, it must end in time, with an exit code that
the README lists, at most one line of error and no line longer than a message may be; nothing that steers a terminal
reaches stderr or a terminal's stdout, no traceback and no "internal error". No code of a file is run, no pickle opened,
no network asked, no stdin read that was not named, no file changed that is not the command's own, and no more memory
taken than 4.5 GiB. Prints how many tries of each kind ended with which code, and each that was flagged; leaves with 1
where there is one. `--kind NAME --first N --tries 1 --keep FOLDER` repeats one and leaves its folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from fuzzing import (  # noqa: F401
    adapting,
    browsing,
    cache,
    command_line,
    drawing,
    folders,
    holding,
    media,
    models,
    pages,
    processors,
    reading,
    serving,
    studies,
)
from fuzzing.many import fuzz, import_everything
from fuzzing.trying import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), default=[])
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first try")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the folders of flagged tries here")
    asked = parser.parse_args()
    import_everything()
    report = fuzz(asked.tries, asked.seed, tuple(asked.kind), asked.seconds, asked.first, asked.keep)
    for name, codes in report.codes.items():
        counts = "  ".join(f"{code}: {count}" for code, count in sorted(codes.items(), key=str))
        print(f"{name:18}{sum(codes.values()):6} tries   exit {counts}")
    print(f"{sum(sum(codes.values()) for codes in report.codes.values())} tries, {len(report.flagged)} flagged")
    return 1 if report.flagged else 0


if __name__ == "__main__":
    sys.exit(main())
