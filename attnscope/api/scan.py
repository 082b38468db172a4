"""`attnscope.scan`, and what the command of that name runs: what each head does on probes, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.api.records import StudyResult, run_study
from attnscope.errors import hints_of
from attnscope.export.study_figures import HEAD_JS, save_head_js, save_probes
from attnscope.figures import Style
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.studies.atlas import Atlas, ScanStudy, plan
from attnscope.studies.head_distances import DIVERGENCES, LOOKS, on_texts, prompts_of
from attnscope.studies.probes import SEQUENCES
from attnscope.utils.display import head_name
from attnscope.utils.schema import takes_fields
from attnscope.utils.stages import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.model.loaded import LoadedModel
    from attnscope.studies.head_distances import OnTexts


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """What a scan reads, and where it is kept.

    sequences: of each probe. seed: of what is drawn. pool: the token ids that probes are made of; those that the
    tokenizer tells to be whole words without it. texts: on these, how far apart heads are and what each looks like.
    out: a folder in which a stopped scan resumes. force: write over another scan there.
    """

    sequences: int = SEQUENCES
    seed: int = 0
    pool: Sequence[int] | None = None
    texts: Sequence[str] | None = None
    out: str | Path | None = None
    force: bool = False


@dataclass(frozen=True)
class ScanCall(ScanOptions):
    """What `attnscope.scan` is called with."""

    model: LoadedModel


@hints_of(LoadOptions)
@takes_fields(ScanCall)
def scan(call: ScanCall) -> Scan:
    """What each head does on probes, against a null, with intervals.

    options: the fields of `ScanOptions`: sequences, seed, pool, texts, out, force. Raises UsageError for an option
    that does not exist and for a folder with another scan, ModelError for a model that probes cannot be made for.

        >>> found = attnscope.scan(attnscope.load("demo"), sequences=8)
        >>> found.atlas.named("induction")
    """
    check_loaded(call.model)
    return run_scan(study_of(call.model, call), call)


def study_of(model: LoadedModel, options: ScanOptions, drawn: int | None = None) -> ScanStudy:
    """What is to be read. drawn: how many sequences are drawn, fewer than are asked for where only the cost is wanted.

    Raises as `study.atlas.scan.plan` and `prompts_of`.
    """
    planned = plan(model, seed=options.seed, sequences=options.sequences, pool=options.pool, drawn=drawn)
    prompts = () if options.texts is None else prompts_of(model, options.texts)
    return ScanStudy(model, planned, prompts)


def run_scan(
    study: ScanStudy,
    options: ScanOptions,
    tell: Progress = NO_PROGRESS,
    style: Style = Style(),
    probe: str | None = None,
) -> Scan:
    """Read the probes, and then the texts; with a folder, write there and draw. probe: one that is always drawn."""
    into = None if options.out is None else Path(options.out)
    scan = Scan(study, run_study(study, into, options.force, tell, study.planned.tokens, "tokens"))
    if into is not None:
        with tell.stage("drawing"):
            scan.draw(into, style, probe)
    if not study.prompts:
        return scan
    with tell.stage("reading texts", len(study.prompts), "texts") as advance:
        scan = replace(scan, texts=on_texts(study.model, study.prompts, into, force=options.force, advance=advance))
    if into is not None:
        with tell.stage("drawing"):
            scan.draw_texts(into, style)
    return scan


@dataclass(frozen=True, repr=False)
class Scan(StudyResult[ScanStudy, Atlas]):
    """A model's atlas; texts: how far apart its heads are on texts, where some were given."""

    texts: OnTexts | None = None

    @property
    def atlas(self) -> Atlas:
        """What the probes show of every head."""
        return self.found

    @property
    def facts(self) -> Mapping[str, Any]:
        """What tells the scan from another."""
        return self.study.facts

    @cached_property
    def roles(self) -> dict[str, list[str]]:
        """{role: names of its heads, as `L3H0`}, of the roles that any head has."""
        return {
            role: [head_name(layer, head) for layer, heads in of.items() for head in heads]
            for role, of in self.atlas.by_role().items()
            if of
        }

    @property
    def title(self) -> str:
        return f"probes of {self.model.name}"

    def table(self) -> pa.Table:
        """A row per contrast and head, see `Atlas.table`; those with a role or a mark first."""
        return self.atlas.table(self.atlas.order())

    def draw(self, folder: Path, style: Style = Style(), probe: str | None = None) -> list[Path]:
        """Draw the effects of every head on the probes that name one, and on `probe`, into a folder; the path."""
        return [save_probes(self.atlas, folder, self.model.name, style, probe)]

    def draw_texts(self, folder: Path, style: Style = Style()) -> Path:
        """Draw how far apart the heads are on the texts; the path."""
        assert self.texts is not None
        return save_head_js(
            self.texts, self.atlas, folder / f"{HEAD_JS}.{style.image}", style.of_model(self.model.name)
        )

    def export(self, folder: str | Path, *, force: bool = False, style: Style = Style()) -> list[Path]:
        """Write atlas.json, tables and pictures, which `atlas=folder` and `--atlas` read; the paths.

        Raises UsageError for a folder that holds another scan, unless force says to write over it.
        """
        written = super().export(folder, force=force, style=style)
        if self.texts is None:
            return written
        self.texts.save(Path(folder))
        return sorted(
            {*written, Path(folder) / DIVERGENCES, Path(folder) / LOOKS, self.draw_texts(Path(folder), style)}
        )
