"""`attnscope silence`: what texts lose where a layer gives nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import ManyTexts, Rehearsal, Sampled, StudyTable
from attnscope.cli.options import ModelText, Selected
from attnscope.cli.study import Printed, load_studied, read_one, run_study
from attnscope.utils.display import Column, Sheet, effect

if TYPE_CHECKING:
    from attnscope.studies.silence import SilenceResult

EXAMPLES = ('attnscope silence "the bank of the river, the bank of the"',)


class TextOrCorpus(ModelText, ManyTexts):
    """One text, or a file of many."""


class Sampling(Rehearsal, Sampled, output.Top):
    """How many texts are read, and how many rows are printed."""


@with_options(TextOrCorpus, Selected, Sampling, StudyTable)
def silence(text: TextOrCorpus, selected: Selected, sampling: Sampling, table: StudyTable) -> int:
    """What texts lose where a layer gives nothing."""
    only = read_one(text, table)

    from attnscope.api.knockout import chosen_heads
    from attnscope.corpus.items import texts_in
    from attnscope.interventions.spec import HeadPlan
    from attnscope.studies.silence import SilenceStudy

    texts = [only] if text.texts is None else [item.text for item in texts_in(text.texts, sampling.sequences)]
    loaded = load_studied(text, table)
    plan = HeadPlan(**chosen_heads(loaded, selected.select, selected.atlas))
    return run_study(SilenceStudy(loaded, texts, plan), sampling, table, Printed(sheet, lambda record: [record.line]))


def sheet(record: SilenceResult, top: int | None) -> Sheet:
    """A row per layer."""
    lost = Column(f"{record.unit} lost", effect, "effect")
    return Sheet(record.table().to_pylist()[:top], [Column("layer", name="set", align="left"), lost])
