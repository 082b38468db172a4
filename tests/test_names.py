"""One name, one thing: what the package's modules define, by name."""

import ast
from collections import defaultdict
from pathlib import Path

import attnscope

FOLDER = Path(attnscope.__file__).parent
# A protocol: each file of `keep/` has one, which says whether its thing is kept.
BY_DESIGN = {"wanted"}
MOST = 2


def defined(source: str) -> set[str]:
    """The public classes, functions and type aliases at the top of a module; constants and type variables aside."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {name for name in names if name[0].isupper() and not name.isupper()}
    return {name for name in found if not name.startswith("_")}


def places(sources: dict[str, str]) -> dict[str, list[str]]:
    """{name: the modules that define it}."""
    found = defaultdict(list)
    for module, source in sources.items():
        for name in defined(source):
            found[name].append(module)
    return found


def test_no_public_name_is_defined_three_times() -> None:
    sources = {str(path.relative_to(FOLDER)): path.read_text("utf-8") for path in sorted(FOLDER.rglob("*.py"))}
    found = places(sources)
    assert {name: where for name, where in found.items() if len(where) > MOST and name not in BY_DESIGN} == {}
    assert all(module.startswith("keep") for name in BY_DESIGN for module in found[name])


def test_the_count_sees_every_kind_of_definition() -> None:
    source = (
        "class A: ...\ndef b(): ...\nasync def c(): ...\nPair = tuple[int, int]\nMOST = 1\nT = TypeVar('T')\n_d = 1\n"
    )
    assert defined(source) == {"A", "b", "c", "Pair"}
    assert places({"x": source, "y": "class A: ..."})["A"] == ["x", "y"]
