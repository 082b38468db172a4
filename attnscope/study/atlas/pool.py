"""The tokens that probes are made of: ordinary ones of the model's own vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError, ModelError
from attnscope.inputs.labels import BYTE_TOKEN
from attnscope.inputs.prompt import place, reading
from attnscope.utils.isolation import IsolatedCall as Apart
from attnscope.utils.isolation import Where

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

LEAST = 20  # tokens without which no sequence of distinct ones can be made
MIDDLE = 0.8  # of the vocabulary by id: the commonest and rarest stay out, as in Olsson et al. 2022, arXiv 2209.11895


def token_pool(loaded: LoadedModel, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ids that probes draw from, ascending: no special, added, byte or unprintable tokens, the middle 80 % by id.

    chosen: the ids of --pool, taken as they are. Raises InputError for ids that the model does not know or that are
    too few, ModelError for a vocabulary that has too few.

        >>> len(token_pool(attnscope.load("demo")))
    """
    if chosen is not None:
        place = loaded.unknown_id(chosen)
        if place is not None:
            raise InputError(f"the pool names the id {chosen[place]}, which the model does not know", "leave it out")
        if len(set(chosen)) < LEAST:
            raise InputError(f"the pool has {len(set(chosen))} ids, and {LEAST} are needed", "name more of them")
        return tuple(sorted(set(chosen)))
    where: Where = "process" if loaded.brought else "here"  # not a thread: what a token decodes to may have no end
    otherwise = "choose another model, name token ids with {pool}"
    with Apart(partial(_ordinary, loaded.tokenizer), where, "its vocabulary", otherwise) as ordinary_of:
        ordinary = ordinary_of(loaded.embeddings)
    cut = round(len(ordinary) * (1 - MIDDLE) / 2)
    found = tuple(ordinary[cut : len(ordinary) - cut])
    if len(found) < LEAST:
        raise ModelError(
            f"{loaded.name} has {len(found)} ordinary tokens, and {LEAST} are needed", "name token ids with {pool}"
        )
    return found


def begins(loaded: LoadedModel) -> tuple[int, ...]:
    """The begin token, where the tokenizer puts one before a text."""
    with reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, False)) as read:
        first = read("a", False, None, None).ids[0]
    return (first,) if first == getattr(loaded.tokenizer, "bos_token_id", None) else ()


def _ordinary(tokenizer: Any, embeddings: int | None) -> list[int]:
    """The ids of ordinary tokens below the embeddings, ascending; not their texts, which may have any length."""
    left_out = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = sorted(token for token in set(tokenizer.get_vocab().values()) if token not in left_out)
    names = tokenizer.convert_ids_to_tokens(known)
    return [
        token
        for token, name in zip(known, names, strict=True)
        if (embeddings is None or token < embeddings)
        and not (isinstance(name, str) and BYTE_TOKEN.fullmatch(name))
        and _readable(tokenizer.decode([token]))
    ]


def _readable(text: str) -> bool:
    """Whether a token alone says something that can be printed: no half of a character, no white space alone."""
    return bool(text.strip()) and text.strip().isprintable() and "�" not in text
