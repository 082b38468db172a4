"""A side of the page from a run's folder, without the model: what heads.csv and relations.csv hold.

Of an encoder-decoder all stacks are on one axis, as in `viewer/stacks.py`.

Tables are what somebody wrote: a cell that is no number, a head, query or key that is not there, is refused.

Shapes: N head, T token, k kept key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import MemoryLimitError, UsageError
from attnscope.files import open_native
from attnscope.folder.manifest import NAME, TARGET, prompt_of, read_manifest
from attnscope.measure.metrics import KNOWN
from attnscope.measure.roles import NONE
from attnscope.memory import free_memory, human_bytes
from attnscope.stacks import OF_TWO_TEXTS, STACKS, is_causal, is_cross
from attnscope.tables import read_delimited
from attnscope.viewer.pack import Blobs, packed_maps, strongest
from attnscope.viewer.side import Wanted, metrics_of, rounded, said_of
from attnscope.viewer.stacks import behind, end_of, first_of, said_axes, starts, with_target

if TYPE_CHECKING:
    import pyarrow as pa

StackLayer = tuple[str, int]  # its stack and number
StackHead = tuple[StackLayer, int]  # a layer and a head of it
LISTED_BYTES = 32  # of a weight and its key, while they are packed


class KeptSide:
    """The folder of a run on its way into the page. Raises UsageError for what a page cannot show, or is damaged.

    otherwise: what to do then.
    """

    def __init__(self, folder: Path, otherwise: str = "leave out {from_tables}") -> None:
        self.folder, self.otherwise = folder, otherwise
        self.manifest = read_manifest(folder / NAME)
        self.prompt = self.source = prompt_of(self.manifest, folder / NAME)
        if TARGET in self.manifest:
            self.prompt = behind(with_target(self.source, prompt_of(self.manifest, folder / NAME, TARGET)))
        if self.of_run("options").get("by"):
            raise UsageError(f"{folder} is of means over kv heads", self.otherwise)
        self.heads, self.relations = self._table("heads.csv"), self._table("relations.csv")
        if not self.places:
            raise UsageError(f"{folder} has no table of heads or relations", self.otherwise)
        if TARGET not in self.manifest and (self.of_run("target") or any(is_cross(stack) for stack, _ in self._layers)):
            raise UsageError(f"{folder} does not say which tokens its target has", self.otherwise)

    @property
    def plain(self) -> Sequence[str]:
        """What each token shows."""
        return self.prompt.plain

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """What is said in words and numbers."""
        model, places, layers = self.of_run("model"), self.places, self._layers
        ids = [name for name in KNOWN if self.heads is not None and name in self.heads.column_names]
        heads = [self._head(place, layers.index(place[0]), ids) for place in places]
        return {
            "name": str(model.get("name")),
            "model": {name: _fact(model.get(name)) for name in ("name", "type", "revision", "layers")}
            | {"dtype": str(self.manifest.get("dtype"))},
            "engine": str(self.manifest.get("engine")),
            **said_of(self.prompt),
            "layers": [
                {**_said_of(layer, [one for one in heads if one["at"] == at]), **self._said_axes(layer[0])}
                for at, layer in enumerate(layers)
            ],
            "metrics": metrics_of(ids, len(self.prompt)),
            "heads": heads,
            "steps": None,
        }

    @property
    def open(self) -> str:
        """The state of the page at first: the head with the largest focus, among the metrics where there are any."""
        crossed = [place for place in self.places if is_cross(place[0][0])] or self.places
        best = max(crossed, key=lambda place: self.rows.get(place, {}).get("focus") or 0.0)
        view = "metrics" if self.said["metrics"] else "head"
        return f"view={view}&at={self._layers.index(best[0])}&head={best[1]}"

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """The side as the page's JSON has it. Raises UsageError for tables without anything that a view shows."""
        side = self._packed(blobs, wanted)
        if not (side["metrics"] or side["maps"] or side["relations"]):
            raise UsageError(f"{self.folder} has neither metrics nor weights of tokens", self.otherwise)
        return side

    def _packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """Whole maps where every visible key was listed, else the listed ones."""
        found, ends = self.listed(), [self._ends(stack) for stack, _ in self._layers]
        first, end = ([None if one is None else blobs.add(one)[0] for one in of] for of in zip(*ends, strict=True))
        said = {**self.said, "first": first, "end": end}
        if found is None:
            return {**said, "maps": [], "relations": None}
        heads = [{"at": one["at"], "head": one["head"]} for one in said["heads"]]
        weight_NTk, key_NTk = found
        if wanted.rows is not None:  # too much for the page: fewer keys
            weight_NTk, key_NTk = weight_NTk[..., : wanted.top_k], key_NTk[..., : wanted.top_k]
        if self.lists_all(weight_NTk):
            maps_NTT = np.zeros((len(heads), len(self.prompt), len(self.prompt)), np.float32)
            head, query, nth = np.nonzero(~np.isnan(weight_NTk))
            maps_NTT[head, query, key_NTk[head, query, nth]] = weight_NTk[head, query, nth]
            entries = packed_maps(blobs, maps_NTT, wanted.bits)
            windowed = [{**head, "bin": 1, "windowed": first[head["at"]] is not None} for head in heads]
            maps = [{**head, **one} for head, one in zip(windowed, entries, strict=True)]
            return {**said, "maps": maps, "relations": None}
        if not weight_NTk.size:
            return {**said, "maps": [], "relations": None}
        keys, numbers, scale = strongest(weight_NTk, key_NTk)
        [place, _] = blobs.add(keys, numbers)
        related = {"k": weight_NTk.shape[-1], "heads": heads, "scale": scale, "bits": 16, **place}
        return {**said, "maps": [], "relations": related}

    def listed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Weights, NaN for none, and keys of every query, as listed, (N, T, k); None where no tokens were listed.

        Raises MemoryLimitError where there is no room for all: few rows may name heads and tokens that are far apart.
        """
        if self.relations is None or "weight" not in self.relations.column_names or self.of_run("export").get("group"):
            return None
        count, number = len(self.prompt), {place: at for at, place in enumerate(self.places)}
        places = _places_of(self.relations)
        heads = [number[place] for place in places]
        axes = [self._axes(stack) for (stack, _), _ in places]
        query, key = (
            self._on_axis(self.relations[name].to_numpy(), [one[at] for one in axes])
            for at, name in enumerate(("query", "key"))
        )
        row = np.array(heads, np.int64) * count + query
        order = np.argsort(row, kind="stable")
        row, starts = row[order], np.searchsorted(row[order], row[order])
        nth = np.arange(len(row)) - starts  # of its query
        if nth.max(initial=0) >= count:
            raise self._damaged("relations.csv")
        shape = len(number) * count, int(nth.max(initial=0)) + 1
        needed, room = math.prod(shape) * LISTED_BYTES, free_memory("cpu")
        if needed > room:
            raise MemoryLimitError(
                f"{shape[1]} keys of {count} tokens and {len(number)} heads take {human_bytes(needed)}, and this "
                f"machine has {human_bytes(room)} free",
                "name fewer heads with {select} where the run is exported",
            )
        weights, keys = np.full(shape, np.nan, np.float32), np.zeros(shape, np.int64)
        weight = self.relations["weight"].to_numpy()[order]
        weights[row, nth], keys[row, nth] = np.where(np.isfinite(weight) & (weight >= 0), weight, np.nan), key[order]
        return weights.reshape(len(number), count, -1), keys.reshape(len(number), count, -1)

    def lists_all(self, weight_NTk: np.ndarray) -> bool:
        """Whether these weights are all that heads have: of every query one of each key that it sees."""
        return np.count_nonzero(~np.isnan(weight_NTk)) == sum(
            self.visible_pairs(stack) for (stack, _), _ in self.places
        )

    def _on_axis(self, place_N: np.ndarray, axes: Sequence[range]) -> np.ndarray:
        """Where the tokens of a table stand on the page's axis. Raises UsageError for those that are not there."""
        start_N, stop_N = (np.array([getattr(one, end) for one in axes], np.int64) for end in ("start", "stop"))
        found = place_N + start_N
        if (found < start_N).any() or (found >= stop_N).any():
            raise self._damaged("relations.csv")
        return found

    def _axes(self, stack: str) -> tuple[range, range]:
        """The tokens of the page that are queries and keys of a stack."""
        if TARGET not in self.manifest:
            return (range(len(self.prompt)),) * 2
        source, count = len(self.source), len(self.prompt)
        query, key = (range(start, count if start else source) for start in starts(source)[stack])
        return query, key

    def _said_axes(self, stack: str) -> dict[str, list[int]]:
        return said_axes(*self._axes(stack)) if TARGET in self.manifest else {}

    def visible_pairs(self, stack: str) -> int:
        """The pairs of a query and a key that it sees, of one head."""
        queries, keys = map(len, self._axes(stack))
        return queries * (queries + 1) // 2 if is_causal(stack) else queries * keys

    def _ends(self, stack: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The first key that each query of a stack sees, and what is behind the last; see `Side`."""
        if is_causal(stack) and TARGET not in self.manifest:
            return None, None
        query, key = self._axes(stack)
        causal_Q = np.arange(1, len(query) + 1) if is_causal(stack) else None
        return first_of(query, key, len(self.prompt)), end_of(query, key, len(self.prompt), causal_Q)

    @cached_property
    def _layers(self) -> list[StackLayer]:
        """The layers of the tables, in the model's order."""
        return list(dict.fromkeys(layer for layer, _ in self.places))

    @cached_property
    def places(self) -> list[StackHead]:
        """The heads of the tables, in the model's order."""
        tables = [table for table in (self.heads, self.relations) if table is not None]
        places = {place for table in tables for place in _places_of(table)}
        return sorted(places, key=lambda place: (STACKS.index(place[0][0]), place))

    @cached_property
    def rows(self) -> Mapping[StackHead, Mapping[str, Any]]:
        """The row of heads.csv of every head that has one."""
        return {} if self.heads is None else dict(zip(_places_of(self.heads), self.heads.to_pylist(), strict=True))

    @cached_property
    def kv_heads(self) -> Mapping[StackHead, int]:
        """The kv head that each head reads."""
        tables = [table for table in (self.heads, self.relations) if table is not None]
        return {
            place: kv_head
            for table in tables
            for place, kv_head in zip(_places_of(table), table["kv_head"].to_pylist(), strict=True)
        }

    def _head(self, place: StackHead, at: int, ids: Sequence[str]) -> dict[str, Any]:
        row = self.rows.get(place, {})
        top_key = row.get("top_key")
        keys = self._axes(place[0][0])[1]
        if top_key is not None and not 0 <= top_key < len(keys):
            raise self._damaged("heads.csv")
        mass, *scores = rounded(np.array([row.get(name) for name in ("top_key_mass", *ids)], np.float64))
        role, text_role, names = self.roles(place)
        return {
            "at": at,
            "head": place[1],
            "kv_head": self.kv_heads[place],
            "role": role,
            "text_role": text_role,
            "near_uniform": row.get("near_uniform"),
            "top_key": top_key if top_key is None else top_key + keys.start,
            "top_key_mass": mass,
            "scores": scores,
            "uniform": [None] * len(ids),
            **({} if names is None else {"atlas": names}),
        }

    def roles(self, place: StackHead) -> tuple[str, str, list[str] | None]:
        """What a head is called, its role on the text, and all that an atlas names it; None without an atlas.

        Until run/4 the column `role` was the text's.
        """
        row = self.rows.get(place, {})
        text_role = _unquoted(row.get("text_role" if "text_role" in row else "role")) or NONE
        if self.heads is None or not self.of_run("atlas"):
            return text_role, text_role, None
        names = _unquoted(row.get("atlas_roles")).split()
        return next(iter(names), NONE), text_role, names

    def of_run(self, name: str) -> Mapping[str, Any]:
        """A part of the manifest; empty where it is none."""
        found = self.manifest.get(name)
        return found if isinstance(found, Mapping) else {}

    def _table(self, name: str) -> pa.Table | None:
        """A table of the folder, its numbers as numbers."""
        import pyarrow as pa

        path = self.folder / name
        if not path.is_file():
            return None
        whole, real = ("layer", "head", "kv_head", "query", "key", "top_key"), ("weight", "top_key_mass", *KNOWN)
        dtypes = {**dict.fromkeys(whole, pa.int32()), **dict.fromkeys(real, pa.float32()), "near_uniform": pa.bool_()}
        try:
            with open_native(path) as source:
                found = read_delimited(source, dtypes, multiline=True)
            if len(set(found.column_names)) < len(found.column_names):
                raise self._damaged(name)
            needed = {"layer", "head", "kv_head"} | ({"query", "key"} if name == "relations.csv" else set())
            if not {*needed, "stack"} <= set(found.column_names):
                raise self._damaged(name)
            stacks = found["stack"].to_pylist()
            if not set(stacks) <= set(STACKS):
                raise self._damaged(name)
            types = found["type"].to_pylist() if "type" in found.column_names else [None] * len(found)
            kept = [stack in OF_TWO_TEXTS and not what for stack, what in zip(stacks, types, strict=True)]
            found = found.filter(pa.array(kept, pa.bool_()))  # a layer without attention has a type, and no head
            if any(_missing(found[one]) for one in needed):
                raise self._damaged(name)
        except (pa.ArrowException, OSError, ValueError):
            raise self._damaged(name) from None
        return found

    def _damaged(self, name: str) -> UsageError:
        return UsageError(f"{self.folder / name} is damaged, or of another kind", self.otherwise)


def _said_of(layer: StackLayer, heads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    most = {name: 1 + max(head[name] for head in heads) for name in ("head", "kv_head")}
    stack, number = layer
    return {"layer": number, "stack": stack, "heads": most["head"], "kv_heads": most["kv_head"], "visible": "-"}


def _fact(value: object) -> str | int | None:
    """What a manifest says of a model, as the page can write it."""
    return value if value is None or isinstance(value, int) else str(value)


def _unquoted(cell: object) -> str:
    """A cell of text, also of a table for spreadsheets."""
    return str(cell or "").removeprefix("'")


def _missing(column: pa.ChunkedArray) -> bool:
    """Whether a place has no number in a column, or none that counts from 0."""
    return bool(column.null_count) or bool((column.to_numpy() < 0).any())


def _places_of(table: pa.Table) -> list[StackHead]:
    """The head of each row."""
    layers = zip(table["stack"].to_pylist(), table["layer"].to_pylist(), strict=True)
    return list(zip(layers, table["head"].to_pylist(), strict=True))
