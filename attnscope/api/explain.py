"""`attnscope.explain`, and what the command of that name runs: one head, one token, every step with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.api.records import Explained
from attnscope.errors import UsageError, hints_of
from attnscope.inputs.tokens import described
from attnscope.model.options import LoadOptions
from attnscope.model.selection import one_head
from attnscope.observe.request import CaptureSpec, Request
from attnscope.observe.run import prepare
from attnscope.steps.traced import explain_head
from attnscope.utils.schema import takes_fields

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Side
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import Text
    from attnscope.observe.run import Run

STACKS = ("an explanation", "decoder", "encoder")  # what needs which models


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Which token is followed, and how the text is read; the other fields are those of `CaptureSpec`.

    query: the one token, as `5`, `last` or `bank#2`.
    """

    query: str | int = "last"
    chat: bool = False
    truncate: Side | None = None
    answer: str | list[int] | None = None
    generate: int | None = None
    pair: str | None = None


@dataclass(frozen=True)
class ExplainCall(ExplainOptions):
    """What `attnscope.explain` is called with."""

    model: LoadedModel
    text: Text
    head: str


@hints_of(LoadOptions)
@takes_fields(ExplainCall)
def explain(call: ExplainCall) -> Explained:
    """One head, one sentence, every step with its numbers, each compared with the model's own.

    head: as `L2H3` or `2.3`. options: the fields of `ExplainOptions`: query, chat, truncate, answer, generate, pair.
    Raises UsageError for what is not one head or one token, and for an option that does not exist; InputError for a
    text that does not fit the model; ModelError for an encoder-decoder.

        >>> attnscope.explain(attnscope.load("demo"), "the cat sat on the mat", head="L2H3").table().to_pandas()
    """
    how = {name: getattr(call, name) for name in ("chat", "truncate", "answer", "generate", "pair")}
    run = prepare(call.model, CaptureSpec(call.text, Request(query=str(call.query)), engine="eager", **how))
    run.loaded.check_task(*STACKS)
    run.loaded.check_softmax("explain")
    return followed(run, call.head)


def followed(run: Run, head: str) -> Explained:
    """The steps of one head for the token that the run asks about. Raises UsageError unless each is exactly one."""
    query = run.chosen.query
    assert query is not None
    if len(query.positions) != 1:
        message = f"query {query.expression} means {described(run.prompt, query)}, expected one token"
        raise UsageError(message, "write its position, or bank#2")
    geometry = run.loaded.geometry
    stack, layer, number = one_head(head, geometry.heads_of_stacks, geometry.stack)
    if stack != geometry.stack:
        message = f"head {head} has no softmax of its own to explain"
        raise UsageError(message, f"`attnscope draw TEXT --select {stack}.{layer}.{number}` draws its map")
    return Explained(explain_head(run.loaded, run.prompt, layer, number, query.positions[0]))
