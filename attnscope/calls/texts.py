"""Several texts through one model, in padded passes: an observation each, as if each were read alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnscope.batch.batches import batch_limit, batches
from attnscope.hooks.engines import engine_named
from attnscope.model.loaded import LoadedModel, pads
from attnscope.model.selection import SEQ2SEQ
from attnscope.observe.choice import FASTER_SCORES, kernel_reads
from attnscope.observe.collect import observe
from attnscope.observe.collectors.maps import drawn_whole
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec as Ask
from attnscope.observe.request import TextInputs as Asked
from attnscope.observe.run import Run, prepare, read

KERNEL = "numba"


def read_texts(loaded: LoadedModel, asks: Sequence[Ask]) -> list[Observation]:
    """What is asked of each text, in order; texts of like length are read in one pass, within what memory allows.

    The asks differ in their text alone. Raises as `run.read`, which reads those that need a pass of their own.

        >>> read_texts(load(), [Ask("the bank"), Ask("the river bank")])
    """
    first = asks[0]
    alone = first.verify or first.keep.rollout or first.keep.operands or first.generate
    if len(asks) == 1 or alone or loaded.geometry.task == SEQ2SEQ or loaded.geometry.over_patches:
        return [read(loaded, ask) for ask in asks]
    runs = [prepare(loaded, ask, compared=place == 0) for place, ask in enumerate(asks)]
    found: dict[int, Observation] = {}
    apart = [
        (run.engine.name, len(run.prompt) * (not pads(loaded.model)), _place(run, at)) for at, run in enumerate(runs)
    ]
    for group in batches([len(run.prompt) for run in runs], batch_limit(loaded), apart):
        found |= dict(zip(group, _together([runs[place] for place in group], first), strict=True))
    return [found[place] for place in range(len(runs))]


def _place(run: Run, at: int) -> int:
    """What keeps a text apart from others: its own place, with binned maps or other inputs; else -1."""
    medium, request = run.prompt.medium, run.request
    binned = request.maps is not None and not drawn_whole(Asked(run.prompt, run.chosen), request)
    return at if binned or medium.inputs or medium.unasked else -1


def _together(runs: Sequence[Run], ask: Ask) -> list[Observation]:
    """One pass over texts that may be read side by side; what does not hold there is read text by text."""
    if len(runs) == 1:
        return [runs[0].observe()]
    one, scores = runs[0], sum(len(run.prompt) ** 2 for run in runs)
    engine, heads = one.engine, sum(layer.heads for layer in one.loaded.geometry.attention_layers)
    if ask.engine == "auto" and heads * scores >= FASTER_SCORES and kernel_reads(one.loaded, one.request):
        engine = engine_named(KERNEL)
    prompts, chosen = [run.prompt for run in runs], [run.chosen for run in runs]
    seen = observe(one.loaded, prompts, one.request, engine=engine, chosen=chosen)
    if seen[0].failures:
        return [run.observe() for run in runs]
    pairs = zip(seen, runs, strict=True)
    return [replace(of.named(run.named_by), facts={**of.facts, **run.facts}, ask=run.ask) for of, run in pairs]
