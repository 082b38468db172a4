"""Whether a model is causal: by its config and class, and as it is heard over a few tokens.

Shapes: B text, T token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnscope.errors import ModelError
from attnscope.seam.engines import UNCHECKED
from attnscope.seam.listen import listen
from attnscope.seam.report import turned

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

TOKENS = 3  # as few as show a window of two keys, and what sees ahead of it


def check_causal(loaded: LoadedModel, what: str) -> None:
    """Raise ModelError where `what` is for a causal model, and this one is none or is heard to look both ways.

    And where `what` reads texts as they are, and an adapter puts tokens before them.

    >>> check_causal(attnscope.load("demo"), "a scan")
    """
    loaded.check_task(what)
    loaded.check_bare(what)
    ids_BT = torch.arange(TOKENS, device=loaded.device)[None] % (loaded.embeddings or TOKENS)
    report = listen(
        loaded.model, ids_BT, lambda call: None, engine=UNCHECKED, windows=loaded.geometry.windows, computed=False
    )
    for line in turned(report.calls):
        raise ModelError(f"{what} is for a causal model, and {loaded.name} is none: {line}", "choose another")
