"""An observation -> a folder of tables, figures and a manifest.

    export(seen, "runs/bank")     # heads.csv, relations.csv, overview.png, top.png, heads/, manifest.json
    export_file(seen, Path("overview.pdf"), Export(("overview",), style=Style(image="pdf")))     # that picture alone

A path is made of layer and head numbers, never of text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from attnscope.errors import UsageError
from attnscope.export.drawing import DEFAULT, Advance, DrawingOptions, check_kinds, draw_alone, drawings, save_rollout
from attnscope.export.manifest import NAME, TARGET, check, inner_folders, run_facts, taken, tokens_of
from attnscope.figures import Style
from attnscope.figures.style import ROLE_COLOURS
from attnscope.metrics.roles import ROLE_METRICS
from attnscope.model.libraries import versions
from attnscope.model.selection import mixes
from attnscope.observe.observation import Mean, token_table
from attnscope.utils.files import jsonable, refuse_links, save_json, sha256_of
from attnscope.utils.folders import PICTURES, TABLES, suffix_of
from attnscope.utils.tables import FORMATS, save

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.inputs.tokens import TokenMatch, TokenSelection
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head

ONE_PICTURE = 'choose a head with heads=["L1H4"], or a figure with figures=["overview"]; or name a folder'
MOST_ROLES = 8  # heads with a role, drawn one by one by default
SHEET_HEADS = 20  # of the contact sheet, by default


class ExportOptions(TypedDict, total=False):
    """The fields of `Export`, as keywords."""

    figures: Sequence[str] | None
    heads: Sequence[str] | None
    style: Style
    sort: str | None
    min_weight: float | None
    over: Literal["heads"] | None
    other_keys: bool
    top_k: int | None
    top: int | None
    depth: Sequence[str]
    metrics: Sequence[str]
    tables: bool
    keys: bool
    per_token: Mean | None
    spreadsheet: bool
    options: Mapping[str, Any]
    force: bool
    workers: int | None
    advance: Advance


@dataclass(frozen=True)
class Export:
    """What is written of an observation, and how.

    figures: kinds of FIGURES, `mass` where keys were chosen, `top`, a contact sheet of the first `top` heads in the
    order of `sort`, and `depth`, metrics over the layers; those of maps only where maps were kept. None: overview,
    contact sheet, and heads. heads: names of those drawn one by one (`L1H4`), without them those of the view; without
    figures, too, at most 8 that have a role. sort: a metric by which heads.csv is ordered, mass where keys were chosen,
    else focus. depth, metrics: the metrics of these figures, without them that of `sort`, and all. min_weight, top_k:
    which relations and shares of a rollout are listed. over, other_keys: see `Observation.relations`. tables: whether
    heads and relations are listed. keys: whether to list what every token receives. per_token: over which heads the
    weights of every token are averaged, None to leave them out. spreadsheet: cells that a spreadsheet would run as a
    formula begin with an apostrophe. options: what the manifest says was asked for. force: write over the run of
    another text, model or options. workers: processes that draw heads, None for as many as pay. advance: called after
    every picture.
    """

    figures: Sequence[str] | None = None
    heads: Sequence[str] | None = None
    style: Style = Style()
    sort: str | None = None
    min_weight: float | None = None
    over: Literal["heads"] | None = None
    other_keys: bool = False
    top_k: int | None = None
    top: int | None = SHEET_HEADS
    depth: Sequence[str] = ()
    metrics: Sequence[str] = ()
    tables: bool = True
    keys: bool = False
    per_token: Mean | None = None
    spreadsheet: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    force: bool = False
    workers: int | None = 1
    advance: Advance = lambda steps: None

    @property
    def kinds(self) -> Sequence[str]:
        """The figures, by their names."""
        return DEFAULT if self.figures is None else self.figures


def export(seen: Observation, folder: str | Path, how: Export = Export()) -> list[Path]:
    """Write what an observation kept: tables, figures, and last manifest.json; returns the paths.

    A path that ends in the format of a picture or table is one file, see `export_file`. Raises UsageError for a folder
    that cannot be written, that holds another run, or that has the name of another file.

        >>> export(seen, "runs/bank", Export(figures=("overview",), style=Style(scale="log")))
    """
    if suffix_of(Path(folder)) in (*PICTURES, *TABLES):
        return [export_file(seen, Path(folder), how)]
    check_kinds(how.kinds, seen)
    how = replace(how, sort=how.sort or seen.ranked_by)
    names = drawn_heads(seen, how)
    record, made = manifest(seen, how.options, _asked(seen, how, names)), Path(folder)
    check(made, record, how.force)
    if how.kinds or seen.rollout is not None:
        refuse_links(inner_folders(made))
    with taken(made, record) as files:
        written = [save(table, made / name, spreadsheet=how.spreadsheet) for name, table in _tables(seen, how)]
        written += _drawn(seen, made, how, names)
        hashes = {path.relative_to(made).as_posix(): sha256_of(path) for path in sorted(written)}
        files.update(hashes)
        return [*written, save_json({**record, "files": hashes}, made / NAME)]


def export_file(seen: Observation, path: Path, how: Export = Export(), hint: str = ONE_PICTURE) -> Path:
    """Write the first table or the one picture of what an observation kept into a file, in the format of its suffix.

    Raises UsageError, with the hint, where there is none to write, or several pictures.
    """
    suffix: Any = suffix_of(path)
    if suffix in PICTURES:
        how = replace(how, style=replace(how.style, image=suffix[1:]))
    check_kinds(how.kinds, seen)
    how = replace(how, sort=how.sort or seen.ranked_by)
    names = drawn_heads(seen, how)

    def first_table() -> pa.Table:
        for _, table in _tables(seen, how):
            return table
        raise UsageError(f"there is no table to write to {path}", hint)

    return write_alone(path, first_table, lambda folder: _drawn(seen, folder, how, names), hint, how.spreadsheet)


def write_alone(
    path: Path,
    table: Callable[[], pa.Table],
    draw: Callable[[Path], Sequence[Path | None]],
    hint: str = "name a folder",
    spreadsheet: bool = False,
) -> Path:
    """Write a table, or what is drawn into a folder, to one file in the format of its suffix; see `draw_alone`."""
    if path.suffix[1:].lower() in FORMATS:
        return save(table(), path, spreadsheet=spreadsheet)
    return draw_alone(path, draw, hint)


def _asked(seen: Observation, how: Export, names: Sequence[str]) -> dict[str, Any]:
    """What the manifest says was to be written; names: of the heads that are drawn one by one."""
    one_by_one = names if seen.maps and "heads" in how.kinds else []
    chosen = [named(obs.chosen) for obs in seen.stacks.values() if not obs.chosen.nothing]
    return {
        "figures": how.kinds,
        "heads": one_by_one,
        "sort": how.sort,
        "min_weight": how.min_weight,
        "top_k": how.top_k,
        "over": how.over,
        "other_keys": how.other_keys or None,
        "group": seen.group,
        "weights": seen.view.weights,
        "keys": how.keys,
        "spreadsheet": how.spreadsheet,
        **{name: match.expression for name, match in (chosen[0] if chosen else {}).items()},
        **({"per_token": how.per_token} if how.per_token else {}),
        **({"depth": how.depth} if "depth" in how.kinds else {}),
        **({"metrics": how.metrics} if "metrics" in how.kinds and how.metrics else {}),
        **{name: value for name, value in asdict(how.style).items() if name != "about"},
    }


def _tables(seen: Observation, how: Export) -> Iterator[tuple[str, pa.Table]]:
    """The files of tables, and what each holds."""
    if seen.columns.scores and how.tables:
        yield "heads.csv", seen.table(how.sort)
    if seen.kept_keys is not None and how.tables:
        yield "relations.csv", seen.relations(how.min_weight, how.over, how.other_keys)
    if how.keys:
        yield "keys.csv", seen.key_table()
    if how.per_token:
        yield "text.csv", token_table(seen, how.per_token)
    if seen.rollout is not None:
        yield "rollout.csv", seen.rollout_table(how.top_k, how.min_weight)


def _drawn(seen: Observation, folder: Path, how: Export, names: Sequence[str]) -> list[Path]:
    """Draw the figures of every stack, each stack but the first in a folder of its own."""
    rolled = {stack * _several(seen): obs for stack, obs in seen.stacks.items() if obs.rollout is not None}
    written = [save_rollout(obs, folder / stack, how.style) for stack, obs in rolled.items()]
    top = how.top if "top" in how.kinds else 0
    drawn = drawings(seen, DrawingOptions(names, how.sort, top, how.depth, how.metrics)) if how.kinds else {}
    for stack, drawing in drawn.items():
        written += drawing.draw(folder / stack, how.kinds, how.style, how.workers, how.advance)
    return written


def drawn_heads(seen: Observation, how: Export) -> list[str]:
    """The heads that are drawn one by one: those that were named; else those of the view, or with a role."""
    if how.heads is not None:
        return list(how.heads)
    if how.figures is None and seen.view.heads is None:
        return heads_with_roles(seen, how.sort)
    return [head.name for head in seen.kept_heads()]


def heads_with_roles(seen: Observation, sort: str | None) -> list[str]:
    """The names of at most MOST_ROLES heads with a role: of every role its strongest head, then its second, and so on.

    The strongest has the largest score on the text in the metric of its role; without one the order is that of `sort`.
    """

    def weakness(head: Head) -> float:
        score = head.score.get(ROLE_METRICS.get(head.role, ""), math.nan)
        return math.inf if math.isnan(score) else -score

    of_role: dict[str, list[Head]] = {role: [] for role in ROLE_COLOURS}
    for head in sorted(seen.kept_heads(sort), key=weakness):
        of_role.get(head.role, []).append(head)
    in_turn = chain.from_iterable(zip_longest(*of_role.values()))
    return [head.name for head in in_turn if head is not None][:MOST_ROLES]


def picture_count(seen: Observation, how: Export) -> int:
    """How many pictures `export` draws: the calls of `how.advance`."""
    options = DrawingOptions(drawn_heads(seen, how), how.sort, how.top, how.depth, how.metrics)
    drawn = drawings(seen, options)
    return sum(drawing.pictures(how.kinds) for drawing in drawn.values())


def _several(seen: Observation) -> bool:
    """Whether facts of tokens and units are written for each stack: layers without a softmax share the decoder's."""
    return any(not mixes(stack) for stack in seen.other_stacks)


def manifest(seen: Observation, options: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """What made an export: model, engine, versions, text, options, what was checked; enough to repeat the run.

    asked: what was to be written. row_sum_error, masked_weight and value_error are the largest over all calls; null
    where they were not measured.
    """
    calls, facts = seen.calls, dict(seen.facts)
    # What is asked for a manifest alone follows what the pass said, and what was found after it comes last.
    late = ("unread", "rollout", "parity", "largest_difference_to_steps")
    after = {name: facts.pop(name) for name in [*facts] if name in late}
    if seen.atlas is not None and seen.ask is not None:
        facts["atlas"] = {name: seen.atlas.facts.get(name) for name in ("seed", "sequences", "ids_sha256")}
    if seen.ask is not None:
        facts["ask"] = seen.ask.as_json()
    facts |= after
    if _several(seen) and seen.rollout is not None:
        facts["rollout"] = {
            stack: obs.facts["rollout"] for stack, obs in seen.stacks.items() if obs.rollout is not None
        }
    record = run_facts(seen.prompt, facts, options)
    prompt = record.pop("prompt")  # the longest, last
    # a model of one stack has the tokens that were asked about without the stack's name, as before there were several
    matches = {stack: named(obs.chosen) for stack, obs in seen.stacks.items() if not obs.chosen.nothing}
    chosen_of = {stack: {name: asdict(match) for name, match in of.items()} for stack, of in matches.items() if of}
    chosen = chosen_of if _several(seen) else chosen_of.get(seen.stack)
    return {
        **record,
        "export": jsonable(asked),
        **({"chosen": jsonable(chosen)} if chosen else {}),
        "versions": versions(),
        "checks": {
            "row_sum_error": _largest([check.row_sum_error for check in calls]),
            "masked_weight": _largest([check.masked_weight for check in calls]),
            "value_error": _largest([check.value_error for check in calls]),
            "sink_logits": any(check.sink_logits for check in calls),
            "failures": seen.failures,
            "unmeasured": seen.unmeasured,
        },
        # what is false of most calls is written where it is true: a deep model has hundreds of them
        "calls": [
            {
                "layer": check.layer,
                "call": check.call,
                "module": check.path,
                "heads": check.heads,
                "route": check.route,
                "mask": check.mask,
                "kernel": check.kernel,
            }
            | ({"altered": True} if check.altered else {})
            | ({"repeats": True} if check.repeats else {})
            | ({"stack": check.stack} if seen.other_stacks else {})
            for check in calls
        ],
        "answered_by": replace(seen.report, calls=calls).answered_by,
        "prompt": prompt,
        **({TARGET: tokens_of(seen.queries)} if seen.of_two_texts else {}),
    }


def named(chosen: TokenSelection) -> dict[str, TokenMatch]:
    """The queries and the keys that were chosen, where some were."""
    return {name: match for name, match in (("query", chosen.query), ("key", chosen.key)) if match is not None}


def _largest(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return max(measured) if measured else None
