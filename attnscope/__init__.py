"""attnscope: see, measure and verify what every attention head of a pretrained transformer attends to.

>>> import attnscope
>>> model = attnscope.load("demo")
>>> seen = attnscope.capture(model, "the financial bank is located on river bank")
>>> seen.weights[0]          # layer 0: (heads, queries, keys)
>>> seen.heads[0].score      # what its first head does
>>> seen.heatmap(1, 4)       # layer 1, head 4, drawn
>>> seen.export("runs/bank") # tables, figures, manifest.json
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscope._version import __version__

if TYPE_CHECKING:
    from attnscope.api import capture, knockout, load
    from attnscope.errors import AttnscopeError
    from attnscope.figures import Style
    from attnscope.keep.view import View
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.loading import wrap
    from attnscope.observation import Observation
    from attnscope.observe import Request
    from attnscope.seam.listen import listen

__all__ = [
    "AttnscopeError",
    "LoadedModel",
    "Observation",
    "Request",
    "Style",
    "View",
    "__version__",
    "capture",
    "knockout",
    "listen",
    "load",
    "wrap",
]

_HOMES = {
    "AttnscopeError": "attnscope.errors",
    "LoadedModel": "attnscope.model.loading",
    "Observation": "attnscope.observation",
    "Request": "attnscope.observe",
    "Style": "attnscope.figures",
    "View": "attnscope.keep.view",
    "capture": "attnscope.api",
    "knockout": "attnscope.api",
    "listen": "attnscope.seam.listen",
    "load": "attnscope.api",
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
