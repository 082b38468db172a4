"""A notebook run in one namespace, and `docs/python.md`, which is made of what it shows."""

import ast
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTE = "Made from [python.ipynb](python.ipynb) by `scripts/python_doc.py`; a test holds it to what the cells show."


@dataclass(frozen=True)
class Shown:
    """One cell: its words or code, what it printed, and its last expression as a notebook would show it.

    picture: the file under docs/images that the cell's metadata names for its PNG.
    """

    id: str
    kind: str
    source: str
    printed: str = ""
    png: bytes | None = None
    html: str | None = None
    picture: str = ""


def cells_of(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook file, as they are stored."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run(cells: Sequence[dict[str, Any]]) -> Iterator[Shown]:
    """Run cell after cell in one namespace; what a cell raises goes up, with the cell's id as its file name."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            yield _ran(cell, source, namespace)
        else:
            yield Shown(cell["id"], cell["cell_type"], source)


def document(shown: Sequence[Shown]) -> str:
    """Markdown: words as they are, code and what it printed in fences, pictures as links into docs/images."""
    title, *parts = [part for cell in shown for part in _parts(cell)]
    return "\n\n".join([title, NOTE, *parts]) + "\n"


def pictures(shown: Sequence[Shown]) -> dict[str, bytes]:
    """{file name: PNG} of the pictures that `document` links to."""
    return {cell.picture: cell.png for cell in shown if cell.png is not None}


def _ran(cell: dict[str, Any], source: str, namespace: dict[str, Any]) -> Shown:
    id, tree, value, out = cell["id"], ast.parse(source), None, io.StringIO()
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(out), redirect_stderr(io.StringIO()):  # bars of the reader's own calls to transformers
        exec(compile(tree, id, "exec"), namespace)
        if last is not None:
            value = eval(compile(last, id, "eval"), namespace)
    png, html = (getattr(value, name, lambda: None)() for name in ("_repr_png_", "_repr_html_"))
    text = "" if value is None or png else repr(value) + "\n"
    return Shown(id, "code", source, out.getvalue() + text, png, html, cell["metadata"].get("picture", ""))


def _parts(cell: Shown) -> Iterator[str]:
    if cell.kind != "code":
        yield cell.source
        return
    yield f"```python\n{cell.source}\n```"
    if cell.printed:
        yield f"```text\n{cell.printed.rstrip()}\n```"
    if cell.png is not None:
        yield f"![{cell.picture.partition('.')[0]}](images/{cell.picture})"
