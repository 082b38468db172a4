"""What `attnscope.capture` returns: an observation that draws, exports and shows itself."""

from __future__ import annotations

import html
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from attnscope.errors import UsageError
from attnscope.notebook import coloured_text, heads_html, matrix_of, place_of
from attnscope.observe.observation import Observation
from attnscope.utils.schema import check_names

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from attnscope.export.drawing import Picture
    from attnscope.export.export import ExportOptions as Ways
    from attnscope.figures.style import StyleFields
    from attnscope.notebook import ColouredText
    from attnscope.observe.records import Head
    from attnscope.viewer.page import Page

NAMES = (  # that TAB offers
    *("atlas", "calls", "chosen", "export", "facts", "failures", "head", "heads", "heatmap", "kept_heads", "key_table"),
    *("keys", "maps", "matrix", "of", "operands", "over_picture", "page", "prompt", "queries", "relations", "rollout"),
    *("rollout_table", "spans", "stack", "stacks", "table", "text", "token_table", "uniform", "unmeasured", "view"),
    *("weight_heads", "weights"),
)


@dataclass(frozen=True, repr=False)
class Capture(Observation):
    """An observation with its ways out, and those of the other stacks.

    >>> seen = attnscope.capture(attnscope.load("demo"), "the financial bank")
    >>> seen.export("runs/bank")
    """

    @classmethod
    def made_of(cls, seen: Observation) -> Capture:
        """The same numbers, with their ways out."""
        parts = {one.name: getattr(seen, one.name) for one in fields(seen)}
        return cls(**parts | {"other_stacks": {stack: cls.made_of(one) for stack, one in seen.other_stacks.items()}})

    def token_table(self, mean: Literal["none", "layer", "all"] = "none") -> pa.Table:
        """Every token's weight: a row per head and token, or per token of the heads' mean in a layer, or of all.

        Columns layer, head, kv_head (null where several were averaged), position, token, weight, uniform. The weight is
        what the chosen queries give the token on average, or, where keys alone were chosen, what it gives to them; null
        where the mask hides it. Raises UsageError where it was not asked for.
        """
        from attnscope.observe.observation import look_table

        return look_table(self, mean)

    def head(self, name: str) -> Head:
        """One head by its name, `L1H4`, `1.4` or `cross L1H4`: its role, scores, strongest relation.

        Raises UsageError for a head that the model does not have.

            >>> seen.head("L1H4").score["entropy"]
        """
        key, number = place_of(self, name)
        there = (one for one in self.heads if (one.layer, one.stack) == (key.layer, key.stack))
        found = next((one for one in there if one.head == number), None)
        if found is None:
            raise UsageError("heads were averaged over each kv head", "ask for View(by_kv=False)")
        return found

    def matrix(self, name: str) -> torch.Tensor:
        """The weights of one head by its name, (Q, K) fp32 on the CPU. Raises UsageError where they were not kept."""
        return matrix_of(self, name)

    def text(self, query: str | int | None = None, head: str | None = None) -> ColouredText:
        """The text, coloured by the weight that its tokens get: for a notebook, `.table()` has the numbers.

        query: the tokens that look, as `last` or `Mary`; those of the capture, or the last, without it. head: of one
        head, as `L1H4`; the mean of all heads whose matrices were kept, without it. Raises UsageError for what names no
        token or head, and where no matrices were kept.

            >>> seen.text(query="last", head="L2H1")
        """
        return coloured_text(self, query, head)

    def heatmap(self, layer: int | str, head: int | None = None, **style: Unpack[StyleFields]) -> Picture:
        """One head's map as a picture, for a notebook or `.save(path)`; style: the fields of `figures.Style`.

        layer, head: as numbers, or the name of the head alone, as "L1H4". Raises UsageError for a head whose map was
        not kept.
        """
        from attnscope.export.drawing import head_picture

        if isinstance(layer, str):
            key, number = place_of(self, layer)
            of_stack = self if key.stack == self.stack else self.of(key.stack)
            return head_picture(of_stack, key.layer, number, **style)
        if head is None:
            raise UsageError(
                f"layer {layer} has several heads", f'name one, as heatmap({layer}, 0) or heatmap("L{layer}H0")'
            )
        return head_picture(self, layer, head, **style)

    def over_picture(self, *heads: str, picture: int = 0, **style: Unpack[StyleFields]) -> Picture:
        """Where the chosen queries look in a picture, drawn over it, for a notebook or `.save(path)`.

        heads: as `L1H3`, or none for those that look most at it. picture: which, counted from 0. style: the fields of
        `figures.Style`. Raises UsageError where no weights per token were kept.

            >>> attnscope.capture(model, "What is this?", picture="cat.png", query="last").over_picture("L1H3")
        """
        from attnscope.export.drawing import over_picture

        return over_picture(self, heads, picture, **style)

    def page(self, *, select: str | None = None, precision: Literal[8, 16] = 8, max_mb: float = 20.0) -> Page:
        """What was kept as one HTML file to hover over: shown in a notebook's frame, or `.save(path)`.

        select: heads whose maps stay whole if all do not fit into a page of `max_mb`, as "27.3,last". precision:
        bits per weight. For an encoder-decoder it has the kept heads of all stacks, over the text and after it the
        target; for a text with pictures those of decoder and vision tower, over the text and after it the patches.
        Raises UsageError for logits, and for means over kv heads.

            >>> seen.page().save("bank.html")
        """
        from attnscope.model.selection import select as selected
        from attnscope.viewer.page import Plan, about, page_of
        from attnscope.viewer.side import Side, StackedSide, stacked

        if stacked(self):
            of_all = StackedSide(self)
            return page_of([of_all], Plan(max_mb, precision), about(of_all.seen, {}))
        side, there = Side(self), {key.layer: heads for key, (heads, _) in self.kv_of.items()}
        named = self.atlas.by_role() if self.atlas else None
        whole = selected(select, there, named) if select is not None else {}
        return page_of([side], Plan(max_mb, precision, whole), about(self, whole))

    def export(self, folder: str | Path, **how: Unpack[Ways]) -> list[Path]:
        """Write tables, figures and manifest.json into a folder; the paths. how: fields of `attnscope.export.Export`.

        A path that ends in the format of a picture (png, svg, pdf) or of a table (csv, tsv, jsonl, parquet, arrow) is
        one file: `seen.export("maps.pdf", figures=["overview"])`. Raises UsageError for a folder that holds another run
        (force=True writes over it), for what does not exist, and for a file of several pictures.
        """
        from attnscope.export.export import Export, export

        check_names("export", how, Export)
        return export(self, folder, Export(**how))

    def __dir__(self) -> list[str]:
        """What is for users: the parts that the ways out are made of are left out."""
        return sorted(NAMES)

    def _repr_html_(self) -> str:
        """The first heads in the terminal's columns, and the overview where maps were kept."""
        from attnscope.export.drawing import overview_picture

        picture = overview_picture(self)._repr_html_() if self.maps else ""
        return f"<div><pre>{html.escape(repr(self))}</pre>{heads_html(self)}{picture}</div>"
