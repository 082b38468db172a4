"""`attnscope knockout --keep`: what a text or its answer loses where heads keep the keys of a cache budget alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnscope.cells import shortened
from attnscope.cli import output
from attnscope.cli.budgets_table import budget_notes, budgets_sheet
from attnscope.cli.groups import command_line
from attnscope.cli.knockout_options import field_of
from attnscope.cli.place import write_file
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from attnscope.cli.figure_options import Look
    from attnscope.cli.knockout_options import Answered, CacheBudgets, Compared, Edges, Table
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.budgets.cases import AskedCache, CacheCase
    from attnscope.study.budgets.effects import BudgetPlan


def measure_budgets(
    answered: Answered, edges: Edges, budgets: CacheBudgets, compared: Compared, table: Table, look: Look
) -> int:
    """The command with --keep."""
    format = output.wanted_format(table.format)
    text = None
    if answered.texts is None:
        from attnscope.cli.single import read_text

        text = read_text(answered, table)
    output.complain_through_talk(table.quiet)
    asked = _asked(answered, edges, budgets, text, compared.sequences)

    from attnscope.calls.knockout import chosen_heads
    from attnscope.cli.single import load_model
    from attnscope.study.budgets.cases import budget_cases
    from attnscope.study.budgets.effects import BudgetPlan, budgeted

    assert budgets.keep is not None
    loaded = load_model(answered, table)
    output.talk(f"{loaded.name}  {loaded.device}  {loaded.precision}  {loaded.geometry.in_words}", table.quiet)
    name = BudgetPlan.name if edges.select is None else edges.select
    plan = BudgetPlan(budgets.keep, edges.over, chosen_heads(loaded, edges.select, edges.atlas), name, budgets.below)
    cases = budget_cases(loaded, asked, budgets.keep)
    if len(cases) == 1:
        _tell(cases[0], table.quiet)
    if compared.dry_run:
        output.show(_rehearsed(loaded, cases, plan, table.quiet))
        return 0
    with unwinding():
        with output.progress("cutting", None, table.quiet) as advance:
            found = budgeted(loaded, cases, plan, table.folder, force=table.force, advance=advance)
        if table.out is not None:
            from attnscope.show.budgets import save_budgets

            style = look.style(command_line("knockout", answered, edges, budgets, look))
            if table.file is not None:
                write_file(table.file, found.table, lambda folder: save_budgets(found, folder, style), table.quiet)
            else:
                with output.progress("drawing", None, table.quiet):
                    save_budgets(found, table.out, style)
    output.emit_first(found.table(), compared, format, lambda: budgets_sheet(found, compared.shown), table.quiet)
    for line in budget_notes(found, loaded.geometry):
        output.talk(line, table.quiet)
    return 0


def _asked(
    answered: Answered, edges: Edges, budgets: CacheBudgets, text: str | Sequence[int] | None, most: int
) -> list[AskedCache]:
    """What is asked of the one text, or of each of the corpus, with the fields that its record has. Raises as
    `texts_in`."""
    from attnscope.batch.items import texts_in
    from attnscope.study.budgets.cases import FIELDS, asked_caches

    shared: dict[str, Any] = {
        "at": budgets.at,
        "answer": answered.answer,
        "foil": answered.foil,
        "generate": budgets.generate,
    }
    shared |= {"define": edges.asks()["define"], "chat": answered.chat, "truncate": answered.truncate}
    if text is not None:
        return asked_caches(text, shared)
    assert answered.texts is not None
    found = []
    for item in texts_in(answered.texts, most, chat=answered.chat):
        own = {name: field_of(item, name) for name in FIELDS if item.fields.get(name) is not None}
        [one] = asked_caches([{"text": item.text, **own}], shared)
        found.append(replace(one, where=item.id))
    return found


def _tell(case: CacheCase, quiet: bool) -> None:
    """Say where the prompt ends, and what is measured."""
    last = case.end - 1
    if last < len(case.prompt) - 1:
        output.talk(f"the prompt ends with token {last}: {case.prompt.labels[last]}", quiet)
    said = f"answer: {shortened(case.said, 200)}" if case.answer else f"measured: {len(case.rows)} next tokens"
    output.talk(said, quiet)


def _rehearsed(loaded: LoadedModel, cases: Sequence[CacheCase], plan: BudgetPlan, quiet: bool) -> str:
    """What would be done, and its cost at most."""
    from attnscope.cli.rehearsal import number_of, rehearsed
    from attnscope.study.budgets.effects import choosing_texts, planned_budgets

    asked, passes = planned_budgets(loaded, cases, plan)
    sets, shares = [one.budget for one in asked], passes.token_layers([])
    together = [one.budget for one in asked if one.condition == "together"]
    held = passes.token_layers(together) // 2 if choosing_texts(len(cases), plan.over) else 0
    said = f"{len(sets)} budgets of heads, on {number_of(len(cases), 'text')}"
    return rehearsed(loaded, passes, sets, said, quiet, before=shares + held)
