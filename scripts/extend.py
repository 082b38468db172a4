"""Add a metric, an option, an engine and a command to a copy of attnscope: `python scripts/extend.py FOLDER`.

Each is what its author would write, in the one or two files that CONTRIBUTING.md names; `tests/test_extend.py` runs
them. `cd FOLDER && python -m attnscope heads --text "a b c" --sort two_back --engine recomputed --role sink`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

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
            asks=lambda texts: (Back(2),),
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

COMMAND = '''"""`attnscope tokens`: how a text is cut."""

from __future__ import annotations

from attnscope.cli import output
from attnscope.cli.options import ModelText, Printing
from attnscope.cli.takes import takes

EXAMPLES = ('attnscope tokens --text "the bank"',)


@takes(ModelText, Printing)
def tokens(asked: ModelText, printing: Printing) -> int:
    """The tokens of a text, one a row."""
    from attnscope.cli.single import prepared, read_text
    from attnscope.tables import as_table

    format = output.wanted_format(printing.format)
    prompt = prepared(asked, printing, read_text(asked, printing)).prompt
    columns = {"position": list(range(len(prompt))), "id": list(prompt.ids), "token": list(prompt.labels)}
    output.emit(as_table(columns), format, lambda: " ".join(prompt.labels))
    return 0
'''

# What is added -> its files -> (the line it stands before, or "" for a new file; what is written there) ...
EXTENSIONS: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "a metric": {"measure/metrics.py": (('        Metric(\n            id="self",', METRIC.lstrip("\n")),)},
    "an option": {
        "cli/heads.py": (
            ("\n\nGROUPS = ", OPTION.rstrip("\n")),
            ("    if printing.out:", "    shown = [head for head in shown if ranking.role in (None, head.role)]\n"),
        )
    },
    "an engine": {
        "seam/engines.py": (
            ("\ndef fastest(", ENGINE),
            ('        Engine("fused", ', '        Engine("recomputed", recomputed, bytes=eager_bytes),\n'),
        ),
        "cli/options.py": (('"fused", "tiles", "numba", "triton"],', '"recomputed", '),),
    },
    "a command": {
        "cli/tokens.py": (("", COMMAND),),
        "cli/app.py": (('    "metrics": (', '    "tokens": (LOOK_UP, "The tokens of a text, one a row."),\n'),),
    },
}


def extend(folder: Path) -> Path:
    """A copy of the package in `folder`, extended; the folder to put on PYTHONPATH. Raises ValueError."""
    target = folder / "attnscope"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    for files in EXTENSIONS.values():
        for name, edits in files.items():
            path = target / name
            source = path.read_text(encoding="utf-8") if path.exists() else ""
            for before, addition in edits:
                if before and source.count(before) != 1:
                    raise ValueError(f"{name}: {before.strip()!r} stands there {source.count(before)} times, not once")
                source = source.replace(before, addition + before) if before else addition
            path.write_text(source, encoding="utf-8")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/extend.py FOLDER")
    print(f"attnscope with {', '.join(EXTENSIONS)}: {extend(Path(sys.argv[1]))}")
