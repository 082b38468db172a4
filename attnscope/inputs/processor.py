"""The processor of a checkpoint, and which part of which picture each of its tokens represents.

It makes ids and pixels of a text and pictures. It is put together of its parts, because transformers loads all of them
or none: a processor that knows videos too is had without what reads videos, which needs another package.

A token's part is found by where the token is and by what the processor made. A processor gives every picture a run of
equal tokens, row by row. Some put a token between rows; some cut a picture into tiles, each with its run after
`<row_1_col_2>`, and end with a run for the whole picture in small. Tokens that are arranged in another way are counted,
and have no place in the picture.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, InputError, ModelError, UsageError, first_line
from attnscope.inputs.chat import Message, by_template, parts_of, pictures_of, texts_of
from attnscope.inputs.prompt import Patch, picture_name
from attnscope.model.checkpoint import read_json
from attnscope.model.options import read_error
from attnscope.utils.isolation import without_stderr

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

Box = tuple[float, float, float, float]
Grid = tuple[int, int]  # rows, columns
Labelled = tuple[str, Patch]
TILE = re.compile(r"<row_(\d+)_col_(\d+)>")
FILES = ("processor_config.json", "preprocessor_config.json")
AUDIO = "audio_tokenizer"  # a model that transformers loads from wherever a processor's file says
MARK = "\ue000"  # of the private-use area: no template says it
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Sight:
    """What a processor made of the pictures.

    boxes: the part of each picture that the model sees, as in a Patch. grids: rows and columns of each, where they are
    given; else they are in proportion to shape, height and width of what the tower is given. tiled: whether it is given
    a picture in several parts.
    """

    boxes: tuple[Box, ...]
    grids: tuple[Grid, ...] = ()
    shape: tuple[int, int] = (1, 1)
    tiled: bool = False


def patches_of(names: Sequence[str], image: Sequence[bool], sight: Sight) -> dict[int, Labelled]:
    """{position: label, patch} of the image tokens; names: what all tokens are called.

    >>> patches_of(["<s>", *["<image>"] * 4], [False, *[True] * 4], Sight((WHOLE,)))[3][0]
    'img 1,0'
    """
    edges = [at for at, (before, now) in enumerate(pairwise([False, *image, False])) if before != now]
    runs = [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    tiles = [TILE.fullmatch(names[run.start - 1]) if run.start else None for run in runs]
    if any(tiles):
        # Tiles count the rows and columns of their whole picture, which follows them and is called `small`.
        counted = [(int(tile[1]) - 1, int(tile[2]) - 1) if tile else None for tile in tiles]
        ends, labels = [at + 1 for at, tile in enumerate(counted) if tile is None], dict[int, Labelled]()
        for picture, (start, stop) in enumerate(pairwise([0, *ends])):
            tiles_here = [tile for tile in counted[start:stop] if tile]
            rows, columns = (max((tile[side] for tile in tiles_here), default=0) + 1 for side in (0, 1))
            for run, tile in zip(runs[start:stop], counted[start:stop], strict=True):
                side, box, name = isqrt(len(run)), sight.boxes[picture], picture_name(picture)
                if tile:
                    first, box = (tile[0] * side, tile[1] * side), part(box, (rows, columns), *tile)
                else:
                    first, name = (0, 0), name + " small" * bool(tiles_here)
                labels |= zip(run, cells(picture, (side, side), box, name=name, first=first), strict=True)
        return labels
    every = [at for run in runs for at in run]
    grids = None if sight.tiled else _of_rows(runs, names, sight) or _of_runs(runs, sight)
    if grids is None:
        return {at: (f"img {number}", Patch(0, None)) for number, at in enumerate(every)}
    labelled = (cell for picture, (grid, _) in enumerate(grids) for cell in cells(picture, grid, sight.boxes[picture]))
    return dict(zip([at for _, places in grids for at in places], labelled, strict=True))


def cells(
    picture: int, grid: Grid, box: Box, merge: int = 1, name: str = "", first: Grid = (0, 0)
) -> Iterator[Labelled]:
    """Label and patch of every cell of a grid over a part of a picture, row by row.

    merge: the side of the blocks that come one after the other, each row by row, as towers that merge patches read.
    name: the picture's, unless given. first: the row and column that counting begins with.

    >>> [label for label, _ in cells(1, (1, 2), WHOLE)]
    ['img2 0,0', 'img2 0,1']
    """
    for row, column in _walk(grid, merge):
        label = f"{name or picture_name(picture)} {first[0] + row},{first[1] + column}"
        yield label, Patch(picture, part(box, grid, row, column))


def windows(grid: Grid, merge: int, side: int) -> tuple[tuple[int, ...], ...]:
    """The places of such cells in each window of side x side, in the order of a tower that reads window by window.

    >>> windows((1, 3), 1, 2)
    ((0, 1), (2,))
    """
    places: dict[Grid, list[int]] = {}
    for place, (row, column) in enumerate(_walk(grid, merge)):
        places.setdefault((row // side, column // side), []).append(place)
    return tuple(tuple(places[window]) for window in sorted(places))


def _walk(grid: Grid, merge: int) -> Iterator[Grid]:
    """Row and column of every cell, block by block."""
    blocks = product(range(0, grid[0], merge), range(0, grid[1], merge), range(merge), range(merge))
    return ((top + down, left + across) for top, left, down, across in blocks)


def part(box: Box, grid: Grid, row: int, column: int) -> Box:
    """The box of one cell of a grid over a box."""
    left, top, right, bottom = box
    height, width = (bottom - top) / grid[0], (right - left) / grid[1]
    return (left + column * width, top + row * height, left + (column + 1) * width, top + (row + 1) * height)


def _of_runs(runs: Sequence[range], sight: Sight) -> list[tuple[Grid, Sequence[int]]] | None:
    """The grid and the tokens of each picture, where each has a run, or as large a part of one as the others."""
    pictures, every = len(sight.boxes), [at for run in runs for at in run]
    each = [rows * columns for rows, columns in sight.grids] or [len(every) // pictures] * pictures
    starts = [sum(each[:picture]) for picture in range(pictures + 1)]
    places = runs if len(runs) == pictures else [every[start:stop] for start, stop in pairwise(starts)]
    grids = list(sight.grids)
    if not grids:  # rows and columns of so many tokens in the proportions of a shape; no cells where there are none
        high, wide = sight.shape
        rows_of = [(len(run), isqrt(len(run) * high // wide)) for run in places]
        grids = [(rows, n // rows) if rows and rows * rows * wide == n * high else (0, 0) for n, rows in rows_of]
    fit = sum(map(len, places)) == len(every) and len(grids) == pictures
    fit = fit and all(rows * columns == len(run) for (rows, columns), run in zip(grids, places, strict=True))
    return list(zip(grids, places, strict=True)) if fit else None


def _of_rows(runs: Sequence[range], names: Sequence[str], sight: Sight) -> list[tuple[Grid, Sequence[int]]] | None:
    """The same where runs are the rows of a picture: as long as one another, with one token between two."""
    pictures: list[list[range]] = []
    for run in runs:
        rows = pictures[-1] if pictures else []
        follows = rows and run.start == rows[-1].stop + 1 and len(run) == len(rows[0])
        if follows and names[run.start - 1] == names[rows[0].stop]:
            rows.append(run)
        else:
            pictures.append([run])
    if len(runs) == len(sight.boxes) or len(pictures) != len(sight.boxes):
        return None
    return [((len(rows), len(rows[0])), [at for row in rows for at in row]) for rows in pictures]


def processor_of(loaded: LoadedModel) -> Any:
    """The processor in the model's folder, with a tokenizer of its own, which it may change.

    Raises ModelError where the model is given no pictures, brings no processor, or brings one that needs a package.
    """
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = loaded.model.config
    if getattr(config, "vision_config", None) is None:
        message = f"{loaded.name} ({config.model_type}) reads no pictures"
        raise ModelError(message, "leave out {picture}, or choose a vision-language model")
    made_of = PROCESSOR_MAPPING.get(type(config), None)
    if made_of is None:
        raise ModelError(f"transformers has no processor for {config.model_type}", "choose another model")
    with _loading(loaded) as folder:
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

    with _loading(loaded) as folder:
        return AutoImageProcessor.from_pretrained(folder, **loaded.permits.given)


@contextmanager
def _loading(loaded: LoadedModel) -> Iterator[Path]:
    """The folder with the files of a model's processor, checked. ModelError where there are none, or loading fails."""
    folder = loaded.base_folder or loaded.source_folder or Path(loaded.model.config.name_or_path or "-")
    if not any((folder / name).is_file() for name in FILES):
        message = f"{loaded.name} brings no processor, and pictures need one"
        raise ModelError(message, f"load the model from a folder with a {' or a '.join(FILES)}")
    # A file may have transformers load another model from elsewhere.
    wrong = next((path for path, values in read_files(folder).items() if AUDIO in path.name or AUDIO in values), None)
    if wrong is not None:
        raise ModelError(
            f"{wrong} has an {AUDIO} loaded, which reads no picture",
            f"delete that file, or its {AUDIO}" if AUDIO not in wrong.name else "delete that file",
        )
    try:
        with loaded.permits.held(), without_stderr():
            yield folder
    except ImportError as error:
        message = f"the processor of {loaded.name} needs a package: {first_line(error)}"
        raise ModelError(message, "install that") from error
    except Exception as error:  # any family's processor, with any files
        raise read_error(f"the processor of {loaded.name}", error, "check its files") from error


def read_files(folder: Path) -> dict[Path, dict[str, Any]]:
    """What the files of a processor say, before transformers reads them. Raises ModelError where they are no JSON."""
    paths = [folder / name for name in (*FILES, f"{AUDIO}_config.json") if (folder / name).is_file()]
    return {path: read_json(path) for path in paths}


def with_places(processor: Any, text: str, pictures: int) -> str:
    """A text with a place for every picture: before it, as the chat template writes one, where it has none."""
    token = _token(processor)
    count = text.count(token)
    if count not in (0, pictures):
        message = f"expected {pictures} of {token} in the text, one per picture, got {count}"
        raise InputError(message, "write one for each picture, or none: pictures are then put before the text")
    return text if count else _place(processor, token) * pictures + text


def render_chat(processor: Any, messages: Sequence[Message], pictures: int, answered: bool = False) -> str:
    """A chat by the model's template, with the pictures where it has parts for them, or before the user's first text.

    answered: the assistant's turn is opened. UsageError without a template, InputError where it puts the pictures
    nowhere.
    """
    token, waiting, parts = _token(processor), pictures, []
    if any(token in words for message in messages for words in texts_of(message)):
        raise InputError(f"the chat says {token} itself", "leave it out: the template writes it")
    placed = sum(map(pictures_of, messages))
    if placed not in (0, pictures):
        problem = f"expected {pictures} pictures in the chat, one for each that is given, got {placed}"
        raise InputError(problem, "write a part for each, or none: the first message of the user then begins with them")
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
    return by_template(processor.tokenizer, messages, answered, chat_template=template)


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
