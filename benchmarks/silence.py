"""How long every command is silent at its start: seconds to its first words on stderr, in a pipe and on a terminal.

    python benchmarks/silence.py [NAME ...] [--most 2]

Each command runs twice on the embedded model, once with stderr in a pipe and once on a terminal. A command that ends
before the limit may say nothing. The exit code is 1 where one is silent for longer, or fails. Time in which its main
thread waited for a processor, on a busy machine, is not counted as silence; Linux alone says how long that was.
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
ATTNSCOPE = (sys.executable, "-m", "attnscope")
STORY = "the cat sat on the mat and the cat saw the dog and the dog saw the cat"
ANSWER = ("Mary saw John, and John gave Mary a", "--query", "last", "--key", "Mary")
COMMANDS = {  # name -> what is typed; CORPUS, DATASET, LINES, RUN and OUT are paths of the run
    "heads": ("heads", STORY),
    "heads of a dataset": ("heads", "DATASET"),
    "relations": ("relations", STORY),
    "keys": ("keys", STORY),
    "text": ("text", STORY),
    "draw": ("draw", STORY, "--out", "OUT"),
    "draw of a folder": ("draw", "RUN", "--out", "OUT"),
    "view": ("view", STORY, "--out", "OUT.html"),
    "view of a folder": ("view", "RUN", "--from-tables", "--out", "OUT.html"),
    "rollout": ("rollout", STORY),
    "explain": ("explain", STORY, "--head", "L3H0"),
    "tokens": ("tokens", STORY),
    "batch": ("batch", "CORPUS", "--out", "OUT"),
    "scan": ("scan", "demo", "--sequences", "8"),
    "compare": ("compare", STORY, "--compare-text", "the dog sat on the mat"),
    "ablate": ("ablate", "demo", "--select", "L3H0", "--sequences", "8", "--random", "4"),
    "knockout": ("knockout", *ANSWER),
    "budgets": ("budgets", STORY, "--keep", "stream:4+4", "--over", "layers"),
    "patch": ("patch", "Mary saw John", "--corrupted", "Lily saw John", "--answer", " and"),
    "why": ("why", STORY, "--head", "L3H0"),
    "run": ("run", "LINES"),
    "serve": ("serve", "--idle", "1s"),
    "serve --page": ("serve", "--page", "--idle", "1s"),
    "parity": ("parity", STORY),
    "parity --whole": ("parity", STORY, "--whole"),
    "info": ("info", "demo"),
    "metrics": ("metrics",),
    "doctor": ("doctor",),
}


class Silence(NamedTuple):
    """Of one run: seconds to the first words on stderr, None without any, and to its end; its exit code.

    waited: seconds before the first words in which it waited for a processor.
    """

    first: float | None
    waited: float
    end: float
    code: int

    def over(self, limit: float) -> bool:
        """Whether nothing was said for so long, and the command still ran."""
        return (self.end if self.first is None else self.first) - self.waited > limit


def listen(command: Sequence[str], terminal: bool, out: Path) -> Silence:
    """Run a command, its stdout in a file, and note when its stderr has the first byte."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "TERM": "xterm-256color", "ATTNSCOPE_NO_SERVER": "1"}
    environment["XDG_RUNTIME_DIR"] = str(out.parent)  # a server of its own
    environment.pop("ATTNSCOPE_STAGES", None)
    first, waited, start = None, 0.0, time.monotonic()
    with out.open("wb") as data:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=data, stderr=writer, env=environment)
    os.close(writer)
    while _read(reader):
        if first is None:
            first, waited = time.monotonic() - start, _waited(process.pid)
    os.close(reader)
    code = process.wait()
    return Silence(first, waited, time.monotonic() - start, code)


def _waited(process: int) -> float:
    """Seconds in which the main thread of a process could run and had no processor; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _read(stream: int) -> bytes:
    try:
        return os.read(stream, 1 << 16)
    except OSError:  # the other end of a terminal is closed
        return b""


def prepare(folder: Path) -> dict[str, str]:
    """Write what the commands read; returns where it is, by the name in COMMANDS."""
    places = {name: str(folder / name.lower()) for name in ("CORPUS", "DATASET", "LINES", "RUN")}
    places["CORPUS"] += ".txt"
    Path(places["CORPUS"]).write_text("".join(f"{STORY} {number}\n" for number in range(40)))
    Path(places["LINES"]).write_text(f"heads '{STORY}'\n")
    for words in (("heads", STORY, "--out", places["RUN"]), ("batch", places["CORPUS"], "--out", places["DATASET"])):
        subprocess.run([*ATTNSCOPE, *words, "--quiet"], stdout=subprocess.DEVNULL, check=True)
    return places


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--most", type=float, default=LIMIT, help="seconds that a command may be silent")
    options = parser.parse_args()
    silent = []
    print("| command | stderr | first words, s | of it without a processor, s | end, s | exit code |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        places = prepare(Path(folder))
        for name in options.commands or COMMANDS:
            for kind in ("pipe", "terminal"):
                out = f"{folder}/{name}-{kind}".replace(" ", "-")
                words = [{**places, "OUT": out, "OUT.html": f"{out}.html"}.get(word, word) for word in COMMANDS[name]]
                run = listen([*ATTNSCOPE, *words], kind == "terminal", Path(folder, "data"))
                first = "-" if run.first is None else f"{run.first:.1f}"
                print(f"| {name} | {kind} | {first} | {run.waited:.1f} | {run.end:.1f} | {run.code} |", flush=True)
                silent += [f"{name} ({kind})"] * (run.over(options.most) or run.code != 0)
    print(f"silent for over {options.most:g} s, or failed: {', '.join(silent) or 'none'}")
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
