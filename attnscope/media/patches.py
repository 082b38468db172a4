"""Which part of which picture a token represents, found by where it is and by what the processor made.

A processor gives every picture a run of equal tokens, row by row. Some put a token between rows; some cut a picture
into tiles, each with its run after `<row_1_col_2>`, and end with a run for the whole picture in small. Tokens that
are arranged in another way are counted, and have no place in the picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import isqrt

from attnscope.text.prompt import Patch, picture_name

Box = tuple[float, float, float, float]
Grid = tuple[int, int]  # rows, columns
Labelled = tuple[str, Patch]
TILE = re.compile(r"<row_(\d+)_col_(\d+)>")
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
        return dict(_of_tiles(runs, [(int(tile[1]) - 1, int(tile[2]) - 1) if tile else None for tile in tiles], sight))
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
    grids = sight.grids or [_grid(len(run), sight.shape) for run in places]
    fit = sum(map(len, places)) == len(every) and len(grids) == pictures
    fit = fit and all(rows * columns == len(run) for (rows, columns), run in zip(grids, places, strict=True))
    return list(zip(grids, places, strict=True)) if fit else None


def _grid(count: int, shape: tuple[int, int]) -> Grid:
    """Rows and columns of so many tokens in the proportions of a shape; no cells where there are none."""
    rows = isqrt(count * shape[0] // shape[1])
    return (rows, count // rows) if rows and rows * rows * shape[1] == count * shape[0] else (0, 0)


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


def _of_tiles(runs: Sequence[range], tiles: Sequence[Grid | None], sight: Sight) -> Iterator[tuple[int, Labelled]]:
    """Tiles count the rows and columns of their whole picture, which follows them and is called `small`."""
    ends = [at + 1 for at, tile in enumerate(tiles) if tile is None]
    for picture, (start, stop) in enumerate(pairwise([0, *ends])):
        tiles_here = [tile for tile in tiles[start:stop] if tile]
        rows, columns = (max((tile[side] for tile in tiles_here), default=0) + 1 for side in (0, 1))
        for run, tile in zip(runs[start:stop], tiles[start:stop], strict=True):
            side, box, name = isqrt(len(run)), sight.boxes[picture], picture_name(picture)
            if tile:
                first = (tile[0] * side, tile[1] * side)
                labelled = cells(picture, (side, side), part(box, (rows, columns), *tile), first=first)
            else:
                name += " small" * bool(tiles_here)
                labelled = cells(picture, (side, side), box, name=name)
            yield from zip(run, labelled, strict=True)
