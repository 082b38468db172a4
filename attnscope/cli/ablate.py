"""`attnscope ablate`: what a task costs without some heads, alone, together, and against random sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.ablate_options import Measured, On, Taken
from attnscope.cli.ablate_other import Otherwise, print_answer
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import command_line, fill
from attnscope.cli.heads import GROUPS
from attnscope.cli.scan import Studied
from attnscope.cli.study import show_cost
from attnscope.cli.takes import takes
from attnscope.utils import display as cells
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.interventions.spec import Task
    from attnscope.model.loaded import LoadedModel

EXAMPLES = (
    "attnscope ablate demo --select @previous-token --sequences 32 --out runs/ablate",
    "attnscope ablate demo --select 3.0-1,1.5 --pairs --sequences 32",
    "attnscope ablate demo --prune --dry-run",
    "attnscope ablate demo --method gradient --sequences 32",
)


@takes(Studied, Taken, On, Otherwise, Measured, Look, file=GROUPS)
def ablate(studied: Studied, taken: Taken, on: On, otherwise: Otherwise, measured: Measured, look: Look) -> int:
    """What is lost without some heads, alone and together.

    A head's output is replaced before the output projection while the model predicts, and the loss compared with that
    of the same pass's intact rows, in nats per token. Heads back each other up: alone each may cost nothing, and all
    together everything. Sets are the roles of an atlas, those of a file, or a selection and each of its heads; without
    any, probes are run first to find the roles.
    """
    output.wanted_format(measured.format)  # what it refuses is refused before the work
    otherwise.check(taken)
    loaded = _loaded(studied, measured)

    from attnscope.api.ablate import AblateOptions, atlas_named, loss_task, named_sets, run_ablation, study_of

    asked = fill(AblateOptions, taken, **_of(on), **_of(otherwise), out=measured.out, force=measured.force)
    task, whole = loss_task(loaded, on.read_texts(), asked, on.drawn), otherwise.asks_all and taken.nothing
    if on.dry_run and taken.nothing and not whole and atlas_named(loaded, None) is None:
        output.show(_before_probes(loaded, task, on))
        return 0
    style = look.style(command_line("ablate", studied, taken, on, otherwise, look))
    tell = output.Talk(measured.quiet)
    with unwinding():
        heads = taken.sets if taken.sets is not None else taken.select
        named, atlas = ([], None) if whole else named_sets(loaded, heads, asked, tell)
    study = study_of(loaded, task, named, asked)
    cost = study.cost(lambda count: on.of_all(count, task))
    if on.dry_run:
        show_cost(cost, measured.quiet)
        return 0
    output.talk(cost.line, measured.quiet)
    with unwinding():
        result = run_ablation(study, asked, atlas, tell, cost.steps, style)
    return print_answer(result.found, on, measured)


def _of(group: On | Otherwise) -> dict[str, Any]:
    """The options of a group that the library has under the same name."""
    names = ("on", "sequences", "seed", "pairs", "prune", "method")
    return {name: getattr(group, name) for name in names if hasattr(group, name)}


def _loaded(studied: Studied, measured: Measured) -> LoadedModel:
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load

    output.complain_through_talk(measured.quiet)
    silence_libraries(measured.verbose)
    with output.progress(f"loading {cells.model_name(studied.asked)}", None, measured.quiet):
        loaded = load(studied.load_options())
    output.talk(loaded.line, measured.quiet)
    return loaded


def _before_probes(loaded: LoadedModel, task: Task, on: On) -> str:
    """What is known of the cost before the probes name the sets."""
    from attnscope.api.ablate import probes_of

    layers = len(loaded.geometry.layers)
    return (
        f"probes find the roles: {probes_of(loaded, on.seed).tokens} tokens x {layers} layers; then per set and random "
        f"set at most {on.of_all(task.tokens, task)} tokens x {layers} layers"
    )
