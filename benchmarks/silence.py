"""How long every command is silent at its start: seconds to its first words on stderr, in a pipe and on a terminal.

    python benchmarks/silence.py [COMMAND ...] [--most 2]

Each command runs twice on the embedded model, once with stderr in a pipe and once on a terminal. A command that ends
before the limit may say nothing. The exit code is 1 where one is silent for longer, or fails.
"""

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT = 2.0  # seconds
STORY = "the cat sat on the mat and the cat saw the dog and the dog saw the cat"
ANSWER = ("Mary saw John, and John gave Mary a", "--query", "last", "--key", "Mary")
COMMANDS = {  # name -> what is typed behind it; CORPUS and OUT are paths of the run
    "heads": (STORY,),
    "relations": (STORY,),
    "keys": (STORY,),
    "text": (STORY,),
    "draw": (STORY, "--out", "OUT"),
    "view": (STORY, "--out", "OUT.html"),
    "rollout": (STORY,),
    "explain": (STORY, "--head", "L3H0"),
    "tokens": (STORY,),
    "batch": ("CORPUS", "--out", "OUT"),
    "scan": ("demo", "--sequences", "8"),
    "compare": (STORY, "--compare-text", "the dog sat on the mat"),
    "ablate": ("demo", "--select", "L3H0", "--sequences", "8", "--random", "4"),
    "knockout": ANSWER,
    "patch": ("Mary saw John", "--corrupted", "Lily saw John", "--answer", " and"),
    "why": (STORY, "--head", "L3H0"),
    "parity": (STORY,),
    "info": ("demo",),
    "metrics": (),
    "doctor": (),
}


class Silence(NamedTuple):
    """Of one run: seconds to the first words on stderr, None without any, and to its end; its exit code."""

    first: float | None
    end: float
    code: int

    def over(self, limit: float) -> bool:
        """Whether nothing was said for so long, and the command still ran."""
        return (self.end if self.first is None else self.first) > limit


def listen(command: Sequence[str], terminal: bool, out: Path) -> Silence:
    """Run a command, its stdout in a file, and note when its stderr has the first byte."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "TERM": "xterm-256color", "ATTNSCOPE_NO_SERVER": "1"}
    environment.pop("ATTNSCOPE_STAGES", None)
    first, start = None, time.monotonic()
    with out.open("wb") as data:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=data, stderr=writer, env=environment)
    os.close(writer)
    while _read(reader):
        first = time.monotonic() - start if first is None else first
    os.close(reader)
    code = process.wait()
    return Silence(first, time.monotonic() - start, code)


def _read(stream: int) -> bytes:
    try:
        return os.read(stream, 1 << 16)
    except OSError:  # the other end of a terminal is closed
        return b""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--most", type=float, default=LIMIT, help="seconds that a command may be silent")
    options = parser.parse_args()
    silent = []
    print("| command | stderr | first words, s | end, s | exit code |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.txt")
        corpus.write_text("".join(f"{STORY} {number}\n" for number in range(40)))
        for name in options.commands or COMMANDS:
            for kind in ("pipe", "terminal"):
                places = {"CORPUS": str(corpus), "OUT": f"{folder}/{name}-{kind}", "OUT.html": f"{folder}/{kind}.html"}
                words = [places.get(word, word) for word in COMMANDS[name]]
                run = listen(
                    [sys.executable, "-m", "attnscope", name, *words], kind == "terminal", Path(folder, "data")
                )
                first = "-" if run.first is None else f"{run.first:.1f}"
                print(f"| {name} | {kind} | {first} | {run.end:.1f} | {run.code} |", flush=True)
                silent += [f"{name} ({kind})"] * (run.over(options.most) or run.code != 0)
    print(f"silent for over {options.most:g} s, or failed: {', '.join(silent) or 'none'}")
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
