"""The processor of a checkpoint: what makes ids and pixels of a text and pictures, and where a picture is in it.

It is put together of its parts, because transformers loads all of them or none: a processor that knows videos too is
had without what reads videos, which needs another package.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, InputError, ModelError, UsageError, first_line
from attnscope.model.checkpoint import read_json
from attnscope.model.options import unread
from attnscope.text.chat import Message, parts_of, pictures_of, texts_of
from attnscope.utils.isolation import without_stderr

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

FILES = ("processor_config.json", "preprocessor_config.json")
AUDIO = "audio_tokenizer"  # a model that transformers loads from wherever a processor's file says
MARK = "\ue000"  # of the private-use area: no template says it


def processor_of(loaded: LoadedModel) -> Any:
    """The processor in the model's folder, with a tokenizer of its own, which it may change.

    Raises ModelError where the model is given no pictures, brings no processor, or brings one that needs a package.
    """
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = loaded.model.config
    if getattr(config, "vision_config", None) is None:
        raise ModelError(
            f"{loaded.name} ({config.model_type}) reads no pictures",
            "leave out {picture}, or choose a vision-language model",
        )
    made_of = PROCESSOR_MAPPING.get(type(config), None)
    if made_of is None:
        raise ModelError(f"transformers has no processor for {config.model_type}", "choose another model")
    folder = _folder_of(loaded)
    with _loading(loaded):
        parts = {"image_processor": AutoImageProcessor.from_pretrained(folder, **loaded.permits.given)}
        parts["tokenizer"] = copy.deepcopy(loaded.tokenizer)
        values, _ = made_of.get_processor_dict(folder, **loaded.permits.given)
        # The same class, which takes None for a part: what reads videos needs a package that is not needed here.
        unchecked = {"check_argument_for_proper_class": lambda self, name, part: None}
        lenient: Any = type(made_of.__name__, (made_of,), unchecked)
        return lenient.from_args_and_dict([parts.get(name) for name in made_of.get_attributes()], values)


def image_processor_of(loaded: LoadedModel) -> Any:
    """What makes pixels of a picture for a model of pictures alone, by the files in its folder.

    Raises ModelError where there are none, and for one that needs a package.
    """
    from transformers import AutoImageProcessor

    folder = _folder_of(loaded)
    with _loading(loaded):
        return AutoImageProcessor.from_pretrained(folder, **loaded.permits.given)


def _folder_of(loaded: LoadedModel) -> Path:
    """Where the files of a model's processor lie, checked. Raises ModelError where there are none."""
    folder = loaded.base_folder or loaded.source_folder or Path(loaded.model.config.name_or_path or "-")
    if not any((folder / name).is_file() for name in FILES):
        raise ModelError(
            f"{loaded.name} brings no processor, and pictures need one",
            f"load the model from a folder with a {' or a '.join(FILES)}",
        )
    check_files(folder)
    return folder


@contextmanager
def _loading(loaded: LoadedModel) -> Iterator[None]:
    """What fails while a processor is loaded is a ModelError."""
    try:
        with loaded.permits.held(), without_stderr():
            yield
    except ImportError as error:
        raise ModelError(
            f"the processor of {loaded.name} needs a package: {first_line(error)}", "install that"
        ) from error
    except Exception as error:  # any family's processor, with any files
        raise unread(f"the processor of {loaded.name}", error, "check its files") from error


def read_files(folder: Path) -> dict[Path, dict[str, Any]]:
    """What the files of a processor say, before transformers reads them. Raises ModelError where they are no JSON."""
    paths = [folder / name for name in (*FILES, f"{AUDIO}_config.json") if (folder / name).is_file()]
    return {path: read_json(path) for path in paths}


def check_files(folder: Path) -> None:
    """Raise ModelError for files of a processor that are no JSON, or that have another model loaded from elsewhere."""
    files = read_files(folder)
    wrong = next((path for path, values in files.items() if AUDIO in path.name or AUDIO in values), None)
    if wrong is not None:
        raise ModelError(
            f"{wrong} has an {AUDIO} loaded, which reads no picture",
            f"delete that file, or its {AUDIO}" if AUDIO not in wrong.name else "delete that file",
        )


def with_places(processor: Any, text: str, pictures: int) -> str:
    """A text with a place for every picture: before it, as the chat template writes one, where it has none."""
    token = _token(processor)
    count = text.count(token)
    if count not in (0, pictures):
        raise InputError(
            f"expected {pictures} of {token} in the text, one per picture, got {count}",
            "write one for each picture, or none: pictures are then put before the text",
        )
    return text if count else _place(processor, token) * pictures + text


def rendered(processor: Any, messages: Sequence[Message], pictures: int, answered: bool = False) -> str:
    """A chat by the model's template, with the pictures where it has parts for them, or before the user's first text.

    answered: the assistant's turn is opened. UsageError without a template, InputError where it puts the pictures
    nowhere.
    """
    token, waiting, parts = _token(processor), pictures, []
    if any(token in words for message in messages for words in texts_of(message)):
        raise InputError(f"the chat says {token} itself", "leave it out: the template writes it")
    placed = sum(map(pictures_of, messages))
    if placed not in (0, pictures):
        raise InputError(
            f"expected {pictures} pictures in the chat, one for each that is given, got {placed}",
            "write a part for each, or none: the first message of the user then begins with them",
        )
    for message in messages:
        here, waiting = (waiting, 0) if message["role"] == "user" and not placed else (0, waiting)
        content = [{"type": "image"}] * here + parts_of(message)
        parts.append({**message, "content": content})
    text = _by_template(processor, parts, answered)
    if text.count(token) != pictures:
        raise InputError("the model's chat template writes no place for the pictures", "leave out {chat}")
    return text


def _by_template(processor: Any, messages: Sequence[Any], answered: bool = False) -> str:
    template = processor.chat_template or getattr(processor.tokenizer, "chat_template", None)
    if template is None:
        raise UsageError("this model has no chat template", "leave out {chat}")
    try:
        how = {"tokenize": False, "add_generation_prompt": answered, "chat_template": template}
        return str(processor.tokenizer.apply_chat_template(list(messages), **how))
    except Exception as error:  # a template is a program of its own and may raise anything
        raise InputError(
            f"the model's chat template refused the messages: {first_line(error)}", "check the roles and their order"
        ) from error


def _place(processor: Any, token: str) -> str:
    """What the template writes for a picture, `<|vision_start|><|image_pad|><|vision_end|>`; without one the token."""
    mark = {"type": "text", "text": MARK}
    try:
        without, with_picture = (
            _by_template(processor, [{"role": "user", "content": content}])
            for content in ([mark], [{"type": "image"}, mark])
        )
    except AttnscopeError:
        return token
    start = next((at for at, pair in enumerate(zip(without, with_picture, strict=False)) if pair[0] != pair[1]), 0)
    rest = without[start:]
    place = with_picture[start : len(with_picture) - len(rest)] if with_picture.endswith(rest) else ""
    return place if place.count(token) == 1 and MARK not in place else token


def _token(processor: Any) -> str:
    """What represents a picture in a text."""
    return str(getattr(processor, "image_token", None) or "<image>")
