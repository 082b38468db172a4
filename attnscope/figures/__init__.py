"""Matrices -> figures: raster for maps, seaborn for curves. Numpy arrays in, files out: no model and no torch here.

`About`, `Style`, `Maps`, `Part` and `Panel` are light; what draws loads matplotlib, and seaborn, only when it is first
asked for.
"""

from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

from attnscope.figures.style import About, Depth, Maps, Panel, Part, Patches, PatchSheet, Style

if TYPE_CHECKING:
    from attnscope.figures.curves import SetCost, save_depth, save_sets
    from attnscope.figures.heads import head_maps, save_head_maps
    from attnscope.figures.metrics import save_metrics
    from attnscope.figures.overview import save_layer, save_layers, save_overview
    from attnscope.figures.pictures import save_patches

__all__ = ["About", "Depth", "Maps", "Panel", "Part", "PatchSheet", "Patches", "Style"]
__all__ += ["head_maps", "save_head_maps", "save_layer", "save_layers", "save_metrics", "save_overview"]
__all__ += ["SetCost", "save_depth", "save_patches", "save_sets"]

OF_A_TEXT = ("heads", "metrics", "overview")  # what draws a text; the others load several times as long


def load_in_thread() -> None:
    """Load in another thread what draws: it takes as long as twenty pictures, and a forward pass leaves time for it."""
    Thread(target=load_drawing, name="loading what draws").start()


def load_drawing() -> None:
    """Load what draws a text."""
    for module in OF_A_TEXT:
        with suppress(ImportError):  # told where it is needed
            import_module(f"{__name__}.{module}")


def __getattr__(name: str) -> Any:
    for module in (*OF_A_TEXT, "pictures", "curves") if name in __all__ else ():
        home = import_module(f"{__name__}.{module}")
        if hasattr(home, name):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
