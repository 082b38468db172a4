"""`scripts/house.py` counts what it says it counts: a small package whose numbers are known."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import house  # noqa: E402

MAPS = '''"""Maps of heads, which stand in a row."""

# The scale is kept.
SCALE = 2  # pixels


def draw(weights):
    """Draw `stood` maps behind
    others, as one told us."""
    return _scaled(weights)


def _scaled(weights):

    return weights * SCALE


def _unused(weights):
    return weights
'''
LONG = "def long():\n    # so that it ends\n" + "    step()\n" * 27
FILES = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attnscope.figures.maps import draw\n",
    "errors.py": "",
    "figures/__init__.py": "",
    "figures/maps.py": MAPS,
    "figures/say.py": "def late():\n    from ..model import load\n    from .maps import draw\n" + LONG,
    "model/__init__.py": "from attnscope.model.load import load\n",
    "model/load.py": "from attnscope import model\nfrom attnscope.errors import Error\nimport attnscope.figures.maps\n",
}


@pytest.fixture
def modules(tmp_path: Path) -> list[house.Module]:
    for name, source in FILES.items():
        path = tmp_path / "attnscope" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return house.modules_of(tmp_path)


def test_the_table(modules: list[house.Module]) -> None:
    table = dict(house.measures(modules))
    assert table["files"] == 7
    assert table["modules of the ground floor"] == "2: __init__ errors"
    assert table["rooms"] == "2: figures model"
    assert table["lines"] == sum(source.count("\n") for source in FILES.values())
    assert table["lines: docstrings"].startswith("3 ")
    assert table["lines: comments"].startswith("2 ")
    assert table["lines: blank"].startswith(f"{MAPS.count(chr(10) * 2) * 1 + MAPS.count(chr(10) * 3)} ")
    assert table["functions"] == 5
    assert table["lines of a function"] == "median 2, p90 18, max 28"
    assert table["arrows between rooms"] == 3


def test_circles_count_late_imports_and_those_of_rooms(modules: list[house.Module]) -> None:
    table = dict(house.measures(modules))
    assert table["circles of modules"] == "model model.load"
    assert table["arrows between rooms that run in a circle"] == "figures -> model, model -> figures"


def test_what_is_listed_has_its_file_and_line(modules: list[house.Module]) -> None:
    assert [*map(str, house.used_once(modules))] == ["attnscope/figures/maps.py:13: _scaled, 2 lines"]
    assert [*map(str, house.uncommented(modules))] == []
    words = [str(place).removeprefix("attnscope/figures/maps.py:") for place in house.dialect(modules)]
    assert words == ["1: stand", "9: told"]


def test_a_long_function_needs_more_than_one_comment(tmp_path: Path) -> None:
    (tmp_path / "attnscope").mkdir()
    path = tmp_path / "attnscope" / "a.py"
    longer = LONG + "    step()\n" * 3
    for source, found in (
        (longer.replace("    # so that it ends\n", ""), ["attnscope/a.py:1: long, 31 lines, 0 comments"]),
        (longer, ["attnscope/a.py:1: long, 31 lines, 1 comments"]),
        (longer.replace("step()", "step()  # by hand", 1), []),
        (LONG, []),
    ):
        path.write_text(source)
        assert [*map(str, house.uncommented(house.modules_of(tmp_path)))] == found


def test_a_walk_counts_calls_that_cross_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__.py": "from attnscope.b import made\nSIZE = made(2)\n",  # not counted: it is imported then
        "a.py": "from attnscope.b import halves\n"
        "def run():\n    return sum(halves(3)) + own()\ndef own():\n    return 1\n",
        "b.py": "def made(n):\n    return n\ndef halves(n):\n    for i in range(n):\n        yield made(i)\n",
    }
    (tmp_path / "attnscope").mkdir()
    for name, source in files.items():
        (tmp_path / "attnscope" / name).write_text(source)
    monkeypatch.setitem(house.WALKS, "a", "import attnscope.a\ntraced(attnscope.a.run)")
    # run, own, halves once although it yields three times, made three times
    assert house.walk(tmp_path, "a") == {"files": ["a.py", "b.py"], "calls": 6, "crossings": 1, "functions": 4}


@pytest.mark.e2e  # it parses the whole package, which takes seconds
def test_long_functions_of_the_package_have_reasons_and_docstrings_are_plain() -> None:
    modules = house.modules_of(ROOT)
    assert [*map(str, house.uncommented(modules))] == []
    assert [*map(str, house.dialect(modules))] == []
