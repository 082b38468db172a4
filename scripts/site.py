"""What `mkdocs build` calls, by mkdocs.yml: the site has the repository's layout, so that its links work in both.

README.md, the pages of docs/ and what they link to are copied into a folder that is removed after the build. A page of
the API is added, of the names that `attnscope` exports.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r'\]\(([^)\s#]+)|src="([^"]+)"')
_places: list[TemporaryDirectory[str]] = []


def on_config(config: Any) -> Any:
    """Build from the copy."""
    place = TemporaryDirectory(prefix="attnscope-site-")
    _places.append(place)
    lay_out(Path(place.name))
    config.docs_dir = place.name
    return config


def on_post_build(config: Any) -> None:
    """Remove the copy."""
    _places.pop().cleanup()


def on_build_error(error: Exception) -> None:
    """Remove the copy."""
    while _places:
        _places.pop().cleanup()


def lay_out(place: Path) -> None:
    """Copy all files of the site into a folder, and write the page of the API."""
    for path in files():
        target = place / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (place / "docs" / "api.md").write_text(api(exported()), "utf-8")


def files() -> set[Path]:
    """The pages, and the files of this repository that they link to, theirs included."""
    waiting = [ROOT / name for name in FIRST] + sorted((ROOT / "docs").glob("*.md"))
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += linked(path) if path.suffix == ".md" else []
    return found


def linked(page: Path) -> Iterator[Path]:
    """The files of this repository that a page links to."""
    for found in LINK.finditer(page.read_text("utf-8")):
        path = (page.parent / (found[1] or found[2])).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path


def exported() -> list[str]:
    """The public names of the package, without importing it."""
    tree = ast.parse((ROOT / "attnscope" / "__init__.py").read_text("utf-8"))
    [names] = [
        one.value for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    ]
    return [name for name in ast.literal_eval(names) if not name.startswith("_")]


def api(names: Iterable[str]) -> str:
    """A page that mkdocstrings fills with the docstrings of these names."""
    return "# Python API\n\n[A tour](python.md) has examples.\n\n" + "\n".join(
        f"::: attnscope.{name}\n" for name in names
    )
