"""Values -> colours and printed numbers. H head, Q query, K key."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colorbar import Colorbar
from matplotlib.colors import (
    Colormap,
    LinearSegmentedColormap,
    ListedColormap,
    LogNorm,
    Normalize,
    PowerNorm,
    is_color_like,
)
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from attnscope.errors import UsageError, nearest
from attnscope.figures.style import OPEN, SIGNED, TAKEN, Quantity, Style
from attnscope.utils import display as cells

BLANK = "#efefef"  # a key the query cannot see: light, so that it is never mistaken for a small weight
DARK_INK, LIGHT_INK = "#262626", "#ffffff"
LOWEST_FLOOR = 1e-6
LIGHT_CELL = 0.408  # seaborn's threshold on the relative luminance
# Perceptual and safe for colour-blind readers. A signed one is light at 0, as paper is.
CMAP, SIGNED_CMAP = "viridis", "RdBu_r"
NAMES: dict[Quantity, str] = {
    "weight": "attention weight",
    "norm": "norm of what the key writes",
    "share": "share of the token",
    "logit": "logit",
    "difference": "difference of attention weights",
    "signed": "signed weight",
    "channel": "signed channel weight",
    "size": "mean |w| over channels",
}
LEVEL = ("auto", "linear")  # scales on which equal steps are equal: figures choose before they draw
SMALL = 0.1  # of the largest value: two decimals show no more than one digit of it
ROUND = (1, 2, 5, 10)  # tick steps that a reader counts in


@dataclass(frozen=True)
class Limits:
    """The two ends of a colour scale, and whether values lie beyond them."""

    low: float
    high: float
    below: bool = False
    above: bool = False


def find_limits(
    values: Iterable[np.ndarray], style: Style, quantity: Quantity = "weight", *, alone: int | None = None
) -> Limits:
    """One scale for all the arrays (... x queries x keys).

    Rows with one visible key (where more are visible than are drawn, the first `alone`) are 1 whatever the head does,
    and would set every scale: they are left out and take the top colour. What has a sign reaches equally far to both
    sides of 0; weights start at 0, or on a log scale at the style's floor, without one at the power of ten below
    the least weight, 1e-6 at the lowest. Raises UsageError for a log or square-root scale on logits, which are
    logarithms.
    """
    if quantity == "logit" and style.scale not in LEVEL:
        raise UsageError(
            f"a {style.scale} scale needs weights, got scores", "scores are logarithms already: use scale linear"
        )
    arrays = [np.asarray(array, dtype=np.float64) for array in values]
    everything = np.concatenate([array[np.isfinite(array)] for array in arrays] or [np.zeros(0)])
    if not everything.size:
        return Limits(0.0, 1.0)
    if quantity in SIGNED:
        reach = float(np.abs(everything).max()) or 0.5
        return Limits(-reach, reach)
    # Only the rows in which a head has a choice set the scale.
    parts = []
    for array in arrays:
        chosen = array if alone is None else array[..., alone:, :]
        choice = np.isfinite(chosen) & (alone is not None or seen(chosen).sum(-1, keepdims=True) >= 2)
        parts.append(chosen[choice])
    compared = np.concatenate(parts)
    high = float(compared.max()) if compared.size and compared.max() > 0 else float(everything.max()) or 1.0
    if 0.9 <= high <= 1:
        high = 1.0  # the end of the scale that a reader expects
    low = 0.0
    if style.scale == "log":
        positive = everything[everything > 0]
        decade = 10.0 ** math.floor(math.log10(positive.min())) if positive.size else LOWEST_FLOOR
        low = style.floor or max(LOWEST_FLOOR, decade)
        low = low if low < high else high / 10
    return Limits(low, high, below=bool((everything < low).any()), above=bool((everything > high).any()))


def seen(values: np.ndarray) -> np.ndarray:
    """Where a query sees a key, drawn or taken out."""
    return np.isfinite(values) | (values == TAKEN)


def sink_limits(values: np.ndarray, quantity: Quantity) -> Limits:
    """The strip's own scale: logits and norms from least to greatest, anything else from 0 to 1."""
    finite = values[np.isfinite(values)]
    if quantity not in OPEN or not finite.size:
        return Limits(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    return Limits(low, high) if high > low else Limits(low - 0.5, low + 0.5)


def make_norm(limits: Limits, style: Style) -> Normalize:
    """Limits -> the norm that a mesh or an image takes: of equal steps where values have a sign."""
    if style.scale == "sqrt" and limits.low >= 0:
        return PowerNorm(0.5, limits.low, limits.high, clip=True)
    kind = LogNorm if style.scale == "log" and limits.low > 0 else Normalize
    return kind(limits.low, limits.high, clip=True)


def drawable(values: np.ndarray, limits: Limits, style: Style) -> np.ma.MaskedArray:
    """Blank where not finite; on a log scale the zeros are lifted to the floor, where they have a colour."""
    masked = np.ma.masked_invalid(np.asarray(values, dtype=np.float64))
    return np.ma.maximum(masked, limits.low) if style.scale == "log" and limits.low > 0 else masked


def cmap_of(style: Style, quantity: Quantity) -> Colormap:
    """The style's colour map, or the one for what the values are; one of a style file is for values of one sign."""
    if quantity in SIGNED:
        return find_cmap(style.cmap or SIGNED_CMAP)
    of_sheet = style.sheet.get("image.cmap") if style.sheet else None
    return find_cmap(style.cmap or of_sheet or CMAP)


def find_cmap(name: str) -> Colormap:
    """The colour map of that name, or through these colours, by commas; blank cells are transparent.

    Raises UsageError with the nearest name where there is none.

    >>> find_cmap("white,#0072b2").N
    256
    """
    if "," in name:
        colours = [part.strip() for part in name.split(",")]
        wrong = next((colour for colour in colours if not is_color_like(colour)), None)
        if wrong is not None:
            raise UsageError(f"{wrong!r} is not a colour", "write names or #rrggbb, as in white,#0072b2")
        return LinearSegmentedColormap.from_list(name, colours).with_extremes(bad=(0, 0, 0, 0))
    if name not in mpl.colormaps:
        near = nearest(name, mpl.colormaps)
        others = "name one of matplotlib's, such as viridis, or colours by commas: white,#0072b2"
        raise UsageError(f"no colour map {name!r}", f"did you mean {near}?" if near else others)
    return mpl.colormaps[name].with_extremes(bad=(0, 0, 0, 0))


def greys_of(quantity: Quantity) -> tuple[str, str]:
    """What lies beneath the cells of a map, and what was taken out of it: each darker where 0 is light."""
    return ("#c9c9c9", "#a3a3a3") if quantity in SIGNED else (BLANK, "#cccccc")


def hatch(quantity: Quantity) -> dict[str, Any]:
    """Hatching over colours, as keywords of a patch: light, but dark where 0 is light."""
    colour = "#26262659" if quantity in SIGNED else "#ffffff88"
    return {"fill": False, "hatch": "////", "edgecolor": colour, "linewidth": 0}


def blank_cmap(quantity: Quantity) -> Colormap:
    """Those two greys, for 0 and 1."""
    return ListedColormap(list(greys_of(quantity))).with_extremes(bad=(0, 0, 0, 0))


def luminance(rgba: np.ndarray) -> np.ndarray:
    """Relative luminance (W3C) of colours, ... x 4 in 0 to 1."""
    rgb = rgba[..., :3]
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def ink_on(rgba: np.ndarray) -> np.ndarray:
    """The text colour that is read best on each colour."""
    return np.where(luminance(rgba) > LIGHT_CELL, DARK_INK, LIGHT_INK)


def cell_number(value: float, style: Style, decimals: int = 2, largest: float = 1.0) -> str:
    """What is printed in a cell: so many decimals, small weights on a log scale as 3e-4.

    Where the largest is small too they are so on any scale, down to a thousandth of it.
    """
    if style.scale == "log" and value < 0.01:
        return cells.power(value)
    if largest < SMALL and largest / 1000 <= abs(value) < 0.01:
        return cells.typeset(cells.power(value))
    return cells.printed(value, decimals)


def quantity_name(quantity: Quantity, style: Style) -> str:
    """What the colours mean, as it is written along the colour bar."""
    if style.scale == "log":
        return f"{quantity}, log scale"
    if style.scale == "sqrt":
        return f"{quantity}, square-root scale"
    return NAMES[quantity]


def label_colourbar(bar: Colorbar, limits: Limits, style: Style, label: str) -> None:
    """Plain ticks: matplotlib's own log ticks are mathtext, which figures never parse."""
    bar.outline.set_linewidth(0)
    bar.set_label(label)
    if style.scale in LEVEL:
        bar.locator = MaxNLocator(5, steps=ROUND)
        bar.formatter = FuncFormatter(lambda value, _: cells.typeset(f"{value:.4g}"))
        bar.update_ticks()
        return
    if style.scale == "log":
        first, last = math.floor(math.log10(limits.low)), math.floor(math.log10(limits.high) + 1e-9)
        digits = (1, 2, 5) if last - first < 2 else (1,)
        marks = {float(f"{digit}e{power}") for power in range(first, last + 1) for digit in digits}
        ticks = sorted({limits.low, *(mark for mark in marks if limits.low * 1.001 < mark <= limits.high * 1.001)})
    else:
        # Round numbers from the end of the scale down to 0, no two closer than a tenth of a square-root scale.
        high, ticks = limits.high, list[float]()
        power = math.floor(math.log10(high))
        rounds = [digit * 10.0**p for p in range(power, power - 3, -1) for digit in (5, 2, 1)]
        for mark in [*(mark for mark in rounds if mark <= high * 1.001), 0.0]:
            if not ticks or math.sqrt(ticks[-1]) - math.sqrt(mark) >= 0.1 * math.sqrt(high):
                ticks.append(mark)
        ticks.reverse()

    def label_of(value: float, _: object) -> str:
        plain = f"{value:g}" if value >= 0.01 else cells.power(value)
        return f"≤{plain}" if limits.below and math.isclose(value, limits.low) else plain

    bar.locator, bar.formatter, bar.minorlocator = FixedLocator(ticks), FuncFormatter(label_of), FixedLocator([])
    bar.update_ticks()


def colourbar_kws(limits: Limits) -> dict[str, Any]:
    """A pointed top says that rows with one visible key lie above the scale."""
    return {"extend": "max" if limits.above else "neither", "extendfrac": 0.03}
