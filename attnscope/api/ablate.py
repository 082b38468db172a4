"""`attnscope.ablate`, and what the command of that name runs: what a task costs without some heads.

What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnscope.api.records import StudyResult, run_study
from attnscope.errors import InputError, UsageError, hints_of
from attnscope.export.study_figures import save_ablation
from attnscope.figures import Style
from attnscope.interventions.passes import check_model
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.model.selection import everything, pairs
from attnscope.observe.atlas import atlas_of
from attnscope.studies import ablation as tasks
from attnscope.studies.ablation import Ablation, AblationStudy, HeadSets, direct_means
from attnscope.studies.ablation_search import (
    HeadRecord,
    HeadStudy,
    PairsStudy,
    PruneStudy,
    Pruning,
    ScreenStudy,
    head_set,
    of_roles,
    parts,
    read_sets,
    selected,
)
from attnscope.studies.atlas import ScanStudy, load_atlas, plan
from attnscope.utils.display import head_name, model_name
from attnscope.utils.schema import takes_fields
from attnscope.utils.stages import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from attnscope.export.drawing import Picture
    from attnscope.interventions.spec import HeadSet, Task
    from attnscope.model.loaded import LoadedModel
    from attnscope.studies.atlas import Atlas, Plan

QUESTIONS: Mapping[str, type[HeadStudy[Any]]] = {study.kind: study for study in (PairsStudy, PruneStudy, ScreenStudy)}


@dataclass(frozen=True, repr=False)
class Answered(StudyResult[HeadStudy[Any], HeadRecord]):
    """The answer to another question than what sets cost: a row per pair, per head that is removed, or per head of the
    screen."""

    @property
    def title(self) -> str:
        return self.study.kind

    def figure(self, style: Style = Style()) -> Picture | None:  # type: ignore[override]
        """The loss after each head that a pruning removes; None of the other questions."""
        return super().figure(style) if isinstance(self.found, Pruning) else None

    def draw(self, folder: Path, style: Style = Style()) -> list[Path]:
        """Draw the curve of a pruning into a folder; the path, none of the other questions."""
        if not isinstance(self.found, Pruning):
            return []
        from attnscope.figures.curves import save_pruning

        result, (model, task) = self.found, (self.model.name, self.study.task)
        line = f"{model_name(model)}, {task.name}, {len(task)} sequences"
        style = replace(style, about=replace(style.of_model(model).about, line=line))
        names = [head_name(step.layer, step.head) for step in result.steps]
        values = [result.intact, *(step.value for step in result.steps)]
        return [save_pruning(folder / f"prune.{style.image}", names, values, [("uniform guess", result.guess)], style)]


# What names the heads that go: a selection, names, sets, or a file of sets.
HeadsOption = str | Sequence[str] | Mapping[str, Sequence[str]] | Path
EACH = "each head"
PROBED = ("repeated", "offsets")  # trials that name the sets where none are named


@dataclass(frozen=True, kw_only=True)
class AblateOptions:
    """Which heads go, what replaces them, and what is asked.

    atlas: what `scan` found, or its folder: sets are its roles where no heads are named. by: "kv" takes away whole
    groups. each: every head of the model alone, too. replace: a head's mean over other sequences, zero, or another
    sequence's output. random: random sets of as many heads to hold each against. controls: the heads that these are
    drawn from. on: "copy", repeated tokens, or a JSONL file of texts with targets. sequences: at most. seed: of what is
    drawn. pairs, prune, method="gradient": another question instead. out: a folder in which a stopped run resumes.
    force: write over another study there.
    """

    atlas: Atlas | Path | str | None = None
    by: Literal["kv"] | None = None
    each: bool = False
    replace: Literal["mean", "zero", "resample"] = "mean"
    random: int = 100
    controls: Literal["unnamed", "all"] = "unnamed"
    on: str | Path | None = None
    sequences: int = 64
    seed: int = 0
    pairs: bool = False
    prune: bool = False
    method: Literal["replace", "gradient"] = "replace"
    out: str | Path | None = None
    force: bool = False

    @property
    def question(self) -> type[HeadStudy[Any]] | None:
        """The question that is asked instead of what sets cost. Raises UsageError for two at once."""
        wishes = {"pairs": self.pairs, "prune": self.prune, "gradient": self.method == "gradient"}
        wanted = [name for name, wish in wishes.items() if wish]
        if len(wanted) > 1:
            raise UsageError(f"{wanted[0]} and {wanted[1]} were both asked for", "ask one question at a time")
        return QUESTIONS[wanted[0]] if wanted else None


@dataclass(frozen=True)
class AblateCall(AblateOptions):
    """What `attnscope.ablate` is called with."""

    model: LoadedModel
    heads: HeadsOption | None = None
    texts: Sequence[str] | None = None


@hints_of(LoadOptions)
@takes_fields(AblateCall)
def ablate(call: AblateCall) -> AblationResult | Answered:
    """What is lost without some heads, alone and together, in nats per token.

    heads: a selection as of --select ("3.0-1", "@induction", "linear.3.2" of a linear layer), names (["L3H0", "L3H1"]),
    sets by name, or a file of sets; without any the roles of an atlas, which probes find where there is none. texts:
    the loss of their next tokens; without any, of repeated tokens. options: the fields of `AblateOptions`.
    Returns what sets cost, or with pairs, prune or method="gradient" the answer to that question. Raises UsageError for
    heads that are not there and for an option that does not exist, InputError where no text has two tokens.

        >>> attnscope.ablate(attnscope.load("demo"), "3.0-1", sequences=8, random=4).table().to_pandas()
    """
    model = call.model
    check_loaded(model)
    task = loss_task(model, call.texts, call)
    whole = call.heads is None and call.atlas is None and call.question is not None and not call.pairs
    named, atlas = ([], None) if whole else named_sets(model, call.heads, call)
    return run_ablation(study_of(model, task, named, call), call, atlas)


def loss_task(loaded: LoadedModel, texts: Sequence[str] | None, asked: AblateOptions, drawn: int | None = None) -> Task:
    """The sequences, and what counts in them; drawn: how many are, fewer than asked for where the cost is wanted.

    Raises ModelError for a model that is none for an ablation, before any probe is read.
    """
    check_model(loaded)
    if texts is not None:
        if asked.on not in (None, "texts"):
            raise UsageError(f"texts were given, and on={str(asked.on)!r}", "leave out one of them")
        return tasks.texts(loaded, list(texts)[: asked.sequences])
    if asked.on in (None, "copy"):
        return tasks.copy(loaded, sequences=asked.sequences if drawn is None else drawn, seed=asked.seed)
    return tasks.targets(loaded, Path(str(asked.on)), asked.sequences)


def named_sets(
    loaded: LoadedModel, heads: HeadsOption | None, options: AblateOptions, tell: Progress = NO_PROGRESS
) -> tuple[Sequence[HeadSet], Atlas | None]:
    """The sets that were asked for, and the atlas where one was read: of a file, or of a selection and each of its
    heads, or a set per role of the atlas, which probes find where there is none."""
    if isinstance(heads, Path):
        return read_sets(heads, loaded.geometry), None
    if isinstance(heads, Mapping):
        return [selected(",".join(names), loaded.geometry, name=name) for name, names in heads.items()], None
    atlas = atlas_named(loaded, options.atlas)
    if heads is not None:
        expression = heads if isinstance(heads, str) else ",".join(heads)
        together = selected(expression, loaded.geometry, atlas.by_role() if atlas else None)
        each = parts(together, loaded.geometry, options.by == "kv")
        return [together, *(subset for subset in each if subset.heads != together.heads)], atlas
    if atlas is None:
        planned, layers = probes_of(loaded, options.seed), len(loaded.geometry.layers)
        tell.say(f"no sets were named: probes find the roles, {planned.tokens} tokens x {layers} layers")
        with tell.stage("reading probes", planned.tokens, "tokens") as advance:
            atlas = ScanStudy(loaded, planned).run(advance=advance)
    sets = of_roles(atlas.roles, list(atlas.by_role()))
    if not sets:
        raise InputError("no head has a role", "name heads with {select=3.0-1}")
    return sets, atlas


def atlas_named(loaded: LoadedModel, asked: Atlas | Path | str | None) -> Atlas | None:
    """The atlas that was asked for, or the one in the model's folder; None without one."""
    atlas, geometry = atlas_of(loaded, asked, load_atlas), loaded.geometry
    every = [pairs(everything(heads)) for heads in (geometry.unnamed, geometry.changeable)]
    if atlas is not None and set(atlas.heads) not in map(set, every):
        raise InputError("the atlas is of a model with other heads", "scan this one")
    return atlas


def probes_of(loaded: LoadedModel, seed: int) -> Plan:
    """The probes of repetition and offsets, as `scan` runs them."""
    planned = plan(loaded, seed=seed)
    return replace(planned, trials=[trial for trial in planned.trials if trial.name.startswith(PROBED)])


def study_of(
    loaded: LoadedModel, task: Task, named: Sequence[HeadSet], asked: AblateOptions
) -> AblationStudy | HeadStudy[Any]:
    """The study of some sets; of their heads where another question is asked, of all heads where there are none."""
    if asked.question is not None:
        heads = sorted({head for chosen in named for head in chosen.heads})
        return asked.question(loaded, task, heads, asked.replace)
    geometry, by_kv, drawn = loaded.geometry, asked.by == "kv", {"random": asked.random, "controls": asked.controls}
    sets = HeadSets.of(named, geometry, by_kv=by_kv, seed=asked.seed, **drawn)  # type: ignore[arg-type]
    if asked.each:
        each = parts(head_set(EACH, everything(geometry.unnamed)), geometry, by_kv)
        sets = replace(sets, alone={**sets.alone, EACH: each})
    return AblationStudy(loaded, task, sets, asked.replace)


def run_ablation(
    study: AblationStudy | HeadStudy[Any],
    options: AblateOptions,
    atlas: Atlas | None = None,
    tell: Progress = NO_PROGRESS,
    total: int | None = None,
    style: Style = Style(),
) -> AblationResult | Answered:
    """Run the study; with a folder, write there and draw. total: what it will take."""
    result: AblationResult | Answered
    if isinstance(study, AblationStudy):
        with tell.stage("direct effects"):
            study = replace(study, direct=direct_means(study.planned))
        result = AblationResult(study, run_study(study, options.out, options.force, tell, total), atlas)
    else:
        result = Answered(study, run_study(study, options.out, options.force, tell, total))
    if options.out is not None:
        with tell.stage("drawing"):
            result.draw(Path(options.out), style)
    return result


@dataclass(frozen=True, repr=False)
class AblationResult(StudyResult[AblationStudy, Ablation]):
    """What sets of heads cost a task; atlas: what named them, where there is one. See `Ablation`."""

    atlas: Atlas | None = None

    @property
    def title(self) -> str:
        return "ablation"

    def draw(self, folder: Path, style: Style = Style()) -> list[Path]:
        """Draw what each set costs, next to random ones, and a map of each head; the paths."""
        geometry, every = self.model.geometry, pairs(everything(self.model.geometry.unnamed))
        if not {head for heads in self.found.effects for head in heads} <= set(every):
            every = pairs(everything(geometry.changeable))
        return save_ablation(self.found, folder, every, self.atlas, style)
