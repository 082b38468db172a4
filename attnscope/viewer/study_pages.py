"""knockout.html: a knockout as a page of one view: the text with queries and keys, each cut's effect and its nulls.

cuts_page(found, loaded.geometry, notes).save(folder / PAGE)

depth.html: what each layer reads of earlier blocks, as a page of one view.

DepthSide(source, prompt, unit, readers, blocks, panels).page().save(folder / DEPTH_PAGE)

Logits taken apart on their way into the page: what each component gives to every key of some heads and queries.

WhySide(seen, why).packed(blobs, Wanted())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.model.selection import DECODER, LINEAR, StackLayer, stack_of
from attnscope.observe.request import LayerKey
from attnscope.studies.attribution_records import KeyParts
from attnscope.viewer.pack import Blobs, joined_arrays
from attnscope.viewer.page import BASE64, About, Plan, page_of
from attnscope.viewer.page_data import Side, Wanted, rounded, said_of

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.geometry import Geometry, LayerGeometry
    from attnscope.observe.observation import Observation
    from attnscope.studies.attribution_records import Component
    from attnscope.studies.knockout_records import AskedCut, Case, KnockoutResult
    from attnscope.viewer.page import Page

PAGE, DEPTH_PAGE = "knockout.html", "depth.html"
MOST_TEXTS = 20  # of a corpus, that are shown with their queries and keys
COUNTS = ("n", "n_permuted", "pool", "n_heads")
NUMBERS = (
    *("mass", "effect", "low_all", "high_all", "p", "positive"),
    *(f"{name}_{kind}" for kind in ("permuted", "heads") for name in ("null", "low", "high", "p")),
)


@dataclass(frozen=True)
class Again:
    """What makes the numbers again. line: the command as the page says it, without the text; command: as a shell takes
    it; python: the lines of a program."""

    line: str | None = None
    command: str | None = None
    python: Sequence[str] = ()


def cuts_page(found: KnockoutResult, geometry: Geometry, notes: Sequence[str] = (), again: Again = Again()) -> Page:
    """The page of a knockout; notes: what a reader has to know to read the numbers.

    >>> cuts_page(found, loaded.geometry).save("knockout.html")
    """
    side = CutsSide(found, geometry, notes, again)
    return page_of([side], Plan(), About(again.line, side.open))


@dataclass(frozen=True)
class CutsSide:
    """A knockout on its way into the page: tokens and heads without weights, and its cuts."""

    found: KnockoutResult
    geometry: Geometry
    notes: Sequence[str] = ()
    again: Again = field(default_factory=Again)

    @property
    def plain(self) -> Sequence[str]:
        """What each token shows."""
        return self.found.cases[0].prompt.plain if len(self.found.cases) == 1 else ()

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """The side as the page's JSON has it: it has no arrays."""
        return {**self.said, "maps": [], "relations": None, "steps": None, "first": [None] * len(self.said["layers"])}

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """The side's words and numbers, as the page's JSON has them."""
        # The page of a text has tokens, layers and heads; of a knockout those that were cut, and no weights.
        facts, model = self.found.facts, self.found.facts["model"]
        whole: dict[int, LayerGeometry] = {layer.index: layer for layer in self.geometry.layers}
        whole |= {StackLayer(layer.index, LINEAR): layer for layer in self.geometry.views.get(LINEAR, ())}
        count = len(self.found.cases)
        return {
            "name": model["name"],
            **({"called": f"{count} texts"} if count > 1 else {}),
            "model": {name: model[name] for name in ("name", "type", "revision")}
            | {"layers": len(self.geometry.layers), "dtype": facts["dtype"]},
            "engine": "",
            **_text(self.found.cases),
            "layers": [
                {
                    "layer": int(layer),
                    "stack": stack_of(layer, DECODER),
                    "heads": whole[layer].heads,
                    "kv_heads": whole[layer].kv_heads,
                    "visible": "",
                }
                for layer in self._layers
            ],
            # A head has the fields that the page reads of every head, empty: nothing of it was measured but its cuts.
            "metrics": [],
            "heads": [
                {
                    "at": self._layers.index(layer),
                    "head": head,
                    "kv_head": head * whole[layer].kv_heads // whole[layer].heads,
                    "role": "-",
                    "near_uniform": None,
                    "top_key": None,
                    "top_key_mass": None,
                    "scores": [],
                    "uniform": [],
                }
                for layer, head in self._heads
            ],
            "cuts": self.cuts,
        }

    @cached_property
    def cuts(self) -> dict[str, Any]:
        """What was cut and what it cost, as the view takes it."""
        facts, cases = self.found.facts, self.found.cases
        table = self.found.table().take(np.argsort(self.found.order))  # as the cuts were asked for
        columns = {name: rounded(np.array(table[name].to_pylist(), np.float64)) for name in NUMBERS}
        columns |= {name: table[name].to_pylist() for name in COUNTS}
        rows = [
            {"set": item.cut.name, **self._place(item), **{name: values[place] for name, values in columns.items()}}
            for place, item in enumerate(self.found.asked)
        ]
        return {
            "over": facts["over"],
            "how": facts["how"],
            "select": facts["select"],
            "unit": facts["measure"]["unit"],
            "random": facts["random"],
            "intact": rounded(np.array([facts["intact"]]))[0],
            "count": len(cases),
            "texts": [_asked(case, len(cases) > 1) for case in cases[:MOST_TEXTS]],
            "rows": rows,
            "notes": list(self.notes),
            "command": self.again.command,
            "python": list(self.again.python),
        }

    @property
    def open(self) -> str:
        """The state of the page at first: the cut with the largest effect."""
        rows = self.cuts["rows"]
        best = max(rows, key=lambda row: -np.inf if row["effect"] is None else row["effect"])
        state = {"view": "cuts", "at": best["at"] or 0, "head": best["head"] or 0, "key": best["key"]}
        if best["heads"]:
            state["at"], state["head"] = best["heads"][0]
        return "&".join(f"{name}={value}" for name, value in state.items() if value is not None)

    @cached_property
    def _heads(self) -> list[tuple[int, int]]:
        """The heads that were cut in any set, in the model's order."""
        return sorted({head for item in self.found.asked for head in item.cut.heads})

    @cached_property
    def _layers(self) -> list[int]:
        return sorted({layer for layer, _ in self._heads})

    def _place(self, item: AskedCut) -> dict[str, Any]:
        """The place of a cut on the page: its layer, its head or heads, its key."""
        over, at = self.found.facts["over"], self._layers.index
        return {
            "at": None if item.layer is None else at(item.layer),
            "layer": None if item.layer is None else int(item.layer),
            "head": item.head,
            "heads": [[at(layer), head] for layer, head in item.cut.heads] if over in ("heads", "kv") else [],
            "key": item.cut.keys[0][0] if over == "keys" else None,
        }


@dataclass(frozen=True)
class DepthSide:
    """What each reader of the residual gets of each earlier block, on its way into the page.

    panels: {the mean, or a token or stream: numbers and norms, (2, readers, blocks)}, NaN where a block comes later.
    """

    name: str
    prompt: Prompt
    unit: str
    readers: Sequence[str]
    blocks: Sequence[str]
    panels: Mapping[str, np.ndarray]
    notes: Sequence[str] = ()
    again: Again = field(default_factory=Again)

    @staticmethod
    def most(readers: int, blocks: int) -> int:
        """How many panels have room in a page."""
        return max(1, int(Plan().room // (2 * 4 * readers * blocks * BASE64)))

    def page(self) -> Page:
        """The page of this side alone."""
        return page_of([self], Plan(), About(self.again.line, "view=depth"))

    @property
    def plain(self) -> Sequence[str]:
        """What each token shows."""
        return self.prompt.plain

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """The side's words, as the page's JSON has them: of its model the page names no layers or heads."""
        return {
            "name": self.name,
            "model": {"name": self.name, "type": "", "revision": None, "layers": 0, "dtype": ""},
            "engine": "",
            **said_of(self.prompt),
            **dict.fromkeys(("layers", "metrics", "heads", "maps", "first"), ()),
            **dict.fromkeys(("relations", "steps")),
        }

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """The side as the page's JSON has it: numbers are float32, those of all panels, then their norms."""
        numbers, norms = np.stack(list(self.panels.values()), 1)
        depth = {
            "unit": self.unit,
            "readers": list(self.readers),
            "blocks": list(self.blocks),
            "panels": list(self.panels),
            "notes": list(self.notes),
            "command": self.again.command,
            "python": list(self.again.python),
            **blobs.add(joined_arrays([numbers, norms]))[0],
        }
        return {**self.said, "depth": depth}


def _text(cases: Sequence[Case]) -> dict[str, Any]:
    """The one text; of a corpus none, since each has tokens of its own."""
    if len(cases) == 1:
        return {**said_of(cases[0].prompt), "answer": None}
    tokens: dict[str, list[Any]] = {name: [] for name in ("text", "label", "plain", "id", "special", "start", "stop")}
    return {"text": "", "tokens": tokens, "words": [], "sentences": [], "turns": [], "answer": None}


def _asked(case: Case, apart: bool) -> dict[str, Any]:
    """What was asked of a text; apart: with its tokens, where the page has those of no text."""
    tokens = said_of(case.prompt)["tokens"]
    return {
        "queries": list(case.queries),
        "keys": list(case.keys),
        "answer": case.answer_text,
        "foil": case.foil_text or None,
        "tokens": {name: tokens[name] for name in ("label", "plain", "special")} if apart else None,
    }


class WhySide(Side):
    """A side with logits that were taken apart."""

    def __init__(self, seen: Observation, why: Sequence[KeyParts]) -> None:
        super().__init__(seen)
        self.why = why

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """As that of a side, with the logits: numbers are float32, parts_CQK, then logit_QK."""
        side = super().packed(blobs, wanted)
        at = {key.named: place for key, place in self.at.items()}
        why = [
            {
                "at": at[parts.layer],
                "head": parts.head,
                "queries": list(parts.queries),
                "components": [_said(component, at) for component in parts.components],
                "cap": parts.softcap,
                "sinks": parts.sinks,
                **blobs.add(joined_arrays([parts.parts_CQK, parts.logit_QK]))[0],
            }
            for parts in self.why
        ]
        return {**side, "why": why}


def _said(component: Component, at: Mapping[int, int]) -> dict[str, Any]:
    place = None if component.layer is None else at.get(LayerKey(component.layer, component.stack or "").named)
    if component.head is None or place is None:
        return {"name": component.name}
    return {"name": component.name, "at": place, "head": component.head}
