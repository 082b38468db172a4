"""A side of the page from a run's folder, without the model: what heads.csv and relations.csv hold.

Tables are what somebody wrote: a cell that is no number, a head, query or key that is not there, is refused.

Shapes: N head, T token, k kept key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import UsageError
from attnscope.files import jsonable
from attnscope.manifest import NAME, prompt_of, read_manifest
from attnscope.measure.metrics import KNOWN
from attnscope.stacks import KINDS
from attnscope.viewer.pack import Blobs, packed_maps, strongest
from attnscope.viewer.side import Wanted, metrics_of, rounded, said_of

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[int, int]  # layer and head


class KeptSide:
    """The folder of a run on its way into the page. Raises UsageError for what a page cannot show, or is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder / NAME)
        self.prompt = prompt_of(self.manifest, folder / NAME)
        if self._said("options").get("by"):
            raise UsageError(f"{folder} is of means over kv heads", "leave out --from-tables")
        self.heads, self.relations = self._table("heads.csv"), self._table("relations.csv")
        if self.heads is None and self.relations is None:
            raise UsageError(f"{folder} has no table of heads or relations", "leave out --from-tables")

    @property
    def plain(self) -> Sequence[str]:
        """What each token shows."""
        return self.prompt.plain

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """What is said in words and numbers."""
        model, places = self._said("model"), self._places
        layers = sorted({layer for layer, _ in places})
        ids = [name for name in KNOWN if self.heads is not None and name in self.heads.column_names]
        heads = [self._head(place, layers.index(place[0]), ids) for place in places]
        return {
            "name": str(model.get("name")),
            "model": jsonable({name: model.get(name) for name in ("name", "type", "revision", "layers")})
            | {"dtype": str(self.manifest.get("dtype"))},
            "engine": str(self.manifest.get("engine")),
            **said_of(self.prompt),
            "layers": [self._layer(layer, [one for one in heads if layers[one["at"]] == layer]) for layer in layers],
            "metrics": metrics_of(ids, len(self.prompt)),
            "heads": heads,
            "quantity": "weight",
            "received": None,
            "steps": None,
            "first": [None] * len(layers),
            "end": [None] * len(layers),
        }

    @property
    def open(self) -> str:
        """The head with the largest focus, as the state of the page that shows it."""
        best = max(self._places, key=lambda place: self._rows.get(place, {}).get("focus") or 0.0)
        return f"at={sorted({layer for layer, _ in self._places}).index(best[0])}&head={best[1]}"

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """The side as the page's JSON has it: whole maps where every visible key was listed, else the listed ones."""
        found = self._listed()
        if found is None:
            return {**self.said, "maps": [], "relations": None}
        heads = [{"at": one["at"], "head": one["head"]} for one in self.said["heads"]]
        weight_NTk, key_NTk = found
        if wanted.rows is not None:  # too much for the page: fewer keys
            weight_NTk, key_NTk = weight_NTk[..., : wanted.top_k], key_NTk[..., : wanted.top_k]
        if np.count_nonzero(~np.isnan(weight_NTk)) == len(heads) * len(self.prompt) * (len(self.prompt) + 1) // 2:
            maps_NTT = np.zeros((len(heads), len(self.prompt), len(self.prompt)), np.float32)
            head, query, nth = np.nonzero(~np.isnan(weight_NTk))
            maps_NTT[head, query, key_NTk[head, query, nth]] = weight_NTk[head, query, nth]
            entries = packed_maps(blobs, maps_NTT, wanted.bits)
            maps = [{**head, "bin": 1, "windowed": False, **one} for head, one in zip(heads, entries, strict=True)]
            return {**self.said, "maps": maps, "relations": None}
        if not weight_NTk.size:
            return {**self.said, "maps": [], "relations": None}
        keys, numbers, scale = strongest(weight_NTk, key_NTk)
        [place, _] = blobs.add(keys, numbers)
        related = {"k": weight_NTk.shape[-1], "heads": heads, "scale": scale, "bits": 16, **place}
        return {**self.said, "maps": [], "relations": related}

    def _listed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Weights, NaN for none, and keys of every query, as listed, (N, T, k); None where no tokens were listed."""
        if self.relations is None or "weight" not in self.relations.column_names or self._said("export").get("group"):
            return None
        count, number = len(self.prompt), {place: at for at, place in enumerate(self._places)}
        heads = [number[place] for place in _places_of(self.relations)]
        query, key = (self.relations[name].to_numpy() for name in ("query", "key"))
        if len(query) and (min(query.min(), key.min()) < 0 or max(query.max(), key.max()) >= count):
            raise self._damaged("relations.csv")
        row = np.array(heads, np.int64) * count + query
        order = np.argsort(row, kind="stable")
        row, starts = row[order], np.searchsorted(row[order], row[order])
        nth = np.arange(len(row)) - starts  # of its query
        if nth.max(initial=0) >= count:
            raise self._damaged("relations.csv")
        shape = len(number) * count, int(nth.max(initial=0)) + 1
        weights, keys = np.full(shape, np.nan, np.float32), np.zeros(shape, np.int64)
        weight = self.relations["weight"].to_numpy()[order]
        weights[row, nth], keys[row, nth] = np.where(np.isfinite(weight) & (weight >= 0), weight, np.nan), key[order]
        return weights.reshape(len(number), count, -1), keys.reshape(len(number), count, -1)

    @cached_property
    def _places(self) -> list[Place]:
        """The heads of the tables, in the model's order."""
        tables = [table for table in (self.heads, self.relations) if table is not None]
        return sorted({place for table in tables for place in _places_of(table)})

    @cached_property
    def _rows(self) -> Mapping[Place, Mapping[str, Any]]:
        rows = [] if self.heads is None else self.heads.to_pylist()
        return {(row["layer"], row["head"]): row for row in rows}

    @cached_property
    def _kv_heads(self) -> Mapping[Place, int]:
        tables = [table for table in (self.heads, self.relations) if table is not None]
        return {
            place: kv_head
            for table in tables
            for place, kv_head in zip(_places_of(table), table["kv_head"].to_pylist(), strict=True)
        }

    def _head(self, place: Place, at: int, ids: Sequence[str]) -> dict[str, Any]:
        row = self._rows.get(place, {})
        top_key = row.get("top_key")
        if top_key is not None and not 0 <= top_key < len(self.prompt):
            raise self._damaged("heads.csv")
        mass, *scores = rounded(np.array([row.get(name) for name in ("top_key_mass", *ids)], np.float64))
        return {
            "at": at,
            "head": place[1],
            "kv_head": self._kv_heads[place],
            "role": str(row.get("role") or "-").removeprefix("'"),  # of --spreadsheet
            "near_uniform": row.get("near_uniform"),
            "top_key": top_key,
            "top_key_mass": mass,
            "scores": scores,
            "uniform": [None] * len(ids),
        }

    def _layer(self, layer: int, heads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        most = {name: 1 + max(head[name] for head in heads) for name in ("head", "kv_head")}
        return {"layer": layer, "kind": "decoder", "heads": most["head"], "kv_heads": most["kv_head"], "visible": "-"}

    def _said(self, name: str) -> Mapping[str, Any]:
        found = self.manifest.get(name)
        return found if isinstance(found, Mapping) else {}

    def _table(self, name: str) -> pa.Table | None:
        """A table of the folder, its numbers as numbers."""
        import pyarrow as pa
        from pyarrow import csv

        path = self.folder / name
        if not path.is_file():
            return None
        whole, real = ("layer", "head", "kv_head", "query", "key", "top_key"), ("weight", "top_key_mass", *KNOWN)
        kinds = {**dict.fromkeys(whole, pa.int32()), **dict.fromkeys(real, pa.float32()), "near_uniform": pa.bool_()}
        try:
            parse, convert = csv.ParseOptions(newlines_in_values=True), csv.ConvertOptions(column_types=kinds)
            found = csv.read_csv(path, parse_options=parse, convert_options=convert)
            if {"head", "kind"} <= set(found.column_names):  # a layer without attention has a row, and no head
                rows = zip(found["head"].to_pylist(), found["kind"].to_pylist(), strict=True)
                found = found.filter(pa.array([head is not None or kind in KINDS for head, kind in rows], pa.bool_()))
            needed = {"layer", "head", "kv_head"} | ({"query", "key"} if name == "relations.csv" else set())
            if not needed <= set(found.column_names) or any(_missing(found[one]) for one in needed):
                raise self._damaged(name)
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            raise self._damaged(name) from None
        return found

    def _damaged(self, name: str) -> UsageError:
        return UsageError(f"{self.folder / name} is damaged, or of another kind", "leave out --from-tables")


def _missing(column: pa.ChunkedArray) -> bool:
    """Whether a place has no number in a column, or none that counts from 0."""
    return bool(column.null_count) or bool((column.to_numpy() < 0).any())


def _places_of(table: pa.Table) -> list[Place]:
    return list(zip(table["layer"].to_pylist(), table["head"].to_pylist(), strict=True))
