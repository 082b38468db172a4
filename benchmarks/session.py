"""Enter to output of short commands on the demo, with `attnscope serve` and without.

    python benchmarks/session.py [--runs 9] [--alone 3] [--commands heads,why] [--write]

Fresh processes, one after the other; wall time of each and CPU seconds of its own process. A server of its own, in a
folder of its own.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from results import measured_here

SENTENCE, RIVER = "the financial bank is located on river bank", "the bank of the river, the bank of the"
COMMANDS = {
    "heads": ["heads", SENTENCE],
    "tokens": ["tokens", SENTENCE],
    "relations": ["relations", SENTENCE],
    "view": ["view", SENTENCE, "--out", "-"],
    "explain": ["explain", SENTENCE, "--head", "L2H3"],
    "why": ["why", RIVER, "--head", "L3H0", "--key", "river"],
    "knockout": ["knockout", RIVER, "--key", "river", "--over", "heads"],
}
ATTNSCOPE = [sys.executable, "-m", "attnscope"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="with a server")
    parser.add_argument("--alone", type=int, default=3, help="without")
    parser.add_argument("--commands", type=lambda text: text.split(","), default=["heads"])
    parser.add_argument("--write", action="store_true", help="update benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines = [
        "| command | asked: s | CPU s of its process | alone: s | CPU s |",
        "|---|---|---|---|---|",
    ]
    with serving() as environment:
        for name in options.commands:
            cells = []
            for count, more in ((options.runs, {}), (options.alone, {"ATTNSCOPE_NO_SERVER": "1"})):
                cells += times(COMMANDS[name], environment | more, count)
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    text = f"Median of {options.runs} asked and {options.alone} alone (least to most):\n\n" + "\n".join(lines)
    print(text)
    if options.write:
        measured_here("A session", f"`python benchmarks/session.py --commands {','.join(options.commands)}`. {text}")


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """The environment in which commands find a server of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        server = subprocess.Popen([*ATTNSCOPE, "serve"], env=environment, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            while not server.stderr.readline().startswith("answering"):
                assert server.poll() is None
            yield environment
        finally:
            server.terminate()
            server.wait()


def times(command: list[str], environment: dict[str, str], count: int) -> list[str]:
    """Wall and CPU seconds, after one run that fills the disk's cache."""
    wall, cpu = zip(*[one(command, environment) for _ in range(count + 1)][1:], strict=True)
    return [f"{statistics.median(part):.2f} ({min(part):.2f} to {max(part):.2f})" for part in (wall, cpu)]


def one(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    before, start = used(), time.perf_counter()
    subprocess.run([*ATTNSCOPE, *command], env=environment, check=True, capture_output=True)
    return time.perf_counter() - start, used() - before


def used() -> float:
    """CPU seconds of the processes that were waited for."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


if __name__ == "__main__":
    main()
