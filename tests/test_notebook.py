"""docs/python.ipynb runs from top to bottom, and docs/python.md shows what its cells showed."""

import ast
import io
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import attnscope
from helpers.notebook import Shown, cells_of, document, pictures, run

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOK = DOCS / "python.ipynb"


@pytest.fixture(scope="module")
def shown() -> list[Shown]:
    """Every cell, run: one that raises fails every test here."""
    return list(run(cells_of(NOTEBOOK)))


def test_the_notebook_is_well_formed_and_without_outputs() -> None:
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    cells = stored["cells"]
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids)
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    for cell in cells:
        keys = {"cell_type", "id", "metadata", "source"}
        assert cell.keys() == keys | ({"execution_count", "outputs"} if cell["cell_type"] == "code" else set())
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)


def test_every_cell_is_python_and_takes_names_that_are_there() -> None:
    sources = ("".join(cell["source"]) for cell in cells_of(NOTEBOOK) if cell["cell_type"] == "code")
    attributes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in attributes if ast.unparse(node.value) == "attnscope"}
    assert {"load", "capture"} < names <= set(attnscope.__all__)


@pytest.mark.e2e
def test_every_cell_shows_something(shown: list[Shown]) -> None:
    assert [cell.id for cell in shown if cell.kind == "code" and not cell.printed and cell.png is None] == []


@pytest.mark.e2e
def test_the_document_is_what_the_cells_show(shown: list[Shown]) -> None:
    assert (DOCS / "python.md").read_text(encoding="utf-8") == document(shown), "run scripts/python_doc.py"


@pytest.mark.e2e
def test_what_the_notebook_claims_holds(shown: list[Shown]) -> None:
    """The document would hold a False as faithfully."""
    claims = [line for cell in shown for line in cell.printed.splitlines() if line.endswith((": True", ": False"))]
    assert len(claims) == 4
    assert all(line.endswith(": True") for line in claims)


@pytest.mark.e2e
def test_the_picture_is_the_one_in_the_document(shown: list[Shown]) -> None:
    [(name, png)] = pictures(shown).items()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.endswith(b"IEND\xaeB`\x82")
    drawn, stored = imread(io.BytesIO(png)), imread(DOCS / "images" / name)
    assert drawn.shape == stored.shape
    assert np.abs(drawn - stored).mean() < 0.01
    assert drawn.std() > 0.1  # not an empty sheet
    [cell] = [cell for cell in shown if cell.png is not None]
    assert cell.html is not None
    assert cell.html.startswith("<img ")


def test_the_runner_shows_what_a_notebook_would_and_raises_what_a_cell_raises() -> None:
    def code(id: str, source: str) -> dict:
        return {"id": id, "cell_type": "code", "metadata": {}, "source": source.splitlines(keepends=True)}

    cells = run([code("a", "x = 2\nprint('said')\nx"), code("b", "x + 1"), code("c", "None"), code("d", "y")])
    assert [next(cells).printed for _ in range(3)] == ["said\n2\n", "3\n", ""]
    with pytest.raises(NameError):
        next(cells)
