"""What `scan` shows on a terminal: each named head with the probe that named it, every head on one probe, or on one
probe at every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnscope.cli.intervals import Effect, interval_notes
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet

if TYPE_CHECKING:
    from rich.console import Group

    from attnscope.cli.top import Top
    from attnscope.model.selection import HeadIndex
    from attnscope.studies.atlas import Atlas, Finding
    from attnscope.studies.head_distances import OnTexts

WIDE = 108  # a narrower screen shows one null alone, and roles below each other


def scanned_sheet(atlas: Atlas, probe: str | None, top: int | None, read: OnTexts | None, width: int) -> Group:
    """The heads as was asked; below them what each looks like on texts, where some were read."""
    from rich.console import Group

    heads = named_sheet(atlas, top) if probe is None else probe_sheet(atlas, contrasts(atlas, probe), top, width)
    return Group(heads, *[] if read is None else [_texts_sheet(atlas, read, top)])


def named_sheet(atlas: Atlas, top: int | None) -> Sheet:
    """A row per head and role: the probe that named it, its score and null, and the effect's interval."""
    from attnscope.studies.atlas import MARK, named_by

    rows: list[Row] = []
    uniform = _near_uniform(atlas)
    for place in _named(atlas)[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        for role in atlas.roles[head]:
            finding = named_by(role, atlas.findings, place)
            rows.append({"head": name, "role": role, "named by": finding.probe, **_numbers(finding, place)})
        if name in uniform:
            rows.append({"head": name, "role": MARK.role, "named by": "JS to uniform", "score": uniform[name]})
    texts = [Column(title, align="left") for title in ("head", "role", "named by")]
    return Sheet(rows, [*texts, Column("score", cells.number), Column("null", cells.number), _effects_of(atlas)])


def probe_sheet(atlas: Atlas, shown: Sequence[Finding], top: int | None, width: int) -> Sheet:
    """Every head, those with a role first, then by effect: the probe's score, its nulls, and the effect's interval."""
    first, wide = shown[0], width >= WIDE
    nulls = shown if wide else shown[:1]
    copying, uniform = (_copying(atlas, first), _near_uniform(atlas)) if wide else (None, {})
    rows: list[Row] = []
    for place in atlas.order(first.probe)[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        row = {"head": name, "roles": (" " if wide else "\n").join(atlas.roles[head]) or cells.MISSING}
        row |= {f"null {one.against}": one.effects.null[place] for one in nulls}
        row |= {"copying": copying.effects.score[place]} if copying else {}
        rows.append({**row, "JS": uniform.get(name), **_numbers(first, place)})
    columns = [
        Column("head", align="left"),
        Column("roles", align="left"),
        Column(first.probe, cells.number, "score", fit="wrap"),
        *(Column(one.against, cells.number, f"null {one.against}", fit="wrap") for one in nulls),
        _effects_of(atlas),
        Column("p", cells.p_value),
        *[Column("copying", cells.number)] * (copying is not None),
        *[Column("JS", cells.number)] * bool(uniform),
    ]
    return Sheet(rows, columns)


def left_out(atlas: Atlas, probe: str | None, top: Top, width: int) -> list[str]:
    """What the table does not show, and how to see it."""
    heads, narrow = len(atlas.heads), width < WIDE
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


def _texts_sheet(atlas: Atlas, read: OnTexts, top: int | None) -> Sheet:
    """The role that every head has on most of the texts that show one."""
    rows = [
        {
            "head": cells.head_name(*head),
            "roles": " ".join(atlas.roles[head]) or cells.MISSING,
            "text role": looked(read, head),
        }
        for head in atlas.heads[:top]
    ]
    return Sheet(rows, [Column(title, align="left") for title in ("head", "roles", "text role")])


def _effects_of(atlas: Atlas) -> Effect:
    """The effect of a probe, and its interval for all heads at once."""
    return Effect(f"effect\n[95 %, all {len(atlas.heads)}]", cells.signed)


def _numbers(finding: Finding, place: int) -> dict[str, float]:
    """What a probe shows of a head, by the names of `Effects`."""
    return {name: values[place] for name, values in vars(finding.effects).items()}


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


def looked(found: OnTexts, head: tuple[int, int]) -> str:
    """`sink 82 %`: the role that a head has on most texts that show one."""
    shares = {look: share for look, share in found.shares.get(head, {}).items() if look != "-"}
    return next((f"{look} {cells.percent(100 * share)}" for look, share in shares.items()), cells.MISSING)


def effects_at(atlases: Mapping[str, Atlas], probe: str, heads: Sequence[HeadIndex]) -> Sheet:
    """The effect of one probe at every checkpoint, a row per head."""
    from attnscope.export.study_figures import courses

    last = list(atlases.values())[-1]
    [course] = [one for one in courses(atlases, list(last.heads)) if one.name == probe]
    rows = [
        {
            "head": cells.head_name(*head),
            "roles": " ".join(last.roles[head]) or cells.MISSING,
            **{f"at {name}": value for name, value in zip(atlases, values, strict=True)},
        }
        for head in heads
        for values in [course.values_RN[:, last.heads.index(head)].tolist()]
    ]
    columns = [Column("head", align="left"), Column("roles at the last", name="roles", align="left")]
    return Sheet(rows, [*columns, *(Column(name, cells.signed, f"at {name}") for name in atlases)])
