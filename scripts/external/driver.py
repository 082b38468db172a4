"""Run the external judges: each gets an environment, which is made, used and deleted, and its result is kept.

A judge is two files next to this one. NAME.toml:

    title = "..."             # its heading in docs/external.md
    about = "..."             # plain sentences: what it is, what is compared
    requires = ["x==1.2.3"]   # what pip installs, pinned
    constraints = true        # the versions of constraints.txt bind it
    project = "fast"          # attnscope from this clone, with these extras; "" for none, false where it is left out
    source = "..."            # what must be given by --source NAME=FOLDER, where there is no package
    minutes = 60              # after which it is stopped
    calls = "From x"          # the part of docs/coming-from.md whose rows it runs, see `calls`
    column = "x"              # its column in the table of model types, see `model_types`

NAME.py runs in that environment as `python -m external.NAME OUT [--source FOLDER]`; see `common`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from external.document import document, fell_short, filled, tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class NotHadError(Exception):
    """A judge cannot be run: what it needs is missing, or its environment could not be made."""


@dataclass(frozen=True)
class Judge:
    """A judge as its NAME.toml describes it."""

    name: str
    title: str
    about: str
    requires: Sequence[str] = ()
    constraints: bool = True
    project: str | bool = ""
    source: str = ""
    minutes: float = 60
    calls: str = ""
    column: str = ""


def judges(folder: Path = HERE) -> dict[str, Judge]:
    """Every judge by name."""
    found = sorted(folder.glob("*.toml"))
    return {one.stem: Judge(one.stem, **tomllib.loads(one.read_text("utf-8"))) for one in found}


def installs(judge: Judge, root: Path = ROOT) -> list[str]:
    """pip's arguments for a judge's environment; it is used once, so that only what it imports is compiled."""
    bound = ["-c", str(root / "constraints.txt")] if judge.constraints else []
    own = [] if judge.project is False else ["-e", f"{root}[{judge.project}]" if judge.project else str(root)]
    return ["install", "-q", "--no-compile", *bound, *judge.requires, *own]


def made_environment(judge: Judge, folder: Path) -> Path:
    """The Python of the judge's environment in `folder`; one that an earlier run finished there is used again."""
    python, finished = folder / "env" / "bin" / "python", folder / "env" / "finished"
    if not finished.exists():
        shutil.rmtree(folder / "env", ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, stdout=sys.stderr)
            subprocess.run([python, "-m", "pip", *installs(judge)], check=True, stdout=sys.stderr)
        except subprocess.CalledProcessError as error:
            raise NotHadError(f"its environment could not be made: {' '.join(map(str, error.cmd))}") from error
        finished.touch()
    return python


def ask(judge: Judge, python: Path, folder: Path, source: Path | None, scripts: Path) -> Any:
    """Run a judge's script with a Python and read its result; raises RuntimeError where it makes none.

    scripts: the folder in which the package of the judges lies.
    """
    out, work = folder / "result.json", folder / "work"
    work.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    given = ["--source", str(source.resolve())] if source else []
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(scripts),
        "ATTNSCOPE_PYTHON": sys.executable,
    }
    command = [python, "-m", f"external.{judge.name}", out, *given]
    running = subprocess.Popen(command, cwd=work, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        code = running.wait(judge.minutes * 60)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"stopped after {judge.minutes} minutes") from None
    finally:
        if running.poll() is None:  # with what it has started itself
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    if code or not out.exists():
        raise RuntimeError(f"its script ended with exit code {code}{' and wrote no result' * (not out.exists())}")
    return json.loads(out.read_text("utf-8"))


def run(judge: Judge, source: Path | None, folder: Path | None, scripts: Path = HERE.parent) -> Any:
    """A judge's result, with date and machine; folder: kept after, so that a run which was cut off resumes."""
    if judge.source and source is None:
        raise NotHadError(f"it needs {judge.source}: --source {judge.name}=FOLDER")
    place = Path(tempfile.mkdtemp()) if folder is None else folder.resolve() / judge.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        found = ask(judge, made_environment(judge, place), place, source, scripts)
    finally:
        if folder is None:
            shutil.rmtree(place)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"date": str(datetime.date.today()), "machine": machine, **found}


def write_document(folder: Path = HERE, page: Path = ROOT / "docs" / "external.md") -> None:
    """Make docs/external.md and the tables of docs/external/ from the results that are kept.

    docs/coming-from.md next to it is made to agree with them.
    """
    kept = {one.stem: json.loads(one.read_text("utf-8")) for one in sorted((folder / "results").glob("*.json"))}
    known = judges(folder)
    page.write_text(document(known, kept), encoding="utf-8")
    page.with_suffix("").mkdir(exist_ok=True)
    for name, text in tables(known, kept).items():
        (page.with_suffix("") / name).write_text(text, encoding="utf-8")
    calls = page.with_name("coming-from.md")
    if calls.exists():
        parts = {judge.calls: kept[name] for name, judge in known.items() if judge.calls and name in kept}
        calls.write_text(filled(calls.read_text("utf-8"), parts), encoding="utf-8")


def parsed(arguments: Sequence[str], known: dict[str, Judge]) -> argparse.Namespace:
    """What was asked; ends with exit code 2 for a judge that is not known."""
    parser = argparse.ArgumentParser(prog="scripts/external.sh", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all where none is given")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER", help="a folder for a judge")
    parser.add_argument("--docs", action="store_true", help="make docs/external.md from the kept results, run nothing")
    parser.add_argument("--folder", type=Path, help="work here and keep it: a run that was cut off resumes")
    asked = parser.parse_args(arguments)
    asked.sources = {}
    for one in asked.source:
        name, _, folder = one.partition("=")
        if not folder or not Path(folder).is_dir():
            parser.error(f"expected --source NAME=FOLDER with a folder that exists, got {one!r}")
        asked.sources[name] = Path(folder)
    for name in [*asked.names, *asked.sources]:
        if name not in known:
            parser.error(f"there is no judge {name!r}: the judges are {', '.join(known)}")
    return asked


def main(arguments: Sequence[str], folder: Path = HERE, page: Path = ROOT / "docs" / "external.md") -> int:
    """Run the judges that are named; 1 where one fell short, a control passed whole or a script failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a judge does not outlive the driver
    known = judges(folder)
    asked = parsed(arguments, known)
    bad = []
    for name in [] if asked.docs else asked.names or known:
        try:
            found = run(known[name], asked.sources.get(name), asked.folder, folder.parent)
        except NotHadError as error:
            print(f"{name}: could not be had: {error}", file=sys.stderr)
            continue
        except RuntimeError as error:
            bad.append(f"{name}: {error}")
            continue
        (folder / "results").mkdir(exist_ok=True)
        kept = json.dumps(found, indent=1, ensure_ascii=False)
        (folder / "results" / f"{name}.json").write_text(kept + "\n", encoding="utf-8")
        bad += [f"{name}: {one}" for one in fell_short(found)]
    write_document(folder, page)
    print("\n".join([*bad, f"wrote {page}"]))
    return 1 if bad else 0
