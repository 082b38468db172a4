"""ablation.png: what each set costs, next to random ones; ablation_heads.png: score, direct effect, cost of each head.

L layer, H head.

probes.png: every probe of an atlas as a layers x heads map of its effects; head_js.png: how far apart heads are.

L layer, H head, N head of all layers.

Atlases of one model's checkpoints side by side: one table, one picture. R revision, N head.

budgets.png and budgets_curve.png: budgets drawn. By heads as layers x heads, by layers as lines, and all together
over the share of the keys that is kept.

knockout.png: a knockout drawn. By heads as layers x heads, by layers as a curve, by keys as the coloured text.

patching.png: what patches cost and give back, by heads, by layers, by positions, or by both of these.

A comparison in a folder: its tables, and its pictures.

    save(found, Path("runs/swapped"), {...})   # tables, pictures, compare.json

Shapes: L layer, H head, Q, K cell of a map.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope import figures
from attnscope.errors import visible
from attnscope.figures import (
    About,
    Course,
    Maps,
    Pairs,
    Panel,
    SetCost,
    Style,
    save_courses,
    save_layers,
    save_metrics,
    save_pairs,
)
from attnscope.figures.curves import BudgetLine, save_budget_lines
from attnscope.figures.style import ROLE_COLOURS, Quantity, count
from attnscope.inputs.spans import WORDS
from attnscope.metrics.metrics import METRICS, Metric, metrics_for
from attnscope.model.libraries import versions
from attnscope.model.selection import HeadIndex
from attnscope.studies.atlas import LEAST, NAMED_BY, Atlas
from attnscope.studies.comparison import NAME, SCHEMA, Places, clear, heads_table, metrics_table, tokens_table
from attnscope.studies.head_distances import clustered
from attnscope.utils.display import head_name, model_name, shortened
from attnscope.utils.files import save_json, sha256_of
from attnscope.utils.folders import writable
from attnscope.utils.tables import save, words
from attnscope.utils.tables import save as save_table

if TYPE_CHECKING:
    from attnscope.figures.curves import Lines
    from attnscope.figures.pictures import Grid
    from attnscope.studies.ablation import Ablation
    from attnscope.studies.atlas import Finding
    from attnscope.studies.budgets import BudgetCosts
    from attnscope.studies.comparison import Comparison, Pair, Shared
    from attnscope.studies.head_distances import OnTexts
    from attnscope.studies.knockout_records import KnockoutResult
    from attnscope.studies.patching import PatchedPairs

PICTURE, OF_HEADS = "ablation", "ablation_heads"  # without the suffix of their kind of file
MOST_SETS = 40  # bars of a picture
STANDS_IN = {
    "mean": "mean ablation (over other sequences)",
    "zero": "zero ablation",
    "resample": "resample ablation (another sequence's output)",
}
LONGEST_SET = 32  # letters of a set's name
SMALL = 0.1  # of what heads add: what they take away is drawn as 0 is


@dataclass(frozen=True)
class Shown:
    """What one panel shows: a number per head, NaN or left out for none; scale: panels of one name share its reach."""

    name: str
    unit: str
    values: Mapping[HeadIndex, float]
    scale: str


def save_ablation(
    record: Ablation,
    folder: Path,
    heads: Sequence[HeadIndex],
    atlas: Atlas | None = None,
    style: Style = Style(),
    costs: Sequence[SetCost] | None = None,
) -> list[Path]:
    """The pictures of a study; heads: all of the model. costs: of its sets, where its table was read from a folder.

    A score is of the probe that names the heads of a set: a set that is a role of the atlas, or selected by one.
    """
    facts = record.facts
    task, stands_in = facts["task"], STANDS_IN[facts["replacement"]]
    unit = facts["measure"]["unit"].partition(" per ")[0]
    note = f"task {task['name']}, {task['sequences']} sequences; intact {facts['intact']:.2f} {unit}; {stands_in}"
    style = style.of_model(facts["model"]["name"])
    costs = costs_of(record.table().to_pydict()) if costs is None else costs
    left = f"the first {MOST_SETS} of {len(costs)} sets" * (len(costs) > MOST_SETS)
    interval = "in black 95 % intervals for all rows at once" * any(one.interval[0] == one.interval[0] for one in costs)
    said = "; ".join(filter(None, (note, interval, left)))
    paths = [folder / f"{name}.{style.image}" for name in (PICTURE, OF_HEADS)]
    title = f"What is lost without {count(len(costs), 'set')} of heads"
    figures.save_sets(paths[0], costs[:MOST_SETS], style, title=title, note=said, unit=facts["measure"]["unit"])
    if shown := shown_of(record, atlas):
        save_effects(paths[1], heads, shown, style, note)
    return paths[: 1 + bool(shown)]


def costs_of(rows: Mapping[str, Sequence[Any]]) -> list[SetCost]:
    """A bar per named set of an ablation's table, in its order."""
    columns = ("set", "condition", "heads", "effect", "low_all", "high_all", "random_low", "random_high")
    absent = [None] * len(rows["set"])
    every = zip(*(rows.get(name, absent) for name in columns), strict=True)
    return [
        SetCost(_set_name(str(name), str(heads)), _end(effect), (_end(low), _end(high)), (_end(least), _end(most)))
        for name, condition, heads, effect, low, high, least, most in every
        if condition == "together"
    ]


def _set_name(name: str, heads: str) -> str:
    """`induction, 3 heads`; a head alone by its name."""
    several = len(heads.split())
    return name if several < 2 and name else f"{shortened(name, LONGEST_SET)}, {count(several, 'head')}"


def _end(value: float | None) -> float:
    return math.nan if value is None else float(value)


def shown_of(record: Ablation, atlas: Atlas | None = None) -> list[Shown]:
    """The panels of a study: what was measured of score, direct and alone."""
    alone: dict[HeadIndex, float] = {}
    for heads, effect_S in record.effects.items():
        if len(heads) == 1:
            alone[heads[0]] = float(effect_S.mean())
    unit = record.facts["measure"]["unit"]
    panels = [*_scores(record, atlas), Shown("direct", "logits of the right token", record.direct or {}, "direct")]
    panels.append(Shown("alone", f"{unit} without it", alone, "effect"))
    return [one for one in panels if one.values]


def _scores(record: Ablation, atlas: Atlas | None) -> list[Shown]:
    """The probe that names each role by which the sets were chosen; of several periods the task's, else the first."""
    if atlas is None:
        return []
    said = [f"@{one.name}" for one in record.asked.named]
    roles = [role for role in NAMED_BY if any(re.search(rf"@{re.escape(role)}(?![\w-])", name) for name in said)]
    period, shown = record.facts["task"].get("period"), dict[str, Shown]()
    for probe, against in (NAMED_BY[role] for role in roles):
        probes = [one for one in atlas.findings if one.probe.partition(" p")[0] == probe and one.against == against]
        one = next((one for one in probes if one.probe == f"{probe} p{period}"), next(iter(probes), None))
        if one is not None:
            values = dict(zip(atlas.heads, one.effects.effect.tolist(), strict=True))
            shown[one.probe] = Shown(one.probe, f"above {one.against}", values, "score")
    return list(shown.values())


def save_effects(
    path: Path, heads: Sequence[HeadIndex], shown: Sequence[Shown], style: Style, note: str = "", title: str = ""
) -> Path:
    """Draw the panels; heads: all of the model. Raises UsageError for a folder that cannot be written."""
    layers = sorted({layer for layer, _ in heads})
    title = title or f"What {len(heads)} heads do, and what is lost without them"
    panels = effect_panels(heads, shown)
    return save_metrics(path, panels, style, layer_labels=layers, title=title, note=note)


def effect_panels(heads: Sequence[HeadIndex], shown: Sequence[Shown]) -> list[Panel]:
    """The panels: colours from 0 on, or centred on 0 where effects reach far to both sides of it."""
    layers = sorted({layer for layer, _ in heads})
    shape = len(layers), 1 + max(head for _, head in heads)
    reach: dict[str, tuple[float, float]] = {}
    for one in shown:
        known = [value for value in one.values.values() if value == value]
        low, high = reach.get(one.scale, (0.0, 0.0))
        reach[one.scale] = min([low, *known]), max([high, *known])
    panels = []
    for one in shown:
        values_LH = np.full(shape, np.nan)
        for (layer, head), value in one.values.items():
            values_LH[layers.index(layer), head] = value
        low, high = reach[one.scale]
        signed, end = -low > SMALL * high, max(-low, high) or 1.0
        scale = (-end, end) if signed else (low, end)
        quantity: Quantity = "logit" if signed else "weight"
        panels.append(Panel(one.name, values_LH, *scale, one.unit, quantity=quantity, values_printed=True))
    return panels


OTHER_ROLE = "#000000"
PROBES, HEAD_JS = "probes", "head_js"  # pictures, without the suffix of their kind of file


def save_probes(atlas: Atlas, folder: Path, name: str, style: Style = Style()) -> Path:
    """Draw an atlas into a folder; heads whose lower bound names nothing are hatched. name: of the model.

    A probe that names no head has no panel, unless none names any; the note lists them.
    """
    layers = sorted({layer for layer, _ in atlas.heads})
    first: dict[str, Finding] = {}
    for one in atlas.findings:
        first.setdefault(one.probe, one)
    kinds = list(dict.fromkeys(_kind(name) for name in first))
    names = sorted(first, key=lambda name: kinds.index(_kind(name)))
    every = [probe_panel(atlas, first[name], layers) for name in names]
    panels = [one for one in every if one.hatched_LH is not None and not one.hatched_LH.all()] or every
    title = f"Probes of {len(atlas.heads)} heads in {len(layers)} layers"
    note = probes_note(atlas, [one.name for one in every if all(one is not other for other in panels)])
    path = folder / f"{PROBES}.{style.image}"
    return save_metrics(path, panels, style.of_model(name), layer_labels=layers, title=title, note=note)


def probes_note(atlas: Atlas, left_out: Sequence[str]) -> str:
    """What numbers and hatching mean, on how many sequences they rest, and the probes without a panel."""
    sequences, seed = (atlas.facts.get(name) for name in ("sequences", "seed"))
    said = [f"{sequences} sequences"] * isinstance(sequences, int) + [f"seed {seed}"] * isinstance(seed, int)
    lines = [", ".join(["effect: score minus null", *said])]
    lines.append(f"hatched: the lower bound for all heads at once is below {LEAST}, which names no role")
    lines += [f"without a panel, for no head's bound reaches {LEAST}: {'; '.join(left_out)}"] * bool(left_out)
    return "\n".join(lines)


def _kind(probe: str) -> str:
    """The probe without its period: its panels are drawn side by side."""
    return probe.partition(" p")[0]


def probe_panel(atlas: Atlas, finding: Finding, layers: list[int]) -> Panel:
    """The effects of one contrast; layers: those of the atlas, in order."""
    place = np.array([layers.index(layer) for layer, _ in atlas.heads])
    head = np.array([head for _, head in atlas.heads])
    effect_LH, low_LH = (np.full((len(layers), int(head.max()) + 1), np.nan) for _ in range(2))
    effect_LH[place, head], low_LH[place, head] = finding.effects.effect, finding.effects.low_all
    return Panel(
        name=finding.probe,
        values_LH=effect_LH,
        low=0.0,
        high=1.0,
        unit=f"above {finding.against}",
        hatched_LH=~(np.nan_to_num(low_LH, nan=-1.0) >= LEAST),
    )


def save_head_js(found: OnTexts, atlas: Atlas, path: Path, style: Style = Style()) -> Path:
    """Draw how far apart all heads are on texts, alike ones side by side, with the colours of their roles."""
    tree, roles = clustered(found.js_NN), [atlas.roles.get(head, ()) for head in found.heads]
    named = [one for one in atlas.by_role() if any(one in names for names in roles)]
    legend = {role: role_colour(role) for role in named}
    pairs = Pairs(
        values_NN=found.js_NN,
        labels=[head_name(*head) for head in found.heads],
        leaves=tree.leaves,
        merges=tree.merges,
        colours=[[legend[role] for role in names] for names in roles],
        legend=legend,
    )
    note = f"Jensen-Shannon divergence, mean over the rows of {count(found.texts, 'text')}; tree: average linkage"
    title = f"How far apart {len(roles)} heads are"
    return save_pairs(path, pairs, style, title=title, note=note, unit="JS, bits")


def role_colour(role: str) -> str:
    """Of a role of an atlas."""
    return ROLE_COLOURS.get(role, OTHER_ROLE)


TABLE, CHECKPOINTS_PICTURE = "checkpoints.parquet", "checkpoints"  # the picture without the suffix of its kind of file


def folder_of(out: Path, revision: str) -> Path:
    """Where a revision's scan goes: refs/pr/1 is one folder, not three."""
    return out / revision.replace("/", "_")


def stacked(
    atlases: Mapping[str, Atlas], heads: Sequence[HeadIndex] | None = None, probe: str | None = None
) -> pa.Table:
    """The rows of all atlases, with a first column `revision`; heads, probe: of some alone, see `Atlas.table`."""
    tables = []
    for revision, atlas in atlases.items():
        table = atlas.table(None if heads is None else [atlas.heads.index(head) for head in heads], probe)
        tables.append(table.add_column(0, "revision", words([revision] * len(table)).dictionary_encode()))
    return pa.concat_tables(tables)


def save_checkpoints(atlases: Mapping[str, Atlas], folder: Path, name: str, style: Style = Style()) -> None:
    """Write the table of all atlases and the picture of every probe over them; name: of the model."""
    save(stacked(atlases), folder / TABLE)
    draw_checkpoints(atlases, folder, name, style)


def draw_checkpoints(atlases: Mapping[str, Atlas], folder: Path, name: str, style: Style = Style()) -> Path:
    """Draw every probe over the checkpoints; name: of the model."""
    heads = list(dict.fromkeys(head for atlas in atlases.values() for head in atlas.heads))
    return save_courses(
        folder / f"{CHECKPOINTS_PICTURE}.{style.image}",
        courses(atlases, heads),
        style.of_model(name),
        heads=[head_name(*head) for head in heads],
        revisions=list(atlases),
        note=f"effect: score minus null; coloured: a lower bound for all heads at once of {LEAST} at some checkpoint",
    )


def courses(atlases: Mapping[str, Atlas], heads: list[tuple[int, int]]) -> list[Course]:
    """The effects of the first contrast of every probe, NaN where a checkpoint has none."""
    first: dict[str, str] = {}
    for atlas in atlases.values():
        for one in atlas.findings:
            first.setdefault(one.probe, one.against)
    found = []
    for probe, against in first.items():
        effect_RN, low_RN = (
            np.stack([_of(atlas, (probe, against), part, heads) for atlas in atlases.values()])
            for part in ("effect", "low_all")
        )
        named = np.flatnonzero((np.nan_to_num(low_RN, nan=-1.0) >= LEAST).any(0)).tolist()
        found.append(Course(probe, f"above {against}", effect_RN, named))
    return found


def _of(atlas: Atlas, contrast: tuple[str, str], part: str, heads: list[tuple[int, int]]) -> np.ndarray:
    """A part of one contrast's effects, (N,)."""
    value_N = np.full(len(heads), np.nan)
    places = [heads.index(head) for head in atlas.heads]
    for one in atlas.findings:
        if (one.probe, one.against) == contrast:
            value_N[places] = getattr(one.effects, part)
    return value_N


BUDGETS_PICTURE, CURVE = "budgets", "budgets_curve"  # without the suffix of their kind of file
MOST_PANELS = 12  # budgets that are drawn by heads


def save_budgets(record: BudgetCosts, folder: Path, style: Style = Style()) -> list[Path]:
    """The pictures: what each part loses, where parts were measured, and the curve of several budgets. Raises
    UsageError for a folder it cannot write."""
    over = record.facts["over"]
    style = style.of(About(line=_line(record), command=style.about.command))
    paths = []
    if over in ("heads", "kv"):
        paths.append(_heads(record, folder / f"{BUDGETS_PICTURE}.{style.image}", style))
    elif over == "layers":
        paths.append(_layers(record, folder / f"{BUDGETS_PICTURE}.{style.image}", style))
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


KNOCKOUT_PICTURE = "knockout"  # without the suffix of its kind of file


def save_knockout(record: KnockoutResult, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of a knockout; None where all was cut at once. Raises UsageError for a folder it cannot write."""
    over, path = record.facts["over"], folder / f"{KNOCKOUT_PICTURE}.{style.image}"
    style = style.of(About(line=_knockout_line(record), command=style.about.command))
    if over == "none":
        return None
    if over == "keys":
        return _tokens(record, path, style)
    return _knockout_heads(record, path, style) if over in ("heads", "kv") else _knockout_layers(record, path, style)


def _knockout_line(record: KnockoutResult) -> str:
    """What the picture is of."""
    count, answer = len(record.cases), record.cases[0].answer_text
    texts = f"{count} texts" if count > 1 else f"answer {shortened(answer, 24)}"
    how = {"mask": "the rest of the row takes the weight", "zero": "the weight is lost"}[record.facts["how"]]
    return f"{record.facts['model']['name']}, {texts}; {how}"


def _knockout_heads(record: KnockoutResult, path: Path, style: Style) -> Path | None:
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


def _knockout_layers(record: KnockoutResult, path: Path, style: Style) -> Path:
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


def _tokens(record: KnockoutResult, path: Path, style: Style) -> Path:
    from attnscope.figures.curves import ColouredTokens, save_tokens

    case = record.cases[0]
    tokens = ColouredTokens(case.prompt.plain, record.by_token(), record.facts["measure"]["unit"], case.queries)
    return save_tokens(path, tokens, style, style.headed(f"What is lost without each key in {record.where}"))


PATCHING_PICTURE = "patching"  # without the suffix of its kind of file
TITLES = {"output": "outputs", "pattern": "patterns", "key": "keys", "value": "values"}
COSTS, BACK = "lost", "given back"


def save_patching(record: PatchedPairs, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of patches; None where all was patched at once. Raises UsageError for a folder it cannot write."""
    from attnscope.figures.curves import save_lines
    from attnscope.figures.pictures import save_grid

    facts, path = record.facts, folder / f"{PATCHING_PICTURE}.{style.image}"
    style = style.of(About(line=_patching_line(record), command=style.about.command))
    title = f"Which {TITLES[facts['what']]} carry the difference"
    if facts["over"] == "none":
        return None
    if facts["over"] in ("heads", "kv"):
        return _patching_heads(record, path, style, title)
    if facts["over"] == "layers,positions":
        return save_grid(path, _grid(record), style, style.headed(title))
    return save_lines(path, _lines(record), style, style.headed(title))


def _patching_line(record: PatchedPairs) -> str:
    """What the picture is of."""
    count = len(record.pairs)
    texts = f"{count} pairs" if count > 1 else f"answer {shortened(record.pairs[0].clean.answer_text, 24)}"
    gap = "" if record.gap is None else f"; the texts differ by {record.gap:.2f} {record.facts['measure']['unit']}"
    return f"{record.facts['model']['name']}, {texts}{gap}"


def _values(record: PatchedPairs) -> tuple[np.ndarray, np.ndarray, str]:
    """What each patch costs and gives back, and the unit: shares of the gap where there is one. Estimates where
    patches were not run."""
    unit = record.facts["measure"]["unit"] if record.gap is None else "share of the gap"
    if record.estimates is not None:
        both = record.estimates[::2].mean(0), -record.estimates[1::2].mean(0)
        cost, back = both if record.gap is None else (record.normalised(one) for one in both)
        return cost, back, unit
    cost_name, back_name = ("effect", "restored") if record.gap is None else ("normalised", "restored_normalised")
    return record.statistics[cost_name], record.statistics[back_name], unit


def _patching_heads(record: PatchedPairs, path: Path, style: Style, title: str) -> Path:
    """Layers x heads; a kv group's heads have the effect of their group."""
    *both, unit = _values(record)
    panels = [
        Shown(name, unit, {head: float(value) for one, value in pairs for head in one.patch.heads}, "effect")
        for name, values in zip((COSTS, BACK), both, strict=True)
        for pairs in [list(zip(record.asked, values, strict=True))]
    ]
    return save_effects(path, sorted(panels[0].values), panels, style, title=title)


def _lines(record: PatchedPairs) -> Lines:
    """In the order of the table."""
    from attnscope.figures.curves import Lines

    *both, unit = _values(record)
    ends = [np.full((2, len(both[0])), np.nan)] * 2
    if record.estimates is None:
        named = ("low_all", "high_all") if record.gap is None else ("normalised_low", "normalised_high")
        ends = [np.stack([record.statistics[of + end] for end in named]) for of in ("", "restored_")]
    axis = "layer" if record.facts["over"] == "layers" else "token that is patched"
    series = {name: (values, end) for name, values, end in zip((COSTS, BACK), both, ends, strict=True)}
    return Lines([one.patch.name for one in record.asked], series, unit, axis)


def _grid(record: PatchedPairs) -> Grid:
    """Layers x positions."""
    from attnscope.figures.pictures import Grid

    *both, unit = _values(record)
    layers = sorted({one.layer for one in record.asked if one.layer is not None})
    names = [one.patch.name.partition(" ")[2] for one in record.asked if one.layer == layers[0]]
    shape = len(layers), len(names)
    panels = {name: values.reshape(shape) for name, values in zip((COSTS, BACK), both, strict=True)}
    return Grid([f"L{layer}" for layer in layers], names, panels, unit)


LONGEST_TEXT, LONGEST_SIDE = 40, 28  # letters at the foot of a picture, and of a side in a title


def comparison_save(
    found: Comparison,
    folder: Path,
    asked: Mapping[str, Any],
    style: Style = Style(),
    *,
    places: Places = None,
    spreadsheet: bool = False,
    advance: Callable[[int], object] = lambda pictures: None,
) -> list[Path]:
    """Write tables, pictures and last compare.json; returns the paths. asked: what tells this comparison from another.

    >>> save(found, Path("runs/swapped"), {"text": "..."})
    """
    clear(folder)
    tables = {"heads": heads_table(found, places), "metrics": metrics_table(found, places)}
    tables |= {"tokens": tokens_table(found.pair)} if found.pair else {}
    with writable(folder):
        written = [save_table(one, folder / f"{name}.csv", spreadsheet=spreadsheet) for name, one in tables.items()]
    for path in save_differences(found, folder, style.of(replace(style.about, line=_comparison_line(found)))):
        written.append(path)
        advance(1)
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in written}
    said = {"schema": SCHEMA, "asked": asked, "versions": versions(), "texts": found.texts, "files": hashes}
    said |= {"aligned": {one.stack: one.by for one in found.pair.texts}} if found.pair else {}
    return [*written, save_json({**said, "failures": list(found.failures)}, folder / NAME)]


def panels(found: Comparison, stack: str | None = None) -> tuple[tuple[int, ...], list[Panel]]:
    """The layers, and a layers x heads panel of the divergence and of each metric's difference, centred on 0.

    stack: of which stack; the first without it.
    """
    stack = stack or found.head_stacks[0]
    places = found.stacks[stack]
    layers = tuple(dict.fromkeys(found.heads[place][0] for place in places))
    row, head = np.array([(layers.index(layer), head) for layer, head in (found.heads[at] for at in places)]).T

    def placed(values: np.ndarray) -> np.ndarray:
        values_LH = np.full((len(layers), head.max() + 1), np.nan)
        values_LH[row, head] = values[places]
        return values_LH

    js_LH = placed(found.js.effect)
    divergence = Panel("Jensen-Shannon divergence", js_LH, 0.0, _largest(js_LH) or 1.0, "bits")
    signed = [_signed(METRICS[id], placed(found.metric(id).effect)) for id in metrics_for(list(METRICS), stack)]
    return layers, [divergence, *signed]


def signed_maps(pair: Pair, stack: str | None = None, prefix: str = "") -> list[Maps]:
    """The other side minus the first, a layer each, between the units that the texts share.

    stack: of which stack; the first without it. prefix: the words before a layer's number.
    """
    stack = stack or next(iter(pair.drawn), "")
    if stack not in pair.drawn:
        return []
    # A cell is named by the first unit that it holds.
    drawn, axes = pair.drawn[stack], pair.axes(stack)
    labels = [tuple(_label(one, unit) for unit in cells.starts) for one, cells in zip(axes, drawn.cells, strict=True)]
    starts = [
        tuple(one.units.members[0][unit][0] for unit in cells.starts)
        for one, cells in zip(axes, drawn.cells, strict=True)
    ]
    # One size of cells is said of both axes, the larger: the other has as many units or fewer.
    size = max(cells.size for cells in drawn.cells)
    return [
        Maps(
            layer=layer,
            heads=tuple(drawn.heads[layer]),
            values_HQK=values_hQK,
            labels_Q=labels[0],
            labels_K=labels[1],
            bin_size=size,
            bin_rule="sum over keys, mean over queries" if size > 1 else "",
            quantity="difference",
            name=f"{f'{prefix}layer {layer}'.capitalize()}: {minus(pair)}",
            starts_Q=starts[0],
            starts_K=starts[1],
            stack=prefix,
        )
        for layer, values_hQK in drawn.values.items()
    ]


def save_differences(found: Comparison, folder: Path, style: Style) -> Iterator[Path]:
    """The pictures of every stack, in a folder of its own where there are several; style: what they are of, too."""
    several = len(found.stacks) > 1
    for stack, places in found.stacks.items():
        into, (layers, drawn) = folder / (stack if several else ""), panels(found, stack)
        title = f"Differences of {len(places)} {f'{stack} ' * several}heads in {len(layers)} layers"
        which = minus(found.pair) if found.pair else "the other side − the first"
        path, note = into / f"differences.{style.image}", f"metrics: {which}"
        yield save_metrics(path, drawn, style, layer_labels=layers, title=title, note=note)
        if found.pair:
            maps = signed_maps(found.pair, stack, found.stack_name(stack))
            yield from save_layers([(into / "layers" / f"L{one.layer:02d}.{style.image}", one) for one in maps], style)


def minus(pair: Pair) -> str:
    """`“Anna gave John …” − “Mary gave John …”`, or the models where these differ: what a signed map shows."""
    first, other = (model_name(one.loaded.name) for one in pair[:2])
    if first == other:
        read = next(iter(pair.texts), None)
        first, other = _apart(*(one.text for one in read[2:4])) if read else (first, other)
    return visible(f"{other} − {first}") if first != other else "the other side − the first"


def _apart(first: str, other: str) -> tuple[str, str]:
    """Two texts in quotes, from a little before they differ where that is not near their beginning."""
    pairs = enumerate(zip(first, other, strict=False))
    same = next((place for place, (one, two) in pairs if one != two), min(len(first), len(other)))
    start = first.rfind(" ", 0, max(0, same - LONGEST_SIDE // 3)) + 1 if same > LONGEST_SIDE // 2 else 0
    one, two = (
        f"“{'… ' * bool(start)}{shorten(text[start:], LONGEST_SIDE, placeholder=' …')}”" for text in (first, other)
    )
    return one, two


def _comparison_line(found: Comparison) -> str:
    """The line at the foot of a picture: of one pair the models and texts, else how many texts."""
    if found.pair is None:
        return f"{found.texts} texts"
    texts = [[f"“{shorten(one.text, LONGEST_TEXT)}”" for one in text[2:4]] for text in reversed(found.pair.texts)]
    sides = zip(found.pair[:2], zip(*texts, strict=True), strict=True)
    said = [f"{model_name(one.loaded.name)}, {' ← '.join(quoted)}" for one, quoted in sides]
    by = ", ".join(dict.fromkeys(WORDS[one.by] for one in found.pair.texts))
    return visible(f"{' compared with '.join(dict.fromkeys(said))}, {by}")


def _label(text: Shared, unit: int) -> str:
    """`·the`, or `·Mary/·Anna` where a word replaces another."""
    sides = zip((text.first, text.other), text.units.members, strict=True)
    labels = ["".join(prompt.labels[at] for at in members[unit]) for prompt, members in sides]
    return labels[0] if labels[0].lstrip("·") == labels[1].lstrip("·") else "/".join(labels)


def _signed(metric: Metric, values_LH: np.ndarray) -> Panel:
    reach = _largest(np.abs(values_LH)) or 1.0
    return Panel(metric.title, values_LH, -reach, reach, metric.unit, quantity="difference")


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0
