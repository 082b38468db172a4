"""Add one of each kind of extension to a copy of attnscope: `python scripts/extend.py FOLDER`.

Each is what its author would write, in the files that CONTRIBUTING.md names. The files and lines that each took are
printed; `tests/test_extend.py` runs the extensions, and leaves each out in turn.
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

COLLECTOR = '''"""The largest weight of every row. Shapes: B text, H head, Q query."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnscope.attention.questions import MaxWeight, Question
from attnscope.observe.collector import Answers, Collector
from attnscope.observe.layers import Layer
from attnscope.observe.request import Asked, Request


class LargestCollector(Collector):
    """Of a layer (B, H, Q), of one text (H, Q)."""

    name = "largest"

    @classmethod
    def of(cls, texts: Sequence[Asked], request: Request) -> LargestCollector:
        """Of every text: a number a row is little."""
        return cls()

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [MaxWeight()]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        return answers[MaxWeight()].float().cpu()

    def of_text(self, collected: Tensor, row: int, text: Asked) -> Tensor:
        return collected[row, :, : len(text.prompt)]
'''

INTERVENTION = '''"""Heads whose output is halved. Shapes: B text, T token, H head, V width of v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from attnscope.interventions.spec import HeadSet
from attnscope.interventions.base import Intervention
from attnscope.interventions.replacement import replacing
from attnscope.hooks.calls import CallPlace
from attnscope.hooks.engines import Engine


class Halving(Intervention):
    """A head's output, before the output projection, is halved."""

    name = "halved"

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        return replace(engine, change=replacing(sets, lengths, halved))


def halved(place: CallPlace, output_BTHV: Tensor, lengths: Sequence[int]) -> Tensor:
    """Half of what the head gave."""
    return output_BTHV / 2
'''

COMMAND = '''"""`attnscope sentences`: how a text is cut into sentences."""

from __future__ import annotations

from attnscope.cli import output
from attnscope.cli.options import ModelText, Printing
from attnscope.cli.config import takes

EXAMPLES = ('attnscope sentences --text "The bank. The river."',)


@takes(ModelText, Printing)
def sentences(asked: ModelText, printing: Printing) -> int:
    """The sentences of a text, one a row."""
    from attnscope.cli.single import prepared, read_text
    from attnscope.utils.tables import as_table

    format = output.wanted_format(printing.format)
    found = prepared(asked, printing, read_text(asked, printing)).prompt.sentences
    columns = {"first": [one.start for one in found], "sentence": [one.name for one in found]}
    output.emit(as_table(columns), format, lambda: "\\n".join(columns["sentence"]))
    return 0
'''

# Extension -> its files -> (the anchor before which it is written, or "" for a new file; what is written) ...
EXTENSIONS: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "a metric": {"metrics/metrics.py": (('        Metric(\n            id="self",', METRIC.lstrip("\n")),)},
    "a collector": {"keep/collectors/largest.py": (("", COLLECTOR),)},
    "an intervention": {"intervene/halving.py": (("", INTERVENTION),)},
    "an option": {
        "cli/heads.py": (
            ("\n\nGROUPS = ", OPTION.rstrip("\n")),
            ("    if printing.out:", "    shown = [head for head in shown if printing.role in (None, head.role)]\n"),
        )
    },
    "an engine": {
        "hooks/engines.py": (
            ("\ndef fastest(", ENGINE),
            ('        Engine("fused", ', '        Engine("recomputed", recomputed, bytes=eager_bytes),\n'),
        ),
    },
    "a command": {
        "cli/sentences.py": (("", COMMAND),),
        "cli/app.py": (('    "metrics": (', '    "sentences": (LOOK_UP, "The sentences of a text, one a row."),\n'),),
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
