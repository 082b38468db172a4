"""One labelled heatmap per head, drawn here or in worker processes."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path

from attnscope.figures.colours import CMAPS, find_cmap
from attnscope.figures.fonts import Fonts, fonts_for, shown_label
from attnscope.figures.heatmap import HeadFigure
from attnscope.figures.jobs import HeadMap, prepare_heads
from attnscope.figures.pool import draw_in_workers, worker_count
from attnscope.figures.style import Maps, Style, head_title
from attnscope.figures.writer import configure, drawing, save_behind


def save_head_maps(
    jobs: Sequence[tuple[Path, Maps, int]],
    style: Style,
    *,
    title: Callable[[Maps, int], str] = head_title,
    workers: int | None = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write one labelled heatmap per job (path, maps, index into maps.heads); returns the paths.

    Numbers are written into the cells of maps of at most 12 tokens. All files of weights share one colour scale unless
    `style.per_head_scale`, which prints each file's; a file of logits has its own. `workers=1` draws here;
    `workers=None` uses other processes when there are enough heads to pay for their start. They import no torch, but
    the calling script: its work must stand under `if __name__ == "__main__"`. `progress` is called with the number of
    files written so far. Raises UsageError for an unknown colour map or a folder that cannot be written.

        save_head_maps([(Path("heads/L27H03.png"), maps, 3)], Style())
        save_head_maps(jobs, Style(sink="mask", scale="log"), workers=2)
    """
    tell = progress or (lambda done: None)
    with closing(head_maps(jobs, style, title, workers)) as drawn:  # an error in `progress` stops the workers too
        for done, _ in enumerate(drawn, start=1):
            tell(done)
    return [path for path, _, _ in jobs]


def head_maps(
    jobs: Sequence[tuple[Path, Maps, int]],
    style: Style,
    title: Callable[[Maps, int], str] = head_title,
    workers: int | None = 1,
) -> Generator[Path, None, None]:
    """`save_head_maps`, one path at a time."""
    find_cmap(style.cmap or CMAPS["weight"])
    fonts = fonts_for(_texts(jobs, style, title))
    heads = prepare_heads(jobs, style, title)
    if workers is None:
        workers = worker_count([head.values_QK.size for head in heads], style)
    yield from _drawn(heads, style, fonts, workers)


def _texts(jobs: Sequence[tuple[Path, Maps, int]], style: Style, title: Callable[[Maps, int], str]) -> set[str]:
    """All that will be drawn, before glyphs that no font has are replaced."""
    titles = {title(maps, index) for _, maps, index in jobs}
    labels = {
        label for axes in {(maps.labels_Q, maps.labels_K) for _, maps, _ in jobs} for axis in axes for label in axis
    }
    return titles | {style.title, style.about.line} | set(map(shown_label, labels))


def _drawn(heads: Sequence[HeadMap], style: Style, fonts: Fonts, workers: int) -> Generator[Path, None, None]:
    if workers > 1:
        return draw_in_workers(partial(_draw_in_worker, style, fonts), heads, workers)
    return draw_heads(heads, style, fonts)


def draw_heads(heads: Iterable[HeadMap], style: Style, fonts: Fonts) -> Generator[Path, None, None]:
    """Write the heads in this process, one path at a time."""
    built: dict[tuple, HeadFigure] = {}
    with drawing(fonts):
        if style.image == "png":
            yield from save_behind(((head.path, _shown(head, style, built).pixels()) for head in heads), style)
        else:
            yield from (_shown(head, style, built).save(head.path) for head in heads)


def _shown(head: HeadMap, style: Style, built: dict[tuple, HeadFigure]) -> HeadFigure:
    """The figure that shows a head; a kind's is built once."""
    if head.kind not in built:
        built[head.kind] = HeadFigure.of(head, style)
    built[head.kind].show(head)
    return built[head.kind]


def _draw_in_worker(style: Style, fonts: Fonts, head: HeadMap) -> Path:
    return _shown(head, style, _of_worker(style, fonts)).save(head.path)


@cache
def _of_worker(style: Style, fonts: Fonts) -> dict[tuple, HeadFigure]:
    """A worker's figures, one per kind; they and matplotlib's settings stay for as long as it lives."""
    configure(fonts)
    return {}
