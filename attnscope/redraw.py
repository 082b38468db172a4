"""A finished run drawn again from its folder, with other looks: an observation as its tables tell it.

    seen = kept_run(Path("runs/bank"))
    drawings(seen)[""].draw(Path("pictures"), style=Style(cmap="magma"))

Metrics are drawn from heads.csv, maps from relations.csv where it lists every weight. What the tables do not hold (what
uniform attention scores, how many rows a metric stands on) is not drawn. No model is loaded.

Shapes: N head, T token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.drawing import coarser
from attnscope.errors import UsageError
from attnscope.folder.manifest import TARGET
from attnscope.keep.columns import HeadColumns, Score
from attnscope.keep.layers import LayerKey, PerLayer
from attnscope.keep.records import LayerMaps
from attnscope.keep.view import View
from attnscope.measure.binned import MAP_SIDE, Cells
from attnscope.measure.metrics import KNOWN
from attnscope.observation import Observation
from attnscope.seam.report import CaptureReport
from attnscope.viewer.kept import KeptSide, StackHead

MOST = 1 << 12  # heads of a layer: a number beyond is no head
ENOUGH = 1 << 30  # rows of a text, where nothing says how many there are
AGAIN = "read the text again: attnscope heatmap --from {}"


def kept_run(folder: Path, *, sink_apart: bool = False) -> Observation:
    """The run of a folder; its maps are None where relations.csv does not list every weight.

    sink_apart: whether key 0 of a long text keeps a column of its own. Raises UsageError for a folder that is damaged,
    and for one of several stacks or of means over kv heads, whose tables are read by nothing yet.
    """
    side = KeptSide(folder, AGAIN.format(folder))
    if TARGET in side.manifest or len({stack for (stack, _), _ in side.places}) > 1:
        raise UsageError(f"{folder} is a run of several stacks", side.otherwise)
    counts: dict[LayerKey, int] = defaultdict(int)
    for (stack, layer), head in side.places:
        counts[LayerKey(layer, stack)] = max(counts[LayerKey(layer, stack)], head + 1)
    if max(counts.values()) > MOST:
        raise UsageError(f"{folder} names heads that no model has", "name the folder of a finished run")
    maps = _maps(side, sink_apart)
    return Observation(
        queries=side.prompt,
        keys=side.prompt,
        columns=_columns(side, counts),
        view=View(),
        group=None,
        support=PerLayer({key: defaultdict(lambda: ENOUGH) for key in counts}),
        visible=PerLayer(dict.fromkeys(counts, "")),
        received=np.zeros(len(side.prompt)),
        report=CaptureReport(),
        kv_of=PerLayer({key: (count, 1 + _last_kv_head(side, key)) for key, count in counts.items()}),
        facts={"model": {"name": str(side.of_run("model").get("name"))}},
        kept={} if maps is None else {"maps": maps},
    )


def _last_kv_head(side: KeptSide, key: LayerKey) -> int:
    return max(number for ((stack, layer), _), number in side.kv_heads.items() if (layer, stack) == key)


def _columns(side: KeptSide, counts: Mapping[LayerKey, int]) -> HeadColumns:
    """The heads of every layer up to the last that is listed; those that are listed are kept."""
    places: list[StackHead] = [((key.stack, key.layer), head) for key, count in counts.items() for head in range(count)]
    rows = [side.rows.get(place, {}) for place in places]
    ids = [name for name in KNOWN if side.heads is not None and name in side.heads.column_names]
    number_N, none_N = np.zeros(len(places), np.int64), np.full(len(places), np.nan)
    role, text_role, names = zip(*map(side.roles, places), strict=True)
    return HeadColumns(
        layer=np.array([layer for (_, layer), _ in places]),
        stack=np.array([stack for (stack, _), _ in places], object),
        head=np.array([head for _, head in places]),
        kv_head=np.array([side.kv_heads.get(place, 0) for place in places]),
        role=np.array(role, object),
        text_role=np.array(text_role, object),
        atlas_roles=np.array([None if of_head is None else " ".join(of_head) for of_head in names], object),
        near_uniform=np.array([row.get("near_uniform") for row in rows], object),
        scores={name: Score(_numbers(rows, name), none_N) for name in ids},
        top_key=_top_keys(side, rows),
        top_key_mass=_numbers(rows, "top_key_mass"),
        relation_weight=none_N,
        relation_query=number_N,
        relation_key=number_N,
        kept=np.array([place in side.kv_heads for place in places]),
    )


def _top_keys(side: KeptSide, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    found = [row.get("top_key") or 0 for row in rows]
    if not all(0 <= key < len(side.prompt) for key in found):
        raise UsageError(f"{side.folder} names keys that its text does not have", side.otherwise)
    return np.array(found)


def _numbers(rows: Sequence[Mapping[str, object]], name: str) -> np.ndarray:
    return np.array([row.get(name) for row in rows], np.float64)


def _maps(side: KeptSide, sink_apart: bool) -> LayerMaps | None:
    """The matrices, NaN where a query sees no key; None where a table does not list every weight."""
    found, count = side.listed(), len(side.prompt)
    if found is None or not side.lists_all(found[0]):
        return None
    weight_NTk, key_NTk = found
    values: dict[LayerKey, list[np.ndarray]] = defaultdict(list)
    heads: dict[LayerKey, list[int]] = defaultdict(list)
    for number, ((stack, layer), head) in enumerate(side.places):
        values_TT = np.full((count, count), np.nan, np.float32)
        query, nth = np.nonzero(~np.isnan(weight_NTk[number]))
        values_TT[query, key_NTk[number, query, nth]] = weight_NTk[number, query, nth]
        values[LayerKey(layer, stack)].append(values_TT)
        heads[LayerKey(layer, stack)].append(head)
    cells = Cells.of(range(count), count)
    whole = LayerMaps(PerLayer({key: np.stack(of) for key, of in values.items()}), PerLayer(heads), cells, cells, "sum")
    return coarser(whole, MAP_SIDE, sink_apart)
