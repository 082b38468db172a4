"""`attnscope scan`: what each head does on probes that isolate one behaviour, and how sure that is."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look, Sequences, StudyTable
from attnscope.cli.info import NamedModel
from attnscope.cli.option_groups import FIRST, command_line, fill
from attnscope.cli.options import Loading, Seed
from attnscope.cli.output import Top, writing_to
from attnscope.cli.study import show_cost
from attnscope.cli.study_tables import contrasts, effects_at, left_out, probe_answers, scanned_sheet
from attnscope.errors import UsageError, nearest
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.api.scan import Scan
    from attnscope.figures import Style
    from attnscope.model.options import LoadOptions
    from attnscope.studies.atlas import Atlas

EXAMPLES = (
    "attnscope scan demo --sequences 32 --texts corpus.txt.gz --out runs/atlas && "
    'attnscope heads "the cat sat" --atlas runs/atlas --select @induction',
    "attnscope scan demo --dry-run",
)


class Studied(NamedModel, Loading):
    """The model, which has to be named: a study takes minutes. COMMAND: which study's options these are."""

    COMMAND = "ablate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None and self.model is None:
            how = f"attnscope {self.COMMAND} MODEL [OPTIONS]"
            raise UsageError(
                f"no model was named; usage: {how}",
                f"name one as MODEL, for example demo; attnscope {self.COMMAND} --help lists the options",
            )


class Scanned(Studied):
    """The model, in one revision or several."""

    COMMAND = "scan"

    revision: Annotated[str | None, "Branch, tag or commit on the hub, or several by commas: one scan each."] = None

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


class Probing(Sequences, Seed, Top, panel="What to ask"):
    """What is drawn, and what is shown."""

    probe: Annotated[
        str | None,
        "Print every head on one probe (default: each named head on its probe, in a pipe all).",
        "PROBE",
        FIRST,
    ] = None
    seed: Annotated[int, "Seed of the sequences."] = 0
    top: Annotated[
        str | None,
        "Heads printed, with all their rows: a number, or all (default: 40 on a terminal, all in a pipe)."
        " Files have all.",
    ] = None
    pool: Annotated[Path | None, "File of token ids, for the sequences of the probes."] = None
    texts: Annotated[
        str | None, "Also compare heads on these texts (pairwise divergence, role frequencies).", "FILE"
    ] = None


Kept = writing_to(StudyTable, "Folder for table, picture and roles; a stopped scan resumes.")


@with_options(Scanned, Probing, Kept, Look)
def scan(scanned: Scanned, probing: Probing, kept: StudyTable, look: Look) -> int:
    """Test every head for known behaviours, with confidence intervals.

    Each probe is a set of sequences of the model's own tokens that isolates one behaviour: repetition, the place of
    a key, the sink. Each score is compared with a control in which the behaviour is impossible. The interval of the
    difference holds for all heads at once. A role is named by its lower bound alone. Of a linear layer's map, which
    has signs, |w| is read as a share of its row. A pipe gets every probe of
    every head as csv, or those of --probe and --top.
    """
    format = output.wanted_format(kept.format)
    if probing.texts is not None and kept.out is None and not probing.dry_run:
        raise UsageError("--texts writes tables and a picture", "name a folder with --out DIR")

    from attnscope.corpus.items import texts_in
    from attnscope.model.libraries import silence_libraries
    from attnscope.utils.files import read_ids

    # Files are read first: what is wrong with them is known before a model is loaded.
    silence_libraries(kept.verbose)
    pool = None if probing.pool is None else read_ids(str(probing.pool))
    texts = None if probing.texts is None else [item.text for item in texts_in(probing.texts)]
    files = {"pool": pool, "texts": texts}
    style = look.figure_style(command_line("scan", scanned, probing, look))
    if len(scanned.revisions) > 1:
        return scan_each(scanned, files, probing, kept, style)
    result = scan_one(scanned.load_options(), files, probing, kept, style)
    if result is None:
        return 0
    atlas = result.atlas
    table = atlas.table(atlas.order(probing.probe)[: probing.limit(format)], probing.probe)
    output.emit(table, format, lambda: scanned_sheet(atlas, probing.probe, probing.shown, result.texts, output.width()))
    # Under the table what it leaves out, and by which rule each role that it names was given.
    lines = [f"not measured: {what}: {why}" for what, why in atlas.facts["not_measured"].items()]
    if probing.probe is not None:
        output.log_lines(probe_answers(atlas, probing.probe), kept.quiet)
    lines += [f"{rule.role}: {rule.condition}{f' ({rule.source})' * bool(rule.source)}" for rule in atlas.rules()]
    output.log_lines(lines, kept.quiet)
    if format == "table":
        output.log_lines(left_out(atlas, probing.probe, probing, output.width()), kept.quiet)
    return 0


def scan_one(
    options: LoadOptions, files: dict[str, Any], probing: Probing, kept: StudyTable, style: Style
) -> Scan | None:
    """Load one model and scan it; None where its cost is all that was asked for.

    files: what was read of them, the token ids of --pool and the texts of --texts.
    """
    from attnscope.model.loading import load

    with output.loading(str(options.model), kept.quiet):
        loaded = load(options)

    from attnscope.api.scan import ScanOptions, run_scan, study_of

    asked = fill(ScanOptions, probing, kept, **files)
    study = study_of(loaded, asked, probing.drawn)
    if probing.probe not in (None, *study.planned.probes):
        probes = study.planned.probes
        stems = dict.fromkeys(name.partition(" p")[0] for name in probes)  # of several periods without the period
        stem = nearest(str(probing.probe), stems)
        near = [name for name in probes if name.partition(" p")[0] == stem]
        hint = f"did you mean {', '.join(near)}?; " * bool(near)
        known = "; ".join(probes)  # some names have a comma
        raise UsageError(f"there is no probe {probing.probe!r}", f"{hint}the probes are {known}")
    output.log(loaded.line, kept.quiet)
    cost = study.cost()
    if probing.dry_run:
        show_cost(cost, kept.quiet)
        return None
    output.log(cost.line, kept.quiet)
    with unwinding():
        return run_scan(study, asked, output.TerminalProgress(kept.quiet), style, probing.probe)


def scan_each(scanned: Scanned, files: dict[str, Any], probing: Probing, kept: StudyTable, style: Style) -> int:
    """One scan per revision, each model gone before the next is loaded; then all of them side by side."""
    from attnscope.export.study_figures import TABLE, draw_checkpoints, folder_of, stacked
    from attnscope.utils.folders import refuse_other_kind
    from attnscope.utils.tables import save

    if kept.out is not None:
        refuse_other_kind(kept.out, TABLE, kept.force)
    atlases: dict[str, Atlas] = {}
    for number, revision in enumerate(scanned.revisions, start=1):
        output.log(f"revision {revision}, {number} of {len(scanned.revisions)}", kept.quiet)
        options = replace(scanned.load_options(), revision=revision)
        here = replace(kept, out=kept.out and folder_of(kept.out, revision))
        result = scan_one(options, files, probing, here, style)
        if result is None:
            return 0  # what one costs, the others cost
        atlases[revision] = result.atlas
        del result
        gc.collect()  # a model holds itself in circles, and would stay beside the next
    if kept.out is not None:
        save(stacked(atlases), kept.out / TABLE)
        draw_checkpoints(atlases, kept.out, scanned.asked, style)
    [shown, *_] = contrasts(next(iter(atlases.values())), probing.probe)
    format = output.wanted_format(kept.format)
    last = list(atlases.values())[-1]
    heads = [last.heads[place] for place in last.order(shown.probe)]
    table = stacked(atlases, heads[: probing.limit(format)], probing.probe)
    output.emit(table, format, lambda: effects_at(atlases, shown.probe, heads[: probing.shown]))
    return 0
