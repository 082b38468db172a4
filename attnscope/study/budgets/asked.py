"""What a study of budgets may be asked, before a model is there."""

from __future__ import annotations

from attnscope.errors import UsageError
from attnscope.interventions.spec import written_budgets

OVER = ("none", "layers", "kv", "heads")
BELOW = 0.01  # in the unit of the effects: what a head may lose and still be listed as one that can bear the budget


def check_budgets(
    keep: str, over: str = "none", *, query: str | None = None, key: str | None = None, how: str = "mask"
) -> None:
    """Raise UsageError for what is no budget, and for what only a knockout of named keys is asked."""
    written_budgets(keep)
    for name, given in (("query", query), ("key", key)):
        if given is not None:
            raise UsageError(
                f"{name} does not apply to a budget, which chooses its keys itself", f"leave out {{{name}}} or {{keep}}"
            )
    if how != "mask":
        raise UsageError(
            "a budget gives the weight of lost keys to the rest of the row",
            f"leave out {{how={how}}} or {{keep}}",
        )
    if over not in OVER:
        raise UsageError(
            f"expected a budget over {', '.join(OVER[:-1])} or {OVER[-1]}, got {over[:20]!r}", "write {over=heads}"
        )


def check_no_budget(at: str | int | None, generate: int | None) -> None:
    """Raise UsageError where there is no budget, for what only a budget is asked."""
    for name, given in (("at", at), ("generate", generate)):
        if given is not None:
            raise UsageError(f"{name} needs a budget", f"leave out {{{name}}}, or add {{keep=top:64}}")


def check_below(below: float) -> None:
    """Raise UsageError for a limit that is no number above 0."""
    if not 0 < below < float("inf"):
        raise UsageError(f"expected a limit above 0 for what a head may lose, got {below}", "write 0.01")
