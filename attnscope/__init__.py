"""attnscope: see, measure and verify what every attention head of a pretrained transformer attends to.

>>> import attnscope
>>> model = attnscope.load("demo")
>>> seen = attnscope.capture(model, "the financial bank is located on river bank")
>>> seen.weights[0]          # layer 0: (heads, queries, keys)
>>> seen.heads[0].score      # what its first head does
>>> seen.heatmap(1, 4)       # layer 1, head 4, drawn
>>> seen.export("runs/bank") # tables, figures, manifest.json

The commands are functions here: `scan`, `ablate`, `compare`, `batch`, `parity`, `explain`,
`knockout`, `patch`, `why`, `depth`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscope._version import __version__

if TYPE_CHECKING:
    from attnscope.api.ablate import ablate
    from attnscope.api.batch import batch
    from attnscope.api.capture import capture, from_tensors, from_weights, load, save_tensors, save_weights
    from attnscope.api.compare import compare
    from attnscope.api.depth import depth
    from attnscope.api.explain import explain
    from attnscope.api.knockout import knockout, patch
    from attnscope.api.parity import parity
    from attnscope.api.recording import recording
    from attnscope.api.scan import scan
    from attnscope.api.why import why
    from attnscope.errors import AttnscopeError
    from attnscope.figures import Style
    from attnscope.hooks.listen import listen
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.loading import wrap
    from attnscope.observe.observation import Observation
    from attnscope.observe.request import Request, View
    from attnscope.serve.client import connect

__all__ = [
    "AttnscopeError",
    "LoadedModel",
    "Observation",
    "Request",
    "Style",
    "View",
    "__version__",
    "ablate",
    "batch",
    "capture",
    "compare",
    "connect",
    "depth",
    "explain",
    "from_tensors",
    "from_weights",
    "knockout",
    "listen",
    "load",
    "parity",
    "patch",
    "recording",
    "save_tensors",
    "save_weights",
    "scan",
    "why",
    "wrap",
]

_HOMES = {
    "AttnscopeError": "attnscope.errors",
    "LoadedModel": "attnscope.model.loading",
    "Observation": "attnscope.observe.observation",
    "Request": "attnscope.observe.request",
    "Style": "attnscope.figures",
    "View": "attnscope.observe.request",
    "ablate": "attnscope.api.ablate",
    "batch": "attnscope.api.batch",
    "capture": "attnscope.api.capture",
    "compare": "attnscope.api.compare",
    "connect": "attnscope.serve.client",
    "depth": "attnscope.api.depth",
    "explain": "attnscope.api.explain",
    "from_tensors": "attnscope.api.capture",
    "from_weights": "attnscope.api.capture",
    "knockout": "attnscope.api.knockout",
    "patch": "attnscope.api.knockout",
    "listen": "attnscope.hooks.listen",
    "load": "attnscope.api.capture",
    "parity": "attnscope.api.parity",
    "recording": "attnscope.api.recording",
    "save_tensors": "attnscope.api.capture",
    "save_weights": "attnscope.api.capture",
    "scan": "attnscope.api.scan",
    "why": "attnscope.api.why",
    "wrap": "attnscope.model.loading",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `attnscope --help` never imports torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
