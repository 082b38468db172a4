"""An item -> its Prompt: of its text, of the sound that its record names, or of the pictures beside its text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from attnscope.apart import Where
from attnscope.batch.items import Item, printable
from attnscope.batch.job import Job
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.media.picture import all_opened
from attnscope.media.picture_prompt import reading_with_pictures
from attnscope.media.processor import processor_of
from attnscope.media.sound import MODEL_OF_SOUND, extractor_of, heard, read_sound, reads_sound
from attnscope.model.loading import LoadedModel
from attnscope.seam.generation import start_token
from attnscope.shown import brief
from attnscope.text.prompt import Prompt, Side, reading
from attnscope.text.target import reading_target


def check_fields(job: Job, loaded: LoadedModel) -> None:
    """Raise ModelError for sounds or pictures that the model does not read, and for a model of sound without them."""
    if reads_sound(loaded.model) and job.audio_field is None:
        raise ModelError(
            f"{loaded.name} reads sound, and a corpus is of texts",
            "name the field of each record that holds a sound's file with {audio_field=NAME}",
        )
    if job.audio_field is not None:
        if not reads_sound(loaded.model):
            raise ModelError(f"{loaded.name} reads text, and {job.audio_field!r} names sounds", MODEL_OF_SOUND)
        extractor_of(loaded)
    if job.picture_field is not None:
        processor_of(loaded)
        if job.output.weights:
            raise UsageError(
                "lower triangles are of text alone: tokens of a picture may see ahead", "leave out {matrices}"
            )


@contextmanager
def prompts(job: Job, loaded: LoadedModel) -> Iterator[Callable[[Item], Prompt]]:
    """What makes token ids of an item, and what is read beside them; it raises InputError where there is nothing.

    >>> with prompts(job, loaded) as read:
    ...     read(item).tokens
    """
    with _reading(job, loaded) as read:

        def prompt(item: Item) -> Prompt:
            if item.problem is not None:
                raise InputError(item.problem)
            try:
                return read(item)
            except ModelError as error:
                raise InputError(error.message) from error

        yield prompt


@contextmanager
def targets(job: Job, loaded: LoadedModel) -> Iterator[Callable[[Item], Prompt]]:
    """What makes token ids of the target that an item's record gives; it raises InputError where it gives no text."""
    with reading_target(loaded.tokenizer, _where(loaded)) as read:

        def target(item: Item) -> Prompt:
            value = item.says(job.target_field or "")
            if not isinstance(value, str):
                raise InputError(f"field {job.target_field!r}: expected text, got {type(value).__name__}")
            try:
                return read(value, start_token(loaded), loaded.geometry.max_positions)
            except ModelError as error:
                raise InputError(error.message) from error

        yield target


def _where(loaded: LoadedModel) -> Where:
    """Where many texts are read: one process for all of them costs less than a thread for each."""
    return "process" if loaded.brought else "here"


@contextmanager
def _reading(job: Job, loaded: LoadedModel) -> Iterator[Callable[[Item], Prompt]]:
    if job.audio_field is not None:
        yield lambda item: _of_sound(job, loaded, item)
    elif job.picture_field is not None:
        field = job.picture_field
        with reading_with_pictures(loaded) as read:
            # nothing is drawn over the pictures themselves
            yield lambda item: replace(read(item.text, all_opened(_files(item, field)), job.chat, False), images=())
    else:
        with reading(loaded.tokenizer, _where(loaded)) as read:

            def text(item: Item) -> Prompt:
                prompt = read(item.text, job.chat, *_cut(job, loaded))
                loaded.check_ids(prompt.ids)
                return prompt

            yield text


def _of_sound(job: Job, loaded: LoadedModel, item: Item) -> Prompt:
    files = _files(item, job.audio_field or "")
    if len(files) > 1:
        raise InputError(f"field {job.audio_field!r} names {len(files)} files, and one sound is read")
    try:
        return heard(loaded, read_sound(files[0]), job.truncate)
    except UsageError as error:  # a file that needs the extra: others of the corpus may not
        raise InputError(error.message) from error


def _cut(job: Job, loaded: LoadedModel) -> tuple[int | None, Side | None]:
    """The most tokens that a text may have, and the side on which a longer one is cut; None: it fails."""
    if job.max_tokens is None:
        return loaded.geometry.max_positions, job.truncate
    return job.max_tokens, job.truncate or "right"


def _files(item: Item, field: str) -> list[str]:
    """The files that a field of the record names, from the folder of the corpus file. Raises InputError for others.

    A cell of csv holds several as JSON.
    """
    given: Any = item.says(field)
    if isinstance(given, str) and given.startswith("["):
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    named = given if isinstance(given, list) else [given]
    if not named or not all(isinstance(one, str) and one for one in named):
        raise InputError(f"field {field!r}: expected the name of a file, got {brief(given)}")
    files = [os.path.join(os.path.dirname(item.file) or os.curdir, one) for one in named]
    missing = next((one for one in files if not os.path.isfile(one)), None)
    if missing is not None:  # nor a pipe, which would be waited for
        raise InputError(printable(f"there is no file {missing}"))
    return files
