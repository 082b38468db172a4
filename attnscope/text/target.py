"""The text of an encoder-decoder's decoder: given, or what the model makes of the source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from attnscope.errors import InputError
from attnscope.text.prompt import Prompt, check_length, from_ids
from attnscope.utils.isolation import IsolatedCall as Apart
from attnscope.utils.isolation import Where


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


def reading_target(tokenizer: Any, where: Where) -> Apart[Prompt]:
    """(text, start, ends, most) -> `target`, within a deadline unless it is "here", as `prompt.reading` reads a text.

    >>> with reading_target(loaded.tokenizer, "process") as read:
    ...     read("Das Haus", 0, {1}, None)
    """
    return Apart(partial(target, tokenizer), where)


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
