"""`attnscope.why`, and what the command of that name runs: one head, one query, one key, and who wrote its logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from attnscope.ask import Ask
from attnscope.calls.records import Record, picture_of
from attnscope.cells import head_name, number, signed
from attnscope.errors import ModelError, UsageError
from attnscope.figures import About, SetCost, Style, save_sets
from attnscope.files import save_json
from attnscope.folder.claim import check, document
from attnscope.keep.request import Request
from attnscope.model.loaded import check_loaded
from attnscope.run import prepare
from attnscope.seam.inputs import given_of
from attnscope.selection import pairs, select_stacks
from attnscope.stacks import OF_TWO_TEXTS, TASKS, is_cross, prefix
from attnscope.study.ablation.screen import rank_correlation
from attnscope.study.why.parts import AskedLogit, LogitParts, parts_of
from attnscope.tables import as_table, numbers, save, words
from attnscope.text.expressions import check_expression
from attnscope.text.labels import visible_blanks
from attnscope.text.tokens import Found, described, find
from attnscope.typed import check_names

if TYPE_CHECKING:
    from attnscope.ask import Text
    from attnscope.drawing import Picture
    from attnscope.media.picture import PictureSource
    from attnscope.model.geometry import Geometry
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe import Asked
    from attnscope.run import Run
    from attnscope.study.why.written import Component
    from attnscope.text.prompt import Prompt, Side

STACKS = ("a logit taken apart", *TASKS)  # what needs which models
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
    target: str | Sequence[int] | None
    picture: PictureSource | Sequence[PictureSource] | None
    generate: int | None


@dataclass(frozen=True)
class WhyOptions:
    """Which logit is taken apart, and how.

    query, key: one token each, as `5`, `last` or `bank#2`; without a key the one that gets most weight. against:
    `mean`, of all keys that the query sees, or another key. side: what the components wrote into: the key, the query,
    or both, in pairs. by: `tokens` splits what a head wrote by the tokens that it read. verify: replace the components
    with the largest contrasts one by one, and make the logit again. define: names for tokens. chat, truncate, target,
    picture, generate: how the text is read, as of `attnscope.ask.Ask`.
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
    target: str | Sequence[int] | None = None
    picture: PictureSource | Sequence[PictureSource] | None = None
    generate: int | None = None

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

    head: as `L3H0`, `3.0` or `cross L3H0`. options: the fields of `WhyOptions`: query, key, against, side, by, verify,
    define, chat, truncate, target, picture, generate. Raises UsageError for what is not one head or one token, for an
    option that does not exist, for half precision and for quantized weights; InputError for a key that the query does
    not see; ModelError for a family whose contributions do not sum to the logit.

        >>> attnscope.why(attnscope.load("demo"), "the bank of the river, the bank", "L3H0").table().to_pandas()
    """
    check_names("why", options, WhyOptions)
    asked = WhyOptions(**options)
    asked.check()
    check_loaded(model)
    model.check_task(*STACKS)
    return taken_apart(prepare(model, ask_of(text, asked), compared=False), head, asked)


def ask_of(text: Text, asked: WhyOptions) -> Ask:
    """How the text is read, and which of its tokens are meant."""
    how = {name: getattr(asked, name) for name in ("chat", "truncate", "target", "picture", "generate")}
    return Ask(text, request(asked), engine="fused", **how)


def request(asked: WhyOptions) -> Request:
    """Which tokens are meant."""
    key = None if asked.key is None else str(asked.key)
    return Request(query=str(asked.query), key=key, define=asked.define or {})


def taken_apart(run: Run, head: str, asked: WhyOptions) -> Why:
    """The logit of one head that the run asks about. Raises UsageError unless head, query and key are exactly one."""
    geometry = run.loaded.geometry
    stack, layer, number = one_head(head, geometry)
    meant = run.asked[stack]
    assert meant.chosen.query is not None
    if meant.chosen.nothing:
        named = " or ".join(
            f"{what} {one}" for what, one in (("query", asked.query), ("key", asked.key)) if one is not None
        )
        raise UsageError(f"{named} means no token that {stack} layers read, expected one of each", ONE)
    logit = AskedLogit(
        layer,
        number,
        _one("query", meant.prompt, meant.chosen.query),
        None if meant.chosen.key is None else _one("key", meant.looked_at, meant.chosen.key),
        _against(meant.looked_at, asked),
        asked.side,
        asked.by == "tokens",
        VERIFIED if asked.verify else 0,
        None if stack == geometry.stack else stack,
    )
    reads, inputs = given_of(run.loaded, run.prompt, run.source)
    texts = {None if one == geometry.stack else one: of_stack for one, of_stack in run.asked.items()}
    return Why(parts_of(run.loaded, reads, logit, **inputs), texts, run.loaded.name)


def one_head(text: str, geometry: Geometry) -> tuple[str, int, int]:
    """The stack, layer and head that `L2H3`, `2.3` or `cross L2H3` names; UsageError unless it is exactly one."""
    if "@" in text:
        raise UsageError(f"head {text} names a role, expected one head", "write it as L2H3 or 2.3")
    chosen = select_stacks(text, geometry.heads_of_stacks, geometry.stack)
    found = [(stack, layer, head) for stack, heads in chosen.items() for layer, head in pairs(heads)]
    if len(found) != 1:
        raise UsageError(f"head {text} names {len(found)} heads, expected one", "write it as L2H3 or 2.3")
    if found[0][0] not in OF_TWO_TEXTS:
        raise ModelError(f"{text} is in layers that do not read the tokens of a text", "choose another layer")
    return found[0]


def _one(what: str, prompt: Prompt, found: Found) -> int:
    """The one token that was meant."""
    if len(found.positions) != 1:
        raise UsageError(f"{what} {found.expression} means {described(prompt, found)}, expected one token", ONE)
    return found.positions[0]


def _against(prompt: Prompt, asked: WhyOptions) -> int | None:
    """The other key that the key is compared with; None for the mean of all."""
    if asked.against == MEAN:
        return None
    return _one("against", prompt, find(prompt, str(asked.against), asked.define or {}))


@dataclass(frozen=True, repr=False)
class Why(Record):
    """A logit and what wrote it; see `LogitParts`. texts: what each stack reads, as `Component.stack` names it."""

    parts: LogitParts
    texts: Mapping[str | None, Asked]
    source: str

    @property
    def head(self) -> str:
        """As `L3H0`, `cross L3H0`."""
        asked = self.parts.asked
        return ("" if asked.stack is None else prefix(asked.stack)) + head_name(asked.layer, asked.head)

    @property
    def prompt(self) -> Prompt:
        """The text that the query is of."""
        return self.texts[self.parts.asked.stack].prompt

    @property
    def keys(self) -> Prompt:
        """The text that the key is of."""
        return self.texts[self.parts.asked.stack].looked_at

    def token(self, position: int | None) -> str:
        """A key as a message names it: `bank(8)`."""
        assert position is not None
        return _named(self.keys, position)

    def read_by(self, component: Component) -> str:
        """The token that a head read, where its rows are split by tokens; empty elsewhere."""
        at = component.position
        return "" if at is None else _named(self.texts[component.stack].looked_at, at)

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
            f"{self.source}, query {_named(self.prompt, asked.query)}: {self.token(asked.key)} is "
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
        read = self.read_by(component)
        return component.name + f" from {read}" * bool(read) + ("" if other is None else f" with {other.name}")

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
        columns: dict[str, Any] = {
            "side": words([parts.side] * len(order)).dictionary_encode(),
            "component": words([one.name for one in components]),
            **{name: pa.array([getattr(one, name) for one in components], pa.int32()) for name in ("layer", "head")},
            "other": words([None if one is None else one.name for one in others]),
            "position": pa.array([one.position for one in components], pa.int32()),
            "token": words([self._token_read(one) for one in components]),
        }
        values = {
            "contribution": parts.contribution_N,
            "contrast": parts.contrast_N,
            "share": parts.share_N,
            "true": parts.true_N,
        }
        return as_table(columns | {name: numbers(value[order]) for name, value in values.items()})

    def _token_read(self, component: Component) -> str | None:
        at = component.position
        return None if at is None else self.texts[component.stack].looked_at.tokens[at]

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
            **({"keys_sha256": self.keys.sha256} if is_cross(asked.stack or "") else {}),
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


def _named(prompt: Prompt, position: int) -> str:
    return f"{visible_blanks(prompt.plain[position]).strip('·') or prompt.labels[position]}({position})"
