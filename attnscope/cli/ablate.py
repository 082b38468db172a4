"""`attnscope ablate`: what a task costs without some heads, alone, together, and against random sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.ablate_options import Measured, On, Taken
from attnscope.cli.ablate_other import Otherwise, answered
from attnscope.cli.ablate_tables import notes, sets_sheet
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.scan import Studied
from attnscope.cli.takes import takes
from attnscope.errors import InputError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.intervene.intervention import HeadSet
    from attnscope.intervene.task import Task
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.ablation.effects import HeadSets
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.atlas.scan import Plan

EXAMPLES = (
    "attnscope ablate demo --select 3.0-1 --sequences 32 --out runs/ablate",
    "attnscope ablate demo --select 3.0-1,1.5 --pairs --sequences 32",
    "attnscope ablate demo --prune --dry-run",
    "attnscope ablate demo --method gradient --sequences 32",
)
EACH = "each head"
PASSED = "tokens x layers"
PROBED = ("repeated", "offsets")  # trials that name the sets where nobody does


@takes(Studied, Taken, On, Otherwise, Measured, Look, file=GROUPS)
def ablate(studied: Studied, taken: Taken, on: On, otherwise: Otherwise, measured: Measured, look: Look) -> int:
    """What is lost without some heads, alone and together.

    A head's output is replaced before the output projection while the model predicts, and the loss compared with that
    of the same pass's intact rows, in nats per token. Heads back each other up: alone each may cost nothing, and all
    together everything. Sets are the roles of an atlas, those of a file, or a selection and each of its heads; without
    any, probes are run first to find the roles.
    """
    format = output.wanted_format(measured.format)
    otherwise.check(taken)
    loaded = _loaded(studied, measured)
    task, whole = on.task(loaded), otherwise.asks_all and taken.nothing
    atlas = None if whole or taken.sets is not None else _kept(loaded, taken.atlas)
    if atlas is None and taken.nothing and not whole:
        if on.dry_run:
            output.show(_before_probes(loaded, task, on))
            return 0
        atlas = _probed(loaded, on, measured.quiet)
    style = look.style(command_line("ablate", studied, taken, on, otherwise, look))
    named = [] if whole else _named(loaded, taken, atlas)
    if otherwise.question is not None:
        heads = sorted({head for one in named for head in one.heads})
        return answered(loaded, task, heads, otherwise, (taken, on, measured, style))

    from attnscope.intervene.passes import Passes
    from attnscope.selection import everything, pairs
    from attnscope.show.ablation import save_ablation
    from attnscope.study.ablation.direct import direct_means
    from attnscope.study.ablation.effects import ablate as ablated_by
    from attnscope.study.ablation.effects import ablation_cost, pass_seconds

    asked = _with_random(loaded, named, taken, on.seed)
    token_layers, operations = (on.of_all(one, task) for one in ablation_cost(loaded, task, asked, taken.replace))
    plan = f"{len(asked.sets)} sets on {on.of_all(len(task), task)} sequences of {task.name}"
    plan += f": {token_layers} tokens x layers, about {operations:.0e} operations"
    if on.dry_run:
        with output.progress("measuring a batch", None, measured.quiet):
            seconds = token_layers * pass_seconds(Passes.planned(loaded, task, taken.replace), asked.sets)
        output.show(plan + output.estimated(seconds))
        return 0
    output.talk(plan, measured.quiet)
    with unwinding():
        with output.progress("direct effects", None, measured.quiet):
            direct = direct_means(Passes.planned(loaded, task, taken.replace))
        with output.progress(f"{len(asked.sets)} sets", token_layers, measured.quiet, PASSED) as advance:
            found = ablated_by(
                loaded,
                task,
                asked,
                taken.replace,
                measured.out,
                force=measured.force,
                direct=direct,
                advance=advance,
            )
        if measured.out is not None:
            with output.progress("drawing", None, measured.quiet):
                save_ablation(found, measured.out, pairs(everything(loaded.geometry.heads_by_layer)), atlas, style)
    output.emit(found.table(), format, lambda: sets_sheet(found, on.top))
    for line in notes(found):
        output.talk(line, measured.quiet)
    return 0


def _loaded(studied: Studied, measured: Measured) -> LoadedModel:
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load

    output.complain_through_talk(measured.quiet)
    silence_libraries(measured.verbose)
    with output.progress(f"loading {studied.asked}", None, measured.quiet):
        loaded = load(studied.load_options())
    output.talk(f"{loaded.name}  {loaded.device}  {loaded.dtype}  {loaded.geometry.in_words}", measured.quiet)
    return loaded


def _probes(loaded: LoadedModel, seed: int) -> Plan:
    """The probes of repetition and offsets, as `scan` runs them."""
    from attnscope.study.atlas.scan import plan

    planned = plan(loaded, seed=seed)
    return replace(planned, trials=[one for one in planned.trials if one.name.startswith(PROBED)])


def _before_probes(loaded: LoadedModel, task: Task, on: On) -> str:
    """What is known of the cost before the probes name the sets."""
    layers = len(loaded.geometry.layers)
    return (
        f"probes find the roles: {_probes(loaded, on.seed).tokens} tokens x {layers} layers; then per set and random "
        f"set at most {on.of_all(task.tokens, task)} tokens x {layers} layers"
    )


def _named(loaded: LoadedModel, taken: Taken, atlas: Atlas | None) -> Sequence[HeadSet]:
    """The sets that were asked for: of a file, a selection and each of its heads, or a set per role of the atlas."""
    from attnscope.study.ablation.sets import of_roles, parts, read_sets, selected

    if taken.sets is not None:
        return read_sets(taken.sets, loaded.geometry)
    if taken.select is not None:
        together = selected(taken.select, loaded.geometry, atlas.by_role() if atlas else None)
        each = parts(together, loaded.geometry, taken.by == "kv")
        return [together, *(one for one in each if one.heads != together.heads)]
    assert atlas is not None
    found = of_roles(atlas.roles, list(atlas.by_role()))
    if not found:
        raise InputError("no head has a role", "name heads with --select or --sets")
    return found


def _kept(loaded: LoadedModel, folder: Path | None) -> Atlas | None:
    """The atlas of a folder, or the one beside the model; None without one."""
    from attnscope.selection import everything, pairs
    from attnscope.study.atlas.atlas import atlas_of

    atlas = atlas_of(loaded, folder)
    if atlas is not None and set(atlas.heads) != set(pairs(everything(loaded.geometry.heads_by_layer))):
        raise InputError("the atlas is of a model with other heads", "scan this one")
    return atlas


def _probed(loaded: LoadedModel, on: On, quiet: bool) -> Atlas:
    """What the probes find."""
    from attnscope.study.atlas.scan import scan

    planned, layers = _probes(loaded, on.seed), len(loaded.geometry.layers)
    output.talk(f"no sets were named: probes find the roles, {planned.tokens} tokens x {layers} layers", quiet)
    with unwinding(), output.progress("reading probes", planned.tokens, quiet, "tokens") as advance:
        return scan(loaded, planned, advance=advance)


def _with_random(loaded: LoadedModel, named: Sequence[HeadSet], taken: Taken, seed: int) -> HeadSets:
    """The sets with their random sets, and each head or kv group alone where that was asked for."""
    from attnscope.study.ablation.effects import HeadSets

    by_kv = taken.by == "kv"
    asked = HeadSets.of(named, loaded.geometry, by_kv=by_kv, seed=seed, random=taken.random, controls=taken.controls)
    return replace(asked, alone={**asked.alone, EACH: _each_head(loaded, taken)}) if taken.each else asked


def _each_head(loaded: LoadedModel, taken: Taken) -> Sequence[HeadSet]:
    """Every head of the model, or every kv group."""
    from attnscope.selection import everything
    from attnscope.study.ablation.sets import head_set, parts

    return parts(head_set(EACH, everything(loaded.geometry.heads_by_layer)), loaded.geometry, taken.by == "kv")
