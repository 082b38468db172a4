"""`attnscope.depth`, and what the command of that name runs: how much of what a layer reads each earlier block wrote.

What it returns is a line, a table, a figure and files. Torch is imported when a text is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnscope.api.records import DrawnRecord
from attnscope.errors import hints_of
from attnscope.export.drawing import picture_of
from attnscope.figures import About, Style
from attnscope.inputs.tokens import check_expression
from attnscope.model.options import LoadOptions
from attnscope.model.selection import TEXT_TASKS
from attnscope.observe.request import CaptureSpec, Reading, Request, spec_of
from attnscope.studies.attribution_records import SHARE, DepthParts, DepthPoint
from attnscope.utils.display import signed
from attnscope.utils.files import save_json
from attnscope.utils.folders import check, document, refuse_other_kind
from attnscope.utils.schema import takes_fields
from attnscope.utils.tables import as_table, integers, numbers, save, words

if TYPE_CHECKING:
    from attnscope.export.drawing import Picture
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import Text, TextInputs
    from attnscope.observe.run import Run
    from attnscope.viewer.page import Page
    from attnscope.viewer.study_pages import Again

STACKS = ("depth", *TEXT_TASKS)  # what needs which models
SCHEMA, NAME, TABLE, PICTURE = "depth/1", "depth.json", "depth.parquet", "depth"
PANELS = 8  # of the picture: tokens and streams


@dataclass(frozen=True, kw_only=True)
class DepthOptions(Reading):
    """Of which tokens; how the text is read is of `Reading`.

    query: the tokens that get rows of their own, as `5`, `last` or `bank#2`; without it all rows are means over the
    tokens. define: names for tokens.
    """

    query: str | int | None = None
    define: Mapping[str, str] | None = None

    def check(self) -> None:
        """Raise UsageError for what no text makes right."""
        if self.query is not None:
            check_expression(str(self.query), self.define or {})


def ask_of(text: Text, options: DepthOptions) -> CaptureSpec:
    """How the text is read, and which of its tokens are meant."""
    query = None if options.query is None else str(options.query)
    return spec_of(text, options, Request(query=query, define=options.define or {}))


@dataclass(frozen=True)
class Row:
    """One row of the table. token: None in a mean; stream: None where the residual is one vector per token."""

    point: DepthPoint
    token: int | None
    stream: int | None
    block: str
    number: float
    norm: float


class _Panel(NamedTuple):
    """Readers by blocks of one picture. rows: the readers. place, stream: which token and vector are meant."""

    name: str
    rows: Sequence[int]
    place: int
    stream: int


@dataclass(frozen=True, repr=False)
class Depth(DrawnRecord):
    """What each layer of a model reads of earlier blocks; see `DepthParts`. texts: what each stack reads."""

    parts: DepthParts
    texts: Mapping[str, TextInputs]
    source: str
    query: str | None

    @property
    def prompt(self) -> Prompt:
        """The text of the last stack."""
        return self.texts[self.parts.points[-1].stack].prompt

    @property
    def several(self) -> bool:
        """Whether rows are of several stacks."""
        return len({point.stack for point in self.parts.points}) > 1

    @property
    def unit(self) -> str:
        """What the numbers are."""
        return "share of the residual" if self.parts.measure == SHARE else "weight on the block"

    def readers(self) -> Iterator[list[Row]]:
        """The rows of each reader, token and stream, in the order of the model."""
        for point in self.parts.points:
            streams = point.number_CSQ.shape[1]
            for place, token in enumerate([None] if point.tokens is None else point.tokens):
                for stream in range(streams):
                    at = point, token, stream if streams > 1 else None
                    values = point.number_CSQ[:, stream, place].tolist(), point.norm_CSQ[:, stream, place].tolist()
                    yield [Row(*at, *row) for row in zip(point.blocks, *values, strict=True)]

    def token(self, point: DepthPoint, position: int | None) -> str | None:
        """A token as a table names it; None of a mean."""
        return None if position is None else self.texts[point.stack].prompt.tokens[position]

    def reader(self, point: DepthPoint) -> str:
        """The reader: `L3`, `L3 q`, `final`."""
        layer = "" if point.layer is None else f"L{point.layer}"
        use = "" if point.use == "layer" else point.use
        return " ".join(part for part in (point.stack if self.several else "", layer, use) if part)

    def table(self, most: int | None = None) -> pa.Table:
        """A row per reader and block, in the order of the model; docs/schemas.md says what the columns are.

        most: so many readers.
        """
        rows = list(chain.from_iterable(islice(self.readers(), most)))
        own, other = ([row.number for row in rows], [None] * len(rows))
        share, weight = (own, other) if self.parts.measure == SHARE else (other, own)
        columns: dict[str, Any] = {
            "stack": words([row.point.stack for row in rows]).dictionary_encode(),
            "layer": integers([row.point.layer for row in rows], np.int32),
            "use": words([row.point.use for row in rows]),
            "position": integers([row.token for row in rows], np.int32),
            "token": words([self.token(row.point, row.token) for row in rows]),
            "stream": integers([row.stream for row in rows], np.int32),
            "block": words([row.block for row in rows]),
            "weight": numbers(np.array(weight, float)),
            "share": numbers(np.array(share, float)),
            "norm": numbers(np.array([row.norm for row in rows])),
        }
        return as_table(columns)

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers has to know."""
        if self.parts.measure != SHARE:
            return ["weight: of the model's softmax over earlier blocks; the weights sum to 1"]
        share = "the projection of a block's output on the residual, over its squared norm; the shares sum to 1"
        lines = [f"share: {share}"]
        if any("rest" in block for block in self.blocks):
            lines.append("rest: what a layer adds besides, such as the bias of a norm")
        return lines

    @property
    def held(self) -> str:
        """How exactly the parts are what is read."""
        shares = self.parts.measure == SHARE
        what = "the parts sum to each residual" if shares else "weights times states are what is read"
        return f"{what} within {self.parts.error:.1e} of it"

    @property
    def line(self) -> str:
        """What was found, in a line."""
        point = self.parts.points[-1]
        mean_C = point.number_CSQ.mean((1, 2))
        order = np.argsort(-np.abs(mean_C), kind="stable")[:2]
        largest = " and ".join(f"{point.blocks[place]} {signed(mean_C[place])}" for place in order)
        return f"{self.source}, {len(self.prompt)} tokens: largest in the final residual: {largest}; {self.held}"

    def facts(self) -> dict[str, Any]:
        """What was asked, and how exact it is, as `depth.json` has it."""
        return self._asked() | {"measure": self.parts.measure, "error": self.parts.error}

    def _asked(self) -> dict[str, Any]:
        prompts = {stack: text.prompt for stack, text in self.texts.items()}
        texts = {stack: {"sha256": prompt.sha256, "tokens": len(prompt)} for stack, prompt in prompts.items()}
        return {"schema": SCHEMA, "model": self.source, "texts": texts, "query": self.query}

    @property
    def _title(self) -> str:
        return "What each layer reads of earlier blocks"

    def figure(self, style: Style = Style()) -> Picture:
        """Readers by blocks."""
        return picture_of(self._title, style, self.draw)

    def draw(self, folder: Path, style: Style = Style()) -> Path:
        """Draw readers by blocks into a folder; the path. A panel for each token or stream, up to eight."""
        from attnscope.figures.pictures import Grid, save_grid

        panels = {panel.name: self._cells(panel)[0] for panel in self._panels[:PANELS]}
        style = style.of(About(line=f"{self.source}, {len(self.prompt)} tokens", command=style.about.command))
        grid = Grid(list(map(self.reader, self.parts.points)), self.blocks, panels, self.unit)
        return save_grid(folder / f"{PICTURE}.{style.image}", grid, style, style.headed(self._title))

    @cached_property
    def blocks(self) -> list[str]:
        """The names of all blocks, in the order of the model."""
        return list(dict.fromkeys(block for point in self.parts.points for block in point.blocks))

    @cached_property
    def _panels(self) -> list[_Panel]:
        """The mean of all, or each token of each stack; one for each stream."""
        points, panels = self.parts.points, []
        by_text: dict[str | None, list[int]] = {}
        for row, point in enumerate(points):
            by_text.setdefault(None if point.tokens is None else point.stack, []).append(row)
        for stack, rows in by_text.items():
            streams, first = max(points[row].number_CSQ.shape[1] for row in rows), points[rows[0]]
            for place, token in enumerate((None,) if first.tokens is None else first.tokens):
                names = (
                    [] if token is None else [f"{stack} " * self.several + self.texts[first.stack].prompt.named(token)]
                )
                for stream in range(streams):
                    name = ", ".join([*names, *[f"stream {stream}"] * (streams > 1)])
                    panels.append(_Panel(name or "mean over the tokens", rows, place, stream))
        return panels

    def _cells(self, panel: _Panel) -> np.ndarray:
        """(2, readers, blocks): number and norm, NaN where a block comes later, and of another stack's readers."""
        cells_2RC = np.full((2, len(self.parts.points), len(self.blocks)), np.nan)
        for row in panel.rows:
            point = self.parts.points[row]
            columns = [self.blocks.index(block) for block in point.blocks]
            stream = min(panel.stream, point.number_CSQ.shape[1] - 1)
            both_2C = [number_CSQ[:, stream, panel.place] for number_CSQ in (point.number_CSQ, point.norm_CSQ)]
            cells_2RC[:, row, columns] = both_2C
        return cells_2RC

    def page(self, again: Again | None = None) -> Page:
        """Readers by blocks as an HTML page; again: what makes the numbers once more, as it is copied from there.

        >>> attnscope.depth(model, "the bank of the river").page().save("depth.html")
        """
        from attnscope.viewer.study_pages import Again, DepthSide

        readers = list(map(self.reader, self.parts.points))
        some = self._panels[: DepthSide.most(len(readers), len(self.blocks))]
        panels, every = {panel.name: self._cells(panel) for panel in some}, len(self._panels)
        notes = [*self.notes, self.held]
        notes += [f"{len(some)} of {every} tokens and streams have room"] * (every > len(some))
        again = again or Again()
        return DepthSide(self.source, self.prompt, self.unit, readers, self.blocks, panels, notes, again).page()

    def export(
        self, folder: str | Path, *, style: Style = Style(), force: bool = False, again: Again | None = None
    ) -> list[Path]:
        """Write depth.parquet, depth.json, figure and page; the paths. Raises UsageError for another text's folder.

        again: see `page`.
        """
        from attnscope.viewer.study_pages import DEPTH_PAGE

        into = Path(folder)
        refuse_other_kind(into, NAME, force)
        before = document(into / NAME, "damaged, or no depth of ours", "name another folder", force=force)
        check(into, "text", before, self._asked(), force)
        into.mkdir(parents=True, exist_ok=True)
        table = save(self.table(), into / TABLE)
        save_json(self.facts(), into / NAME)
        return [table, into / NAME, self.draw(into, style), self.page(again).save(into / DEPTH_PAGE)]


@dataclass(frozen=True)
class DepthCall(DepthOptions):
    """What `attnscope.depth` is called with."""

    model: LoadedModel
    text: Text


@hints_of(LoadOptions)
@takes_fields(DepthCall)
def depth(call: DepthCall) -> Depth:
    """How much of what each layer reads each earlier block wrote: the embedding, attention and MLPs.

    options: the fields of `DepthOptions`: query, define, and of `Reading`: chat, truncate, generate, target, picture,
    pair, global_tokens. A model that mixes earlier blocks by a softmax gives its weights. Raises ModelError where the
    residual cannot be followed, or its parts do not sum to it.

        >>> attnscope.depth(attnscope.load("demo"), "the bank of the river, the bank").table().to_pandas()
    """
    from attnscope.model.loaded import check_loaded
    from attnscope.observe.run import prepare

    call.check()
    check_loaded(call.model)
    call.model.check_task(*STACKS)
    return read_depth(prepare(call.model, ask_of(call.text, call), compared=False))


def read_depth(run: Run) -> Depth:
    """What each layer of a prepared run reads."""
    from attnscope.hooks.forward import text_inputs
    from attnscope.studies.depth import depth_of

    reads, inputs = text_inputs(run.loaded, run.prompt, run.source)
    tokens = {stack: text.chosen.query.positions for stack, text in run.asked.items() if text.chosen.query is not None}
    parts = depth_of(run.loaded, reads, inputs, tokens or None)
    return Depth(parts, run.asked, run.loaded.name, run.request.query)
