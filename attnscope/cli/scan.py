"""`attnscope scan`: what each head does on probes that isolate one behaviour, and how sure that is."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from attnscope import cells
from attnscope.cli import output, scan_texts
from attnscope.cli.groups import FIRST
from attnscope.cli.info import Named
from attnscope.cli.load_options import Loading
from attnscope.cli.options import Exporting, Format, Seed, Sequences, Top
from attnscope.cli.takes import takes
from attnscope.errors import UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.model.options import LoadOptions
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.atlas.findings import Finding
    from attnscope.study.atlas.texts import OnTexts

WIDE = 108  # a narrower screen shows one null alone, and roles below each other

EXAMPLES = (
    "attnscope scan demo --sequences 32 --texts corpus.txt.gz --out runs/atlas && "
    'attnscope heads "the cat sat" --atlas runs/atlas --select @induction',
    "attnscope scan demo --dry-run",
)


@dataclass(frozen=True, kw_only=True)
class Scanned(Named, Loading):
    """The model, named as `info` names it."""

    revision: Annotated[
        str | None, Option(help="Branch, tag or commit on the hub; several by commas: one scan each.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.revisions:
            if not name or self.revisions.count(name) > 1:
                raise UsageError(
                    f"--revision {self.revision} names {name!r} twice"
                    if name
                    else "--revision names an empty revision",
                    "name each once, as --revision step1000,step2000",
                )

    @property
    def revisions(self) -> list[str]:
        """The revisions that were named."""
        return [] if self.revision is None else [name.strip() for name in self.revision.split(",")]


@dataclass(frozen=True, kw_only=True)
class Probing(Sequences, Seed, Top):
    """What is drawn, and what is shown."""

    probe: Annotated[
        str | None, Option(help="The probe that the table shows (default: induction).", metavar="PROBE"), FIRST
    ] = None
    seed: Annotated[int, Option(help="Seed of the sequences.")] = 0
    pool: Annotated[Path | None, Option(help="A file of the token ids that probes are made of.", metavar="FILE")] = None
    texts: Annotated[
        str | None,
        Option(help="Texts: how far apart heads are on them, and what each looks like on how many.", metavar="FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Kept(Format, Exporting):
    """A table to stdout, the atlas to --out."""

    out: Annotated[
        Path | None,
        Option(help="Write table, picture and roles here; a stopped scan resumes."),
    ] = None


@takes(Scanned, Probing, Kept)
def scan(scanned: Scanned, probing: Probing, kept: Kept) -> int:
    """What each head does on probes, against a null, with intervals.

    Sequences of the model's own tokens isolate one behaviour each: repetition, the place of a key, the sink. Every
    score is compared with what the head scores where the behaviour cannot show, with an interval of the difference
    that holds for all heads at once; a role is named by its lower bound alone. In a pipe every probe of every head
    is printed as csv.
    """
    format = output.wanted_format(kept.format)
    if probing.texts is not None and kept.out is None and not probing.dry_run:
        raise UsageError("--texts writes tables and a picture", "name a folder with --out DIR")

    from attnscope.batch.items import texts_in
    from attnscope.model.libraries import silence_libraries
    from attnscope.text.reading import read_ids

    output.complain_through_talk(kept.quiet)
    silence_libraries(kept.verbose)
    pool = None if probing.pool is None else read_ids(str(probing.pool))
    given = ScanFiles(pool, None if probing.texts is None else [item.text for item in texts_in(probing.texts)])
    if len(scanned.revisions) > 1:
        return scan_each(scanned, given, probing, kept)
    found = scan_one(scanned.load_options(), given, probing, kept)
    if found is None:
        return 0
    atlas, read = found
    shown = _shown(atlas, probing.probe)
    output.emit(atlas.table(), format, lambda: atlas_sheet(atlas, shown, probing.top, read))
    for what, why in atlas.facts["not_measured"].items():
        output.talk(f"not measured: {what}: {why}", kept.quiet)
    for rule in atlas.rules():
        output.talk(f"{rule.role}: {rule.condition}{f' ({rule.source})' * bool(rule.source)}", kept.quiet)
    if format == "table":
        output.talk(f"probes: {', '.join(atlas.probes())}; --probe NAME shows another", kept.quiet)
    return 0


class ScanFiles(NamedTuple):
    """What was read of files: the token ids of --pool, the texts of --texts."""

    pool: list[int] | None
    texts: list[str] | None


def scan_one(
    options: LoadOptions, given: ScanFiles, probing: Probing, kept: Kept
) -> tuple[Atlas, OnTexts | None] | None:
    """Load one model and scan it; None where its cost is all that was asked for."""
    from attnscope.model.loading import load

    with output.progress(f"loading {options.model}", None, kept.quiet):
        loaded = load(options)

    from attnscope.show.atlas import save_probes
    from attnscope.study.atlas.scan import plan, scan_cost
    from attnscope.study.atlas.scan import scan as scanned_by
    from attnscope.study.atlas.texts import prompts_of

    planned = plan(loaded, seed=probing.seed, sequences=probing.drawn, pool=given.pool)
    if probing.probe not in (None, *planned.probes):
        raise UsageError(f"there is no probe {probing.probe!r}", f"the probes are {', '.join(planned.probes)}")
    prompts = None if given.texts is None else prompts_of(loaded, given.texts)
    layers = len(loaded.geometry.attention_layers)
    output.talk(f"{loaded.name}  {loaded.device}  {loaded.dtype}  {loaded.geometry.in_words}", kept.quiet)
    tokens = {one.name: one.tokens for one in planned.trials}
    if probing.dry_run:
        tokens = scan_cost(loaded, probing.sequences, given.pool)
    cost = _cost(tokens, layers) + (f"; {scan_texts.texts_cost(prompts, layers)}" if prompts else "")
    if probing.dry_run:
        output.show(cost)
        return None
    output.talk(cost, kept.quiet)
    with unwinding(), output.progress("probes", planned.tokens, kept.quiet) as advance:
        atlas = scanned_by(loaded, planned, kept.out, force=kept.force, advance=advance)
        if kept.out is not None:
            save_probes(atlas, kept.out, loaded.name)
    return atlas, scan_texts.read_texts(loaded, atlas, prompts, kept) if prompts else None


def scan_each(scanned: Scanned, given: ScanFiles, probing: Probing, kept: Kept) -> int:
    """One scan per revision, each model gone before the next is loaded; then all of them side by side."""
    from attnscope.cli.scan_revisions import effects_at
    from attnscope.show.checkpoints import folder_of, save_checkpoints, stacked

    atlases: dict[str, Atlas] = {}
    for number, revision in enumerate(scanned.revisions, start=1):
        output.talk(f"revision {revision}, {number} of {len(scanned.revisions)}", kept.quiet)
        options = replace(scanned.load_options(), revision=revision)
        found = scan_one(options, given, probing, replace(kept, out=kept.out and folder_of(kept.out, revision)))
        if found is None:
            return 0  # what one costs, the others cost
        atlases[revision] = found[0]
        gc.collect()  # a model holds itself in circles, and would stay beside the next
    if kept.out is not None:
        save_checkpoints(atlases, kept.out, scanned.asked)
    [shown, *_] = _shown(next(iter(atlases.values())), probing.probe)
    format = output.wanted_format(kept.format)
    output.emit(stacked(atlases), format, lambda: effects_at(atlases, shown.probe, probing.top))
    return 0


def _cost(tokens: Mapping[str, int], layers: int) -> str:
    return f"{len(tokens)} trials ({', '.join(tokens)}): {sum(tokens.values())} tokens x {layers} layers"


def _shown(atlas: Atlas, asked: str | None) -> list[Finding]:
    """The contrasts of the probe that the table shows; of induction those of its middle period."""
    names = atlas.probes()
    periods = [name for name in names if name.startswith("induction")]
    name = asked or (periods[len(periods) // 2] if periods else names[0])
    return [one for one in atlas.findings if one.probe == name]


def atlas_sheet(atlas: Atlas, shown: Sequence[Finding], top: int | None, read: OnTexts | None = None) -> RichTable:
    """The heads, those with a role first, then by effect: the probe's score, its nulls, and the effect's interval."""
    first, sheet = shown[0], output.sheet()
    wide = output.width() >= WIDE
    shown = shown if wide else shown[:1]
    copying, uniform = _copying(atlas, first), atlas.facts.get("near_uniform", {})
    heads = len(atlas.heads)
    for title in ("head", "roles"):
        sheet.add_column(title, no_wrap=True)
    for title in (first.probe, *(one.against for one in shown)):
        sheet.add_column(output.one_line(title), justify="right")
    sheet.add_column(f"effect\n[95 %, all {heads}]", no_wrap=True)
    for title in ("p", *(["copying"] if copying else []), *(["JS"] if uniform else [])):
        sheet.add_column(title, justify="right", no_wrap=True)
    if read:
        sheet.add_column("looks like", no_wrap=True)
    effect = first.effects
    order = sorted(
        range(heads), key=lambda place: (not atlas.roles[atlas.heads[place]], -_or_least(float(effect.effect[place])))
    )
    for place in order[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        low, high = cells.number(effect.low_all[place]), cells.number(effect.high_all[place])
        sheet.add_row(
            name,
            (" " if wide else "\n").join(atlas.roles[head]) or cells.MISSING,
            cells.number(effect.score[place]),
            *(cells.number(one.effects.null[place]) for one in shown),
            f"{cells.signed(effect.effect[place])} [{low}, {high}]",
            cells.p_value(effect.p[place]),
            *([cells.number(copying.effects.score[place])] if copying else []),
            *([cells.number(uniform.get(name))] if uniform else []),
            *([scan_texts.looked(read, head)] if read else []),
        )
    return sheet


def _copying(atlas: Atlas, shown: Finding) -> Finding | None:
    """What belongs beside induction: a head that finds the place may still not write what stands there."""
    found = [one for one in atlas.findings if one.probe == "copying"]
    return found[0] if found and shown.probe.startswith("induction") else None


def _or_least(value: float) -> float:
    return value if value == value else float("-inf")
