"""An item -> what is asked of it: of its text, of the sound that its record names, or of the pictures with its text.

ask = ask_for(job, item)
with prompts(job, loaded) as read:
    read(ask).tokens
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from attnscope.batch.items import Item, printable
from attnscope.batch.job import Job
from attnscope.batch.records import as_text
from attnscope.batch.spans import ranges_of
from attnscope.errors import InputError, ModelError, UsageError, brief
from attnscope.inputs.answers import check_answer, check_has_answer, check_room
from attnscope.inputs.processor import processor_of
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.sound import MODEL_OF_SOUND, Sound, extractor_of, read_sound, reads_sound
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import VISION_ONLY
from attnscope.observe.inputs import notes_of, reading, reading_targets
from attnscope.observe.request import CaptureSpec as Ask
from attnscope.utils.isolation import Where

logger = logging.getLogger(__name__)


def check_fields(job: Job, loaded: LoadedModel) -> None:
    """Raise ModelError for sounds or pictures that the model does not read, and for a model that reads no text.

    UsageError for answers after the text of a model that is not causal, and for triangles of a text with pictures.
    """
    # Whatever the corpus holds: what each of its texts would fail with is said once, before any is read.
    if loaded.geometry.task == VISION_ONLY:
        raise ModelError(
            f"batch reads texts, and {loaded.name} reads pictures alone",
            "read one picture at a time, with attnscope heads",
        )
    if job.answered:
        otherwise = "name the field of each target with {target_field=NAME}"
        check_has_answer(loaded.geometry.task, otherwise, loaded.geometry.both_ways)
        loaded.check_logits("an answer")
    if reads_sound(loaded.model) and job.audio_field is None:
        raise ModelError(
            f"{loaded.name} reads sound, and this corpus has texts",
            "name the field of each record that holds a sound's file with {audio_field=NAME}",
        )
    # What makes inputs of sounds and pictures is loaded here, so that a checkpoint without it is refused now.
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


def ask_for(job: Job, item: Item) -> Ask:
    """What is asked of one text: the job's options, and what its record says.

    Raises InputError where there is no text, or where a field of the record does not say what it should.
    """
    if item.problem is not None:
        raise InputError(item.problem)
    # Each field that the job names is read of the record; what it does not name is as the job says, or is not there.
    text = item.text if job.audio_field is None else _sound(item, job.audio_field)
    picture = None if job.picture_field is None else _files(item, job.picture_field)
    target = None if job.target_field is None else _said(item, job.target_field)
    answer = job.answer if job.answer_field is None else _said(item, job.answer_field)
    check_answer(None, answer, None)
    # What a record says of the tokens to ask about stands in place of the job's own query and key.
    fields = {"query": job.query_field, "key": job.key_field}
    named = {name: _expression(item, field) for name, field in fields.items() if field is not None}
    return Ask(
        text,
        replace(job.request, **named),  # type: ignore[arg-type]
        engine=job.engine,
        select=job.select,
        chat=job.chat,
        truncate=job.truncate if job.max_tokens is None else job.truncate or "right",
        answer=answer,
        target=target,
        picture=picture,
        pair=None if job.pair_field is None else _said(item, job.pair_field),
        global_tokens=job.global_tokens,
    )


@contextmanager
def prompts(job: Job, loaded: LoadedModel) -> Iterator[Callable[[Ask], Prompt]]:
    """What makes a Prompt of the ask of an item; it raises InputError where the text is what is wrong."""
    with reading(loaded, _where(loaded), job.max_tokens or loaded.geometry.max_positions) as read:
        warned = set[str]()

        def read_prompt(ask: Ask) -> Prompt:
            try:
                prompt = read(ask)
                check_room(prompt, None, loaded.geometry.max_positions)
                notes = {*notes_of(loaded, prompt, "--pair-field NAME")} - warned
            except ModelError as error:
                raise InputError(error.message) from error
            except UsageError as error:
                if job.audio_field is None:
                    raise
                raise InputError(error.message) from error  # it needs the extra: other sounds of the corpus may not
            for note in sorted(notes):  # once of a corpus
                logger.warning("%s: %s", loaded.name, note)
            warned.update(notes)
            # nothing is drawn over the pictures themselves, so that none is held until its text is measured
            return replace(prompt, medium=replace(prompt.medium, images=())) if prompt.medium.images else prompt

        yield read_prompt


@contextmanager
def targets(loaded: LoadedModel) -> Iterator[Callable[[Ask], Prompt]]:
    """What makes a Prompt of the target that an ask gives; it raises InputError where the target is what is wrong."""
    with reading_targets(loaded, _where(loaded)) as read:

        def target(ask: Ask) -> Prompt:
            try:
                return read(ask)
            except ModelError as error:
                raise InputError(error.message) from error

        yield target


def _where(loaded: LoadedModel) -> Where:
    """Where many texts are read: one process for all of them costs less than a thread for each."""
    return "process" if loaded.brought else "here"


def _said(item: Item, field: str) -> str:
    """The text of a field of the item's record."""
    value = as_text(item.says(field))
    if not isinstance(value, str):
        raise InputError(f"field {field!r}: expected text, got {type(value).__name__}")
    return value


def _expression(item: Item, field: str) -> str | None:
    """What a field of the item's record says of its tokens; None of ranges, which need the text's tokens.

    Raises InputError where it says nothing.
    """
    value = item.says(field)
    if ranges_of(value) is not None:
        return None
    if type(value) not in (str, int):
        expected = 'tokens, such as "bank" or "3-7", or ranges of characters, such as [[5, 9]]'
        raise InputError(f"field {field!r}: expected {expected}, got {brief(value)}")
    return str(value)


def _sound(item: Item, field: str) -> Sound:
    files = _files(item, field)
    if len(files) > 1:
        raise InputError(f"field {field!r} names {len(files)} files, and one sound is read")
    try:
        return read_sound(files[0])
    except UsageError as error:  # a file that needs the extra: others of the corpus may not
        raise InputError(error.message) from error


def _files(item: Item, field: str) -> list[str]:
    """The files that a field of the record names, from the folder of the corpus file. Raises InputError for others.

    A cell of csv holds several as JSON.
    """
    value: Any = item.says(field)
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"field {field!r}: expected the name of a file, got {brief(value)}")
    files = [os.path.join(os.path.dirname(item.file) or os.curdir, name) for name in names]
    missing = next((name for name in files if not os.path.isfile(name)), None)
    if missing is not None:  # nor a pipe, which would be waited for
        raise InputError(printable(f"there is no file {missing}"))
    return files
