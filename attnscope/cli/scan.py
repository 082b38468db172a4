"""`attnscope scan`: what each head does on probes that isolate one behaviour, and how sure that is."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from attnscope.cli import output, scan_texts
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import FIRST, command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.info import Named
from attnscope.cli.load_options import Loading
from attnscope.cli.options import Config, Exporting, Format, Seed, Sequences, Top
from attnscope.cli.scan_tables import contrasts, left_out, scanned_sheet
from attnscope.cli.takes import takes
from attnscope.errors import UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from attnscope.figures import Style
    from attnscope.model.options import LoadOptions
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.atlas.texts import OnTexts

EXAMPLES = (
    "attnscope scan demo --sequences 32 --texts corpus.txt.gz --out runs/atlas && "
    'attnscope heads "the cat sat" --atlas runs/atlas --select @induction',
    "attnscope scan demo --dry-run",
)


@dataclass(frozen=True, kw_only=True)
class Studied(Named, Loading):
    """The model, which has to be named: a study takes minutes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None and self.model is None:
            raise UsageError("no model was named", "name one as MODEL, for example demo, the model in the package")


@dataclass(frozen=True, kw_only=True)
class Scanned(Studied):
    """The model, in one revision or several."""

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
        str | None,
        Option(
            help="Show every head on one probe (default: each named head on the probe that named it).", metavar="PROBE"
        ),
        FIRST,
    ] = None
    seed: Annotated[int, Option(help="Seed of the sequences.")] = 0
    pool: Annotated[Path | None, Option(help="A file of the token ids that probes are made of.", metavar="FILE")] = None
    texts: Annotated[
        str | None,
        Option(help="Texts: how far apart heads are on them, and what each looks like on how many.", metavar="FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Kept(Config, Format, Exporting):
    """A table to stdout, the atlas to --out."""

    out: Annotated[
        Path | None,
        Option(help="Write table, picture and roles here; a stopped scan resumes."),
    ] = None


@takes(Scanned, Probing, Kept, Look, file=GROUPS)
def scan(scanned: Scanned, probing: Probing, kept: Kept, look: Look) -> int:
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
    style = look.style(command_line("scan", scanned, probing, look))
    if len(scanned.revisions) > 1:
        return scan_each(scanned, given, probing, kept, style)
    found = scan_one(scanned.load_options(), given, probing, kept, style)
    if found is None:
        return 0
    atlas, read = found
    output.emit(atlas.table(), format, lambda: scanned_sheet(atlas, probing.probe, probing.top, read))
    for what, why in atlas.facts["not_measured"].items():
        output.talk(f"not measured: {what}: {why}", kept.quiet)
    for rule in atlas.rules():
        output.talk(f"{rule.role}: {rule.condition}{f' ({rule.source})' * bool(rule.source)}", kept.quiet)
    for line in left_out(atlas, probing.probe, probing.top) if format == "table" else ():
        output.talk(line, kept.quiet)
    return 0


class ScanFiles(NamedTuple):
    """What was read of files: the token ids of --pool, the texts of --texts."""

    pool: list[int] | None
    texts: list[str] | None


def scan_one(
    options: LoadOptions, given: ScanFiles, probing: Probing, kept: Kept, style: Style
) -> tuple[Atlas, OnTexts | None] | None:
    """Load one model and scan it; None where its cost is all that was asked for."""
    from attnscope.model.loading import load

    with output.progress(f"loading {options.model}", None, kept.quiet):
        loaded = load(options)

    from attnscope.show.atlas import save_probes
    from attnscope.study.atlas.scan import plan, scan_cost, scan_seconds
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
        with output.progress("measuring a batch", None, kept.quiet):
            seconds = scan_seconds(loaded, planned, probing.sequences)
        everything = sum(tokens.values()) + sum(map(len, prompts or ()))
        output.show(cost + output.estimated(everything * seconds))
        return None
    output.talk(cost, kept.quiet)
    with unwinding():
        with output.progress("reading probes", planned.tokens, kept.quiet, "tokens") as advance:
            atlas = scanned_by(loaded, planned, kept.out, force=kept.force, advance=advance)
        if kept.out is not None:
            with output.progress("drawing", None, kept.quiet):
                save_probes(atlas, kept.out, loaded.name, style)
    return atlas, scan_texts.read_texts(loaded, atlas, prompts, kept, style) if prompts else None


def scan_each(scanned: Scanned, given: ScanFiles, probing: Probing, kept: Kept, style: Style) -> int:
    """One scan per revision, each model gone before the next is loaded; then all of them side by side."""
    from attnscope.cli.scan_revisions import effects_at
    from attnscope.show.checkpoints import folder_of, save_checkpoints, stacked

    atlases: dict[str, Atlas] = {}
    for number, revision in enumerate(scanned.revisions, start=1):
        output.talk(f"revision {revision}, {number} of {len(scanned.revisions)}", kept.quiet)
        options = replace(scanned.load_options(), revision=revision)
        here = replace(kept, out=kept.out and folder_of(kept.out, revision))
        found = scan_one(options, given, probing, here, style)
        if found is None:
            return 0  # what one costs, the others cost
        atlases[revision] = found[0]
        gc.collect()  # a model holds itself in circles, and would stay beside the next
    if kept.out is not None:
        save_checkpoints(atlases, kept.out, scanned.asked, style)
    [shown, *_] = contrasts(next(iter(atlases.values())), probing.probe)
    format = output.wanted_format(kept.format)
    output.emit(stacked(atlases), format, lambda: effects_at(atlases, shown.probe, probing.top))
    return 0


def _cost(tokens: Mapping[str, int], layers: int) -> str:
    return f"{len(tokens)} trials ({', '.join(tokens)}): {sum(tokens.values())} tokens x {layers} layers"
