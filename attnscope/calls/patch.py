"""`attnscope.patch`: what an answer loses where heads are as in another text, and what that gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.calls.knockout import chosen_heads
from attnscope.errors import UsageError, hints_of
from attnscope.interventions.spec import METHODS, OVER, WHAT
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.studies.patching import AskedPair, PatchPlan, PatchStudy

if TYPE_CHECKING:
    from attnscope.interventions.spec import Method, Over, Texts
    from attnscope.interventions.spec import PatchTarget as What
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.atlas import HeadNames
    from attnscope.studies.patching import PatchedPairs


@hints_of(LoadOptions)
def patch(
    model: LoadedModel,
    text: Texts,
    corrupted: str | Sequence[int] | None = None,
    *,
    at: str | int | None = None,
    answer: str | Sequence[int] | None = None,
    foil: str | Sequence[int] | None = None,
    what: What = "output",
    over: Over = "none",
    select: str | None = None,
    method: Method = "measure",
    random: int = 100,
    seed: int = 0,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    atlas: HeadNames | Path | str | None = None,
    out: Path | str | None = None,
    force: bool = False,
) -> PatchedPairs:
    """What an answer loses where heads are as in the corrupted text (Wang et al. 2022, arXiv 2211.00593).

    text, corrupted: two texts, or token ids of both; or records of {"text", "corrupted", "at", "answer", "foil"}, each
    of which may leave out what all share. at: tokens of the text, all that have a partner in the corrupted one without
    it. answer: what is to follow both, the model's own next token of the text without it; with a foil the effect is the
    fall of logit(answer) - logit(foil), else nats. what: "output", "pattern", "key", "value". over: what is patched
    at a time: "none", "heads", "kv", "layers", "positions", "layers,positions". method: "measure" runs every patch,
    "gradient" estimates all from one backward pass and runs a few. random: sets of other heads to compare with, where
    all are patched together. out: a folder for table and facts, where a stopped run resumes.

    Returns what was measured: `table()` has a row per patch. Raises InputError for texts that cannot be a pair,
    ModelError for a family that attends outside the attention interface.

        >>> attnscope.patch(model, "the bank of the river, the", "the bank of the field, the", over="heads").table()
    """
    check_loaded(model)
    # A wrong word is refused here: a type is of no help to a program that is not checked.
    for name, value, known in (("what", what, WHAT), ("over", over, OVER), ("method", method, METHODS)):
        if value not in known:
            raise UsageError(
                f"{name}: expected one of {', '.join(known)}, got {str(value)[:20]!r}", f"use {known[0]!r}"
            )
    # A record may leave out what all pairs share.
    shared = {"corrupted": corrupted, "at": None if at is None else str(at), "answer": answer, "foil": foil}
    asked = AskedPair.of(text, {**shared, "define": define or {}, "chat": chat})
    plan = PatchPlan(what, over, chosen_heads(model, select, atlas), select or PatchPlan.name, method, random, seed)
    return PatchStudy.of(model, asked, plan).run(None if out is None else Path(out), force=force)
