"""`attnscope knockout --keep`: what a text or its answer loses where heads keep the keys of a cache budget alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.budgets_table import budget_notes, budgets_sheet
from attnscope.cli.groups import command_line
from attnscope.cli.study import Printed, load_studied, questions, read_one, run_study

if TYPE_CHECKING:
    from pathlib import Path

    from attnscope.cli.figure_options import Look
    from attnscope.cli.knockout_options import Answered, CacheBudgets, Compared, Edges, Table
    from attnscope.studies.budgets import BudgetCosts


def measure_budgets(
    answered: Answered, edges: Edges, budgets: CacheBudgets, compared: Compared, table: Table, look: Look
) -> int:
    """The command with --keep."""
    output.wanted_format(table.format)  # what it refuses is refused before the work
    text = read_one(answered, table)

    from attnscope.studies.budgets import AskedCache

    shared: dict[str, Any] = {
        "at": budgets.at,
        "answer": answered.answer,
        "foil": answered.foil,
        "generate": budgets.generate,
        "define": edges.asks()["define"],
        "chat": answered.chat,
        "truncate": answered.truncate,
    }
    asked = questions(answered, text, AskedCache.FIELDS, partial(AskedCache.of, shared=shared), compared.sequences)

    # All that a text makes wrong is said by now: a model takes seconds to load, and torch with it.
    from attnscope.api.knockout import chosen_heads
    from attnscope.studies.budgets import BudgetPlan, BudgetStudy

    assert budgets.keep is not None
    loaded = load_studied(answered, table)
    name = BudgetPlan.name if edges.select is None else edges.select
    plan = BudgetPlan(budgets.keep, edges.over, chosen_heads(loaded, edges.select, edges.atlas), name, budgets.below)
    # Pictures are drawn from a folder alone, and matplotlib is imported for them alone.
    style = look.style(command_line("knockout", answered, edges, budgets, look))

    def draw(record: BudgetCosts, folder: Path) -> list[Path]:
        from attnscope.export.study_figures import save_budgets

        return save_budgets(record, folder, style)

    printed = Printed(budgets_sheet, lambda record: budget_notes(record, loaded.geometry), draw, hint="name a folder")
    return run_study(BudgetStudy.of(loaded, asked, plan), compared, table, printed)
