"""Add one of each kind of extension to a copy of attnscope: `python scripts/extend.py FOLDER`.

Each is what its author would write, in the files that CONTRIBUTING.md names; new files are in `extensions/`. The files
and lines that each took are printed; `tests/test_extend.py` runs the extensions, and leaves each out in turn.
`cd FOLDER && python -m attnscope heads --text "a b c" --sort two_back --engine recomputed --role sink`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "attnscope"

METRIC = """
    Metric(
        id="two_back",
        short="2 back",
        title="two tokens back",
        formula="mean of A[i,i-2]",
        unit="share of a row",
        range="0 to 1",
        source="as previous_token, one token further",
        reading="near 1: the head looks at the token before the last",
        rows="three_keys",
        asks=lambda texts: (ask.Back(2),),
    ),
"""

OPTION = """
    role: Annotated[str | None, Option(help="Print only heads of this role.", metavar="ROLE")] = None
"""

ENGINE = '''
def recomputed(spec: AttentionSpec) -> AttentionOperator:
    """One matrix a layer, made from q and k, while the model's own fused attention gives the outputs."""
    return DenseAttention(spec.weights(0, spec.visible.queries), spec.visible, spec)

'''


def new(name: str) -> tuple[tuple[str, str], ...]:
    """A new file, as it is in `extensions/`, where linters see it and a name that is changed is changed too."""
    return (("", (Path(__file__).with_name("extensions") / name).read_text(encoding="utf-8")),)


# Extension -> its files -> (the anchor before which it is written, or "" for a new file; what is written) ...
EXTENSIONS: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "a metric": {"metrics/metrics.py": (('    Metric(\n        id="self",', METRIC.lstrip("\n")),)},
    "a collector": {"observe/collectors/largest.py": new("largest.py")},
    "an intervention": {"interventions/halving.py": new("halving.py")},
    "an option": {
        "cli/heads.py": (
            ("\n\nGROUPS = ", OPTION.rstrip("\n")),
            ("    if printing.out:", "    shown = [head for head in shown if printing.role in (None, head.role)]\n"),
        )
    },
    "an engine": {
        "hooks/engines.py": (
            ("\ndef select_operator(", ENGINE),
            ('        Engine("fused", ', '        Engine("recomputed", recomputed, bytes=eager_bytes),\n'),
        ),
    },
    "a command": {
        "cli/sentences.py": new("sentences.py"),
        "cli/app.py": (
            ('    "metrics": Row(', '    "sentences": Row(TOOL, "The sentences of a text, one a row."),\n'),
        ),
    },
    "a study": {
        "studies/silence.py": new("silence.py"),
        "cli/silence.py": new("silence_command.py"),
        "cli/app.py": (
            ('    "why": Row(', '    "silence": Row(CAUSE, "What texts lose where a layer gives nothing."),\n'),
        ),
    },
}


class Cost(NamedTuple):
    """What an extension took: files of existing code that were edited, new files, and lines that were written."""

    edited: tuple[str, ...]
    new: tuple[str, ...]
    lines: int


def extend(folder: Path, without: str | None = None) -> dict[str, Cost]:
    """Write the extensions, all but one, into a copy of the package in `folder`, which goes on PYTHONPATH.

    Returns {extension: what it took}. Raises ValueError where an edit does not fit the code of today.
    """
    target = folder / "attnscope"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return {what: _write(target, files) for what, files in EXTENSIONS.items() if what != without}


def _write(target: Path, files: Mapping[str, tuple[tuple[str, str], ...]]) -> Cost:
    edited, new, lines = [], [], 0
    for name, edits in files.items():
        path = target / name
        (edited if path.exists() else new).append(name)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = before
        for anchor, addition in edits:
            after = _inserted(after, anchor, addition, name)
        path.write_text(after, encoding="utf-8")
        changes = unified_diff(before.splitlines(), after.splitlines(), n=0)
        lines += sum(line.startswith("+") and not line.startswith("+++") for line in changes)
    return Cost(tuple(edited), tuple(new), lines)


def _inserted(source: str, anchor: str, addition: str, name: str) -> str:
    """The addition before the anchor; without an anchor it is a whole new file."""
    if not anchor and source:
        raise ValueError(f"{name}: expected a new file, and it exists")
    if anchor and source.count(anchor) != 1:
        raise ValueError(f"{name}: expected {anchor.strip()!r} once, got it {source.count(anchor)} times")
    return source.replace(anchor, addition + anchor) if anchor else addition


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/extend.py FOLDER")
    print(f"{'extension':<16} {'edited':>6} {'new':>4} {'lines':>6}  files")
    for what, cost in extend(Path(sys.argv[1])).items():
        files = ", ".join(cost.edited + cost.new)
        print(f"{what:<16} {len(cost.edited):>6} {len(cost.new):>4} {cost.lines:>6}  {files}")
