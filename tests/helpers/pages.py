"""The page read back in Python, written from the format alone: nothing of `attnscope.viewer` is used here.

Shapes: Q query, K key, R row, C column, k kept key.
"""

import json
import re
import zlib
from base64 import b64decode
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

BLOB = re.compile(rb'<script type="application/octet-stream" id="blob-(\d+)">([A-Za-z0-9+/=]*)</script>')
JSON = re.compile(rb'<script type="application/json" id="page">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Read:
    """A page: its bytes, what it says, and its arrays."""

    html: bytes

    @cached_property
    def said(self) -> dict[str, Any]:
        [found] = JSON.findall(self.html)
        return json.loads(found)

    @cached_property
    def blobs(self) -> list[bytes]:
        found = [
            (int(number), zlib.decompress(b64decode(text, validate=True), -15))
            for number, text in BLOB.findall(self.html)
        ]
        assert [number for number, _ in found] == list(range(len(found)))
        return [data for _, data in found]

    def array(self, place: dict[str, Any], kind: str, count: int) -> np.ndarray:
        assert place["offset"] % 4 == 0
        return np.frombuffer(self.blobs[place["blob"]], kind, count, place["offset"])

    def map(self, entry: dict[str, Any]) -> np.ndarray:
        """A head's map in full, (R, C)."""
        rows, columns, kind = (
            entry["rows"],
            entry["columns"],
            ("i" if entry.get("signed") else "u") + str(entry["bits"] // 8),
        )
        lengths = [min(row + 1, columns) if entry["triangle"] else columns for row in range(rows)]
        stored, full_RC = (
            self.array(entry, kind, sum(lengths)).astype(float) * entry["scale"],
            np.zeros((rows, columns)),
        )
        at = 0
        for row, length in enumerate(lengths):
            full_RC[row, :length] = stored[at : at + length]
            at += length
        return full_RC

    def maps(self, side: int = 0) -> dict[tuple[int, int], np.ndarray]:
        """Every map of a side by place of the layer and head."""
        return {(entry["at"], entry["head"]): self.map(entry) for entry in self.said["sides"][side]["maps"]}

    def relations(self, side: int = 0) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        """By place of the layer and head, the keys (Q, k), -1 for none, and their weights."""
        data = self.said["sides"][side]
        kept, count = data["relations"], len(data["tokens"]["text"])
        shape = len(kept["heads"]), count, kept["k"]
        size = int(np.prod(shape))
        keys = self.array(kept, "<u4", size).reshape(shape).astype(np.int64)
        weights = (
            self.array(
                {**kept, "offset": kept["offset"] + 4 * size}, "<i2" if kept.get("signed") else "<u2", size
            ).reshape(shape)
            * kept["scale"]
        )
        keys[keys == 0xFFFFFFFF] = -1
        heads = [(one["at"], one["head"]) for one in kept["heads"]]
        return {head: (keys[number], weights[number]) for number, head in enumerate(heads)}


def read(path: Path) -> Read:
    """The page of a file."""
    return Read(path.read_bytes())
