"""`attnscope rollout`: how much of each token's final state is attributed to each input token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from attnscope.cli import output
from attnscope.cli.groups import recorded
from attnscope.cli.heads import GROUPS
from attnscope.cli.options import Entries, Map, Printing, Relations, TextRun, Top
from attnscope.cli.relations import picture, say_rest
from attnscope.cli.signals import unwinding
from attnscope.cli.takes import takes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from attnscope.figures import Style
    from attnscope.measure.rollout import Rollout
    from attnscope.model.loading import LoadedModel
    from attnscope.observe import Observation
    from attnscope.text.prompt import Prompt, Span

EXAMPLES = (
    'attnscope rollout --text "the cat sat on the mat" --top-k 3 --out runs/rolled',
    "attnscope rollout --file README.md --truncate right --group sentences --sink mask --out runs/sentences",
)
SUM_TOLERANCE = 1e-4
LONGEST_LABEL = 24


@dataclass(frozen=True, kw_only=True)
class Units(Relations):
    """Which keys are listed, of which units."""

    group: Annotated[
        Literal["tokens", "words", "sentences"] | None,
        Option(help="Units: sum over keys, mean over queries (default: tokens, in runs if over 200)."),
    ] = None  # type: ignore[assignment]


@takes(TextRun, Top, Printing, Units, Map, file=GROUPS)
def rollout(asked: TextRun, top: Top, printing: Printing, units: Units, drawing: Map) -> int:
    """Attention rolled out: which tokens each token came from.

    How much of each token's state after the last layer is attributed to each input token: the product over all layers
    of the heads' mean plus the residual (Abnar & Zuidema 2020), ignoring what values and MLPs do. On a terminal the
    first --top rows are shown; in a pipe all of them are printed as csv. With --out, rollout.csv, a heatmap and
    manifest.json are written too.
    """
    format = output.wanted_format(printing.format)

    from attnscope.cli.single import observe_text, report_checks

    loaded, seen = observe_text(asked, Entries(), printing, metrics=(), rollout=units.group or "bins")
    rolled = seen.rollout
    assert rolled is not None
    seen.context["rollout"] = facts(loaded, rolled)
    table = rolled.table(units.keys_per_query, units.min_weight)
    if printing.out:
        from attnscope.cli.export import finish, writable
        from attnscope.tables import save

        folder, style = writable(printing.out), drawing.style()
        with unwinding():
            written = [save(table, folder / "rollout.csv"), draw(seen, units.group, folder, style)]
            finish(printing, loaded, seen, written, recorded(asked, top, printing, units, drawing))
    output.emit(table, format, lambda: picture(table, top.top))
    say_rest(table, format, top.top, printing.quiet)
    reported = report_checks(loaded, seen, printing.quiet)
    return max(reported, report_rollout(seen, rolled, units.group, printing.quiet))


def facts(loaded: LoadedModel, rolled: Rollout) -> dict[str, Any]:
    """What the manifest says of the rollout."""
    return {
        "layers": list(rolled.layers),
        "passed_over": [layer.index for layer in loaded.geometry.layers if layer.index not in rolled.layers],
        "units": len(rolled.units),
        "row_sum_error": rolled.row_sum_error,
    }


def report_rollout(seen: Observation, rolled: Rollout, group: str | None, quiet: bool) -> int:
    """Say what the rows stand for where they are not what one expects, and what did not hold; the exit code."""
    run = longest(rolled)
    if group is None and run > 1:
        output.talk(f"a row is a run of {run} tokens; --group tokens keeps them apart", quiet)
    if passed_over := seen.context["rollout"]["passed_over"]:
        output.talk(f"layers {passed_over} do not attend to tokens: the rollout passes them unchanged", quiet)
    if rolled.row_sum_error <= SUM_TOLERANCE:
        return 0
    output.talk(f"does not hold: rollout rows sum to 1 only within {rolled.row_sum_error:.2g}", quiet=False)
    return 1


def longest(rolled: Rollout) -> int:
    """Tokens of the longest unit."""
    return max(unit.stop - unit.start for unit in rolled.units)


def draw(seen: Observation, group: str | None, folder: Path, style: Style) -> Path:
    """rollout.png: units x units, put together where there are more than a map takes."""
    from attnscope.cli.export import bin_labels
    from attnscope.figures import Maps, save_head_maps

    rolled = seen.rollout
    assert rolled is not None
    values_GG, step = rolled.binned()
    if group is None:
        run, shown = longest(rolled), bin_labels(seen.prompt.labels, [unit.stop - unit.start for unit in rolled.units])
    else:
        run, shown = 1, labels(seen.prompt, rolled.units, step)
    rule = "sum over keys, mean over queries"
    maps = Maps(rolled.layers[-1], (0,), values_GG[None], shown, shown, run, rule if run > 1 else "", quantity="share")
    title = f"Rollout of {len(rolled.layers)} layers" + f", {step} {group} a cell" * (step > 1)
    path = folder / f"rollout.{style.image}"
    [written] = save_head_maps([(path, maps, 0)], style, title=lambda maps, index: title)
    return written


def labels(prompt: Prompt, units: Sequence[Span], step: int) -> tuple[str, ...]:
    """What stands beside each row of `step` units: the text of a short one, the positions that others span."""
    edges = [
        (units[start].start, units[min(start + step, len(units)) - 1].stop) for start in range(0, len(units), step)
    ]
    texts = ["".join(prompt.labels[start:stop]) for start, stop in edges]
    return tuple(
        text if step == 1 and (stop - start == 1 or len(text) <= LONGEST_LABEL) else f"{start}–{stop - 1}"
        for text, (start, stop) in zip(texts, edges, strict=True)
    )
