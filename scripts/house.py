"""How readable a tree is, in numbers: `python scripts/house.py [TREE] [--walk] [--uncommented] [--dialect] [--once]`

A tree is a checkout, or what holds another `attnscope/`; without one, the checkout that this script lies in. Lines of a
function are those of its `def` and body without docstring, blank lines and comments. `--walk` runs a text through the
tree, once from Python with a loaded model and once from the shell, and counts the files that it enters. The other three
list with file and line what the numbers count.
"""

import argparse
import ast
import importlib.util
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LONG = 25  # lines, from which a function has comments
LINES_PER_COMMENT = 15
PLACE = "behind"  # which says where something is, too
SMALL = 60  # lines below which a file is small
Definition = ast.FunctionDef | ast.AsyncFunctionDef

# Counts calls between files of a tree while one text is read. Not counted: what runs while a module is imported.
TRACER = """
import json, os, sys, threading
PACKAGE = sys.argv[1] + os.sep + "attnscope" + os.sep
functions, crossings, calls = set(), 0, 0

def outer(frame):
    # the files of the package on the stack, innermost first; None where one of them is being imported
    files = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            if frame.f_code.co_name == "<module>":
                return None
            files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files

def on_event(frame, event, argument):
    global crossings, calls
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
        return
    if code.co_flags & 0x20 and code.co_code[frame.f_lasti + 1] & 3:  # a generator that runs on after a yield
        return
    callers = outer(frame.f_back)
    if callers is None:
        return
    calls += 1
    functions.add(code)
    crossings += bool(callers) and callers[0] != code.co_filename

def traced(run):
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        files = sorted({code.co_filename.removeprefix(PACKAGE) for code in functions})
        numbers = {"files": files, "calls": calls, "crossings": crossings, "functions": len(functions)}
        print("\\n" + json.dumps(numbers), file=sys.stderr)
"""
SENTENCE = "the financial bank is located on river bank"
WALKS = {
    "attnscope.capture, warm": f"""
import attnscope
model = attnscope.load("demo")
attnscope.capture(model, {SENTENCE!r})
traced(lambda: attnscope.capture(model, {SENTENCE!r}))
""",
    "attnscope heads --text": f"""
def command():
    from attnscope.cli import run
    run(["heads", "--text", {SENTENCE!r}])
traced(command)
""",
}


class Place(NamedTuple):
    """Somewhere in the tree, and what is there."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Module:
    """A file of the package. name: with dots, without `attnscope` (which itself is the empty name)."""

    path: Path
    file: str
    name: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def comments(self) -> dict[int, bool]:
        """Line -> whether nothing else is on it."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        found = (token for token in tokens if token.type == tokenize.COMMENT)
        return {token.start[0]: not token.line[: token.start[1]].strip() for token in found}

    @cached_property
    def docstrings(self) -> dict[ast.AST, ast.Constant]:
        """Node -> its docstring."""
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        documented = (node for node in ast.walk(self.tree) if isinstance(node, kinds) and ast.get_docstring(node))
        return {node: node.body[0].value for node in documented}  # type: ignore[attr-defined]

    @cached_property
    def docstring_lines(self) -> set[int]:
        return {line for one in self.docstrings.values() for line in range(one.lineno, (one.end_lineno or 0) + 1)}

    @cached_property
    def blank_lines(self) -> set[int]:
        """Those outside docstrings."""
        numbered = enumerate(self.source.splitlines(), 1)
        return {number for number, line in numbered if not line.strip()} - self.docstring_lines

    @property
    def functions(self) -> Iterator[Definition]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Definition))

    @cached_property
    def other_lines(self) -> set[int]:
        """Those of docstrings, blank ones, and those of comments alone."""
        return self.docstring_lines | self.blank_lines | {line for line, alone in self.comments.items() if alone}

    def code_lines(self, function: Definition) -> int:
        lines = range(function.lineno, (function.end_lineno or 0) + 1)
        return sum(line not in self.other_lines for line in lines)

    def comments_in(self, function: Definition) -> int:
        return sum(function.lineno <= line <= (function.end_lineno or 0) for line in self.comments)


def modules_of(tree: Path) -> list[Module]:
    package = tree / "attnscope"
    modules = []
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        modules.append(Module(path, str(path.relative_to(tree)), name, path.read_text("utf-8")))
    return modules


def used_once(modules: list[Module]) -> Iterator[Place]:
    """Private functions and methods whose name occurs once more in the whole package: where they are used."""
    uses: Counter[str] = Counter()
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
    for module in modules:
        for function in module.functions:
            private = function.name.startswith("_") and not function.name.endswith("__")
            if private and uses[function.name] == 1:
                yield Place(module.file, function.lineno, f"{function.name}, {module.code_lines(function)} lines")


def uncommented(modules: list[Module]) -> Iterator[Place]:
    """Functions of more than 25 lines with fewer comments than one per 15 lines."""
    for module in modules:
        for function in module.functions:
            lines, comments = module.code_lines(function), module.comments_in(function)
            if lines > LONG and comments < lines // LINES_PER_COMMENT:
                yield Place(module.file, function.lineno, f"{function.name}, {lines} lines, {comments} comments")


def dialect(modules: list[Module]) -> Iterator[Place]:
    """Words in docstrings that `tests/test_english.py` lists; not `behind`, which names places."""
    lists = [root / "tests" / "test_english.py" for root in (modules[0].path.parents[1], ROOT)]
    path = next(path for path in lists if path.exists())
    sys.path.insert(0, str(path.parent))  # it imports from tests/helpers
    spec = importlib.util.spec_from_file_location("test_english", path)
    assert spec
    assert spec.loader
    english = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(english)
    for module in modules:
        for node in module.docstrings.values():
            # code and quotes of it stay on their lines, so that the line of a word can be counted
            text = english.CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), str(node.value))
            for pattern in english.OTHERS:
                for word in pattern.finditer(text):
                    if word[0].lower() != PLACE:
                        yield Place(module.file, node.lineno + text[: word.start()].count("\n"), word[0])


def imports_of(module: Module, names: Mapping[str, Module]) -> set[str]:
    """Modules of the package that it imports, anywhere in it: late and for types, too."""
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    imported: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ["attnscope", *filter(None, package)][: len(package) + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            members = {f"{base}.{alias.name}" for alias in node.names}
            known = {member for member in members if member.removeprefix("attnscope.") in names}
            imported |= known | ({base} if known < members else set())
    ours = {name.removeprefix("attnscope").removeprefix(".") for name in imported if name.startswith("attnscope")}
    return {name for name in ours if name in names} - {module.name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of nodes of a graph each of which can be reached from every other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {node: reached(node) for node in graph}
    sets = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in graph}
    return sorted(sorted(nodes) for nodes in sets if nodes)


def room_of(name: str) -> str:
    return name.split(".")[0]


def measures(modules: list[Module]) -> Iterator[tuple[str, Any]]:
    """The table: a measure, and what it is here."""
    files = [module.file.split(os.sep)[1:] for module in modules]
    ground = [parts[0] for parts in files if len(parts) == 1]
    yield "files", len(files)
    yield f"files under {SMALL} lines", sum(len(module.source.splitlines()) < SMALL for module in modules)
    yield "modules of the ground floor", f"{len(ground)}: {' '.join(name.removesuffix('.py') for name in ground)}"
    rooms = sorted({parts[0] for parts in files if len(parts) > 1})
    yield "rooms", f"{len(rooms)}: {' '.join(rooms)}"
    yield "folders", len({tuple(parts[:-1]) for parts in files if len(parts) > 1})

    total = sum(len(module.source.splitlines()) for module in modules)
    comments = sum(sum(module.comments.values()) for module in modules)
    trailing = sum(len(module.comments) for module in modules) - comments
    lines = {
        "blank": sum(len(module.blank_lines) for module in modules),
        "docstrings": sum(len(module.docstring_lines) for module in modules),
        "comments": comments,
    }
    yield "lines", total
    yield from ((f"lines: {kind}", f"{count} ({count / total:.1%})") for kind, count in lines.items())
    yield "comments behind code", trailing
    yield "docstrings", sum(len(module.docstrings) for module in modules)

    lengths = [module.code_lines(function) for module in modules for function in module.functions]
    p90 = statistics.quantiles(lengths, n=10, method="inclusive")[-1] if len(lengths) > 1 else 0
    yield "functions", len(lengths)
    yield "lines of a function", f"median {statistics.median(lengths):.0f}, p90 {p90:.0f}, max {max(lengths)}"
    yield f"functions over {LONG} lines", sum(length > LONG for length in lengths)
    yield "of these without enough comments", len([*uncommented(modules)])
    yield "private functions used once", len([*used_once(modules)])
    yield "words in docstrings that are not plain", len([*dialect(modules)])

    names = {module.name: module for module in modules}
    graph = {name: imports_of(module, names) for name, module in names.items()}
    # `attnscope` itself hands out what lies in its rooms, and imports it when it is asked for
    between = {room_of(name): set() for name in graph if name}
    for name in filter(None, graph):
        between[room_of(name)] |= {room_of(other) for other in graph[name]} - {room_of(name), ""}
    yield "arrows between rooms", sum(map(len, between.values()))
    yield "circles of modules", "; ".join(map(" ".join, circles(graph))) or 0
    up = sorted(f"{a} -> {b}" for nodes in circles(between) for a in nodes for b in between[a] & {*nodes})
    yield "arrows between rooms that run in a circle", ", ".join(up) or 0


def walk(tree: Path, name: str) -> dict[str, Any]:
    """What a text enters on its way: files, calls, calls that cross files, functions."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "ATTNSCOPE_NO_SERVER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACER + WALKS[name], str(tree)],
        cwd=tree,  # which `python -c` puts first on the path
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stderr.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--walk", action="store_true", help="run a text through the tree, and list the files entered")
    parser.add_argument("--uncommented", action="store_true", help="list long functions with few comments")
    parser.add_argument("--dialect", action="store_true", help="list words in docstrings that are not plain")
    parser.add_argument("--once", action="store_true", help="list private functions that are used once")
    options = parser.parse_args()
    tree = options.tree.resolve()
    modules = modules_of(tree)
    listed = ((options.uncommented, uncommented), (options.dialect, dialect), (options.once, used_once))
    for place in (place for wanted, find in listed if wanted for place in find(modules)):
        print(place)
    if options.walk:
        for name in WALKS:
            found = walk(tree, name)
            numbers = f"{found['functions']} functions, {found['calls']} calls, {found['crossings']} that cross files"
            print(f"{name}: {len(found['files'])} files, {numbers}")
            print(*(f"    {file}" for file in found["files"]), sep="\n")
    if not (options.walk or options.uncommented or options.dialect or options.once):
        for what, value in measures(modules):
            print(f"{what:<42} {value}")


if __name__ == "__main__":
    main()
