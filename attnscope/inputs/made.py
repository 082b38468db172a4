"""What is read with a text or after it: the target of an encoder-decoder, given or its own, and a model's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError
from attnscope.hooks.engines import within_memory
from attnscope.hooks.forward import given_of
from attnscope.hooks.generation import (
    DecodingSteps,
    continuation,
    end_tokens,
    say_ignored,
    start_token,
    translation,
    watched_steps,
)
from attnscope.inputs.answers import continued, from_target_ids, reading_target
from attnscope.inputs.prompt import Prompt, from_ids, place

if TYPE_CHECKING:
    from attnscope.ask import Ask
    from attnscope.hooks.engines import Engine
    from attnscope.model.loaded import LoadedModel
    from attnscope.utils.isolation import Where

_Advance = Callable[[int], object]


@contextmanager
def reading_targets(loaded: LoadedModel, where: Where) -> Iterator[Callable[[Ask], Prompt]]:
    """What makes a Prompt of the target that an ask gives, as text or as ids. Raises as `text.target`."""
    with reading_target(loaded.tokenizer, where) as tokenised:

        def read(ask: Ask) -> Prompt:
            given, start, room = ask.target, start_token(loaded), loaded.geometry.decoder_positions
            if isinstance(given, str):
                return tokenised(given, start, end_tokens(loaded), room)
            return from_target_ids(loaded.tokenizer, given or (), start, room)

        yield read


def target(
    loaded: LoadedModel, source: Prompt, ask: Ask, engine: Engine, advance: _Advance
) -> tuple[Prompt, Any, DecodingSteps | None]:
    """What the decoder reads, what the manifest says of it, and of one that the model made the steps in which it did.

    Raises as `text.target`, UsageError for both ways.
    """
    how, steps = dict[str, Any](), None
    if ask.target is None:
        with within_memory(loaded, len(source)), watched_steps(loaded.model) as steps:
            made = translation(loaded, source, engine, ask.generate, advance)
        prompt = from_ids(loaded.tokenizer, [*made.start, *made.ids])
        how = {"asked": ask.generate, "made": len(made.ids), "stopped_by": made.stopped_by} | _ignored(loaded)
    elif ask.generate is not None:
        raise UsageError("a target was given, and one is to be generated", "leave out {generate} or {target}")
    else:
        with reading_targets(loaded, place(loaded.tokenizer, loaded.brought, False)) as read:
            prompt = read(ask)
    return prompt, {"target": {"ids": list(prompt.ids), "generated": ask.target is None} | how}, steps


def generated(
    loaded: LoadedModel, prompt: Prompt, most: int, engine: Engine, advance: _Advance
) -> tuple[Prompt, Any, DecodingSteps]:
    """The prompt with what the model puts behind it, what the manifest says of that, and the steps that made it."""
    with within_memory(loaded, len(prompt) + most):
        extras = given_of(loaded, prompt)[1]
        with watched_steps(loaded.model) as steps:
            made = continuation(loaded, prompt.ids, most, engine, advance, **extras)
    facts = {"asked": most, "ids": made.ids, "stopped_by": made.stopped_by} | _ignored(loaded)
    return continued(loaded.tokenizer, prompt, made.ids), {"generated": facts}, steps


def _ignored(loaded: LoadedModel) -> dict[str, list[str]]:
    """The settings of the model's generation config that were not followed, where there are some."""
    names = say_ignored(loaded)
    return {"ignored": list(names)} if names else {}
