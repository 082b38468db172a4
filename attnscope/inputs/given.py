"""What is asked of a text -> its tokens. Each kind of input says which asks it takes, and opens what reads them.

with reading(loaded, "here", 2048) as read:
    read(Ask("the bank")).labels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex

from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks.forward import known_types
from attnscope.hooks.patch_tokens import patch_tokens
from attnscope.inputs import prompt as prompts
from attnscope.inputs.answers import continued, with_virtual
from attnscope.inputs.global_tokens import with_global_tokens
from attnscope.inputs.pictures import all_opened, reading_pixels, reading_with_pictures
from attnscope.inputs.prompt import Prompt, from_ids, place
from attnscope.inputs.sound import Sound, heard
from attnscope.model.fitting import patch_side
from attnscope.model.selection import VISION_ONLY
from attnscope.utils.isolation import IsolatedCall as Apart

if TYPE_CHECKING:
    from attnscope.ask import Ask
    from attnscope.model.loaded import LoadedModel
    from attnscope.utils.isolation import Where

Read = Callable[["Ask"], Prompt]


@contextmanager
def reading(loaded: LoadedModel, where: Where, most: int | None) -> Iterator[Read]:
    """What makes a Prompt of an ask, with the answer that the ask gives; an empty answer is one that is still to come.

    where: texts are tokenised. most: tokens that a text or ids may have. Raises InputError for what is asked for and
    cannot be read, ModelError for what this model does not read, UsageError for what cannot be meant.
    """
    with ExitStack() as opened:

        @cache
        def reader(row: int) -> Read:
            return opened.enter_context(INPUTS[row].reading(loaded, where, most))

        def read(ask: Ask) -> Prompt:
            if ask.pair is not None:
                ask.check_pair()
            prompt = _typed(loaded, reader(next(row for row, one in enumerate(INPUTS) if one.takes(ask)))(ask))
            loaded.check_dense(len(prompt))
            return with_global_tokens(loaded, prompt, ask.global_tokens)

        yield read


class Input(Protocol):
    """One kind of input."""

    def takes(self, ask: Ask) -> bool:
        """Whether an ask that no kind before this one takes is of this kind."""

    def reading(self, loaded: LoadedModel, where: Where, most: int | None) -> AbstractContextManager[Read]:
        """See `reading`."""


class PictureInput:
    """A text with pictures, or a picture alone for a vision tower; where they are read, `picture_prompt` says."""

    def takes(self, ask: Ask) -> bool:
        return ask.picture is not None

    @contextmanager
    def reading(self, loaded: LoadedModel, where: Where, most: int | None) -> Iterator[Read]:
        if loaded.geometry.task == VISION_ONLY:
            with _reading_alone(loaded) as alone:
                yield alone
            return
        loaded.check_bare("a text with pictures")
        with reading_with_pictures(loaded) as with_pictures:

            def read(ask: Ask) -> Prompt:
                pictures, answer = all_opened(ask.picture), ask.answer
                if not isinstance(ask.text, str):
                    raise UsageError("a picture needs a text, got token ids", "give {text}, or leave out {picture}")
                if not ask.text.strip():
                    raise InputError(
                        "the text is empty, and this model reads pictures with one",
                        "give a text with at least one word",
                    )
                if ask.truncate is not None:
                    raise UsageError("a text with pictures is not cut: they would lose patches", "leave out {truncate}")
                prompt = with_pictures(ask.text, pictures, ask.chat, answer is not None)
                return _answered(loaded, prompt, ids_of(loaded, answer) if isinstance(answer, str) else answer)

            yield read


@contextmanager
def _reading_alone(loaded: LoadedModel) -> Iterator[Read]:
    """What makes a Prompt of a picture for a model that reads nothing else."""
    side = patch_side(loaded.model.config)
    assert side is not None  # of every tower that is loaded
    with reading_pixels(loaded) as pixels_of:

        def read(ask: Ask) -> Prompt:
            others = {"text": ask.text != "", "chat": ask.chat, "answer": ask.answer, "truncate": ask.truncate}
            other = next((name for name, one in others.items() if one), None)
            if other is not None:
                raise UsageError(f"{loaded.name} reads a picture alone", f"leave out {{{other}}}")
            pictures = all_opened(ask.picture)
            if len(pictures) > 1:
                raise UsageError(
                    f"{loaded.name} reads one picture at a time, got {len(pictures)}", "give one {picture}"
                )
            pixels = pixels_of(pictures[0])
            given = {name: one.to(loaded.device) for name, one in pixels.inputs.items()}
            values = given.pop("pixel_values").to(loaded.model.dtype)
            found = patch_tokens(loaded.model, values, given, side)
            return pixels.prompt(found.tokens, found.grid, side)

        yield read


class SoundInput:
    """A sound instead of a text, or the frames of one; how long it may be, the model says."""

    def takes(self, ask: Ask) -> bool:
        return isinstance(ask.text, Sound) or (isinstance(ask.text, Prompt) and ask.text.medium.step is not None)

    @contextmanager
    def reading(self, loaded: LoadedModel, where: Where, most: int | None) -> Iterator[Read]:
        def read(ask: Ask) -> Prompt:
            if isinstance(ask.text, Sound):
                return heard(loaded, ask.text, ask.truncate)
            assert isinstance(ask.text, Prompt)
            return ask.text

        yield read


class TextInput:
    """A text, or a chat; with its answer it is tokenised as one, of any length."""

    def takes(self, ask: Ask) -> bool:
        return isinstance(ask.text, str)

    @contextmanager
    def reading(self, loaded: LoadedModel, where: Where, most: int | None) -> Iterator[Read]:
        with prompts.reading(loaded.tokenizer, where) as tokenised:

            def read(ask: Ask) -> Prompt:
                text, answer = ask.text, ask.answer
                assert isinstance(text, str)
                if answer is not None:
                    loaded.check_bare("an answer")
                if not text.strip():
                    raise InputError("the text is empty", "give a text with at least one word")
                if not isinstance(answer, str | None):
                    raise UsageError(
                        "the text is words, and its answer is token ids", "give both as text, or both as token ids"
                    )
                limit = most if answer is None else None
                prompt = tokenised(text, ask.chat, limit, ask.truncate, answer, ask.pair)
                loaded.check_ids(prompt.ids)
                return _behind_virtual(loaded, prompt)

            yield read


class TokenInput:
    """Token ids, or a Prompt, which is read as it is."""

    def takes(self, ask: Ask) -> bool:
        return True

    @contextmanager
    def reading(self, loaded: LoadedModel, where: Where, most: int | None) -> Iterator[Read]:
        def read(ask: Ask) -> Prompt:
            text, answer = ask.text, ask.answer
            assert not isinstance(text, str | Sound)
            if answer is not None:
                loaded.check_bare("an answer")
            check_ids(loaded, text.ids if isinstance(text, Prompt) else text)
            if not isinstance(text, Prompt):
                virtual = list(loaded.virtual)  # ids of an earlier run begin with them
                own = text[len(virtual) :] if list(text[: len(virtual)]) == virtual else text
                room = most if answer is None else None
                text = from_ids(loaded.tokenizer, own, max_tokens=room, truncate=ask.truncate)
            if answer and isinstance(answer, str):
                raise UsageError(
                    "the text is token ids, and its answer is words", "give both as text, or both as token ids"
                )
            return _answered(loaded, _behind_virtual(loaded, text), answer)

        yield read


INPUTS: tuple[Input, ...] = (PictureInput(), SoundInput(), TextInput(), TokenInput())


def check_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raise UsageError for what is no token id, InputError for one that the model has no embedding of."""
    if not all(issubclass(kind, SupportsIndex) for kind in set(map(type, ids))):  # there may be millions of ids
        raise UsageError("expected a text, a Prompt or token ids as whole numbers", "give one text at a time")
    loaded.check_length(len(ids))
    place = loaded.unknown_id(ids)
    if place is not None:
        raise InputError(
            f"token {place} has the id {ids[place]}, and the vocabulary has {loaded.embeddings} ids",
            f"give ids from 0 to {(loaded.embeddings or 1) - 1}, of this model's own tokenizer",
        )


def ids_of(loaded: LoadedModel, answer: str) -> list[int]:
    """The tokens of an answer alone."""
    with Apart(partial(_encoded, loaded.tokenizer), place(loaded.tokenizer, loaded.brought, False)) as encode:
        return encode(answer) if answer else []


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _typed(loaded: LoadedModel, prompt: Prompt) -> Prompt:
    """The prompt without token types where the model tells none apart. Raises ModelError where it has too few."""
    known = known_types(loaded) if prompt.types else None
    if known is not None and not 0 < max(prompt.types) < known:
        if known:
            raise ModelError(
                f"{loaded.name} has {known} token type{'s' * (known > 1)}, and its tokenizer gives the type "
                f"{max(prompt.types)}",
                "copy the model's own tokenizer into its folder",
            )
        return replace(prompt, types=())
    return prompt


def _answered(loaded: LoadedModel, prompt: Prompt, answer: Sequence[int] | Literal[""] | None) -> Prompt:
    """The tokens with those of an answer behind them."""
    if not answer:
        return prompt if answer is None else replace(prompt, answer=len(prompt))
    check_ids(loaded, answer)
    return continued(loaded.tokenizer, prompt, answer)


def _behind_virtual(loaded: LoadedModel, prompt: Prompt) -> Prompt:
    if not loaded.virtual and not prompt.medium.unasked:
        return prompt
    return with_virtual(prompt, loaded.virtual, keys_alone=loaded.prefix is not None)
