"""`attnscope.why`, and what the command of that name runs: one head, one query, one key, and who wrote its logit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from attnscope.ask import Ask
from attnscope.calls.explain import one_head, one_token
from attnscope.calls.records import Record, picture_of
from attnscope.cells import head_name, number, signed
from attnscope.errors import UsageError
from attnscope.figures import About, SetCost, Style, save_sets
from attnscope.files import save_json
from attnscope.folder.claim import check, document
from attnscope.keep.request import Request
from attnscope.model.loaded import check_loaded
from attnscope.run import prepare
from attnscope.study.ablation.screen import rank_correlation
from attnscope.study.why.parts import AskedLogit, LogitParts, parts_of
from attnscope.tables import as_table, numbers, save, words
from attnscope.text.expressions import check_expression
from attnscope.text.labels import visible_blanks
from attnscope.text.tokens import described, find
from attnscope.typed import check_names

if TYPE_CHECKING:
    from attnscope.ask import Text
    from attnscope.drawing import Picture
    from attnscope.model.loaded import LoadedModel
    from attnscope.run import Run
    from attnscope.text.prompt import Prompt, Side

STACKS = ("a logit taken apart", "decoder", "encoder")  # what needs which models
MEAN = "mean"
VERIFIED = 10  # components that --verify replaces
SCHEMA, NAME, TABLE, PICTURE = "why/1", "why.json", "why.parquet", "why"
BARS = 16  # of the picture
ONE = "write its position, or bank#2"
SIDES, ROWS = ("key", "query", "both"), ("component", "tokens")


class WhyFields(TypedDict, total=False):
    """The fields of `WhyOptions`, as keywords."""

    query: str | int
    key: str | int | None
    against: str | int
    side: Literal["key", "query", "both"]
    by: Literal["component", "tokens"]
    verify: bool
    define: Mapping[str, str] | None
    chat: bool
    truncate: Side | None


@dataclass(frozen=True)
class WhyOptions:
    """Which logit is taken apart, and how.

    query, key: one token each, as `5`, `last` or `bank#2`; without a key the one that gets most weight. against:
    `mean`, of all keys that the query sees, or another key. side: what the components wrote into: the key, the query,
    or both, in pairs. by: `tokens` splits what a head wrote by the tokens that it read. verify: replace the components
    with the largest contrasts one by one, and make the logit again. define: names for tokens.
    """

    query: str | int = "last"
    key: str | int | None = None
    against: str | int = MEAN
    side: Literal["key", "query", "both"] = "key"
    by: Literal["component", "tokens"] = "component"
    verify: bool = False
    define: Mapping[str, str] | None = None
    chat: bool = False
    truncate: Side | None = None

    def check(self) -> None:
        """Raise UsageError for what no text makes right."""
        for name, value, known in (("side", self.side, SIDES), ("by", self.by, ROWS)):
            if value not in known:
                raise UsageError(f"expected {name} {', '.join(known)}, got {value!r}", f"use {{{name}={known[0]}}}")
        if self.side == "both" and (self.by == "tokens" or self.verify):
            raise UsageError("pairs of components are neither split by tokens nor replaced", "use {side=key}")
        if self.by == "tokens" and self.verify:
            raise UsageError("what is split by tokens is not replaced", "leave out {by=tokens}")
        for expression in (self.query, self.key, self.against):
            if expression is not None and expression != MEAN:
                check_expression(str(expression), self.define or {})


def why(model: LoadedModel, text: Text, head: str, **options: Unpack[WhyFields]) -> Why:
    """Why a head looks where it looks: a logit before the softmax, taken apart by what wrote its key or query.

    head: as `L3H0` or `3.0`. options: the fields of `WhyOptions`: query, key, against, side, by, verify, define, chat,
    truncate. Raises UsageError for what is not one head or one token, for an option that does not exist, for half
    precision and for quantized weights; InputError for a key that the query does not see; ModelError for an
    encoder-decoder, and for a family whose contributions do not sum to the logit.

        >>> attnscope.why(attnscope.load("demo"), "the bank of the river, the bank", "L3H0").table().to_pandas()
    """
    check_names("why", options, WhyOptions)
    asked = WhyOptions(**options)
    asked.check()
    how: Any = {"chat": asked.chat, "truncate": asked.truncate}
    check_loaded(model)
    model.check_task(*STACKS)
    return taken_apart(prepare(model, Ask(text, request(asked), engine="fused", **how), compared=False), head, asked)


def request(asked: WhyOptions) -> Request:
    """Which tokens are meant."""
    key = None if asked.key is None else str(asked.key)
    return Request(query=str(asked.query), key=key, define=asked.define or {})


def taken_apart(run: Run, head: str, asked: WhyOptions) -> Why:
    """The logit of one head that the run asks about. Raises UsageError unless head, query and key are exactly one."""
    layer, number = one_head(head, run.loaded.geometry.heads_by_layer)
    query, key = one_token(run), run.chosen.key
    if key is not None and len(key.positions) != 1:
        raise UsageError(f"key {key.expression} means {described(run.prompt, key)}, expected one token", ONE)
    logit = AskedLogit(
        layer,
        number,
        query,
        None if key is None else key.positions[0],
        _against(run.prompt, asked),
        asked.side,
        asked.by == "tokens",
        VERIFIED if asked.verify else 0,
    )
    return Why(parts_of(run.loaded, run.prompt.ids, logit), run.prompt, run.loaded.name)


def _against(prompt: Prompt, asked: WhyOptions) -> int | None:
    """The other key that the key is compared with; None for the mean of all."""
    if asked.against == MEAN:
        return None
    found = find(prompt, str(asked.against), asked.define or {})
    if len(found.positions) != 1:
        raise UsageError(f"against {found.expression} means {described(prompt, found)}, expected one token", ONE)
    return found.positions[0]


@dataclass(frozen=True, repr=False)
class Why(Record):
    """A logit and what wrote it; see `LogitParts`."""

    parts: LogitParts
    prompt: Prompt
    source: str

    @property
    def head(self) -> str:
        """As `L3H0`."""
        return head_name(self.parts.asked.layer, self.parts.asked.head)

    def token(self, position: int | None) -> str:
        """A token as a message names it: `bank(8)`."""
        assert position is not None
        return f"{visible_blanks(self.prompt.plain[position]).strip('·') or self.prompt.labels[position]}({position})"

    @property
    def others(self) -> str:
        """What the key is compared with."""
        against = self.parts.asked.against
        return "the mean key" if against is None else self.token(against)

    @property
    def asked_line(self) -> str:
        """Which logit it is, and how far it is from the others."""
        parts, asked = self.parts, self.parts.asked
        return (
            f"{self.source}, query {self.token(asked.query)}: {self.token(asked.key)} is "
            f"{number(parts.logit - parts.base)} above {self.others}"
        )

    @property
    def line(self) -> str:
        """What was found, in a line."""
        largest = " and ".join(f"{self.row_name(row)} {signed(self.parts.contrast_N[row])}" for row in self.order[:2])
        return f"{self.head} of {self.asked_line}; largest: {largest}"

    @property
    def order(self) -> list[int]:
        """The rows, those with the largest contrasts first."""
        found: list[int] = np.argsort(-np.abs(self.parts.contrast_N), kind="stable").tolist()
        return found

    def row_name(self, row: int) -> str:
        """A row as a picture names it: `L2H1`, `L2H1 from bank(8)`, `L2H1 with L0H3`."""
        component, other = self.parts.components[row], self.parts.others[row]
        read = "" if component.position is None else f" from {self.token(component.position)}"
        return component.name + read + ("" if other is None else f" with {other.name}")

    @property
    def rank_correlation(self) -> float | None:
        """Of what replacing components changes with their contrasts; None where none was replaced, or all are equal."""
        tried_N = ~np.isnan(self.parts.true_N)
        if not tried_N.any():
            return None
        found = rank_correlation(self.parts.contrast_N[tried_N], self.parts.true_N[tried_N])
        return None if np.isnan(found) else found

    def table(self) -> pa.Table:
        """A row per component or pair, the largest contrasts first; docs/schemas.md says what the columns are."""
        parts, order = self.parts, self.order
        components = [parts.components[row] for row in order]
        others = [parts.others[row] for row in order]
        positions = [one.position for one in components]
        columns: dict[str, Any] = {
            "side": words([parts.side] * len(order)).dictionary_encode(),
            "component": words([one.name for one in components]),
            **{name: pa.array([getattr(one, name) for one in components], pa.int32()) for name in ("layer", "head")},
            "other": words([None if one is None else one.name for one in others]),
            "position": pa.array(positions, pa.int32()),
            "token": words([None if at is None else self.prompt.tokens[at] for at in positions]),
        }
        values = {
            "contribution": parts.contribution_N,
            "contrast": parts.contrast_N,
            "share": parts.share_N,
            "true": parts.true_N,
        }
        return as_table(columns | {name: numbers(value[order]) for name, value in values.items()})

    def facts(self) -> dict[str, Any]:
        """What was asked, the logit, and what the contributions sum to, as `why.json` has it."""
        parts, asked = self.parts, self.parts.asked
        return self._asked() | {
            "key": asked.key,
            "logit": parts.logit,
            "sum": parts.sum,
            "difference": parts.sum - parts.logit,
            "above": parts.logit - parts.base,
            "visible": parts.visible,
            "softcap": parts.softcap,
            "sinks": parts.sinks,
            "rank_correlation": self.rank_correlation,
        }

    def _asked(self) -> dict[str, Any]:
        asked = self.parts.asked
        return {
            "schema": SCHEMA,
            "model": self.source,
            "sha256": self.prompt.sha256,
            "tokens": len(self.prompt),
            "head": self.head,
            "query": asked.query,
            "key": asked.key,
            "against": MEAN if asked.against is None else asked.against,
            "side": asked.side,
            "by": ROWS[asked.by_tokens],
            "verify": asked.verify > 0,
        }

    def figure(self, style: Style = Style()) -> Picture:
        """The largest contrasts as bars."""
        style = replace(style, image="png")
        return picture_of(self._title, lambda folder: self._draw(folder, style))

    def _picture(self) -> Picture:
        return self.figure()

    @property
    def _title(self) -> str:
        return f"Why {self.head} looks at {self.token(self.parts.asked.key)}"

    def _draw(self, folder: Path, style: Style) -> Path:
        parts, shown = self.parts, self.order[:BARS]
        style = style.of(About(line=self.asked_line, command=style.about.command))
        note = f"{len(shown)} of {len(self.order)}; all together {signed(parts.contrast_N.sum())}"
        bars = [SetCost(self.row_name(row), float(parts.contrast_N[row])) for row in shown]
        path = folder / f"{PICTURE}.{style.image}"
        return save_sets(path, bars, style, title=self._title, note=note, unit=f"logit above {self.others}")

    def export(self, folder: str | Path, *, style: Style = Style(), force: bool = False) -> list[Path]:
        """Write why.parquet, why.json and the figure; the paths. Raises UsageError for a folder that holds another."""
        into = Path(folder)
        self.check_folder(into, force)
        into.mkdir(parents=True, exist_ok=True)
        table = save(self.table(), into / TABLE)
        save_json(self.facts(), into / NAME)
        return [table, into / NAME, self._draw(into, style)]

    def check_folder(self, folder: Path, force: bool) -> None:
        """Raise UsageError for a folder that holds another logit, unless force says to write over it."""
        before = document(folder / NAME, "damaged, or no logit of ours", "name another folder", force=force)
        check(folder, "logit", before, self._asked(), force)
