"""An item -> what is asked of it: of its text, of the sound that its record names, or of the pictures with its text.

ask = ask_for(job, item)
with prompts(job, loaded) as read:
    read(ask).tokens

And which texts run together: batches of like lengths within a token budget. Texts of different length are padded on the
right, except where that changes how a model reads them (`model/loaded.py`): there a batch has one length.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from attnscope.corpus.folder import Job
from attnscope.corpus.items import Item, printable, ranges_of
from attnscope.corpus.records import as_text
from attnscope.errors import InputError, ModelError, UsageError, brief
from attnscope.hooks.engines import eager_bytes
from attnscope.inputs.answers import check_answer, check_has_answer, check_room
from attnscope.inputs.processor import processor_of
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.sound import MODEL_OF_SOUND, Sound, extractor_of, read_sound, reads_sound
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import VISION_ONLY
from attnscope.observe.inputs import notes_of, reading
from attnscope.observe.request import CaptureSpec
from attnscope.utils.isolation import Where
from attnscope.utils.memory import DTYPE_BYTES, free_memory

logger = logging.getLogger(__name__)


def check_fields(job: Job, loaded: LoadedModel) -> None:
    """Raise ModelError for sounds or pictures that the model does not read, and for a model that reads no text.

    UsageError for answers after the text of a model that is not causal, and for triangles of a text with pictures.
    """
    # Whatever the corpus holds: what each of its texts would fail with is said once, before any is read.
    if loaded.geometry.task == VISION_ONLY:
        message = f"batch reads texts, and {loaded.name} reads pictures alone"
        raise ModelError(message, "read one picture at a time, with attnscope heads")
    if job.answered:
        otherwise = "name the field of each target with {target_field=NAME}"
        check_has_answer(loaded.geometry.task, otherwise, loaded.geometry.both_ways)
        loaded.check_logits("an answer")
    if reads_sound(loaded.model) and job.audio_field is None:
        message = f"{loaded.name} reads sound, and this corpus has texts"
        raise ModelError(message, "name the field of each record that holds a sound's file with {audio_field=NAME}")
    # What makes inputs of sounds and pictures is loaded here, so that a checkpoint without it is refused now.
    if job.audio_field is not None:
        if not reads_sound(loaded.model):
            raise ModelError(f"{loaded.name} reads text, and {job.audio_field!r} names sounds", MODEL_OF_SOUND)
        extractor_of(loaded)
    if job.picture_field is not None:
        processor_of(loaded)
        if job.output.weights:
            message = "lower triangles are of text alone: tokens of a picture may see ahead"
            raise UsageError(message, "leave out {matrices}")


def ask_for(job: Job, item: Item) -> CaptureSpec:
    """What is asked of one text: the job's options, and what its record says.

    Raises InputError where there is no text, or where a field of the record does not say what it should.
    """
    if item.problem is not None:
        raise InputError(item.problem)
    # Each field that the job names is read of the record; what it does not name is as the job says, or is not there.
    text: str | Sound = item.text
    if job.audio_field is not None:
        files = _files(item, job.audio_field)
        if len(files) > 1:
            raise InputError(f"field {job.audio_field!r} names {len(files)} files, and one sound is read")
        try:
            text = read_sound(files[0])
        except UsageError as error:  # a file that needs the extra: others of the corpus may not
            raise InputError(error.message) from error
    picture = None if job.picture_field is None else _files(item, job.picture_field)
    target = None if job.target_field is None else _said(item, job.target_field)
    answer = job.answer if job.answer_field is None else _said(item, job.answer_field)
    check_answer(None, answer, None)
    # What a record says of the tokens to ask about replaces the job's own query and key. Ranges need the text's tokens.
    named: dict[str, str | None] = {}
    for name, field in {"query": job.query_field, "key": job.key_field}.items():
        if field is None:
            continue
        value = item.says(field)
        named[name] = None if ranges_of(value) is not None else str(value)
        if named[name] is not None and type(value) not in (str, int):
            expected = 'tokens, such as "bank" or "3-7", or ranges of characters, such as [[5, 9]]'
            raise InputError(f"field {field!r}: expected {expected}, got {brief(value)}")
    return CaptureSpec(
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
def prompts(job: Job, loaded: LoadedModel) -> Iterator[Callable[[CaptureSpec], Prompt]]:
    """What makes a Prompt of the ask of an item; it raises InputError where the text is what is wrong."""
    with reading(loaded, where(loaded), job.max_tokens or loaded.geometry.max_positions) as read:
        warned = set[str]()

        def read_prompt(ask: CaptureSpec) -> Prompt:
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


def where(loaded: LoadedModel) -> Where:
    """Where many texts are read: one process for all of them costs less than a thread for each."""
    return "process" if loaded.brought else "here"


def _said(item: Item, field: str) -> str:
    """The text of a field of the item's record."""
    value = as_text(item.says(field))
    if not isinstance(value, str):
        raise InputError(f"field {field!r}: expected text, got {type(value).__name__}")
    return value


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


# Texts that are sorted into batches together, and what is kept of them: the first are read, and the last written, while
# the model waits
WINDOW_BYTES = 48 * 2**20
WINDOW_TEXTS = 256
KERNEL = "numba"  # the engine that many short texts are read by
KERNEL_TOKENS = 3  # times a batch's tokens: it makes no matrices, and what a batch costs in Python is paid less often
BATCH_BYTES = 12 * 2**20  # of one layer's matrices: beyond a few caches' size a CPU gains nothing


def batches(
    lengths: Sequence[int], budget: int, alike: Sequence[Hashable] | None = None, most: int | None = None
) -> list[list[int]]:
    """Positions of texts, grouped by like length: padded to its longest, no batch exceeds `budget` tokens.

    Longest first. A text longer than the budget is a batch of its own; texts of a batch are `alike`, where
    that is given: equal in it. `most` is the number of texts in a batch.

        >>> batches([5, 100, 6], budget=100)
        [[1], [0, 2]]
    """
    grouped: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], alike and alike[place], place)):
        length, last = lengths[place], grouped[-1] if grouped else []
        fits = last and (len(last) + 1) * length <= budget and (most is None or len(last) < most)
        if fits and (alike is None or alike[last[0]] == alike[place]):
            last.append(place)
        else:
            grouped.append([place])
    return grouped[::-1]


def batch_limit(loaded: LoadedModel) -> int:
    """The token budget that memory suggests: a batch's matrices take an eighth of what is free, at most."""
    room = free_memory(loaded.devices) // 8
    room = room if loaded.device.startswith("cuda") else min(room, BATCH_BYTES)
    of_a_text = max(1, eager_bytes(loaded.geometry, 128, DTYPE_BYTES[loaded.dtype]))
    tokens = max(128, min(65_536, 128 * room // of_a_text))
    return 1 << (tokens.bit_length() - 1)  # a little more or less free memory is the same batches


def kept_bytes(job: Job, heads: int, tokens: int) -> float:
    """About how many bytes the results of one text take while they wait to be written."""
    entries = tokens * min(tokens, job.request.top_k or tokens) * heads if job.request.relations else 0
    squares = tokens * tokens * heads if job.request.weights or job.request.maps else 0
    pairs = len(job.request.spans) ** 2 * heads
    return 12.0 * entries + 4.0 * squares + 16.0 * pairs + 400.0 * heads + 200.0 * tokens
