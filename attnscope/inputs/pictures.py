"""A file -> a picture, as it is shown and as it is hashed; a text and pictures, or a picture alone -> a Prompt.

    with reading_with_pictures(loaded) as read:
        prompt = read("What is this?", open_pictures("cat.png"), False, False)

The checkpoint's processor makes ids and pixels, and its image tokens get names.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnscope.errors import InputError, ModelError, first_line
from attnscope.inputs.chat import Bounds, Message, read_messages, texts_of, token_turns
from attnscope.inputs.labels import locate_tokens
from attnscope.inputs.processor import (
    WHOLE,
    Box,
    Grid,
    Sight,
    cells,
    image_processor_of,
    patches_of,
    processor_of,
    render_chat,
    windows,
    with_places,
)
from attnscope.inputs.prompt import Medium, Patch, Prompt, from_ids, isolation_for, turn_spans, unnamed_tokens
from attnscope.model.geometry import window_side
from attnscope.model.selection import consecutive
from attnscope.utils.isolation import IsolatedCall

if TYPE_CHECKING:
    from PIL.Image import Image

    from attnscope.model.loaded import LoadedModel

logger = logging.getLogger(__name__)
MOST_PICTURES, MOST_BYTES = 16, 2**28
LEFT_OUT = ("input_ids", "attention_mask", "labels")  # of what a processor makes: the model makes its own mask
BEFORE_PATCHES = {"class_embedding": "[CLS]", "cls_token": "[CLS]", "register_tokens": "[REG]"}  # in a tower's weights
REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
PictureSource = Any  # a file's name or path, or a picture of Pillow


@dataclass(frozen=True)
class Picture:
    """A picture in RGB, upright, and the SHA-256 of its file, or of its pixels where it is from none."""

    image: Image
    sha256: str


def open_pictures(sources: PictureSource | Sequence[PictureSource]) -> tuple[Picture, ...]:
    """One or several pictures. Raises InputError for what is none, and for too many."""
    listed = list(sources) if isinstance(sources, list | tuple) else [sources]
    if not 1 <= len(listed) <= MOST_PICTURES:
        raise InputError(f"expected 1 to {MOST_PICTURES} pictures, got {len(listed)}", "give fewer with {picture}")
    return tuple(open_picture(source) for source in listed)


def open_picture(source: PictureSource) -> Picture:
    """A picture in RGB: the first of an animation, turned as its camera says, on white where it is transparent.

    Raises InputError for a file that cannot be read, is no picture, or is larger than Pillow opens.
    """
    if hasattr(source, "convert"):
        image = _in_rgb(source, "the picture")
        return Picture(image, hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest())
    # Its bytes, as they are hashed.
    path = Path(source)
    try:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {problem}", "name the file of a picture with {picture=FILE}")
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has more than {MOST_BYTES // 2**20} MiB", "make the picture smaller")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {why}", "check the path") from None

    # Pillow only warns of a picture that is larger than it opens, up to twice that.
    from PIL import Image, UnidentifiedImageError

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as opened:
                opened.load()
                return Picture(_in_rgb(opened, str(source)), hashlib.sha256(data).hexdigest())
    except UnidentifiedImageError:
        raise InputError(f"{source} is not a picture that Pillow reads", "give a PNG or JPEG file") from None
    except bombs:
        most = f"{(Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} million"
        raise InputError(f"{source} has more than {most} pixels", "make the picture smaller") from None
    except Exception as error:  # any of Pillow's decoders, over any bytes
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        raise InputError(f"{source} is damaged: {why}", "give a PNG or JPEG file") from error


def _in_rgb(image: Image, name: str) -> Image:
    from PIL import Image, ImageOps

    if getattr(image, "n_frames", 1) > 1:
        logger.warning("%s has %d frames: the first is read", name, image.n_frames)  # type: ignore[attr-defined]
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):  # whose brightest is 65535, and which Pillow would cut at 255
        upright = upright.point(lambda value: value / 257).convert("L")
    if upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info:
        over = upright.convert("RGBA")
        if over.getchannel("A").getextrema() != (255, 255):
            logger.warning("%s is transparent: it is read on white", name)
        upright = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return upright.convert("RGB")


@contextmanager
def reading_with_pictures(loaded: LoadedModel) -> Iterator[Callable[[str, Sequence[Picture], bool, bool], Prompt]]:
    """(text, pictures, chat, answered) -> the tokens of a text, pictures before it or where its placeholders are.

    chat: by the chat template, with the pictures at the head of the first message of the user; answered: an answer is
    to follow. Raises ModelError where the model is given no pictures or brings no processor that can be had here;
    reading raises InputError where the processor refuses, or the model has no room for as many tokens.
    """
    processor = processor_of(loaded)

    def make(
        text: str, pictures: Sequence[Picture], chat: bool, answered: bool
    ) -> tuple[Prompt, dict[str, np.ndarray], Sight]:
        messages = read_messages(text) if chat else []
        count = len(pictures)
        whole = render_chat(processor, messages, count, answered) if chat else with_places(processor, text, count)
        # A template may have written the begin token, which the tokenizer would then add a second time.
        begin = processor.tokenizer.bos_token
        options = {"add_special_tokens": False} if chat and begin is not None and whole.startswith(begin) else {}
        images = [picture.image for picture in pictures]
        inputs = _processed(lambda: processor(images=images, text=whole, return_tensors="np", **options))
        ids = inputs.pop("input_ids")[0].tolist()
        plain = from_ids(processor.tokenizer, ids)
        # Pixels in more parts than pictures are tiles; a grid is counted in patches before the model merges them.
        image_processor, pixels = processor.image_processor, inputs.get("pixel_values")
        sight = Sight(tuple(_seen(image_processor, picture) for picture in pictures))
        if (grid := inputs.get("image_grid_thw")) is not None:
            side = int(getattr(image_processor, "merge_size", 1))
            sight = replace(sight, grids=tuple((int(rows) // side, int(columns) // side) for _, rows, columns in grid))
        elif pixels is not None and pixels.ndim >= 4:
            tiled = int(np.prod(pixels.shape[:-3])) > len(pictures)
            sight = replace(sight, shape=(pixels.shape[-2], pixels.shape[-1]), tiled=tiled)
        is_patch = [token == loaded.model.config.image_token_id for token in ids]
        if not any(is_patch):
            raise InputError("the processor made no tokens of the picture", "choose another model")
        return _named(plain, patches_of(plain.tokens, is_patch, sight), messages), inputs, sight

    # Templates and processors are others' programs; what needs the model stays in this process.
    with IsolatedCall(make, isolation_for(loaded, chat=True)) as making:

        def read(text: str, pictures: Sequence[Picture], chat: bool, answered: bool) -> Prompt:
            prompt, outputs, sight = making(text, pictures, chat, answered)
            patches = prompt.medium.patches
            # The tokens of a picture may lie after the vocabulary; the others have to be in it.
            loaded.check_ids([token for at, token in enumerate(prompt.ids) if at not in patches])
            most = loaded.geometry.max_positions
            if most is not None and len(prompt) > most:
                raise InputError(
                    f"text and pictures have {len(prompt)} tokens, {len(patches)} of them the pictures', and the model "
                    f"reads at most {most}",
                    "shorten the text, or give fewer or smaller pictures",
                )
            # What the model is given next to its ids, and how its tower reads that.
            inputs = _tensors({name: values for name, values in outputs.items() if name not in LEFT_OUT})
            tower = tuple(_tower(loaded, inputs, sight, prompt))
            hashes = " ".join(picture.sha256 for picture in pictures)
            images = tuple(picture.image for picture in pictures)
            return replace(prompt, medium=Medium(inputs, hashes, None, patches, images, tower))

        yield read


class Pixels(NamedTuple):
    """What a model of pictures alone is given of one; inputs: its forward's arguments, by name; box: as of Sight."""

    inputs: Mapping[str, Any]
    picture: Picture
    box: Box

    def prompt(self, tokens: Sequence[int | str], grid: Grid, side: Grid) -> Prompt:
        """The tokens of the picture: the number of a patch, row by row, or what a token is called that is none.

        side: height and width of a patch, in pixels; what no patch covers is at the right and at the bottom.
        """
        height, width = self.inputs["pixel_values"].shape[-2:]
        left, top, right, bottom = self.box
        across, down = (right - left) * grid[1] * side[1] / width, (bottom - top) * grid[0] * side[0] / height
        every = list(cells(0, grid, (left, top, left + across, top + down)))
        labelled = [(token, None) if isinstance(token, str) else every[token] for token in tokens]
        names, patches = zip(*labelled, strict=True)
        of_tokens = {at: patch for at, patch in enumerate(patches) if patch is not None}
        medium = Medium(self.inputs, self.picture.sha256, None, of_tokens, (self.picture.image,))
        return unnamed_tokens(names, medium)


@contextmanager
def reading_pixels(loaded: LoadedModel) -> Iterator[Callable[[Picture], Pixels]]:
    """picture -> what a model that reads pictures alone is given of it, by the checkpoint's own image processor.

    Raises ModelError where the model brings none; reading raises InputError where it refuses the picture.
    """
    processor = image_processor_of(loaded)
    parameters = inspect.signature(loaded.model.forward).parameters

    def make(picture: Picture) -> tuple[dict[str, np.ndarray], Box]:
        inputs = _processed(lambda: processor(images=[picture.image], return_tensors="np"))
        inputs = {name: np.asarray(values) for name, values in inputs.items() if name in parameters}
        return inputs, _seen(processor, picture)

    with IsolatedCall(make, isolation_for(loaded, chat=True)) as making:

        def read(picture: Picture) -> Pixels:
            inputs, box = making(picture)
            # What the processor made may lack an argument of the model, or hold a picture in several parts.
            needed = (each for each in parameters.values() if each.default is each.empty and each.kind not in REST)
            lacking = next((each.name for each in needed if each.name not in inputs), None)
            if lacking is not None:
                message = f"{loaded.name} needs {lacking}, which its image processor does not make"
                raise ModelError(message, "read it within the model that it is a part of")
            shape = inputs["pixel_values"].shape if "pixel_values" in inputs else ()
            if len(shape) != 4 or shape[0] != 1:
                message = f"expected pixels (1, channels, height, width) of the processor of {loaded.name}, got {shape}"
                raise ModelError(message, "choose a model that is given a picture as one")
            return Pixels(_tensors(inputs), picture, box)

        yield read


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What a processor made, as the model takes it."""
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}


def _processed(call: Callable[[], Any]) -> dict[str, np.ndarray]:
    """What a processor returns. Raises InputError where it refuses."""
    try:
        return dict(call())
    except Exception as error:  # any family's processor, over any picture
        message = f"the model's processor refuses the picture: {first_line(error)}"
        raise InputError(message, "give another picture") from error


def _seen(images: Any, picture: Picture) -> Box:
    """The part of a picture that its processor leaves: all of it, or the middle that it cuts out."""
    size, crop = getattr(images, "size", None) or {}, getattr(images, "crop_size", None)
    shortest, width, height = size.get("shortest_edge"), size.get("width"), size.get("height")
    if not (getattr(images, "do_center_crop", False) and crop and (shortest or (width and height))):
        return WHOLE
    if shortest:
        width, height = (shortest * side / min(picture.image.size) for side in picture.image.size)
    across, down = crop["width"] / width, crop["height"] / height
    return ((1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2)


def _named(plain: Prompt, patches: Mapping[int, tuple[str, Patch]], messages: Sequence[Message]) -> Prompt:
    """The prompt with its image tokens called by their place, and the turns of its chat."""

    def with_labels(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(patches[at][0] if at in patches else text for at, text in enumerate(texts))

    words = tuple("" if at in patches else text for at, text in enumerate(plain.plain))
    text, tokens = "".join(words), with_labels(plain.tokens)
    characters = locate_tokens(words, tokens, text)
    bounds = _bounds(messages, text)
    return replace(
        plain,
        text=text,
        tokens=tokens,
        labels=with_labels(plain.labels),
        plain=words,
        special=tuple(at in patches or special for at, special in enumerate(plain.special)),
        characters=characters,
        turns=turn_spans(token_turns(characters, bounds), bounds),
        medium=Medium(patches={at: patch for at, (_, patch) in patches.items()}),
    )


def _bounds(messages: Sequence[Message], text: str) -> Bounds:
    """The characters of what each message says; none where one is not found, in its order."""
    bounds: Bounds = []
    for message in messages:
        after = bounds[-1][1] if bounds else 0
        start = stop = -1
        for words in map(str.strip, texts_of(message)):
            at = text.find(words, after)
            if at < 0:
                return []
            start, stop = at if start < 0 else start, at + len(words)
            after = stop
        if start >= 0:
            bounds.append((start, stop, message["role"]))
    return bounds


def _tower(loaded: LoadedModel, inputs: Mapping[str, Any], sight: Sight, prompt: Prompt) -> Iterator[Prompt]:
    """How the vision tower reads the pictures: a prompt for each text of its batch, of the tokens that it makes.

    Nothing where it is given something else than pixels or rows of patches.
    """
    vision, pixels = loaded.model.config.vision_config, inputs.get("pixel_values")
    side, grids = getattr(vision, "patch_size", None), inputs.get("image_grid_thw")
    merge = getattr(vision, "spatial_merge_size", None)
    if grids is not None and merge:
        _, rows, columns = grids[0].tolist()
        labelled, window = cells(0, (rows, columns), sight.boxes[0], merge=merge), window_side(vision)
        yield _of_patches(labelled, [], windows((rows, columns), merge, window) if window else ())
    elif pixels is not None and pixels.ndim >= 4 and isinstance(side, int):
        # The tokens of a tower before its patches, by the weights that it has for them.
        before: list[str] = []
        for name, weight in loaded.model.named_parameters():
            mark = BEFORE_PATCHES.get(name.rpartition(".")[2])
            if mark is not None:
                count = weight.shape[-2] if weight.ndim > 1 else 1
                before += [mark] if count == 1 else [f"{mark[:-1]}{at}]" for at in range(count)]
        grid = pixels.shape[-2] // side, pixels.shape[-1] // side
        # The picture, and the part of it, of each of the tiles that the tower is given.
        parts = list(enumerate(sight.boxes))
        if sight.tiled:
            patches = prompt.medium.patches
            runs = [[patches[at] for at in run] for run in consecutive(patches)]  # a tile's tokens are side by side
            runs = runs if len(runs) == pixels.shape[:-3].numel() else []
            edges = [list(zip(*(patch.box or WHOLE for patch in run), strict=True)) for run in runs]
            boxes = ((min(left), min(top), max(right), max(bottom)) for left, top, right, bottom in edges)
            parts = [(run[0].picture, box) for run, box in zip(runs, boxes, strict=True)]
        for picture, box in parts:
            yield _of_patches(cells(picture, grid, box), before)


def _of_patches(
    cells_of_grid: Iterator[tuple[str, Patch]], before: Sequence[str], in_windows: tuple[tuple[int, ...], ...] = ()
) -> Prompt:
    """Patches as a prompt, after the tokens that a tower puts before them."""
    labelled = list(cells_of_grid)
    names = (*before, *(label for label, _ in labelled))
    patches = {len(before) + at: patch for at, (_, patch) in enumerate(labelled)}
    return unnamed_tokens(names, Medium(patches=patches, windows=in_windows))
