"""What comes before, after or in place of a prompt's own tokens.

An answer: what can be asked for, and its tokens after those of a prompt. A target: what an encoder-decoder's decoder
reads, given or made by the model of the source. Virtual tokens, which an adapter puts before a text, named by their
number. Keys that are not tokens, named by what they represent: summaries after a text's tokens, and patches of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from attnscope.errors import InputError, UsageError
from attnscope.inputs.labels import locate_tokens
from attnscope.inputs.prompt import Medium, Prompt, Side, Span, check_length, from_ids, join_tokens, unnamed_tokens
from attnscope.model.selection import CAUSAL_LM, SEQ2SEQ
from attnscope.utils.isolation import IsolatedCall, Where


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
    problem = f"the text has {count} tokens and {more} more were asked for"
    problem = problem if more else f"text and answer have {count} tokens"
    hint = f"ask for at most {most - count}" if count < most and more else "shorten the text"
    raise InputError(f"{problem}, the model reads at most {most}", hint)


def with_answer(tokenizer: Any, prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """The prompt with the tokens of an answer after it; in a chat they belong to the assistant's turn.

    >>> with_answer(tokenizer, from_text(tokenizer, "the"), [903]).parts["answer"]
    range(2, 3)
    """
    at, whole = len(prompt), from_ids(tokenizer, [*prompt.ids, *ids])
    plain, before = whole.plain[at:], len(prompt.text)
    answer = "".join(plain)
    characters = ((before + start, before + stop) for start, stop in locate_tokens(plain, whole.tokens[at:], answer))
    turns = prompt.turns
    if turns:  # the answer is the assistant's, whose turn the template may have opened already
        opened = turns[-1].name == "assistant" and turns[-1].stop == at
        start = turns[-1].start if opened else at
        turns = (*turns[: len(turns) - opened], Span(start, len(whole), "assistant"))
    return replace(
        prompt,
        **join_tokens(prompt, whole, at) | {"characters": (*prompt.characters, *characters)},
        text=prompt.text + answer,
        turns=turns,
        answer=at,
        medium=prompt.medium.followed(at, len(ids)),
        types=(*prompt.types, *prompt.types[-1:] * len(ids)),
    )


def target(tokenizer: Any, text: str, start: int | None, ends: Collection[int], most: int | None) -> Prompt:
    """What the decoder reads to say a text: its start token, and the tokens of the text without the end token.

    So it is trained: every query predicts the token after its own. start: the decoder's start token; a text that begins
    with its name says all special tokens itself. ends: the tokens that end a text. A language that mBART's tokenizer
    puts after the end token is what its decoder begins with. Raises InputError for a text without tokens, or with more
    than `most`.

        >>> target(tokenizer, "Das Haus ist wunderbar.", 0, {1}, None).tokens[:2]
        ('<pad>', ' Das')
    """
    if not text.strip():
        raise InputError("the target is empty", "give a target with at least one word, or leave out {target}")
    check_length(text, most, None)
    whole = start is not None and text.startswith(str(tokenizer.convert_ids_to_tokens(start)))
    ids = list(tokenizer(text_target=text, add_special_tokens=not whole)["input_ids"])
    special, at = {*ends, *tokenizer.all_special_ids}, len(ids)
    while at and ids[at - 1] in special and ids[at - 1] not in ends:
        at -= 1
    if at and ids[at - 1] in ends:
        start, ids = (ids[at] if at < len(ids) else start), ids[: at - 1]
    return from_target_ids(tokenizer, ids, start, most)


def reading_target(tokenizer: Any, where: Where) -> IsolatedCall[Prompt]:
    """(text, start, ends, most) -> `target`, within a deadline unless it is "here", as `prompt.reading` reads a text.

    >>> with reading_target(loaded.tokenizer, "process") as read:
    ...     read("Das Haus", 0, {1}, None)
    """
    return IsolatedCall(partial(target, tokenizer), where)


def from_target_ids(tokenizer: Any, ids: Sequence[int], start: int | None, most: int | None) -> Prompt:
    """The same of token ids; the start token comes first, if it does not already."""
    whole = list(ids)
    if start is not None and whole[:1] != [start]:
        whole = [start, *whole]
    if not whole:
        raise InputError("the target has no tokens", "give a target with at least one word")
    if most is not None and len(whole) > most:
        raise InputError(f"the target has {len(whole)} tokens, the decoder reads at most {most}", "shorten the target")
    return from_ids(tokenizer, whole)


def with_virtual(prompt: Prompt, ids: Sequence[int], keys_alone: bool = False) -> Prompt:
    """The tokens with virtual ones before them, key 0 the first of these, unless they are there already.

    keys_alone: whether they have no queries, as prefix tuning's.

    >>> with_virtual(prompt, [2000, 2001]).tokens[:2]
    ('virtual 0', 'virtual 1')
    """
    count = len(ids)
    medium = Medium(unasked=count) if ids and keys_alone else Medium() if prompt.medium.unasked else prompt.medium
    if not ids or prompt.ids[:count] == tuple(ids):
        return prompt if prompt.medium == medium else replace(prompt, medium=medium)
    names = tuple(f"virtual {number}" for number in range(count))
    virtual = replace(unnamed_tokens(names, ids=ids), plain=tuple(f"{name.replace(' ', '_')} " for name in names))
    return replace(  # a word each, to align texts by
        prompt,
        **join_tokens(virtual, prompt),
        turns=tuple(Span(turn.start + count, turn.stop + count, turn.name) for turn in prompt.turns),
        medium=medium,
        segments=tuple(Span(span.start + count, span.stop + count, span.name) for span in prompt.segments),
        types=(*(0,) * count, *prompt.types) if prompt.types else (),
    )


def with_summaries(prompt: Prompt, rate: int, overlap: bool = False) -> Prompt:
    """The tokens, and after them a summary for every `rate` of them, with overlap of the `rate` before them too.

    >>> with_summaries(prompt, 4).tokens[-1]
    'summary 4-7'
    """
    starts = range(0, len(prompt) // rate * rate, rate)
    names = tuple(f"summary {max(0, start - rate * overlap)}-{start + rate - 1}" for start in starts)
    return replace(prompt, **join_tokens(prompt, unnamed_tokens(names, ids=(-1,) * len(names))))


def of_patches(prompt: Prompt, patches: Sequence[Sequence[int]], parts: int = 1) -> Prompt:
    """A text as patches of its tokens, each of them as so many vectors. patches: their tokens, of some none.

    >>> of_patches(prompt, [[0], [1, 2, 3]], parts=2).tokens
    ('patch 0 1/2', 'patch 0 2/2', 'patch 1-3 1/2', 'patch 1-3 2/2')
    """
    tokens = ["-".join(str(at) for at in sorted({*patch[:1], *patch[-1:]})) or "empty" for patch in patches]
    marks = [f" {part}/{parts}" for part in range(1, parts + 1)] if parts > 1 else [""]
    names = tuple(f"patch {of}{mark}" for of in tokens for mark in marks)
    return unnamed_tokens(names, text=prompt.text, ids=(-1,) * len(names))
