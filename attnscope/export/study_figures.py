"""The figures of studies: numbers of their records as panels, lines and bars, and the files that these are drawn to.

ablation.png: what each set costs, next to random ones; ablation_heads.png: score, direct effect, cost of each head.
probes.png: every probe of an atlas, a dot with an interval per head; head_js.png: how far apart heads are.
checkpoints.png: atlases of one model's checkpoints side by side, with one table of them all.
budgets.png: what budgets lose, by heads or by layers; budgets_curve.png: over the share of the keys that is kept.
knockout.png, patching.png: effects by heads, by layers, by keys or positions, or by layers and positions.
differences.png, layers/: a comparison, with its tables.

Shapes: L layer, H head, N head of all layers, Q, K cell of a map, R revision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, zip_longest
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope import figures
from attnscope.errors import visible
from attnscope.export.drawing import layers_by_heads
from attnscope.figures import About, Maps, Panel, SetCost, Style
from attnscope.figures.curves import (
    BudgetLine,
    ColouredTokens,
    Course,
    CourseSheet,
    Curve,
    Dots,
    DotSheet,
    Lines,
    save_budget_lines,
    save_courses,
    save_curve,
    save_dots,
    save_lines,
    save_tokens,
)
from attnscope.figures.pictures import Grid, Pairs, save_grid, save_pairs
from attnscope.figures.style import ROLE_COLOURS, effect_scale
from attnscope.inputs.spans import WORDS
from attnscope.metrics.metrics import METRICS, metrics_for
from attnscope.model.libraries import versions
from attnscope.model.selection import HeadIndex
from attnscope.studies.atlas import LEAST, NAMED_BY, Atlas
from attnscope.studies.comparison import NAME, SCHEMA, Places, clear, heads_table, metrics_table, tokens_table
from attnscope.studies.head_distances import clustered
from attnscope.utils.display import head_name, model_name, number_of, shortened
from attnscope.utils.files import save_json, sha256_of
from attnscope.utils.folders import writable
from attnscope.utils.tables import save, words

if TYPE_CHECKING:
    from attnscope.studies.ablation import Ablation
    from attnscope.studies.atlas import Finding
    from attnscope.studies.budgets import BudgetCosts
    from attnscope.studies.comparison import Comparison, Pair, Shared
    from attnscope.studies.head_distances import OnTexts
    from attnscope.studies.knockout_records import KnockoutResult
    from attnscope.studies.patching import PatchedPairs

MOST_SETS = 40  # bars of a picture
REPLACEMENTS = {
    "mean": "mean ablation (over other sequences)",
    "zero": "zero ablation",
    "resample": "resample ablation (another sequence's output)",
}
LONGEST_SET = 32  # letters of a set's name


@dataclass(frozen=True)
class Shown:
    """What one panel shows: a number per head, NaN or left out for none; scale: panels of one name share its reach.

    unsure: the heads whose interval holds 0.
    """

    name: str
    unit: str
    values: Mapping[HeadIndex, float]
    scale: str
    unsure: frozenset[HeadIndex] = frozenset()


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
    task, replacement, unit = facts["task"], REPLACEMENTS[facts["replacement"]], facts["measure"]["unit"]
    intact = f"intact {facts['intact']:.2f} {unit.partition(' per ')[0]}"
    note = f"task {task['name']}, {task['sequences']} sequences; {intact}; {replacement}"
    style = style.of_model(facts["model"]["name"])
    costs = costs_of(record.table().to_pydict()) if costs is None else costs
    left = f"the first {MOST_SETS} of {len(costs)} sets" * (len(costs) > MOST_SETS)
    interval = "in black 95 % intervals for all rows at once" * any(not math.isnan(cost.interval[0]) for cost in costs)
    of_sets = "; ".join(filter(None, (note, interval, left)))
    paths = [folder / f"{name}.{style.image}" for name in ("ablation", "ablation_heads")]
    title = f"What is lost without {number_of(len(costs), 'set')} of heads"
    figures.save_sets(paths[0], costs[:MOST_SETS], style, title=title, note=of_sets, unit=unit)
    if shown := shown_of(record, atlas):
        save_effects(paths[1], heads, shown, style, note)
    return paths[: 1 + bool(shown)]


def costs_of(rows: Mapping[str, Sequence[Any]]) -> list[SetCost]:
    """A bar per named set of an ablation's table, in its order."""
    columns = ("set", "condition", "heads", "effect", "low_all", "high_all", "random_low", "random_high")
    absent = [None] * len(rows["set"])
    every = zip(*(rows.get(name, absent) for name in columns), strict=True)
    costs = []
    for name, condition, heads, *numbers in every:
        if condition == "together":
            # `induction, 3 heads`; a head alone by its name
            several, label = len(re.findall(r"\bL\d", str(heads))), str(name)
            if several > 1 or not name:
                label = f"{shortened(label, LONGEST_SET)}, {number_of(several, 'head')}"
            effect, low, high, least, most = (math.nan if end is None else float(end) for end in numbers)
            costs.append(SetCost(label, effect, (low, high), (least, most)))
    return costs


def shown_of(record: Ablation, atlas: Atlas | None = None) -> list[Shown]:
    """The panels of a study: what was measured of score, direct and alone."""
    alone: dict[HeadIndex, float] = {}
    for heads, effect_S in record.effects.items():
        if len(heads) == 1:
            alone[heads[0]] = float(effect_S.mean())
    unit = record.facts["measure"]["unit"]
    panels = [*_scores(record, atlas), Shown("direct", "logits of the right token", record.direct or {}, "direct")]
    panels.append(Shown("alone", f"{unit} without it", alone, "effect"))
    return [panel for panel in panels if panel.values]


def _scores(record: Ablation, atlas: Atlas | None) -> list[Shown]:
    """The probe that names each role by which the sets were chosen; of several periods the task's, else the first."""
    if atlas is None:
        return []
    sets = [f"@{heads.name}" for heads in record.asked.named]
    roles = [role for role in NAMED_BY if any(re.search(rf"@{re.escape(role)}(?![\w-])", name) for name in sets)]
    period, shown = record.facts["task"].get("period"), dict[str, Shown]()
    for probe, against in (NAMED_BY[role] for role in roles):
        findings = [item for item in atlas.findings if (_kind(item.probe), item.against) == (probe, against)]
        of_period = [item for item in findings if item.probe == f"{probe} p{period}"]
        for finding in (of_period or findings)[:1]:
            values = dict(zip(atlas.heads, finding.effects.effect.tolist(), strict=True))
            shown[finding.probe] = Shown(finding.probe, f"above {against}", values, "score")
    return list(shown.values())


def save_effects(
    path: Path, heads: Sequence[HeadIndex], shown: Sequence[Shown], style: Style, note: str = "", title: str = ""
) -> Path:
    """Draw the panels; heads: all of the model. Raises UsageError for a folder that cannot be written."""
    layers = sorted({layer for layer, _ in heads})
    title = title or f"What {len(heads)} heads do, and what is lost without them"
    panels = effect_panels(heads, shown)
    return figures.save_metrics(path, panels, style, layer_labels=layers, title=title, note=note)


def effect_panels(heads: Sequence[HeadIndex], shown: Sequence[Shown]) -> list[Panel]:
    """The panels: colours from 0 on, or centred on 0 where effects lie on both sides of it; hatched where unsure."""
    rows = {layer: row for row, layer in enumerate(sorted({layer for layer, _ in heads}))}
    layer_N, head_N = zip(*((rows[layer], head) for layer, head in heads), strict=True)
    panels = []
    for panel in shown:
        values_LH = layers_by_heads(layer_N, head_N, [panel.values.get(head, math.nan) for head in heads])
        # Panels of one scale share its reach, so that their colours can be compared.
        shared = [value for other in shown if other.scale == panel.scale for value in other.values.values()]
        known = [0.0, *(value for value in shared if not math.isnan(value))]
        low, high = min(known), max(known)
        quantity, low, high = effect_scale(low, high)
        unsure_LH = layers_by_heads(layer_N, head_N, [head in panel.unsure for head in heads]) == 1
        drawn = Panel(panel.name, values_LH, low, high, panel.unit, quantity=quantity, always=True)
        panels.append(replace(drawn, hatched_LH=unsure_LH) if panel.unsure else drawn)
    return panels


def holds_zero(low_N: np.ndarray, high_N: np.ndarray) -> np.ndarray:
    """Whether each interval holds 0, (N,); an open end, NaN, holds all on its side, and two are no interval."""
    known_N = ~(np.isnan(low_N) & np.isnan(high_N))
    return known_N & ~(low_N > 0) & ~(high_N < 0)


HEAD_JS = "head_js"  # a picture, without the suffix of its kind of file


MOST_ROWS = 32  # heads of a picture of probes with a row of their own
FEW_ROWS = 3  # of them that a probe has at the least


def save_probes(atlas: Atlas, folder: Path, name: str, style: Style = Style(), probe: str | None = None) -> Path:
    """Draw an atlas into a folder, a dot and an interval per head and probe. name: of the model.

    A probe whose lower bounds name no head has no panel, unless it is `probe` or none names any; the foot lists them.
    """
    first: dict[str, Finding] = {}
    for finding in atlas.findings:
        first.setdefault(finding.probe, finding)
    kinds = list(dict.fromkeys(_kind(name) for name in first))
    every = [probe_dots(first[name]) for name in sorted(first, key=lambda name: kinds.index(_kind(name)))]
    drawn = [dots for dots in every if dots.named_N.any() or dots.name == probe] or every
    note, foot = probes_words(atlas, [dots.name for dots in every if dots not in drawn])
    layers = {layer for layer, _ in atlas.heads}
    title = f"Probes of {number_of(len(atlas.heads), 'head')} in {number_of(len(layers), 'layer')}"
    heads = [head_name(*head) for head in atlas.heads]
    path, look = folder / f"probes.{style.image}", style.of_model(name)
    return save_dots(path, DotSheet(drawn, heads, probe_rows(drawn), LEAST, (title, note, foot)), look)


def probe_dots(finding: Finding) -> Dots:
    """The effects of one contrast with their intervals for all heads at once."""
    effects = finding.effects
    named_N = np.nan_to_num(effects.low_all, nan=-1.0) >= LEAST
    unit = f"above {finding.against}"
    return Dots(finding.probe, unit, effects.effect, effects.low_all, effects.high_all, named_N)


def probe_rows(drawn: Sequence[Dots]) -> list[int]:
    """The heads with a row of their own: all of few, else those that are named, and of each probe the largest."""
    heads = len(drawn[0].effect_N)
    if heads <= MOST_ROWS:
        return list(range(heads))
    largest = {dots.name: np.argsort(-np.nan_to_num(dots.effect_N, nan=-np.inf), kind="stable") for dots in drawn}
    # In turn, so that no probe takes all the rows: first every probe's largest effects, then the others it names.
    wanted = [int(head) for place in range(FEW_ROWS) for head in (order[place] for order in largest.values())]
    named = [[int(head) for head in largest[dots.name] if dots.named_N[head]] for dots in drawn]
    wanted += [head for heads in zip_longest(*named) for head in heads if head is not None]
    return sorted(list(dict.fromkeys(wanted))[:MOST_ROWS])


def probes_words(atlas: Atlas, left_out: Sequence[str]) -> tuple[str, str]:
    """The note: what dots and lines mean, and of how many sequences; the foot: the probes without a panel."""
    sequences, seed = (atlas.facts.get(name) for name in ("sequences", "seed"))
    rest = [f"{sequences} sequences"] * isinstance(sequences, int) + [f"seed {seed}"] * isinstance(seed, int)
    note = ", ".join(["effect: score minus null, with an interval for all heads at once", *rest])
    note += f"\nblue: a lower bound of {LEAST} or more (dashed line), which names a role"
    return note, f"not drawn, since no head's bound reaches {LEAST}: {'; '.join(left_out)}" * bool(left_out)


def _kind(probe: str) -> str:
    """The probe without its period: its panels are drawn side by side."""
    return probe.partition(" p")[0]


def save_head_js(texts: OnTexts, atlas: Atlas, path: Path, style: Style = Style()) -> Path:
    """Draw how far apart all heads are on texts, alike ones side by side, with the colours of their roles."""
    tree, roles = clustered(texts.js_NN), [atlas.roles.get(head, ()) for head in texts.heads]
    named = set(chain.from_iterable(roles))
    legend = {role: ROLE_COLOURS.get(role, "#000000") for role in atlas.by_role() if role in named}
    pairs = Pairs(
        values_NN=texts.js_NN,
        labels=[head_name(*head) for head in texts.heads],
        leaves=tree.leaves,
        merges=tree.merges,
        colours=[[legend[role] for role in names] for names in roles],
        legend=legend,
    )
    note = f"Jensen-Shannon divergence, mean over the rows of {number_of(texts.texts, 'text')}; tree: average linkage"
    title = f"How far apart {len(roles)} heads are"
    return save_pairs(path, pairs, style, title=title, note=note, unit="JS, bits")


TABLE = "checkpoints.parquet"


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


def draw_checkpoints(atlases: Mapping[str, Atlas], folder: Path, name: str, style: Style = Style()) -> Path:
    """Draw every probe over the checkpoints; name: of the model."""
    heads = list(dict.fromkeys(head for atlas in atlases.values() for head in atlas.heads))
    note = f"effect: score minus null; coloured: a lower bound for all heads at once of {LEAST} at some checkpoint"
    sheet = CourseSheet(courses(atlases, heads), [head_name(*head) for head in heads], list(atlases), note)
    return save_courses(folder / f"checkpoints.{style.image}", sheet, style.of_model(name))


def courses(atlases: Mapping[str, Atlas], heads: list[tuple[int, int]]) -> list[Course]:
    """The effects of the first contrast of every probe, NaN where a checkpoint has none."""
    first: dict[str, str] = {}
    for atlas in atlases.values():
        for finding in atlas.findings:
            first.setdefault(finding.probe, finding.against)
    result = []
    for probe, against in first.items():
        effect_RN, low_RN = (np.full((len(atlases), len(heads)), np.nan) for _ in range(2))
        for row, atlas in enumerate(atlases.values()):
            places = [heads.index(head) for head in atlas.heads]
            for finding in atlas.findings:
                if (finding.probe, finding.against) == (probe, against):
                    effect_RN[row, places], low_RN[row, places] = finding.effects.effect, finding.effects.low_all
        named = np.flatnonzero((np.nan_to_num(low_RN, nan=-1.0) >= LEAST).any(0)).tolist()
        result.append(Course(probe, f"above {against}", effect_RN, named))
    return result


MOST_PANELS = 12  # budgets that are drawn by heads


def _of_study(style: Style, facts: Mapping[str, Any], *parts: str) -> Style:
    """The style of a picture with the model and these parts at its foot."""
    return style.of(About(line=", ".join((facts["model"]["name"], *parts)), command=style.about.command))


def _of_texts(count: int, answer: str, many: str = "texts") -> str:
    """Of one text its answer, else how many there are."""
    return f"{count} {many}" if count > 1 else f"answer {shortened(answer, 24)}"


def save_budgets(record: BudgetCosts, folder: Path, style: Style = Style()) -> list[Path]:
    """The pictures: what each part loses, where parts were measured, and the curve of several budgets. Raises
    UsageError for a folder it cannot write."""
    facts, case, paths = record.facts, record.cases[0], []
    texts = [f"{len(record.cases)} texts" if len(record.cases) > 1 else f"{len(case.ids)} tokens"]
    texts += [_of_texts(1, case.answer_text)] * (len(record.cases) == 1 and bool(case.answer))
    style = _of_study(style, facts, facts["select"], *texts)
    path = folder / f"budgets.{style.image}"
    if facts["over"] in ("heads", "kv"):
        effect_N, panels = record.statistics["effect"], []
        unsure_N = holds_zero(record.statistics["low_all"], record.statistics["high_all"])
        for kind in record.kinds[:MOST_PANELS]:
            # A kv group's heads have the effect of their group.
            alone = [
                at for at, item in enumerate(record.asked) if item.budget.keep == kind and item.condition == "alone"
            ]
            effects = {head: float(effect_N[at]) for at in alone for head in record.asked[at].budget.heads}
            unsure = frozenset(head for at in alone if unsure_N[at] for head in record.asked[at].budget.heads)
            panels.append(Shown(kind, f"{record.unit} lost", effects, "effect", unsure))
        heads = sorted({head for panel in panels for head in panel.values})
        title = "What is lost where a head keeps only these keys"
        paths.append(save_effects(path, heads, panels, style, title=title))
    elif facts["over"] == "layers":
        lines = [_line_of(record, [kind], kind, layers=True) for kind in record.kinds]
        title = style.headed("What is lost where a layer keeps only these keys")
        paths.append(save_budget_lines(path, lines, style, title, unit=record.unit, layers=True))
    # One budget is a point, and no curve: of several there is a line per rule by which keys are kept.
    if len(record.kinds) > 1:
        rules: dict[str, list[str]] = {}
        for kind in record.kinds:
            rules.setdefault(kind.partition(":")[0], []).append(kind)
        lines = [_line_of(record, kinds, rule) for rule, kinds in rules.items()]
        title = style.headed("What is lost by the share of keys that is kept")
        path = folder / f"budgets_curve.{style.image}"
        paths.append(save_budget_lines(path, lines, style, title, unit=record.unit))
    return paths


def _line_of(record: BudgetCosts, kinds: list[str], name: str, *, layers: bool = False) -> BudgetLine:
    """The layers of some budgets, or all heads together."""
    condition = "alone" if layers else "together"
    wanted = [item.budget.keep in kinds and item.condition == condition for item in record.asked]
    places, items = np.flatnonzero(wanted), list(compress(record.asked, wanted))
    effect, low, high = (record.statistics[column][places] for column in ("effect", "low_all", "high_all"))
    if layers:
        return BudgetLine(name, np.array([item.layer for item in items]), effect, low, high)
    labels = [item.budget.keep.partition(":")[2] for item in items]
    return BudgetLine(name, record.kept_N[places], effect, low, high, labels)


def save_knockout(record: KnockoutResult, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of a knockout; None where all was cut at once. Raises UsageError for a folder it cannot write."""
    facts, case, path = record.facts, record.cases[0], folder / f"knockout.{style.image}"
    over, unit, effect_N = facts["over"], facts["measure"]["unit"], record.statistics["effect"]
    how = {"mask": "the rest of the row takes the weight", "zero": "the weight is lost"}[facts["how"]]
    style = _of_study(style, facts, f"{_of_texts(len(record.cases), case.answer_text)}; {how}")
    if over == "none":
        return None
    if over == "keys":
        tokens = ColouredTokens(case.prompt.plain, record.by_token(), unit, case.queries)
        return save_tokens(path, tokens, style, style.headed(f"What is lost without each key in {record.where}"))
    if over in ("heads", "kv"):
        # A kv group's heads have the effect of their group.
        effects = {head: float(effect_N[at]) for at, item in enumerate(record.asked) for head in item.cut.heads}
        masses = {head: record.mass(item.cut) for item in record.asked for head in item.cut.heads}
        unsure_N = holds_zero(record.statistics["low_all"], record.statistics["high_all"])
        unsure = frozenset(head for item in compress(record.asked, unsure_N) for head in item.cut.heads)
        lost = Shown("effect", f"{unit} lost without the look", effects, "effect", unsure)
        panels = [lost, Shown("mass", "weight that is cut", masses, "mass")]
        return save_effects(path, sorted(effects), panels, style, title="What is lost where these heads may not look")
    table = record.table()
    low_N, mean_N, high_N = (
        np.array(table[f"{end}_permuted"].to_pylist(), np.float64) for end in ("low", "null", "high")
    )
    ends = record.statistics["low_all"], record.statistics["high_all"]
    curve = Curve([item.cut.name for item in record.asked], effect_N, *ends, unit, (low_N, mean_N, high_N))
    return save_curve(path, curve, style, style.headed("What is lost where these layers may not look"))


def save_patching(record: PatchedPairs, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of patches; None where all was patched at once. Raises UsageError for a folder it cannot write."""
    facts, path = record.facts, folder / f"patching.{style.image}"
    over, unit = facts["over"], facts["measure"]["unit"]
    gap = "" if record.gap is None else f"; the texts differ by {record.gap:.2f} {unit}"
    texts = _of_texts(len(record.pairs), record.pairs[0].clean.answer_text, "pairs")
    style = _of_study(style, facts, f"{texts}{gap}")
    what = {"output": "outputs", "pattern": "patterns", "key": "keys", "value": "values"}[facts["what"]]
    title = f"Which {what} carry the difference"
    if over == "none":
        return None
    # Shares of the gap where there is one; estimates where patches were not run.
    unit = unit if record.gap is None else "share of the gap"
    if record.estimates is not None:
        lost_N, back_N = record.estimates[::2].mean(0), -record.estimates[1::2].mean(0)
        if record.gap is not None:
            lost_N, back_N = record.normalised(lost_N), record.normalised(back_N)
    else:
        lost, back = ("effect", "restored") if record.gap is None else ("normalised", "restored_normalised")
        lost_N, back_N = record.statistics[lost], record.statistics[back]
    effects = {"lost": lost_N, "given back": back_N}
    # Estimates have no interval.
    ends = dict.fromkeys(effects, np.full((2, len(lost_N)), np.nan))
    if record.estimates is None:
        sides = ("low_all", "high_all") if record.gap is None else ("normalised_low", "normalised_high")
        prefixes = zip(effects, ("", "restored_"), strict=True)
        ends = {name: np.stack([record.statistics[prefix + side] for side in sides]) for name, prefix in prefixes}
    unsure = {name: holds_zero(*ends_2N) for name, ends_2N in ends.items()}
    if over in ("heads", "kv"):
        # A kv group's heads have the effect of their group.
        panels = []
        for name, value_N in effects.items():
            pairs = zip(record.asked, value_N.tolist(), strict=True)
            values = {head: value for item, value in pairs for head in item.patch.heads}
            around_0 = frozenset(head for item in compress(record.asked, unsure[name]) for head in item.patch.heads)
            panels.append(Shown(name, unit, values, "effect", around_0))
        return save_effects(path, sorted(panels[0].values), panels, style, title=title)
    if over == "layers,positions":
        layers = sorted({item.layer for item in record.asked if item.layer is not None})
        names = [item.patch.name.partition(" ")[2] for item in record.asked if item.layer == layers[0]]
        shape = len(layers), len(names)
        grids = {name: value_N.reshape(shape) for name, value_N in effects.items()}
        hatched = {name: unsure_N.reshape(shape) for name, unsure_N in unsure.items()}
        grid = Grid([f"L{layer}" for layer in layers], names, grids, unit, hatched)
        return save_grid(path, grid, style, style.headed(title))
    series = {name: (value_N, ends[name]) for name, value_N in effects.items()}
    axis = "layer" if over == "layers" else "token that is patched"
    lines = Lines([item.patch.name for item in record.asked], series, unit, axis)
    return save_lines(path, lines, style, style.headed(title))


LONGEST_TEXT, LONGEST_SIDE = 40, 28  # letters at the foot of a picture, and of a side in a title


def save_comparison(
    comparison: Comparison,
    folder: Path,
    asked: Mapping[str, Any],
    style: Style = Style(),
    *,
    places: Places = None,
    gate: Mapping[str, Any] | None = None,
    spreadsheet: bool = False,
    advance: Callable[[int], object] = lambda pictures: None,
) -> list[Path]:
    """Write tables, pictures and last compare.json; returns the paths. asked: what tells this comparison from another.

    gate: what a gate says of it.

    >>> save(comparison, Path("runs/swapped"), {"text": "..."})
    """
    clear(folder)
    tables = {"heads": heads_table(comparison, places), "metrics": metrics_table(comparison, places)}
    tables |= {"tokens": tokens_table(comparison.pair)} if comparison.pair else {}
    with writable(folder):
        written = [save(table, folder / f"{name}.csv", spreadsheet=spreadsheet) for name, table in tables.items()]
    for path in save_differences(comparison, folder, style.of(replace(style.about, line=_foot(comparison)))):
        written.append(path)
        advance(1)
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in written}
    record = {"schema": SCHEMA, "asked": asked, "versions": versions(), "texts": comparison.texts, "files": hashes}
    record |= {"aligned": {text.stack: text.by for text in comparison.pair.texts}} if comparison.pair else {}
    record |= {"gate": gate} if gate else {}
    return [*written, save_json({**record, "failures": list(comparison.failures)}, folder / NAME)]


def panels(comparison: Comparison, stack: str | None = None) -> tuple[tuple[int, ...], list[Panel]]:
    """The layers, and a layers x heads panel of the divergence and of each metric's difference, centred on 0.

    stack: of which stack; the first without it.
    """
    stack = stack or comparison.head_stacks[0]
    places = comparison.stacks[stack]
    layer_N, head_N = zip(*(comparison.heads[place] for place in places), strict=True)

    def with_reach(value_N: np.ndarray) -> tuple[np.ndarray, float]:
        values_LH = layers_by_heads(layer_N, head_N, value_N[places])
        return values_LH, float(np.max(np.abs(values_LH), where=np.isfinite(values_LH), initial=0.0)) or 1.0

    js_LH, end = with_reach(comparison.js.effect)
    drawn = [Panel("Jensen-Shannon divergence", js_LH, 0.0, end, "bits")]
    for metric in (METRICS[id] for id in metrics_for(list(METRICS), stack)):
        values_LH, end = with_reach(comparison.differences[metric.id].effect)
        drawn.append(Panel(metric.title, values_LH, -end, end, metric.unit, quantity="difference"))
    return tuple(dict.fromkeys(layer_N)), drawn


def signed_maps(pair: Pair, stack: str | None = None, prefix: str = "") -> list[Maps]:
    """The other side minus the first, a layer each, between the units that the texts share.

    stack: of which stack; the first without it. prefix: the words before a layer's number.
    """
    stack = stack or next(iter(pair.drawn), "")
    if stack not in pair.drawn:
        return []
    # A cell is named by the first unit that it holds.
    drawn, axes = pair.drawn[stack], pair.axes(stack)
    sides = list(zip(axes, drawn.cells, strict=True))
    labels = [tuple(_label(axis, unit) for unit in cells.starts) for axis, cells in sides]
    starts = [tuple(axis.units.members[0][unit][0] for unit in cells.starts) for axis, cells in sides]
    # Both axes are labelled with the larger size of cells: the other axis has as many units or fewer.
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


def save_differences(comparison: Comparison, folder: Path, style: Style) -> Iterator[Path]:
    """The pictures of every stack, in a folder of its own where there are several; style: what they are of, too."""
    several = len(comparison.stacks) > 1
    for stack, places in comparison.stacks.items():
        into, (layers, drawn) = folder / (stack if several else ""), panels(comparison, stack)
        title = f"Differences of {len(places)} {f'{stack} ' * several}heads in {len(layers)} layers"
        which = minus(comparison.pair) if comparison.pair else "the other side − the first"
        path, note = into / f"differences.{style.image}", f"metrics: {which}"
        yield figures.save_metrics(path, drawn, style, layer_labels=layers, title=title, note=note)
        if comparison.pair:
            maps = signed_maps(comparison.pair, stack, comparison.stack_name(stack))
            yield from figures.save_layers(
                [(into / "layers" / f"L{item.layer:02d}.{style.image}", item) for item in maps], style
            )


def minus(pair: Pair) -> str:
    """`“Anna gave John …” − “Mary gave John …”`, or the models where these differ: what a signed map shows."""
    first, other = (model_name(side.loaded.name) for side in pair[:2])
    if first == other and pair.texts:
        # Each from a little before they differ, where that is not near their beginning.
        first, other = (prompt.text for prompt in next(iter(pair.texts))[2:4])
        pairs = enumerate(zip(first, other, strict=False))
        same = next((place for place, (a, b) in pairs if a != b), min(len(first), len(other)))
        start = first.rfind(" ", 0, max(0, same - LONGEST_SIDE // 3)) + 1 if same > LONGEST_SIDE // 2 else 0
        ends = [shorten(text[start:], LONGEST_SIDE, placeholder=" …") for text in (first, other)]
        first, other = (f"“{'… ' * bool(start)}{end}”" for end in ends)
    return visible(f"{other} − {first}") if first != other else "the other side − the first"


def _foot(comparison: Comparison) -> str:
    """The line at the foot of a picture: of one pair the models and texts, else how many texts."""
    if comparison.pair is None:
        return f"{comparison.texts} texts"
    texts = comparison.pair.texts
    quotes = [[f"“{shorten(prompt.text, LONGEST_TEXT)}”" for prompt in text[2:4]] for text in reversed(texts)]
    sides = zip(comparison.pair[:2], zip(*quotes, strict=True), strict=True)
    names = [f"{model_name(side.loaded.name)}, {' ← '.join(quoted)}" for side, quoted in sides]
    by = ", ".join(dict.fromkeys(WORDS[text.by] for text in texts))
    return visible(f"{' compared with '.join(dict.fromkeys(names))}, {by}")


def _label(text: Shared, unit: int) -> str:
    """`·the`, or `·Mary/·Anna` where a word replaces another."""
    sides = zip((text.first, text.other), text.units.members, strict=True)
    labels = ["".join(prompt.labels[at] for at in members[unit]) for prompt, members in sides]
    return labels[0] if labels[0].lstrip("·") == labels[1].lstrip("·") else "/".join(labels)
