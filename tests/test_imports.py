"""The direction of design: who may import whom, and what a quick command never loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import attnscope

ROOT = Path(attnscope.__file__).parent
SOURCES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODEL_SIDE = ("models", "hub", "checkpoint", "capturing", "calls", "operators", "probes", "observe", "prompts", "api")


def imports(source, module, is_package=False):
    """Every module that a source imports, anywhere in it; `if TYPE_CHECKING` blocks are not run and do not count."""
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


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
    import hidden
"""
    expected = {"torch.nn", "attnscope.x", "attnscope.x.b", "attnscope.x.c", "attnscope.x.c.d", "attnscope.e"}
    expected |= {"attnscope.e.f", "attnscope.cli", "attnscope.cli.app", "typing", "typing.TYPE_CHECKING"}
    assert imports(source, "attnscope.x.a") == expected
    assert "attnscope.a.b.c" in imports("from .c import d", "attnscope.a.b", is_package=True)


@pytest.mark.parametrize(
    "module", [name for name in SOURCES if not within({name}, "attnscope.cli", "attnscope.__main__")]
)
def test_nothing_imports_the_command_line(module):
    assert not within(imports_of(module), "attnscope.cli")


@pytest.mark.parametrize("module", sorted(within(SOURCES, "attnscope.reference")))
def test_the_reference_imports_torch_alone(module):
    found = imports_of(module)
    assert not within(found, "attnscope") - within(found, "attnscope.reference")
    assert outside(found) <= {"torch"}


@pytest.mark.parametrize("module", sorted(within(SOURCES, "attnscope.figures", "attnscope.tables")))
def test_tables_and_figures_never_see_a_model(module):
    found = imports_of(module)
    assert not within(found, "torch", "transformers", *(f"attnscope.{name}" for name in MODEL_SIDE))


def test_only_parity_and_explain_know_both_sides():
    both = {name for name in SOURCES if within(imports_of(name), "attnscope.reference")}
    assert not {
        name for name in both if not within({name}, "attnscope.reference", "attnscope.parity", "attnscope.explain")
    }


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("import attnscope", "torch transformers numpy rich typer"),
        ("import attnscope.cli as cli; cli.run(['--help'])", "torch transformers numpy rich pyarrow matplotlib yaml"),
        ("import attnscope.cli as cli; cli.run([])", "torch transformers numpy rich pyarrow matplotlib yaml"),
        ("import attnscope.cli as cli; cli.run(['heads', '--help'])", "torch transformers numpy rich pyarrow yaml"),
        ("import attnscope.cli as cli; cli.run(['--version'])", "torch transformers numpy rich"),
        ("import attnscope.cli as cli; cli.run(['heads', '--sort', 'x'])", "torch transformers numpy rich"),
        ("import attnscope.cli as cli; cli.run(['heads', '--model', './x', '--text', 'a'])", "torch transformers"),
        ("import attnscope.cli as cli; cli.run(['metrics'])", "torch transformers rich"),
        ("import attnscope.cli as cli; cli.run(['heads', '--text', 'a'])", "rich pyarrow matplotlib seaborn"),
        ("import attnscope.figures.heatmap, attnscope.figures.grids, attnscope.tables", "torch transformers"),
    ],
)
def test_what_a_quick_command_never_loads(command, absent):
    script = f"{command}\nimport json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "attnscope" in loaded
    assert not loaded & set(absent.split())
