"""The hints of errors, read from the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attnscope
from helpers.seconds import once

ROOT = Path(attnscope.__file__).parent
OPTION = r"(?<![\w-])--\w"  # as the command line has it


@once
def hints_of_source() -> frozenset[str]:
    """The texts of the source that name options in braces; what else is filled in is `X`."""
    return frozenset(
        text
        for tree in _trees()
        for node in ast.walk(tree)
        if (text := _text(node)) is not None and "\n" not in text and re.search(r"\{[a-z_]+(=[^{}]*)?\}", text)
    )


def hints_of_the_library() -> Iterator[str]:
    """The hints of the errors that are made outside `cli/`, of modules with a text like `--option`.

    A constant of its module that an error is given is one too.
    """
    for tree in _trees(but="cli", having=OPTION):
        constants = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "").endswith("Error"):
                for given in call.args[1:]:
                    formatted = [node for node in ast.walk(given) if isinstance(node, ast.JoinedStr)]
                    for node in {*ast.walk(given)} - {part for text in formatted for part in text.values}:
                        text = _text(constants.get(node.id) if isinstance(node, ast.Name) else node)
                        if text is not None:
                            yield text


def _trees(but: str | None = None, having: str = "") -> Iterator[ast.Module]:
    """The modules, but those of a room; having: an expression that the source matches somewhere."""
    for file in sorted(ROOT.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if file.relative_to(ROOT).parts[0] != but and re.search(having, source):
            yield ast.parse(source)


def _text(node: ast.AST | None) -> str | None:
    """A text of the source, formatted or not; None for what is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
