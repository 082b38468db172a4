"""budgets.png and budgets_curve.png: budgets drawn. By heads as layers x heads, by layers as lines, and all together
over the share of the keys that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.figures import About, Style
from attnscope.figures.curves import BudgetLine, save_budget_lines
from attnscope.show.ablation import Shown, save_effects
from attnscope.utils.display import shortened

if TYPE_CHECKING:
    from attnscope.studies.budgets import BudgetCosts

PICTURE, CURVE = "budgets", "budgets_curve"  # without the suffix of their kind of file
MOST_PANELS = 12  # budgets that are drawn by heads


def save_budgets(record: BudgetCosts, folder: Path, style: Style = Style()) -> list[Path]:
    """The pictures: what each part loses, where parts were measured, and the curve of several budgets. Raises
    UsageError for a folder it cannot write."""
    over = record.facts["over"]
    style = style.of(About(line=_line(record), command=style.about.command))
    paths = []
    if over in ("heads", "kv"):
        paths.append(_heads(record, folder / f"{PICTURE}.{style.image}", style))
    elif over == "layers":
        paths.append(_layers(record, folder / f"{PICTURE}.{style.image}", style))
    if len(record.kinds) > 1:
        paths.append(_curve(record, folder / f"{CURVE}.{style.image}", style))
    return paths


def _line(record: BudgetCosts) -> str:
    """What the picture is of."""
    case, count = record.cases[0], len(record.cases)
    texts = f"{count} texts" if count > 1 else f"{len(case.ids)} tokens"
    answer = f", answer {shortened(case.answer_text, 24)}" if count == 1 and case.answer else ""
    return f"{record.facts['model']['name']}, {record.facts['select']}, {texts}{answer}"


def _heads(record: BudgetCosts, path: Path, style: Style) -> Path:
    """A panel of layers x heads per budget; a kv group's heads have the effect of their group."""
    effect_N = record.statistics["effect"]
    panels = []
    for kind in record.kinds[:MOST_PANELS]:
        effects = {
            head: float(effect_N[at])
            for at, one in enumerate(record.asked)
            if one.budget.keep == kind and one.condition == "alone"
            for head in one.budget.heads
        }
        panels.append(Shown(kind, f"{record.unit} lost", effects, "effect"))
    heads = sorted({head for one in panels for head in one.values})
    return save_effects(path, heads, panels, style, title="What is lost where a head keeps only these keys")


def _layers(record: BudgetCosts, path: Path, style: Style) -> Path:
    """A line over the layers per budget."""
    lines = [_line_of(record, [kind], kind, layers=True) for kind in record.kinds]
    title = style.headed("What is lost where a layer keeps only these keys")
    return save_budget_lines(path, lines, style, title, unit=record.unit, layers=True)


def _curve(record: BudgetCosts, path: Path, style: Style) -> Path:
    """All chosen heads together, a line per kind of budget over the share that it keeps."""
    kinds: dict[str, list[str]] = {}
    for one in record.kinds:
        kinds.setdefault(one.partition(":")[0], []).append(one)
    lines = [_line_of(record, written, kind) for kind, written in kinds.items()]
    title = style.headed("What is lost by the share of keys that is kept")
    return save_budget_lines(path, lines, style, title, unit=record.unit)


def _line_of(record: BudgetCosts, written: list[str], name: str, *, layers: bool = False) -> BudgetLine:
    """The layers of some budgets, or all heads together."""
    drawn = "alone" if layers else "together"
    at = [
        place for place, one in enumerate(record.asked) if (one.budget.keep in written, one.condition) == (True, drawn)
    ]
    effect, low, high = (record.statistics[column][at] for column in ("effect", "low_all", "high_all"))
    asked = [record.asked[place] for place in at]
    if layers:
        return BudgetLine(name, np.array([one.layer for one in asked]), effect, low, high)
    return BudgetLine(name, record.kept_N[at], effect, low, high, [one.budget.keep.partition(":")[2] for one in asked])
