"""What `attnscope.capture` returns: an observation that draws, exports and shows itself.

A notebook shows its heads in the terminal's columns, and its text, coloured.

Shapes: H head, Q query, K key, T token.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np
import pyarrow as pa

from attnscope.errors import UsageError
from attnscope.inputs.tokens import choose, described
from attnscope.metrics.metrics import COLUMNS, KEPT_FIRST, KNOWN, LENGTHS, LOOKBACKS, MASS, METRICS, SIGNED, UNIFORM
from attnscope.model.selection import STACKS, HeadsByLayer, mixes, select_layers
from attnscope.observe.observation import Observation
from attnscope.observe.request import LayerKey
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet
from attnscope.utils.schema import check_names
from attnscope.utils.tables import as_table, texts_at

if TYPE_CHECKING:
    import torch

    from attnscope.export.drawing import Picture
    from attnscope.export.export import ExportOptions
    from attnscope.figures.style import StyleFields
    from attnscope.inputs.prompt import Prompt
    from attnscope.observe.records import Head
    from attnscope.viewer.page import Page

SHOWN_HEADS = 12  # of the table
LONGEST_TOKEN = 16  # letters of a cell
RELATION, ROLES = "strongest relation", "roles"
TEXT_ROLE, LEADING = "text role", KEPT_FIRST[:5]  # what an atlas' roles leave room for after the first metrics
NAME = re.compile(r"(?:([a-z]+)[ .])?L?(\d+)[H.](\d+)", re.IGNORECASE)
INK = "31, 119, 180"  # of the coloured text, as red, green, blue


def place_of(observation: Observation, name: str) -> tuple[LayerKey, int]:
    """The layer and the number of a head that is named as `L1H4`, `1.4`, `cross L1H4` or `cross.1.4`.

    Raises UsageError for what names no head of the model, UnknownLayerError for one of a layer without attention.
    """
    match = NAME.fullmatch(name.strip())
    if match is None:
        raise UsageError(f"expected the name of a head, got {name!r}", "write it as L1H4 or 1.4")
    stack = match[1].lower() if match[1] else observation.stack
    if stack not in STACKS or stack not in observation.stacks:
        raise UsageError(f"this model has no {match[1]} layers", f"it has {', '.join(observation.stacks)}")
    key, number = LayerKey(int(match[2]), stack), int(match[3])
    heads, _ = observation.of(stack).kv_of[key]
    if number >= heads:
        raise UsageError(f"there is no head {name}", f"the heads of layer {key.layer} are 0 to {heads - 1}")
    return key, number


def heads_html(seen: Observation) -> str:
    """The first heads in the order and the columns of the terminal: what a notebook shows."""
    # So many that the first are read without scrolling; the note says how many more there are.
    heads = seen.kept_heads(seen.ranked_by)[:SHOWN_HEADS]
    kv = any(head.head is not None and head.kv_head not in (None, head.head) for head in heads)
    which = ["head", *["kv"] * kv, *([ROLES, TEXT_ROLE] if seen.atlas else ["role"])]
    measured = (*seen.every.scores, UNIFORM, "top_key_mass")
    scores = [column for column in score_columns(seen) if column.key in measured]
    columns = [*map(Column, which), *scores, Column(RELATION), Column("weight", cells.number)]
    rows = [{**head_row(seen, head, " ", _token), "kv": str(head.kv_head)} for head in heads]
    more = len(seen.kept_heads()) - len(heads)
    return Sheet(rows, columns)._repr_html_() + (f"<p>{more} more heads in table()</p>" if more else "")


def head_row(seen: Observation, head: Head, between: str, token: Callable[[Prompt, int], str]) -> Row:
    """What the columns show of a head; between: what is between the roles of an atlas. token: how one is written."""
    relation, stack = head.strongest, seen.of(head.stack)
    return {
        "head": head.name,
        "kv": cells.MISSING if mixes(head.stack) else str(head.kv_head),
        "role": head.role,
        ROLES: between.join(head.atlas_roles) or cells.MISSING,
        TEXT_ROLE: head.text_role,
        "unif": "≈" * bool(head.near_uniform),
        **head.score,
        UNIFORM: head.uniform,
        "top_key_mass": f"{token(stack.keys, head.top_key)} {cells.number(head.top_key_mass)}",
        RELATION: f"{token(stack.queries, relation.query)} → {token(stack.keys, relation.key)}"
        if relation
        else cells.MISSING,
        "weight": relation.weight if relation else None,
    }


def score_columns(seen: Observation) -> list[Column]:
    """The metrics, those that were asked for first; with an atlas, after the leading ones the roles on the text."""
    scores = seen.every.scores
    named = [MASS.id, UNIFORM] if MASS.id in scores else []
    named += [name for name in (*LENGTHS, *LOOKBACKS) if name in scores]
    order = dict.fromkeys((*named, *KEPT_FIRST, *METRICS, *SIGNED))
    titles = {UNIFORM: UNIFORM, **COLUMNS, **{name: metric.short for name, metric in KNOWN.items()}}
    columns = [
        Column(titles[name], cells.score, name) for name in order if name in (*named, *METRICS, *COLUMNS, *scores)
    ]
    if seen.atlas:
        columns.insert(len(named) + len(LEADING), Column(TEXT_ROLE, align="left"))
    return columns


def _token(prompt: Prompt, position: int) -> str:
    """A token in a cell of a notebook: `bank(8)`, a long one with an ellipsis."""
    label = prompt.labels[position]
    return f"{cells.shortened(label.strip('·') or label, LONGEST_TOKEN)}({position})"


@dataclass(frozen=True, repr=False)
class ColouredText:
    """A text, and how much of the weight of some queries each of its tokens gets, (T,).

    title: whose weight it is, and of which queries. queries: their positions.
    """

    prompt: Prompt
    weight_T: np.ndarray
    title: str
    queries: tuple[int, ...]

    def table(self) -> pa.Table:
        """A row per token: position, token, weight."""
        place = np.arange(len(self.weight_T), dtype=np.int32)
        return as_table({"position": place, "token": texts_at(self.prompt.tokens, place), "weight": self.weight_T})

    def __repr__(self) -> str:
        most = np.argsort(-self.weight_T, kind="stable")[:3]
        largest = ", ".join(f"{_token(self.prompt, place)} {self.weight_T[place]:.2f}" for place in most.tolist())
        return f"ColouredText: {self.title}; most: {largest}"

    def _repr_html_(self) -> str:
        """The text: the stronger a token's ground, the more it gets; darkest is the largest of those after token 0."""
        others = self.weight_T[1:] if len(self.weight_T) > 1 else self.weight_T
        largest = float(others.max()) or 1.0
        spans = []
        for place, (token, weight) in enumerate(zip(self.prompt.plain, self.weight_T.tolist(), strict=True)):
            line = "; outline: 1px solid" if place in self.queries else ""
            style = f"background: rgba({INK}, {min(1.0, weight / largest) * 0.75:.2f}){line}"
            shown = html.escape(token).replace("\n", "⏎<br>")
            spans.append(f'<span title="{weight:.4f}" style="{style}">{shown}</span>')
        note = f"{self.title}; darkest: {largest:.2f}, token 0: {self.weight_T[0]:.2f}"
        text = "".join(spans)
        return f'<div><p><small>{html.escape(note)}</small></p><p style="white-space: pre-wrap">{text}</p></div>'


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
        parts = {part.name: getattr(seen, part.name) for part in fields(seen)}
        return cls(**parts | {"other_stacks": {stack: cls.made_of(of) for stack, of in seen.other_stacks.items()}})

    def token_table(self, mean: Literal["none", "layer", "all"] = "none") -> pa.Table:
        """Every token's weight: a row per head and token, or per token of the heads' mean in a layer, or of all.

        Columns layer, head, kv_head (null where several were averaged), position, token, weight, uniform. The weight is
        what the chosen queries give the token on average, or, where keys alone were chosen, what it gives to them; null
        where the mask hides it. Raises UsageError where it was not asked for.
        """
        from attnscope.observe.observation import token_table

        return token_table(self, mean)

    def head(self, name: str) -> Head:
        """One head by its name, `L1H4`, `1.4` or `cross L1H4`: its role, scores, strongest relation.

        Raises UsageError for a head that the model does not have.

            >>> seen.head("L1H4").score["entropy"]
        """
        key, number = place_of(self, name)
        for head in self.heads:
            if (head.layer, head.stack, head.head) == (key.layer, key.stack, number):
                return head
        raise UsageError("heads were averaged over each kv head", "ask for View(by_kv=False)")

    def matrix(self, name: str) -> torch.Tensor:
        """The weights of one head by its name, (Q, K) fp32 on the CPU. Raises UsageError where they were not kept."""
        key, number = place_of(self, name)
        of_stack = self.of(key.stack)
        heads = list(of_stack.weight_heads.get(key, ()))
        if number not in heads:
            raise UsageError(f"the matrix of {name} was not kept", "ask for its layer, or for Request(weights=True)")
        return of_stack.weights[key][heads.index(number)]

    def text(self, query: str | int | None = None, head: str | None = None) -> ColouredText:
        """The text, coloured by the weight that its tokens get: for a notebook, `.table()` has the numbers.

        query: the tokens that look, as `last` or `Mary`; those of the capture, or the last, without it. head: of one
        head, as `L1H4`; the mean of all heads with kept matrices, without it. Of a layer without a softmax it is |w| as
        a share of its row. Raises UsageError for what names no token or head, and where no matrices were kept.

            >>> seen.text(query="last", head="L2H1")
        """
        match = self.chosen.query if query is None else None
        if match is None:
            match = choose(self.queries, "last" if query is None else str(query), None, {}, ()).query
        assert match is not None
        rows = list(match.positions)
        stack = self.stack
        if head is not None:
            stack, matrices, whose = place_of(self, head)[0].stack, [self.matrix(head)[None]], head
        else:
            matrices = [weights for weights in self.of(self.stack).weights.values() if len(weights)]
            if not matrices:
                raise UsageError("no matrices were kept of this capture", "ask for Request(weights=True)")
            whose = f"mean of {sum(map(len, matrices))} heads"
        rows_HrK = [weights[:, rows] for weights in matrices]
        if mixes(stack):
            from attnscope.attention.linear import shares_of

            rows_HrK = list(map(shares_of, rows_HrK))
        per_head = [part.mean(1) for part in rows_HrK]  # (H, K) each
        weight_T = np.concatenate([means.double().numpy() for means in per_head]).mean(0)
        title = f"{whose}, query {match.expression}: {described(self.queries, match)}"
        return ColouredText(self.keys, weight_T, title, tuple(rows) if self.queries is self.keys else ())

    def heatmap(self, layer: int | str, head: int | None = None, **style: Unpack[StyleFields]) -> Picture:
        """One head's map as a picture, for a notebook or `.save(path)`; style: the fields of `figures.Style`.

        layer, head: as numbers, or the name of the head alone, as "L1H4". Raises UsageError for a head
        without a kept map.
        """
        from attnscope.export.drawing import head_picture

        if isinstance(layer, str):
            key, number = place_of(self, layer)
            of_stack = self if key.stack == self.stack else self.of(key.stack)
            return head_picture(of_stack, key.layer, number, **style)
        if head is None:
            message = f"layer {layer} has several heads"
            raise UsageError(message, f'name one, as heatmap({layer}, 0) or heatmap("L{layer}H0")')
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
        from attnscope.viewer.page import Plan, about, page_of
        from attnscope.viewer.page_data import Side, StackedSide, stacked

        side = StackedSide(self) if stacked(self) else Side(self)
        whole: HeadsByLayer = {}
        if select is not None and all(mixes(stack) for stack in self.other_stacks):  # others are over another text
            there = {key.named: heads for key, (heads, _) in side.seen.kv_of.items()}
            named = self.atlas.by_role() if self.atlas else None
            whole = select_layers(select, there, self.stack, named, "this page shows")
        return page_of([side], Plan(max_mb, precision, whole), about(side.seen, whole))

    def export(self, folder: str | Path, **how: Unpack[ExportOptions]) -> list[Path]:
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
