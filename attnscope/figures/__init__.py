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
    from attnscope.figures.curves import Course, Dots, SetCost, save_courses, save_depth, save_dots, save_sets
    from attnscope.figures.heads import head_maps, save_head_maps
    from attnscope.figures.metrics import save_metrics
    from attnscope.figures.overview import save_layer, save_layers, save_overview
    from attnscope.figures.pictures import Pairs, save_pairs, save_patches

__all__ = [
    "About",
    "Course",
    "Depth",
    "Dots",
    "Maps",
    "Pairs",
    "Panel",
    "Part",
    "PatchSheet",
    "Patches",
    "SetCost",
    "Style",
    "head_maps",
    "save_courses",
    "save_depth",
    "save_dots",
    "save_head_maps",
    "save_layer",
    "save_layers",
    "save_metrics",
    "save_overview",
    "save_pairs",
    "save_patches",
    "save_sets",
]

_HOME = {
    name: module
    for module, names in {
        "curves": ("Course", "Dots", "SetCost", "save_courses", "save_depth", "save_dots", "save_sets"),
        "heads": ("head_maps", "save_head_maps"),
        "metrics": ("save_metrics",),
        "overview": ("save_layer", "save_layers", "save_overview"),
        "pictures": ("Pairs", "save_pairs", "save_patches"),
    }.items()
    for name in names
}


def load_in_thread() -> None:
    """Load in another thread what draws: it takes as long as twenty pictures, and a forward pass leaves time for it."""
    Thread(target=load_drawing, name="loading what draws").start()


def load_drawing() -> None:
    """Load what draws a text."""
    for module in sorted({_HOME[name] for name in ("save_head_maps", "save_layers", "save_metrics", "save_overview")}):
        with suppress(ImportError):  # told where it is needed
            import_module(f"{__name__}.{module}")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
