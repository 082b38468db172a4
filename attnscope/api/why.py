"""`attnscope.why`, and what the command of that name runs: one head, one query, one key, and who wrote its logit.

What it returns is a line, a table, a figure and files. Torch is imported when a logit is taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from attnscope.api.records import DrawnRecord
from attnscope.errors import ModelError, UsageError, hints_of
from attnscope.export.drawing import picture_of
from attnscope.figures import About, Style
from attnscope.inputs.tokens import TokenMatch, check_expression, described, find
from attnscope.model.options import LoadOptions
from attnscope.model.selection import OF_TWO_TEXTS, TEXT_TASKS, is_cross, mixes, one_head, prefix
from attnscope.observe.request import CaptureSpec, Reading, Request, spec_of
from attnscope.studies.attribution_records import Component, LogitParts, LogitQuery
from attnscope.studies.statistics import rank_correlation
from attnscope.utils.display import head_name, number, signed
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

MEAN = "mean"
STACKS = ("a logit taken apart", *TEXT_TASKS)  # what needs which models
VERIFIED = 10  # components that --verify replaces
ONE = "write its position, or bank#2"
SIDES, ROWS = ("key", "query", "both"), ("component", "tokens")


@dataclass(frozen=True, kw_only=True)
class WhyOptions(Reading):
    """Which logit is taken apart, and how; how the text is read is of `Reading`.

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

    def check(self) -> None:
        """Raise UsageError for what no text makes right."""
        for name, value, known in (("side", self.side, SIDES), ("by", self.by, ROWS)):
            if value not in known:
                raise UsageError(f"expected {name} {', '.join(known)}, got {value!r}", f"use {{{name}={known[0]}}}")
        if self.side == "both" and (self.by == "tokens" or self.verify):
            raise UsageError("side=both goes neither with by=tokens nor with verify", "use {side=key}")
        if self.by == "tokens" and self.verify:
            raise UsageError("by=tokens does not go with verify", "leave out {by=tokens}")
        for expression in (self.query, self.key, self.against):
            if expression is not None and expression != MEAN:
                check_expression(str(expression), self.define or {})


def ask_of(text: Text, options: WhyOptions) -> CaptureSpec:
    """How the text is read, and which of its tokens are meant."""
    key = None if options.key is None else str(options.key)
    return spec_of(text, options, Request(query=str(options.query), key=key, define=options.define or {}))


SCHEMA, NAME, TABLE, PICTURE = "why/1", "why.json", "why.parquet", "why"
BARS = 16  # of the picture


@dataclass(frozen=True, repr=False)
class Why(DrawnRecord):
    """A logit and what wrote it; see `LogitParts`. texts: what each stack reads, as `Component.stack` names it."""

    parts: LogitParts
    texts: Mapping[str | None, TextInputs]
    source: str

    @property
    def head(self) -> str:
        """As `L3H0`, `cross L3H0`."""
        logit = self.parts.asked
        return ("" if logit.stack is None else prefix(logit.stack)) + head_name(logit.layer, logit.head)

    @property
    def prompt(self) -> Prompt:
        """The text that the query is of."""
        return self.texts[self.parts.asked.stack].prompt

    @property
    def keys(self) -> Prompt:
        """The text that the key is of."""
        return self.texts[self.parts.asked.stack].key_prompt

    def token(self, position: int | None) -> str:
        """A key as a message names it: `bank(8)`."""
        assert position is not None
        return self.keys.named(position)

    def read_by(self, component: Component) -> str:
        """The token that a head read, where its rows are split by tokens; empty elsewhere."""
        at = component.position
        return "" if at is None else self._read(component).named(at)

    def _read(self, component: Component) -> Prompt:
        """The text that a head reads: a linear layer's is the model's own."""
        return (self.texts.get(component.stack) or self.texts[None]).key_prompt

    @property
    def others(self) -> str:
        """What the key is compared with."""
        against = self.parts.asked.against
        return "the mean key" if against is None else self.token(against)

    @property
    def asked_line(self) -> str:
        """Which logit it is, and how far it is from the others."""
        parts, logit = self.parts, self.parts.asked
        return (
            f"{self.source}, query {self.prompt.named(logit.query)}: {self.token(logit.key)} is "
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
        rows: list[int] = np.argsort(-np.abs(self.parts.contrast_N), kind="stable").tolist()
        return rows

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
        rank = rank_correlation(self.parts.contrast_N[tried_N], self.parts.true_N[tried_N])
        return None if np.isnan(rank) else rank

    def table(self) -> pa.Table:
        """A row per component or pair, the largest contrasts first; docs/schemas.md says what the columns are."""
        parts, order = self.parts, self.order
        components, others = [parts.components[row] for row in order], [parts.others[row] for row in order]
        read: list[str | None] = [None] * len(order)
        for row, component in enumerate(components):
            if component.position is not None:
                read[row] = self._read(component).tokens[component.position]
        columns: dict[str, Any] = {
            "side": words([parts.side] * len(order)).dictionary_encode(),
            "component": words([one.name for one in components]),
            **{name: integers([getattr(one, name) for one in components], np.int32) for name in ("layer", "head")},
            "other": words([None if other is None else other.name for other in others]),
            "position": integers([one.position for one in components], np.int32),
            "token": words(read),
        }
        names = ("contribution", "contrast", "share", "true")
        return as_table(columns | {name: numbers(getattr(parts, f"{name}_N")[order]) for name in names})

    def facts(self) -> dict[str, Any]:
        """What was asked, the logit, and what the contributions sum to, as `why.json` has it."""
        parts = self.parts
        return self._asked() | {
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
        logit = self.parts.asked
        return {
            "schema": SCHEMA,
            "model": self.source,
            "sha256": self.prompt.sha256,
            "tokens": len(self.prompt),
            **({"keys_sha256": self.keys.sha256} if is_cross(logit.stack or "") else {}),
            "head": self.head,
            "query": logit.query,
            "key": logit.key,
            "against": MEAN if logit.against is None else logit.against,
            "side": logit.side,
            "by": ROWS[logit.by_tokens],
            "verify": logit.verify > 0,
        }

    def figure(self, style: Style = Style()) -> Picture:
        """The largest contrasts as bars."""
        return picture_of(self._title, style, self.draw)

    @property
    def _title(self) -> str:
        return f"Why {self.head} looks at {self.token(self.parts.asked.key)}"

    def draw(self, folder: Path, style: Style = Style()) -> Path:
        """Draw the largest contrasts as bars into a folder; the path."""
        from attnscope.figures import SetCost, save_sets

        parts, shown = self.parts, self.order[:BARS]
        style = style.of(About(line=self.asked_line, command=style.about.command))
        note = f"{len(shown)} of {len(self.order)}; all together {signed(parts.contrast_N.sum())}"
        bars = [SetCost(self.row_name(row), float(parts.contrast_N[row])) for row in shown]
        path = folder / f"{PICTURE}.{style.image}"
        return save_sets(path, bars, style, title=self._title, note=note, unit=f"logit above {self.others}")

    def export(self, folder: str | Path, *, style: Style = Style(), force: bool = False) -> list[Path]:
        """Write why.parquet, why.json and the figure; the paths. Raises UsageError for a folder that holds another."""
        into = Path(folder)
        refuse_other_kind(into, NAME, force)
        before = document(into / NAME, "damaged, or no logit of ours", "name another folder", force=force)
        check(into, "logit", before, self._asked(), force)
        into.mkdir(parents=True, exist_ok=True)
        table = save(self.table(), into / TABLE)
        save_json(self.facts(), into / NAME)
        return [table, into / NAME, self.draw(into, style)]


@dataclass(frozen=True)
class WhyCall(WhyOptions):
    """What `attnscope.why` is called with."""

    model: LoadedModel
    text: Text
    head: str


@hints_of(LoadOptions)
@takes_fields(WhyCall)
def why(call: WhyCall) -> Why:
    """Why a head looks where it looks: a logit before the softmax, taken apart by what wrote its key or query.

    head: as `L3H0`, `3.0` or `cross L3H0`. options: the fields of `WhyOptions`: query, key, against, side, by, verify,
    define, and of `Reading`: chat, truncate, generate, target, picture, pair, global_tokens. Raises UsageError for
    what is not one head or one token, for an option that does not exist, for half precision and for quantized weights;
    InputError for a key that the query does not see; ModelError for a family whose contributions do not sum to the
    logit.

        >>> attnscope.why(attnscope.load("demo"), "the bank of the river, the bank", "L3H0").table().to_pandas()
    """
    from attnscope.model.loaded import check_loaded
    from attnscope.observe.run import prepare

    call.check()
    check_loaded(call.model)
    call.model.check_task(*STACKS)
    call.model.check_softmax(STACKS[0])
    return taken_apart(prepare(call.model, ask_of(call.text, call), compared=False), call.head, call)


def taken_apart(run: Run, head: str, options: WhyOptions) -> Why:
    """The logit of one head that the run asks about. Raises UsageError unless head, query and key are exactly one."""
    from attnscope.hooks.forward import text_inputs
    from attnscope.studies.attribution import decompose_logit

    geometry = run.loaded.geometry
    stack, layer, number = one_head(head, geometry.heads_of_stacks, geometry.stack)
    if mixes(stack):
        raise ModelError(f"{head} has no logits: its layer has no softmax", "choose a head of attention")
    if stack not in OF_TWO_TEXTS:
        raise ModelError(f"{head} is in layers that do not read the tokens of a text", "choose another layer")
    meant = run.asked[stack]
    assert meant.chosen.query is not None
    if meant.chosen.nothing:
        named = " or ".join(
            f"{what} {one}" for what, one in (("query", options.query), ("key", options.key)) if one is not None
        )
        raise UsageError(f"{named} means no token that {stack} layers read, expected one of each", ONE)
    against = None  # the mean of all keys
    if options.against != MEAN:
        match = find(meant.key_prompt, str(options.against), options.define or {})
        against = _one("against", meant.key_prompt, match)
    # A query, a key and a stack, each exactly one.
    logit = LogitQuery(
        layer,
        number,
        _one("query", meant.prompt, meant.chosen.query),
        None if meant.chosen.key is None else _one("key", meant.key_prompt, meant.chosen.key),
        against,
        options.side,
        options.by == "tokens",
        VERIFIED if options.verify else 0,
        None if stack == geometry.stack else stack,
    )
    reads, inputs = text_inputs(run.loaded, run.prompt, run.source)
    texts = {None if name == geometry.stack else name: of_stack for name, of_stack in run.asked.items()}
    return Why(decompose_logit(run.loaded, reads, logit, **inputs), texts, run.loaded.name)


def _one(what: str, prompt: Prompt, match: TokenMatch) -> int:
    """The one token that was meant."""
    if len(match.positions) != 1:
        raise UsageError(f"{what} {match.expression} means {described(prompt, match)}, expected one token", ONE)
    return match.positions[0]
