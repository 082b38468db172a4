"""A prompt and its answer: what can be asked for, and the tokens of an answer after those of a prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnscope.errors import InputError, UsageError
from attnscope.model.selection import CAUSAL_LM, SEQ2SEQ
from attnscope.text.characters import located
from attnscope.text.prompt import Prompt, Side, Span, from_ids


def check_answer(generate: int | None, answer: str | Sequence[int] | None, truncate: Side | None) -> None:
    """Raise UsageError or InputError for an answer that cannot be meant."""
    if generate is not None and answer is not None:
        raise UsageError("an answer was given, and one is to be generated", "leave out {generate} or {answer}")
    if generate is not None and not (isinstance(generate, int) and generate is not True and generate >= 1):
        raise UsageError(f"expected a number of new tokens from 1, got {generate!r}", "use {generate=8}")
    if answer is not None and not (answer.strip() if isinstance(answer, str) else len(answer)):
        raise InputError("the answer is empty", "give an answer with at least one word, or use {generate=8}")
    if truncate and (generate, answer) != (None, None):
        raise UsageError("an answer needs the whole text, and the text would be cut", "leave out {truncate}")


def check_has_answer(task: str, otherwise: str, both_ways: str = "") -> None:
    """Raise UsageError for a model that reads no answer after its text.

    otherwise: what gives a decoder its own. both_ways: what the config of a decoder says that looks both ways.
    """
    if task != CAUSAL_LM:
        why = f", and this one looks both ways: its config says {both_ways}" if both_ways else ""
        raise UsageError(f"only a causal model has an answer after its text{why}", otherwise * (task == SEQ2SEQ))


def check_room(prompt: Prompt, generate: int | None, most: int | None) -> None:
    """Raise InputError where the model has no positions for a prompt and its answer; most: how many it has."""
    count, more = len(prompt), generate or 0
    if prompt.answer is None or most is None or count + more <= most:
        return
    problem = (
        f"the text has {count} tokens and {more} more were asked for"
        if more
        else f"text and answer have {count} tokens"
    )
    hint = f"ask for at most {most - count}" if count < most and more else "shorten the text"
    raise InputError(f"{problem}, the model reads at most {most}", hint)


def continued(tokenizer: Any, prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """The prompt with the tokens of an answer after it; in a chat they belong to the assistant's turn.

    >>> continued(tokenizer, from_text(tokenizer, "the"), [903]).parts["answer"]
    range(2, 3)
    """
    at, whole = len(prompt), from_ids(tokenizer, [*prompt.ids, *ids])
    plain, tokens, before = whole.plain[at:], whole.tokens[at:], len(prompt.text)
    answer = "".join(plain)
    characters = tuple((before + start, before + stop) for start, stop in located(plain, tokens, answer))
    turns = prompt.turns
    if turns:  # the answer is the assistant's, whose turn the template may have opened already
        opened = turns[-1].name == "assistant" and turns[-1].stop == at
        start = turns[-1].start if opened else at
        turns = (*turns[: len(turns) - opened], Span(start, len(whole), "assistant"))
    return replace(
        prompt,
        text=prompt.text + answer,
        ids=whole.ids,
        tokens=prompt.tokens + tokens,
        labels=prompt.labels + whole.labels[at:],
        special=prompt.special + whole.special[at:],
        plain=prompt.plain + plain,
        turns=turns,
        characters=prompt.characters + characters,
        answer=at,
        medium=prompt.medium.followed(at, len(ids)),
        types=(*prompt.types, *prompt.types[-1:] * len(ids)),
    )
