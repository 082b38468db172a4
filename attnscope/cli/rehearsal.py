"""What a study of passes would do, and what that costs, before it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.intervene.intervention import HeadSet
    from attnscope.intervene.passes import Passes
    from attnscope.model.loaded import LoadedModel


def rehearsed(
    loaded: LoadedModel,
    passes: Passes,
    sets: Sequence[HeadSet],
    what: str,
    texts: int,
    unit: str,
    quiet: bool,
    times: int = 1,
) -> str:
    """What would be done, and its cost at most. what: how many sets of what kind; times: sets that are run for each."""
    from attnscope.study.ablation.effects import operations, pass_seconds

    count = f"1 {unit}" if texts == 1 else f"{texts} {unit}s"
    token_layers = passes.token_layers(sets) * times
    rows = sum(map(len, passes.task.rows)) * (1 + len(sets) * times)
    said = f"{what} {count}: at most {token_layers} tokens x layers, "
    said += f"about {operations(loaded, token_layers, rows):.0e} operations"
    with output.progress("measuring a batch", None, quiet):
        seconds = token_layers * pass_seconds(passes, sets)
    return said + output.estimated(seconds)
