"""What a process that draws beside this one does, in a process without PyTorch.

`python drawing_process.py PART FOLDER`; the parts are `draws`, which leaves pictures to be held against those drawn
elsewhere, and `ends`: errors as they are or in words, nothing drawn once nobody wants it, its own death.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from attnscope import figures
from attnscope.errors import UsageError
from attnscope.export.drawing import Drawing
from attnscope.figures import Maps, Panel, Style, drawing_process

BANK = ("the", "bank", "river")


def a_drawing() -> Drawing:
    values = np.where(np.tri(3, dtype=bool), 0.25, np.nan).astype(np.float32)
    layers = (Maps(0, (0, 1), np.stack([values, values * 2]), BANK, BANK),)
    panel = Panel("focus", np.array([[0.1, 0.2]]), 0, 1, few_L=(False,))
    return Drawing(layers, ("L0H1",), (0,), (panel,))


def begun() -> drawing_process.DrawingProcess:
    drawing_process.begin(figures.load_drawing, "attnscope.export.drawing")
    process = drawing_process.take_process()
    assert process is not None
    assert drawing_process.take_process() is None, "one piece of work each"
    return process


def fail(error: Exception) -> Iterator[Path]:
    yield Path("one")
    raise error


def endless(folder: Path) -> Iterator[Path]:
    for number in count():
        time.sleep(0.01)
        (folder / str(number)).touch()
        yield folder / str(number)


def waiting(mine: Path, other: Path) -> Iterator[Path]:
    mine.touch()
    while not other.exists():
        time.sleep(0.01)
    yield mine


def warn(words: str) -> Iterator[Path]:
    logging.getLogger("attnscope").warning(words)
    yield Path("one")


@contextmanager
def warned() -> Iterator[list[str]]:
    words, handler = list[str](), logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("attnscope").addHandler(handler)
    yield words
    logging.getLogger("attnscope").removeHandler(handler)


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.png")}


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def draws(folder: Path) -> None:
    drawing, told = a_drawing(), list[int]()
    drawing_process.begin(figures.load_drawing, "attnscope.export.drawing")  # which loads what draws
    written = drawing.draw(folder, workers=None, advance=told.append)
    assert "matplotlib.figure" not in sys.modules, "drawn here"
    assert len(told) == len(written) == drawing.pictures() == 4


def ends(folder: Path) -> None:
    figures.load_drawing()  # what is forked from here on has it
    assert list(begun().drawn(partial(a_drawing().drawn, folder, ["mass"], Style()))) == []
    together = list(
        begun().drawn(partial(waiting, folder / "a", folder / "b"), partial(waiting, folder / "b", folder / "a"))
    )
    assert sorted(together) == [folder / "a", folder / "b"], "each waits for the other: side by side or never"

    with warned() as words:
        assert list(begun().drawn(partial(warn, "no font"), partial(warn, "no font"))) == [Path("one")] * 2
    assert words == ["no font"], "a warning of both is said once"

    error = raised(lambda: list(begun().drawn(partial(fail, UsageError("no", "do {cmap=x}")))))
    assert (type(error), str(error)) == (UsageError, str(UsageError("no", "do {cmap=x}")))
    error = raised(lambda: list(begun().drawn(partial(fail, ZeroDivisionError("of two")))))
    assert (type(error), str(error)) == (RuntimeError, "ZeroDivisionError: of two")

    (folder / "first").mkdir()
    (folder / "second").mkdir()
    there = begun().drawn(partial(endless, folder / "first"), partial(endless, folder / "second"))
    first = next(there)
    there.close()
    before = len(list(folder.glob("*/*")))
    time.sleep(0.1)
    assert first.exists()
    assert len(list(folder.glob("*/*"))) == before

    process = begun()
    os.kill(process.process.pid or 0, signal.SIGKILL)
    assert "ended early" in str(raised(lambda: list(process.drawn(partial(endless, folder)))))
    begun()  # never asked: it must not keep this process from ending


if __name__ == "__main__":
    {"draws": draws, "ends": ends}[sys.argv[1]](Path(sys.argv[2]))
