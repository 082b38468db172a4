"""What `scan` shows on a terminal: each named head with the probe that named it, or every head on one probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.intervals import interval_notes, with_interval
from attnscope.cli.scan_texts import looked

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

    from attnscope.cli.top import Top
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.atlas.findings import Finding
    from attnscope.study.atlas.texts import OnTexts

WIDE = 108  # a narrower screen shows one null alone, and roles below each other


def scanned_sheet(atlas: Atlas, probe: str | None, top: int | None, read: OnTexts | None) -> RenderableType:
    """The heads as was asked; below them what each looks like on texts, where some were read."""
    from rich.console import Group

    heads = named_sheet(atlas, top) if probe is None else probe_sheet(atlas, contrasts(atlas, probe), top)
    return Group(heads, _texts_sheet(atlas, read, top)) if read else heads


def named_sheet(atlas: Atlas, top: int | None) -> RichTable:
    """A row per head and role: the probe that named it, its score and null, and the effect's interval."""
    from attnscope.study.atlas.roles import MARK, named_by

    sheet = output.sheet()
    for title in ("head", "role", "named by"):
        sheet.add_column(title, no_wrap=True)
    for title in ("score", "null"):
        sheet.add_column(title, justify="right", no_wrap=True)
    sheet.add_column(_effect_of(atlas), no_wrap=True)
    for place in _named(atlas)[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        for role in atlas.roles[head]:
            one = named_by(role, atlas.findings, place)
            effects = one.effects
            score, null = cells.number(effects.score[place]), cells.number(effects.null[place])
            sheet.add_row(name, role, one.probe, score, null, _interval(one, place))
        if name in _near_uniform(atlas):
            sheet.add_row(name, MARK.role, "JS to uniform", cells.number(_near_uniform(atlas)[name]))
    return sheet


def probe_sheet(atlas: Atlas, shown: Sequence[Finding], top: int | None) -> RichTable:
    """Every head, those with a role first, then by effect: the probe's score, its nulls, and the effect's interval."""
    first, sheet, wide = shown[0], output.sheet(), output.width() >= WIDE
    nulls = shown if wide else shown[:1]
    copying = _copying(atlas, first) if wide else None
    uniform = _near_uniform(atlas) if wide else {}
    for title in ("head", "roles"):
        sheet.add_column(title, no_wrap=True)
    for title in (first.probe, *(one.against for one in nulls)):
        sheet.add_column(title, justify="right")
    sheet.add_column(_effect_of(atlas), no_wrap=True)
    for title in ("p", *(["copying"] if copying else []), *(["JS"] if uniform else [])):
        sheet.add_column(title, justify="right", no_wrap=True)
    for place in atlas.order(first.probe)[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        sheet.add_row(
            name,
            (" " if wide else "\n").join(atlas.roles[head]) or cells.MISSING,
            cells.number(first.effects.score[place]),
            *(cells.number(one.effects.null[place]) for one in nulls),
            _interval(first, place),
            cells.p_value(first.effects.p[place]),
            *([cells.number(copying.effects.score[place])] if copying else []),
            *([cells.number(uniform.get(name))] if uniform else []),
        )
    return sheet


def left_out(atlas: Atlas, probe: str | None, top: Top) -> list[str]:
    """What the table does not show, and how to see it."""
    heads, narrow = len(atlas.heads), output.width() < WIDE
    probes = f"probes: {probe_names(atlas.probes())}"
    if probe is None:
        named = len(_named(atlas))
        few = top.rest(len(_named(atlas)[: top.shown]), named, "named heads shown")
        lines = [f"{named} of {heads} heads have a role or a mark; --probe NAME shows every head on one probe"]
        return [*few, *lines, probes, "a pipe without --probe gets every head on each probe"]
    shown = contrasts(atlas, probe)
    missing = [one.against for one in shown[1:]] + ["copying"] * (_copying(atlas, shown[0]) is not None)
    missing += ["JS"] * bool(_near_uniform(atlas))
    lines = interval_notes(vars(shown[0].effects), "sequences")
    lines += [f"not shown on a narrow terminal: {', '.join(missing)}"] * (narrow and bool(missing))
    few = top.rest(len(atlas.heads[: top.shown]), heads, "heads shown")
    return [*lines, *few, probes, "--probe NAME shows another"]


def probe_names(probes: Sequence[str]) -> str:
    """Probes by name, apart by semicolons: some names have a comma."""
    return "; ".join(probes)


def contrasts(atlas: Atlas, asked: str | None) -> list[Finding]:
    """The contrasts of a probe; where none was named, those of induction's middle period."""
    names = atlas.probes()
    periods = [name for name in names if name.startswith("induction")]
    name = asked or (periods[len(periods) // 2] if periods else names[0])
    return [one for one in atlas.findings if one.probe == name]


def _texts_sheet(atlas: Atlas, read: OnTexts, top: int | None) -> RichTable:
    """The role that every head has on most of the texts that show one."""
    sheet = output.sheet()
    for title in ("head", "roles", "text role"):
        sheet.add_column(title, no_wrap=True)
    for head in atlas.heads[:top]:
        sheet.add_row(cells.head_name(*head), " ".join(atlas.roles[head]) or cells.MISSING, looked(read, head))
    return sheet


def _effect_of(atlas: Atlas) -> str:
    return f"effect\n[95 %, all {len(atlas.heads)}]"


def _interval(one: Finding, place: int) -> str:
    """The effect, and its interval for all heads at once."""
    return with_interval({name: values[place] for name, values in vars(one.effects).items()}, of=cells.signed)


def _named(atlas: Atlas) -> list[int]:
    """The places of the heads that have a role or the mark, in the model's order."""
    marked = _near_uniform(atlas)
    heads = enumerate(atlas.heads)
    return [place for place, head in heads if atlas.roles[head] or cells.head_name(*head) in marked]


def _near_uniform(atlas: Atlas) -> dict[str, float]:
    return dict(atlas.facts.get("near_uniform", {}))


def _copying(atlas: Atlas, shown: Finding) -> Finding | None:
    """What belongs to induction: a head that finds the place may still not write the token there."""
    found = [one for one in atlas.findings if one.probe == "copying"]
    return found[0] if found and shown.probe.startswith("induction") else None
