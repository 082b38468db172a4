"""Planted faults: what the tests find of them, by default and in all.

    python scripts/faults.py draw ROOM           # candidates from the syntax tree, in the order of a seed
    python scripts/faults.py show [NAME ...]     # does each change what its command prints or its exit code?
    python scripts/faults.py run [NAME ...]      # which tests find each? An hour for all
    python scripts/faults.py table               # a table by room, from the results of a run

A fault is data, in `faults.toml`: the text of a line before and after, and a command that shows what it changes. Half
of them are drawn by seed, half are written by hand.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "scripts" / "faults.toml"
GROUND = "ground"  # the room of the modules that lie in attnscope/ itself
MOST = 200  # cases that failed with all faults at once, each of which is tried with one
FIRST = 8  # test files that a fault is looked for in before all others
DEFAULT, REST = "not slow and not families and not e2e", "(families or e2e) and not slow"
SECONDS = 120  # after which a command that shows a fault is taken to hang


@dataclass(frozen=True)
class Fault:
    """One line of the package that is wrong.

    before and after: the line's text, once in the file; several lines where one alone occurs twice.
    origin: drawn (by seed, from the syntax tree) or written (by hand).
    kind: what was done, for example comparison, constant, wrong axis.
    shows: a shell command whose output or exit code differs; it runs in an empty folder.
    forked: only a forked command or a server reaches the line.
    """

    name: str
    file: str
    before: str
    after: str
    origin: str
    kind: str
    shows: str
    forked: bool = False

    @property
    def room(self) -> str:
        """The folder below attnscope/ that it lies in."""
        return room_of(Path(self.file))

    def planted(self, root: Path) -> str:
        """The text of its file below root with the fault in it. ValueError where its text is not there once."""
        text = (root / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.file}, got {text.count(self.before)} times")
        return text.replace(self.before, self.after)


def room_of(path: Path) -> str:
    """The folder below attnscope/ of a file's path, relative to the checkout."""
    return path.parts[1] if len(path.parts) > 2 else GROUND


def faults(path: Path, names: list[str]) -> list[Fault]:
    """All that the file holds, or those of these names or rooms."""
    with path.open("rb") as file:
        rows = [Fault(**row) for row in tomllib.load(file)["fault"]]
    return [row for row in rows if not names or {row.name, row.room} & set(names)]


# Drawing


COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and"}


def drawn(room: str, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """(kind, file, line before, line after) of all that can be changed in a room: kinds in turn, places by seed."""
    rng = random.Random(f"{room} {seed}")
    by_kind: dict[str, list[tuple[str, str, str, str]]] = {}
    for path in sorted((ROOT / "attnscope").rglob("*.py")):
        file = path.relative_to(ROOT)
        if room_of(file) == room:
            for candidate in candidates(path.read_text(), str(file)):
                by_kind.setdefault(candidate[0], []).append(candidate)
    order = sorted(by_kind)
    rng.shuffle(order)
    for kind in order:
        rng.shuffle(by_kind[kind])
    while any(by_kind.values()):
        for kind in order:
            if by_kind[kind]:
                yield by_kind[kind].pop()


def candidates(source: str, file: str) -> Iterator[tuple[str, str, str, str]]:
    """Each change of one line of a module: (kind, file, before, after). Lines that occur twice are left out."""
    lines = source.splitlines()
    tree = ast.parse(source)
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for noted in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if noted is not None
        for part in ast.walk(noted)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        for kind, old, new in changes(node):
            if old.lineno != old.end_lineno:
                continue
            line = lines[old.lineno - 1]
            raw = line.encode()  # columns count bytes
            wrong = (raw[: old.col_offset] + new.encode() + raw[old.end_col_offset :]).decode()
            if source.count(line) == 1 and wrong != line:
                yield kind, file, line, wrong


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """What may be wrong of one node: (kind, the part that is replaced, its text then)."""
    text = ast.unparse
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            yield "comparison", node, f"{text(left)} {COMPARED[type(op)]} {text(right)}"
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            yield "comparison", test, f"not ({text(test)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, repr(value + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS and not isinstance(left, ast.Constant):
            yield "sign", node, f"({text(left)}) {SIGNS[type(op)]} ({text(right)})"
        case ast.BoolOp(op=op, values=values):
            yield "sign", node, f" {SIGNS[type(op)]} ".join(f"({text(value)})" for value in values)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "sign", node, text(operand)
        case ast.Call(func=func, args=[first, second, *rest], keywords=words) if not isinstance(first, ast.Starred):
            given = [text(second), text(first), *map(text, rest), *map(text, words)]
            yield "argument", node, f"{text(func)}({', '.join(given)})"
        case ast.Call(func=func, args=args, keywords=[*words, _]) if not any(w.arg is None for w in node.keywords):
            yield "argument", node, f"{text(func)}({', '.join([*map(text, args), *map(text, words)])})"
        case ast.FunctionDef(args=ast.arguments(defaults=defaults, kw_defaults=more)):
            for default in [*defaults, *filter(None, more)]:
                if isinstance(default, ast.Constant) and isinstance(default.value, bool | int | float):
                    wrong = not default.value if isinstance(default.value, bool) else default.value + 1
                    yield "default", default, repr(wrong)
        case ast.Expr(value=ast.Call()):
            yield "dropped call", node, "pass"
        case ast.Return(value=ast.Call(func=_, args=[only], keywords=[])) if not isinstance(only, ast.Starred):
            yield "dropped call", node, f"return {text(only)}"


# Showing


@contextmanager
def copied(place: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of what git knows of the checkout, below place, and the environment in which attnscope is that copy."""
    copy = place / "attnscope"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if (ROOT.parent / "shared").is_dir():
        (place / "shared").symlink_to((ROOT.parent / "shared").resolve())
    # An environment of its own on top of this one's packages: a path that a variable names would not reach every
    # process that a test starts.
    env = place / "env"
    venv.create(env, symlinks=True)
    [packages] = env.glob("lib/python*/site-packages")
    installed = Path(sys.prefix) / packages.relative_to(env)
    (packages / "over.pth").write_text(f"{copy}\n{installed}\n")
    for script in (Path(sys.prefix) / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and not (env / "bin" / script.name).exists():
            first, _, rest = script.read_bytes().partition(b"\n")
            if first.startswith(b"#!") and b"python" in first:
                (env / "bin" / script.name).write_bytes(f"#!{env}/bin/python\n".encode() + rest)
                (env / "bin" / script.name).chmod(0o755)
    other = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if name not in other}
    path = f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}"
    yield copy, inherited | {"VIRTUAL_ENV": str(env), "PATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """While inside, the copy has the fault."""
    path = copy / fault.file
    right, wrong = path.read_text(), fault.planted(copy)
    try:
        write_fresh(path, wrong)
        yield
    finally:
        write_fresh(path, right)


def write_fresh(path: Path, text: str) -> None:
    """Write a module without its bytecode, which a file of the same size and second would be taken to match."""
    path.write_text(text)
    for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
        stale.unlink()


def outcome(command: str, environment: dict[str, str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a shell command in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment | {"HF_HUB_OFFLINE": "1", "ATTNSCOPE_NO_SERVER": "1", "COLUMNS": "80"}
        try:
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return 124, "", f"no end after {SECONDS} s"
        return done.returncode, done.stdout, done.stderr


def show(chosen: list[Fault]) -> int:
    """Run each fault's command on the right code and on the wrong; 1 where one shows no difference."""
    idle = 0
    with tempfile.TemporaryDirectory() as place, copied(Path(place)) as (copy, environment):
        twice = cache(lambda command: (outcome(command, environment), outcome(command, environment)))
        for fault in chosen:
            right, again = twice(fault.shows)
            with planted(fault, copy):
                wrong = outcome(fault.shows, environment)
            steady, shown = right[:2] == again[:2], right[:2] != wrong[:2]
            idle += not (steady and shown)
            print(f"{fault.name:<14} {'shown' if steady and shown else 'IDLE' if steady else 'UNSTEADY'}", flush=True)
            for label, (code, out, err) in (("right", right), ("wrong", wrong)):
                tail = (out or err).strip().splitlines()[-1:] or [""]
                print(f"    {label}: exit {code}, {len(out)} characters, {tail[0][:90]}")
    return int(idle > 0)


# Running


@dataclass
class Place:
    """A copy of the checkout in which tests run."""

    copy: Path
    environment: dict[str, str]

    def pytest(self, *arguments: str) -> tuple[int, list[str]]:
        """Run tests in it: the exit code, and the cases that failed."""
        report = self.copy.parent / "report.jsonl"
        report.unlink(missing_ok=True)
        unplanted = "--ignore=tests/test_planted.py"  # which says of every fault that it is there
        command = ["python", "-m", "pytest", "-q", "--timeout", "300", unplanted, f"--report={report}", *arguments]
        done = subprocess.run(command, cwd=self.copy, env=self.environment, capture_output=True, text=True)
        rows = map(json.loads, report.read_text("utf-8").splitlines()) if report.exists() else ()
        return done.returncode, list(dict.fromkeys(row["case"] for row in rows if row["outcome"] == "failed"))


def own_files(fault: Fault) -> list[str]:
    """The test files that a fault is looked for in first: those that import its module or bear its names."""
    module = fault.file.removesuffix(".py").replace("/", ".")
    package = module.rpartition(".")[0]
    names = {part.strip("_") for part in Path(fault.file).with_suffix("").parts[1:]}
    ranks = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
            elif isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
        file = path.relative_to(ROOT)
        near = package != "attnscope" and any(f"{name}.".startswith(f"{package}.") for name in imported)
        called = sum(name in (*file.parts[1:-1], *path.stem.split("_")) or f"_{name}" in path.stem for name in names)
        if rank := 4 * (module in imported) + 2 * near + 2 * called:
            ranks[str(file)] = (-rank, len(imported))
    return sorted(ranks, key=ranks.__getitem__)[:FIRST]


def found_alone(fault: Fault, place: Place, *arguments: str) -> str:
    """The first case that fails with this fault alone and passes without; "" where there is none."""
    unsound: list[str] = []
    while True:
        with planted(fault, place.copy):
            code, cases = place.pytest("-n", "0", "-x", *arguments, *(f"--deselect={case}" for case in unsound))
        if not cases and code == 1:  # as of failed cases, and none failed: Python ended without pytest
            raise RuntimeError("pytest did not run in the copy: is it in the environment of this one?")
        if not cases:
            return f"pytest left with {code}" if code not in (0, 5) else ""
        if place.pytest("-n", "0", "-m", "", cases[0])[0] == 0:
            return cases[0]
        unsound += cases


def found_together(left: list[Fault], place: Place, marks: str, note: Callable[[Fault, str], None]) -> list[Fault]:
    """Those that a selection does not find. All are planted at once; what fails is tried with each fault alone.

    This is done until a run finds nothing more, as one fault may hide another.
    """
    while left:
        with ExitStack() as stack:
            for fault in left:
                stack.enter_context(planted(fault, place.copy))
            code, cases = place.pytest("-m", marks)
        if code not in (0, 1):  # the run itself failed
            raise RuntimeError(f"pytest left with {code}: {marks}")
        tried = {fault.name: found_alone(fault, place, "-m", marks, *cases[:MOST]) if cases else "" for fault in left}
        for fault in left:
            if tried[fault.name]:
                note(fault, tried[fault.name])
        if not any(tried.values()):
            return left
        left = [fault for fault in left if not tried[fault.name]]
    return left


def run(chosen: list[Fault], results: Path, jobs: int) -> None:
    """Look for each fault by default, its room's own files first, and for what is left in the rest of the suite."""
    known: dict[str, dict[str, str]] = json.loads(results.read_text()) if results.exists() else {}

    def note(selection: str, fault: Fault, case: str) -> None:
        known[fault.name] = {"found": selection, "case": case}
        results.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{fault.name:<14} {selection:<8} {case}", flush=True)

    with ExitStack() as stack:
        places = Queue[Place]()
        for number in range(jobs):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"faults-{number}-")))
            places.put(Place(*stack.enter_context(copied(folder))))

        def alone(fault: Fault) -> None:
            place = places.get()
            try:
                own = own_files(fault)
                if case := found_alone(fault, place, "-p", "no:randomly", *own) if own else "":
                    note("default", fault, case)
            finally:
                places.put(place)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(alone, (fault for fault in chosen if fault.name not in known)))
        left = [fault for fault in chosen if fault.name not in known]
        for selection, marks in (("default", DEFAULT), ("whole", REST)):
            left = found_together(left, places.queue[0], marks, partial(note, selection))
        for fault in left:
            note("missed", fault, "")


def table(chosen: list[Fault], results: Path) -> str:
    """A row for each room: how many faults, what the default selection and the whole suite find, and who is missed."""
    known = json.loads(results.read_text())
    rooms: dict[str, list[Fault]] = {}
    for fault in chosen:
        rooms.setdefault(fault.room, []).append(fault)
    lines = ["| room | faults | default | whole | missed by default |", "|---|---|---|---|---|"]
    for room, members in [*sorted(rooms.items()), ("**all**", chosen)]:
        by = [known[fault.name]["found"] for fault in members]
        default, whole = by.count("default"), len(by) - by.count("missed")
        missed = [f.name + " (by all)" * (known[f.name]["found"] == "missed") for f in members]
        missed = [name for name, how in zip(missed, by, strict=True) if how != "default"] if room != "**all**" else []
        lines.append(f"| {room} | {len(members)} | {default} | {whole} | {', '.join(missed)} |")
    return "\n".join(lines)


def main() -> int:
    """Parse, run, exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="print candidates of a room")
    drawing.add_argument("room")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--count", type=int, default=12)
    for name, what in (
        ("show", "does each fault change what its command prints?"),
        ("run", "what do the tests find?"),
        ("table", "a row for each room, of what was found"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("names", nargs="*", metavar="NAME", help="names of faults or rooms; all without")
        command.add_argument("--file", type=Path, default=FAULTS, help="the faults")
        command.add_argument(
            "--results", type=Path, default=Path("faults.json"), help="where results go; continued if it is there"
        )
        command.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if given.command == "draw":
        for _, (kind, file, before, after) in zip(range(given.count), drawn(given.room, given.seed), strict=False):
            print(f"{kind}: {file}\n- {before}\n+ {after}")
        return 0
    chosen = faults(given.file, given.names)
    if given.command == "show":
        return show(chosen)
    if given.command == "run":
        run(chosen, given.results, given.jobs)
    print(table(chosen, given.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
