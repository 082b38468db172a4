"""`attnscope budgets`: what a text or its answer loses where heads keep the keys of a cache budget alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look, StudyTable
from attnscope.cli.knockout_options import Answered, CacheBudgets, Portions, Texts
from attnscope.cli.option_groups import command_line
from attnscope.cli.output import writing_to
from attnscope.cli.study import Printed, load_studied, questions, read_one, run_study
from attnscope.cli.study_tables import budget_notes, budgets_sheet
from attnscope.utils.folders import PICTURES, TABLES

if TYPE_CHECKING:
    from attnscope.studies.budgets import BudgetCosts

EXAMPLES = (
    "attnscope budgets --file README.md --truncate right --keep stream:4+64,stream:4+16 --over layers",
    'attnscope budgets "the bank of the river, the bank of the river" --keep top:4,h2o:4 --over heads',
)


class Prompts(Answered):
    """One text or many, and what follows each."""

    texts: Annotated[str | None, "Corpus instead of a text; its fields at, answer, foil override the options."] = None


OUT = "Folder for table, facts and figures, or a file for one of them; a stopped run resumes."
Table = writing_to(StudyTable, OUT, *PICTURES, *TABLES)


@with_options(CacheBudgets, Prompts, Portions, Texts, Table, Look)
def budgets(
    budgets: CacheBudgets, prompts: Prompts, portions: Portions, counted: Texts, table: StudyTable, look: Look
) -> int:
    """Keep a part of the KV cache and measure the loss.

    Heads keep the keys of a budget in every row. The effect is the loss of the text per token, or that of the
    answer. stream:A+N keeps the first A and the last N keys, top:N the N largest of each row. h2o:N keeps the
    largest sums so far and the most recent keys. received:N and snap:N@W choose once, at the end of the prompt.
    """
    return measure_budgets(prompts, portions, budgets, counted, table, look)


def measure_budgets(
    answered: Answered, portions: Portions, budgets: CacheBudgets, counted: Texts, table: StudyTable, look: Look
) -> int:
    """What the text or its answer loses under each budget: run, draw and print."""
    keep = budgets.budgets(answered, portions)
    text = read_one(answered, table)

    from attnscope.studies.budgets import AskedCache

    shared = answered.shared | {"at": budgets.at, "generate": budgets.generate, "define": portions.names()}
    asked = questions(answered, text, AskedCache.FIELDS, partial(AskedCache.of, shared=shared), counted.sequences)

    # Errors of a text are raised before this line: a model takes seconds to load, and torch with it.
    from attnscope.api.knockout import chosen_heads
    from attnscope.studies.budgets import BudgetPlan, BudgetStudy

    loaded = load_studied(answered, table)
    heads = chosen_heads(loaded, portions.select, portions.atlas)
    plan = BudgetPlan(keep, budgets.below, over=portions.over, **heads)
    # Pictures are drawn from a folder alone, and matplotlib is imported for them alone.
    style = look.figure_style(command_line("budgets", answered, portions, budgets, look))

    def draw(record: BudgetCosts, folder: Path) -> list[Path]:
        from attnscope.export.study_figures import save_budgets

        return save_budgets(record, folder, style)

    printed = Printed(budgets_sheet, lambda record: budget_notes(record, loaded.geometry), draw, hint="name a folder")
    return run_study(BudgetStudy.of(loaded, asked, plan), counted, table, printed)
