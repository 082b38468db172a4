"""`attnscope.why`, and what the command of that name runs: one head, one query, one key, and who wrote its logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.api.why_record import MEAN, Why, WhyOptions, ask_of
from attnscope.errors import ModelError, UsageError, hints_of
from attnscope.hooks.forward import text_inputs
from attnscope.inputs.tokens import TokenMatch, described, find
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.model.selection import OF_TWO_TEXTS, TEXT_TASKS, check_one_head, only_head, pairs, select_stacks
from attnscope.observe.run import prepare
from attnscope.studies.attribution import decompose_logit
from attnscope.studies.attribution_records import LogitQuery
from attnscope.utils.schema import takes_fields

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.geometry import Geometry
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import Text
    from attnscope.observe.run import Run

STACKS = ("a logit taken apart", *TEXT_TASKS)  # what needs which models
VERIFIED = 10  # components that --verify replaces
ONE = "write its position, or bank#2"


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
    define, chat, truncate, target, picture, generate. Raises UsageError for what is not one head or one token, for an
    option that does not exist, for half precision and for quantized weights; InputError for a key that the query does
    not see; ModelError for a family whose contributions do not sum to the logit.

        >>> attnscope.why(attnscope.load("demo"), "the bank of the river, the bank", "L3H0").table().to_pandas()
    """
    call.check()
    check_loaded(call.model)
    call.model.check_task(*STACKS)
    return taken_apart(prepare(call.model, ask_of(call.text, call), compared=False), call.head, call)


def taken_apart(run: Run, head: str, options: WhyOptions) -> Why:
    """The logit of one head that the run asks about. Raises UsageError unless head, query and key are exactly one."""
    geometry = run.loaded.geometry
    stack, layer, number = one_head(head, geometry)
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


def one_head(text: str, geometry: Geometry) -> tuple[str, int, int]:
    """The stack, layer and head that `L2H3`, `2.3` or `cross L2H3` names; UsageError unless it is exactly one."""
    check_one_head(text)
    chosen = select_stacks(text, geometry.heads_of_stacks, geometry.stack)
    places = [(stack, layer, head) for stack, heads in chosen.items() for layer, head in pairs(heads)]
    only_head(text, [(layer, head) for _, layer, head in places])
    if places[0][0] not in OF_TWO_TEXTS:
        raise ModelError(f"{text} is in layers that do not read the tokens of a text", "choose another layer")
    return places[0]


def _one(what: str, prompt: Prompt, match: TokenMatch) -> int:
    """The one token that was meant."""
    if len(match.positions) != 1:
        raise UsageError(f"{what} {match.expression} means {described(prompt, match)}, expected one token", ONE)
    return match.positions[0]
