"""What is cut one at a time: heads, layers, windows of layers, kv heads, or each key alone."""

from __future__ import annotations

from collections.abc import Sequence

from attnscope.errors import UsageError
from attnscope.interventions.spec import Cut, Selection
from attnscope.model.geometry import Geometry
from attnscope.study.ablation.sets import head_set, portions
from attnscope.study.knockout.over import check_over, window_of
from attnscope.study.knockout.records import AskedCut, Case, key_name


def cuts_over(over: str, selection: Selection, geometry: Geometry, cases: Sequence[Case], name: str) -> list[AskedCut]:
    """The cuts; selection: the heads, by layer. name: of all of them together. Raises UsageError for keys of texts."""
    check_over(over)
    keys = tuple(one.keys for one in cases)
    whole = head_set(name, selection)
    if over == "none":
        return [AskedCut(Cut(name, whole.heads, keys))]
    if over in ("heads", "kv"):
        parts = portions(over, whole, geometry)
        return [AskedCut(Cut(one.name, one.heads, keys), one.layer, one.head) for one in parts]
    if over == "keys":
        if len(cases) > 1:
            raise UsageError("keys of several texts are not the same tokens", "give one text, or another {over}")
        return [AskedCut(Cut(key_name(cases[0], key), whole.heads, ((key,),))) for key in cases[0].keys]
    return _layers(selection, keys, window_of(over))


def _layers(selection: Selection, keys: tuple[tuple[int, ...], ...], width: int) -> list[AskedCut]:
    """A cut per layer, of so many layers around it; at both ends of fewer (Geva et al. 2023, figure 2)."""
    layers, found = sorted(selection), []
    for place, layer in enumerate(layers):
        near = layers[max(0, place - (width - 1) // 2) : place + width // 2 + 1]
        heads = tuple((one, head) for one in near for head in selection[one])
        name = f"L{near[0]}" + f"-{near[-1]}" * (len(near) > 1)
        found.append(AskedCut(Cut(name, heads, keys), layer))
    return found
