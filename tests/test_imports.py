"""The direction of design: who may import whom, and what a quick command never loads."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import attnscope
from helpers.command_line import HANGS

ROOT = Path(attnscope.__file__).parent
SOURCES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
# What each room, and each module of the ground floor, may import of ours, types included. A room that is missing here
# fails the test.
MAY_IMPORT = {
    "_version": "",
    "errors": "",
    "utils": "errors",
    "model": "_version errors utils",
    "inputs": "errors utils model",
    "attention": "errors utils",
    "hooks": "errors utils model inputs attention",
    "metrics": "errors model attention",
    "reference": "",
    "certificate": "errors utils model inputs attention hooks reference",
    "observe": "errors utils model inputs attention hooks metrics certificate",
    "interventions": "errors utils model inputs attention hooks",
    "studies": "errors utils model inputs attention hooks metrics certificate observe interventions",
    "steps": "errors utils model inputs hooks reference certificate",
    "figures": "errors utils",
    "viewer": "_version errors utils model inputs metrics observe studies steps",
    "export": "errors utils model inputs hooks metrics observe studies figures",
    "corpus": "_version errors utils model inputs hooks metrics observe studies figures export",
    "api": "errors utils model inputs attention hooks metrics certificate observe interventions studies"
    " steps figures viewer export corpus",
    "serve": "_version errors utils model inputs observe interventions studies steps viewer api",
    # handed out, imported on first use
    "": "_version errors model hooks observe figures api serve",
}
FREE = {"cli", "__main__"}  # may import whatever they need, and nobody imports them


def imports(source, module, is_package=False):
    """Every module that a source imports, anywhere in it: late, and for types alone, too."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            members = {f"{name}.{alias.name}" for alias in node.names}
            found |= members if members <= SOURCES.keys() else members | {name}  # a module's package is not meant
    return found


@cache
def imports_of(module):
    path = SOURCES[module]
    return imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def within(names, *packages):
    """Those of the names that are one of the packages or lie in them."""
    return {name for name in names if any(name == package or name.startswith(package + ".") for package in packages)}


def outside(names):
    """Top-level names of what is neither ours nor Python's own."""
    return {name.split(".")[0] for name in names} - {"attnscope", "__future__"} - set(sys.stdlib_module_names)


def test_the_walk_sees_every_kind_of_import():
    source = """
import torch.nn as nn
from typing import TYPE_CHECKING
from . import b
from .c import d
from ..e import f
def late():
    from attnscope.cli import app
if TYPE_CHECKING:
    import shown
"""
    expected = {"torch.nn", "attnscope.x", "attnscope.x.b", "attnscope.x.c", "attnscope.x.c.d", "attnscope.e"}
    expected |= {"attnscope.e.f", "attnscope.cli.app", "shown", "typing", "typing.TYPE_CHECKING"}
    assert imports(source, "attnscope.x.a") == expected
    assert "attnscope.a.b.c" in imports("from .c import d", "attnscope.a.b", is_package=True)


def room_of(module):
    """The folder, or the module of the ground floor, that a module belongs to: `attnscope.inputs.prompt` -> `text`."""
    return [*module.split("."), ""][1]


def taken(module):
    """Our modules that a module imports."""
    return {name for name in imports_of(module) if name in SOURCES and name != module}


def circle_in(graph):
    """The first circle of a graph {node: nodes}, as the way around it; empty without one."""
    state = {}

    def visit(node, way):
        state[node] = "open"
        for following in sorted(graph[node]):
            if state.get(following) == "open":
                return [*way[way.index(following) :], following]
            if following not in state and (found := visit(following, [*way, following])):
                return found
        state[node] = "done"
        return []

    return next((found for node in sorted(graph) if node not in state and (found := visit(node, [node]))), [])


@pytest.mark.parametrize("room", sorted(set(map(room_of, SOURCES)) - FREE))
def test_a_room_takes_from_those_below_it(room):
    assert room in MAY_IMPORT, f"say in MAY_IMPORT what {room} may import"
    allowed = {room, "", *MAY_IMPORT[room].split()}
    for module in SOURCES:
        if room_of(module) == room:
            assert {room_of(name) for name in taken(module)} <= allowed, module


def test_no_circles():
    """Neither between rooms nor inside one; late imports count, and those for types."""
    assert circle_in({module: taken(module) for module in SOURCES}) == []
    rooms = {room: set() for room in map(room_of, SOURCES)}
    for module in SOURCES:
        rooms[room_of(module)] |= {room_of(name) for name in taken(module)} - {room_of(module), ""}
    assert circle_in(rooms) == []
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_the_house_stays_one_that_a_newcomer_can_list():
    """A new file is worth it where no file that is there says what it does: see CONTRIBUTING."""
    rooms = {room_of(name) for name, path in SOURCES.items() if path.parent != ROOT}
    ground = [path for path in SOURCES.values() if path.parent == ROOT]
    assert len(SOURCES) <= 255  # a command has two files, layers without a softmax three
    assert len(rooms) <= 20
    assert len(ground) <= 6


def test_the_reference_imports_torch_alone():
    assert outside(set().union(*(imports_of(name) for name in within(SOURCES, "attnscope.reference")))) <= {"torch"}


def test_tables_and_figures_never_see_a_model():
    """Nor do the modules that they take from, all the way down."""
    reached, beneath = set(), {name for name in SOURCES if room_of(name) == "figures"} | {"attnscope.utils.tables"}
    while beneath:
        reached |= beneath
        beneath = {below for module in beneath for below in taken(module)} - reached
    assert reached >= {"attnscope.figures.writer", "attnscope.utils.files", "attnscope.errors"}
    for module in reached - {"attnscope"}:
        assert not within(imports_of(module), "torch", "transformers"), module


def test_only_the_certificate_and_the_steps_know_both_sides():
    both = {room_of(name) for name in SOURCES if within(imports_of(name), "attnscope.reference")}
    assert both == {"reference", "certificate", "steps"}


ASKED = (  # by bash, what may follow `attnscope heads --sort `
    "import os, attnscope.cli as cli; os.environ |= "
    "{'_ATTNSCOPE_COMPLETE': 'complete_bash', 'COMP_WORDS': 'attnscope heads --sort', 'COMP_CWORD': '3'}"
)


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("import attnscope", "torch transformers numpy rich typer"),
        (
            "import attnscope.cli as cli; cli.run(['--help'])",
            "torch transformers numpy rich pyarrow yaml pydantic attnscope.cli.heads attnscope.cli.options matplotlib",
        ),
        (f"{ASKED}; cli.run([])", "torch transformers numpy rich pyarrow matplotlib yaml pydantic"),
        ("import attnscope.cli as cli; cli.run([])", "torch transformers numpy rich pyarrow matplotlib yaml"),
        (
            "import attnscope.cli as cli; cli.run(['heads', '--help'])",
            "torch transformers numpy rich pyarrow yaml pydantic",
        ),
        ("import attnscope.cli as cli; cli.run(['--version'])", "torch transformers numpy rich"),
        ("import attnscope.cli as cli; cli.run(['heads', '--sort', 'x'])", "torch transformers numpy rich"),
        ("import attnscope.cli as cli; cli.run(['heads', '--model', './x', '--text', 'a'])", "torch transformers"),
        (
            "import attnscope.cli as cli; cli.run('heads a --model ./x --format table --top 3 --select 0-1 "
            "--min-weight 0.1 --dtype float32 --out nowhere --define b=a --max-tokens 9'.split())",
            "torch transformers pydantic",  # which Typer imports to convert what was typed
        ),
        ("import attnscope.cli as cli; cli.run(['metrics'])", "torch transformers rich pandas"),
        (
            "import attnscope.observe.observation, attnscope.observe.atlas, attnscope.serve.client",
            "torch transformers pyarrow",  # records, as those who ask a server read them
        ),
        pytest.param(
            "import attnscope.cli.heads, attnscope.model.loading, attnscope.observe.run; "
            "import attnscope.attention.kernels_cpu.sweep",
            "rich pyarrow numba llvmlite",  # no memory for tables and compilers while the model reads the text
            marks=pytest.mark.e2e,  # imports torch
        ),
        pytest.param(
            "import attnscope.cli as cli; cli.run(['heads', '--text', 'a'])",
            "rich matplotlib seaborn pandas",
            marks=pytest.mark.e2e,  # imports torch and transformers
        ),
        pytest.param(
            "import os, pathlib, tempfile; os.chdir(tempfile.mkdtemp()); pathlib.Path('a.txt').write_text('the bank')\n"
            "import attnscope.cli as cli; cli.run(['batch', 'a.txt', '--out', 'b'])",
            "matplotlib seaborn pandas",
            marks=pytest.mark.e2e,  # imports torch and transformers
        ),
        ("import attnscope.figures as f; f.Style()", "torch transformers matplotlib"),
        pytest.param(
            "import attnscope.figures.heads, attnscope.figures.overview, attnscope.utils.tables",
            "torch transformers",
            marks=pytest.mark.e2e,  # imports matplotlib; by default the sources are looked at
        ),
    ],
)
def test_what_a_quick_command_never_loads(command, absent):
    script = f"{command}\nimport json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS, check=True)
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "attnscope" in loaded
    assert not loaded & set(absent.split())
