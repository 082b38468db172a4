"""What a study of passes would do, and what that costs, before it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.intervene.passes import Passes
    from attnscope.intervene.sets import HeadSet
    from attnscope.model.loaded import LoadedModel


def rehearsed(
    loaded: LoadedModel,
    passes: Passes,
    sets: Sequence[HeadSet],
    what: str,
    quiet: bool,
    *,
    times: int = 1,
    before: int = 0,
) -> str:
    """What would be done, and its cost at most.

    what: how many sets of what kind, on how many texts. times: the sets that are run for each. before: tokens times
    layers of the passes that come first.
    """
    from attnscope.study.ablation.effects import operations, pass_seconds

    token_layers = before + passes.token_layers(sets) * times
    rows = sum(map(len, passes.task.rows)) * (1 + len(sets) * times)
    said = f"{what}: at most {token_layers} tokens x layers, about "
    said += f"{operations(loaded, token_layers, rows):.0e} operations"
    with output.progress("measuring a batch", None, quiet):
        seconds = token_layers * pass_seconds(passes, sets)
    return said + output.estimated(seconds)


def number_of(count: int, unit: str) -> str:
    """A number with its unit.

    >>> number_of(2, "text")
    '2 texts'
    """
    return f"{count} {unit}{'s' * (count != 1)}"
