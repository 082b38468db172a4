"""knockout.png: a knockout drawn. By heads as layers x heads, by layers as a curve, by keys as the coloured text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.figures import About, Style
from attnscope.show.ablation import Shown, save_effects
from attnscope.utils.display import shortened

if TYPE_CHECKING:
    from attnscope.studies.knockout_records import KnockoutResult as Knocked

PICTURE = "knockout"  # without the suffix of its kind of file


def save_knockout(record: Knocked, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of a knockout; None where all was cut at once. Raises UsageError for a folder it cannot write."""
    over, path = record.facts["over"], folder / f"{PICTURE}.{style.image}"
    style = style.of(About(line=_line(record), command=style.about.command))
    if over == "none":
        return None
    if over == "keys":
        return _tokens(record, path, style)
    return _heads(record, path, style) if over in ("heads", "kv") else _layers(record, path, style)


def _line(record: Knocked) -> str:
    """What the picture is of."""
    count, answer = len(record.cases), record.cases[0].answer_text
    texts = f"{count} texts" if count > 1 else f"answer {shortened(answer, 24)}"
    how = {"mask": "the rest of the row takes the weight", "zero": "the weight is lost"}[record.facts["how"]]
    return f"{record.facts['model']['name']}, {texts}; {how}"


def _heads(record: Knocked, path: Path, style: Style) -> Path | None:
    """Layers x heads; a kv group's heads have the effect of their group."""
    statistics, unit = record.statistics["effect"], record.facts["measure"]["unit"]
    effects = {head: float(statistics[at]) for at, one in enumerate(record.asked) for head in one.cut.heads}
    masses = {head: record.mass(one.cut) for one in record.asked for head in one.cut.heads}
    panels = [
        Shown("effect", f"{unit} lost without the look", effects, "effect"),
        Shown("mass", "weight that is cut", masses, "mass"),
    ]
    heads = sorted(effects)
    return save_effects(path, heads, panels, style, title="What is lost where these heads may not look")


def _layers(record: Knocked, path: Path, style: Style) -> Path:
    from attnscope.figures.curves import Curve, save_curve

    statistics, table = record.statistics, record.table()

    def column(name: str) -> np.ndarray:
        return np.array([np.nan if one is None else one for one in table[name].to_pylist()], np.float64)

    names = [one.cut.name for one in record.asked]
    unit = record.facts["measure"]["unit"]
    curve = Curve(
        names,
        statistics["effect"],
        statistics["low_all"],
        statistics["high_all"],
        unit,
        (column("low_permuted"), column("null_permuted"), column("high_permuted")),
    )
    return save_curve(path, curve, style, style.headed("What is lost where these layers may not look"))


def _tokens(record: Knocked, path: Path, style: Style) -> Path:
    from attnscope.figures.curves import ColouredTokens, save_tokens

    case = record.cases[0]
    tokens = ColouredTokens(case.prompt.plain, record.by_token(), record.facts["measure"]["unit"], case.queries)
    return save_tokens(path, tokens, style, style.headed(f"What is lost without each key in {record.where}"))
