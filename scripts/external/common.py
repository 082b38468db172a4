"""What the judges' scripts share: the result they write, and the source distribution of a package.

A judge runs as `python -m external.NAME OUT [--source FOLDER]` in its own environment and an empty working folder. It
needs nothing but the standard library from here.

    >>> report = Report(("transformers",))
    >>> with report.check("every head's map is BertViz's, bit for bit") as check:
    ...     for head in heads:
    ...         check.hold(equal(head), f"head {head}")
    >>> with report.control("the heads in reverse order") as check:
    ...     check.hold(equal(reversed_heads))
    >>> report.write(out)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

NAMED = 20  # cases that fell short and are named, at most


@dataclass
class Check:
    """One thing that was checked, over `of` cases.

    explained: cases of those not passed whose reason is in `differs`. short: the first of the others.
    """

    what: str
    passed: int = 0
    of: int = 0
    explained: int = 0
    differs: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def hold(self, held: bool, case: str = "") -> None:
        """Count one case; `case` names it where it did not hold."""
        self.of += 1
        self.passed += bool(held)
        if not held and case and len(self.short) < NAMED:
            self.short.append(case)

    def expect(self, why: str, cases: int) -> None:
        """Count cases that differ as expected; the judge has checked that it is these, for this reason."""
        self.of += cases
        self.explained += cases
        self.differs.append(why)


class Report:
    """What a judge found, as the driver reads it. notes: what was read; not_had: what could not be, and why.

    calls: how far a peer's calls and attnscope's are apart, see `calls`. model_types: how far a peer's weights are from
    transformers', see `model_types`. Both are empty for most judges.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        """packages: whose versions are written down."""
        self.version = {name: version(name) for name in packages}
        self.checks: list[Check] = []
        self.controls: list[Check] = []
        self.notes: list[str] = []
        self.not_had: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.model_types: dict[str, dict[str, Any]] = {}

    @contextmanager
    def check(self, what: str) -> Iterator[Check]:
        """A check, timed; a plain sentence says what it holds."""
        yield from self._timed(what, self.checks)

    @contextmanager
    def control(self, what: str) -> Iterator[Check]:
        """The same check with a planted fault, which must not pass whole."""
        yield from self._timed(what, self.controls)

    def _timed(self, what: str, kept: list[Check]) -> Iterator[Check]:
        check, start = Check(what), time.monotonic()
        yield check
        check.seconds = round(time.monotonic() - start, 1)
        kept.append(check)

    def write(self, out: Path) -> None:
        """Write the result; the judge writes it once, at its end."""
        made = {
            "version": self.version,
            "checks": [asdict(one) for one in self.checks],
            "controls": [asdict(one) for one in self.controls],
            "notes": self.notes,
            "not_had": self.not_had,
            **({"calls": self.calls} if self.calls else {}),
            **({"model_types": self.model_types} if self.model_types else {}),
        }
        out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The arguments of every judge: `out`, and `source` or None."""
    made = argparse.ArgumentParser()
    made.add_argument("out", type=Path)
    made.add_argument("--source", type=Path)
    return made


def arguments() -> argparse.Namespace:
    """The arguments of a judge that has none of its own."""
    return parser().parse_args()


def by_project(module: str, *given: str) -> None:
    """Run a module of this folder with the project's own Python, which has what attnscope needs, and this clone.

    For a judge in whose environment attnscope is not: the module writes what the judge then reads.
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "scripts"), str(root)])}
    command = [os.environ["ATTNSCOPE_PYTHON"], "-m", f"external.{module}", *given]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


def source_of(requirement: str, folder: Path) -> Path:
    """The unpacked source distribution of `package==version`; raises CalledProcessError where pip cannot get it."""
    unpacked = [one for one in folder.glob("*") if one.is_dir()]
    if unpacked:  # by an earlier run in this folder
        return unpacked[0]
    package = requirement.partition("==")[0]
    asked = ["download", "-q", "--no-deps", "--no-binary", package, "--dest", str(folder), requirement]
    subprocess.run([sys.executable, "-m", "pip", *asked], check=True, stdout=sys.stderr)
    (packed,) = folder.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    packed.unlink()
    return next(one for one in folder.iterdir() if one.is_dir())
