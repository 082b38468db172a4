"""Where things go: data to stdout, messages to stderr, colour and progress only where a person looks.

First messages and data, then progress, `--top`, and what `--out` may name: a folder, or, where a command makes one
table or one picture, a file of that format. Last the groups of options of all this.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from typer import Option

from attnscope.cli.option_groups import DRAWN, FIRST, HELD, SETTING, UNRECORDED, OptionGroup, parameters
from attnscope.errors import LINES, UsageError, in_a_line, numbered, visible
from attnscope.utils import signals, stages
from attnscope.utils.display import model_name
from attnscope.utils.folders import OTHER_PICTURES, OTHER_TABLES, PICTURES, TABLES, suffix_of
from attnscope.utils.signals import unwinding
from attnscope.utils.stages import Progress, Stage, Watch

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Task
    from rich.segment import Segment
    from rich.text import Text

DATA_LINES = {**LINES, "\t": "\t"}
STAGES, STAGE_SECONDS = "ATTNSCOPE_STAGES", 0.1  # json: stages are lines on stderr, at most so often
PIPE_WIDTH = 240  # a table written to a file is cut at no screen's edge


def log(message: str, quiet: bool) -> None:
    """One line to the person, on stderr, unless they want quiet."""
    if not quiet:
        with stages.lock, suppress(OSError):  # whoever listened has gone: the data is still wanted
            _make_room()
            print(wrapped(in_a_line(message)), file=sys.stderr)  # noqa: T201


def log_lines(lines: Iterable[str], quiet: bool) -> None:
    """Lines to the person, one after the other."""
    for line in lines:
        log(line, quiet)


def wrapped(message: str) -> str:
    """A line for stderr: on a terminal broken between words, which the terminal itself does not do."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal
        return message
    if not columns:  # a terminal of no size, as a container's or an editor's shell may be
        return message
    return textwrap.fill(message, max(columns, 20), break_long_words=False, break_on_hyphens=False)


class _Complaints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log(f"attnscope: {record.getMessage()}", False)  # to stderr of the moment: a progress bar makes room for it


def complain_through_talk(quiet: bool) -> None:
    """Warnings of the library become lines on stderr."""
    logger = logging.getLogger("attnscope")
    logger.handlers = [_Complaints()]
    logger.propagate = False
    logger.setLevel(logging.ERROR if quiet else logging.WARNING)


def wanted_format(format: str | None, piped: str = "csv") -> str:
    """The format on stdout: as asked, else a table on a terminal, and in a pipe csv or another one."""
    terminal = sys.stdout.isatty()
    if format in ("parquet", "arrow") and terminal:
        raise UsageError(f"--format {format} is binary", "redirect it to a file: > heads.parquet")
    return format or ("table" if terminal else piped)


def emit(table: pa.Table, format: str, picture: Callable[[], RenderableType], spreadsheet: bool = False) -> None:
    """Write a table to stdout: as data in one of the formats, or as the picture of it for a person.

    spreadsheet: cells of the data that a spreadsheet would run as a formula begin with an apostrophe.
    """
    if format == "table":
        show(picture())
    else:
        emit_data(table, format, spreadsheet)


def emit_first(
    table: pa.Table, top: Top, format: str, picture: Callable[[], RenderableType], printing: Results
) -> None:
    """As `emit`, the first rows, as many as were asked for; on stderr how many a person does not see.

    picture: of the first `top.shown` rows.
    """
    emit(table.slice(0, top.limit(format)), format, picture, printing.spreadsheet)
    if format == "table":
        log_lines(top.rest(len(table.slice(0, top.shown)), len(table)), printing.quiet)


def emit_data(table: pa.Table, format: str, spreadsheet: bool = False) -> None:
    """Write a table to stdout as data; spreadsheet: as for `emit`."""
    from attnscope.utils.tables import escape_formulas, write

    stream = data_stream(format)
    write(escape_formulas(table) if spreadsheet else table, stream, format)
    stream.flush()


def data_stream(format: str) -> IO[bytes]:
    """Where data goes: stdout, byte for byte; on a terminal what would steer it is written out."""
    _make_room()
    return cast(IO[bytes], _Screen(format)) if sys.stdout.isatty() else sys.stdout.buffer


class _Screen:
    """The terminal, for whole lines of data: a hidden character is `⟨202E⟩`, in JSON its escape, with equal meaning."""

    def __init__(self, format: str) -> None:
        self.written = (lambda char: json.dumps(char)[1:-1]) if format == "jsonl" else numbered

    def write(self, data: bytes) -> int:
        return sys.stdout.buffer.write(visible(data.decode(), DATA_LINES, self.written).encode())

    def flush(self) -> None:
        sys.stdout.buffer.flush()


def tell(facts: Mapping[str, Any], format: str | None, picture: Callable[[], RenderableType]) -> None:
    """Print facts on stdout: as JSON, by default in a pipe, or as the picture of them for a person."""
    if wanted_format(format, "json") == "json":
        _make_room()
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        show(picture())


def show(renderable: RenderableType, stream: Any = None) -> None:
    """Print something rich on stdout; in a pipe wide and without colour, unless COLUMNS and FORCE_COLOR say else."""
    _make_room()
    console(stream or sys.stdout).print(_Visible(renderable))


class _Visible:
    """Something rich with text that somebody else wrote: what would steer the terminal is written out."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, LINES))


def width() -> int:
    """How many columns the reader of stdout has."""
    return console(sys.stdout).width


def console(stream: Any) -> Console:
    """Rich's console on a stream: colour on a terminal, or where FORCE_COLOR asks; never where NO_COLOR is set."""
    from rich.console import Console

    terminal, columns = stream.isatty(), os.environ.get("COLUMNS", "")
    coloured = terminal or bool(os.environ.get("FORCE_COLOR"))
    return Console(
        file=stream,
        force_terminal=coloured,
        width=None if terminal else int(columns) if columns.isdecimal() and int(columns) else PIPE_WIDTH,
        color_system=None if os.environ.get("NO_COLOR") or not coloured else "auto" if terminal else "256",
        highlight=False,
        markup=False,
        emoji=False,
    )


_watch: Watch | None = None
_watch_line = False  # a line of the watch stands on the terminal


@contextmanager
def watched(quiet: bool) -> Iterator[None]:
    """While the block runs, long work that says nothing is named on stderr: `importing torch`, `loading demo`."""
    global _watch
    if quiet or _watch is not None or os.environ.get(STAGES):
        yield
        return
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    _watch = Watch(_show_line if terminal else lambda line: log(line, quiet=False), terminal)
    _watch.start()
    try:
        yield
    finally:
        _watch.stop()
        _make_room()
        _watch = None


def _show_line(line: str) -> None:
    """A line that the next words replace."""
    global _watch_line
    _watch_line = True
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"{signals.ERASE_LINE}{in_a_line(line)[: columns - 1]}\r")
        sys.stderr.flush()


def _make_room() -> None:
    """Words follow: the line of the watch goes, and it is silent for a while."""
    global _watch_line
    if _watch is None:
        return
    _watch.heard()
    if _watch_line:
        _watch_line = False
        sys.stderr.write(signals.ERASE_LINE)
        sys.stderr.flush()


@contextmanager
def progress(title: str, total: int | None, quiet: bool, unit: str = "") -> Iterator[Callable[[int], None]]:
    """A stage while the block runs, shown by `show_stage`; yields `advance(steps)`.

    title: the stage, such as `drawing`. unit: what is counted. Each step is a place for a signal to be heard that
    something swallowed, see `signals.again`.
    """
    with show_stage(Stage(title, total, unit), quiet) as stage:

        def advance(steps: int) -> None:
            signals.again()
            stage.advance(steps)

        yield advance


def loading(model: str, quiet: bool) -> AbstractContextManager[Callable[[int], None]]:
    """The stage in which a model is loaded, which counts the bytes of its weights by itself."""
    return progress(f"loading {model_name(model)}", None, quiet)


@contextmanager
def show_stage(stage: Stage, quiet: bool) -> Iterator[Stage]:
    """While the block runs, a bar on stderr where that is a terminal; in a pipe `watched` has a line of a long one."""
    if os.environ.get(STAGES) == "json":  # lines on stderr, for a program that shows them
        logged: float = 0.0
        shown: float | None = None

        def line() -> None:
            nonlocal logged, shown
            now = time.monotonic()
            if now - logged >= STAGE_SECONDS or stage.done == stage.total:
                logged, shown = now, stage.done
                facts = dict(zip(("stage", "done", "total", "unit"), (stage.title, *stage.numbers), strict=True))
                log(json.dumps(facts), quiet=False)

        stage.changed = line
        with stages.during(stage):
            line()
            yield stage
            if shown != stage.done:  # since the last line, or fewer steps than expected
                logged = 0.0
                line()
        return
    if quiet or not sys.stderr.isatty():
        with stages.during(stage):
            yield stage
        return
    from rich.progress import BarColumn, ProgressColumn
    from rich.progress import Progress as Bars
    from rich.table import Column
    from rich.text import Text

    class Title(ProgressColumn):
        """What is done, cut where the terminal is narrow."""

        def render(self, task: Task) -> Text:
            return Text(in_a_line(stage.doing), no_wrap=True, overflow="ellipsis")

    class Numbers(ProgressColumn):
        """How much of it, how fast, and how long it takes yet."""

        def render(self, task: Task) -> Text:
            return Text("  ".join(filter(None, (stage.count, stage.rate, stage.time))), no_wrap=True)

    # A stage of unknown length has no count, since a total of 0 would read as done.
    columns = (
        Title(Column(no_wrap=True, overflow="ellipsis", ratio=2)),
        BarColumn(None, table_column=Column(ratio=1)),
        Numbers(Column(no_wrap=True)),
    )
    bar = Bars(*columns, console=console(sys.stderr), transient=True, expand=True)
    task = bar.add_task("", total=stage.total)
    stage.changed = lambda: bar.update(task, total=stage.total, completed=stage.done)
    with stages.during(stage):
        with stages.lock:
            _make_room()
        with bar:
            yield stage


class TerminalProgress(Progress):
    """What a call of the library says, as lines on stderr, and its stages as bars."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._said, self._repeated = list[str](), list[str]()

    def say(self, line: str) -> None:
        if self._repeated[:1] == [line]:
            del self._repeated[0]
            return
        self._repeated.clear()
        self._said.append(line)
        log(line, self.quiet)

    def again(self) -> None:
        """The work begins again, and with it the lines so far: they are printed once."""
        self._repeated = [*self._said]

    def stage(
        self, title: str, total: int | None = None, unit: str = ""
    ) -> AbstractContextManager[Callable[[int], object]]:
        return progress(title, total, self.quiet, unit)


def count_or_all(text: str | int) -> str:
    """What was given to an option `N|all`. Raises ValueError for what is neither."""
    if text != "all" and not re.fullmatch(r"0*[1-9][0-9]{0,8}", str(text)):
        raise ValueError(f"expected a number from 1, or all, got {str(text)[:20]!r}")
    return str(text)


def count_of(text: str) -> int | None:
    """The number that `count_or_all` has checked, None for all."""
    return None if text == "all" else int(text)


class Top(OptionGroup, panel="Output"):
    """How much of a table is printed."""

    FEW = 40  # rows of a terminal's table by default
    top: Annotated[
        str | None,
        "Rows printed: a number, or all (default: 40 on a terminal, all in a pipe). Files have all rows.",
        "N|all",
        Option(parser=count_or_all),
        FIRST,
    ] = None

    @property
    def shown(self) -> int | None:
        """How many a person sees, None for all: as many as were asked for, else FEW."""
        return self.FEW if self.top is None else count_of(self.top)

    def limit(self, format: str) -> int | None:
        """How many are printed in a format, None for all: a terminal's table has FEW by default."""
        return None if self.top is None and format != "table" else self.shown

    def rest(self, count: int, of: int, what: str = "rows") -> list[str]:
        """A line of how many are printed, where that is not all of them."""
        more = "; --top N shows more, a pipe gets all" if self.top is None else "; --top all shows all"
        return [f"{count:,} of {of:,} {what}{more}"] * (count < of)


MOST_MADE = 3  # folders, one in the other, that --out makes

# Of what one picture is: of a text, and of a study.
ONE_PICTURE = "choose a head with {select=L1H4}, or a figure with {figures=overview}"
ONE_BY_ONE = "take heads or layers one by one with {over=heads}"


def check_out(out: Path, suffix: str, files: Sequence[str]) -> None:
    """Raise UsageError for a path that cannot be written, before a model is loaded; make nothing yet.

    suffix: see `suffix_of`. files: the suffixes of files that may be given for a folder.
    """
    if suffix and suffix not in files:
        others = f", or a file in {', '.join(files)}" * bool(files)
        more = f" --image {suffix[1:]}" * (suffix in PICTURES and not files)
        if files and suffix in (*PICTURES, *TABLES):
            kind, command = ("picture", "draw") if suffix in PICTURES else ("table", "heads")
            more += f", or make a {kind}: attnscope {command} TEXT --out {out}"
        more += f", or send the table there: --format {suffix[1:]} > {out}" * (suffix in TABLES and not files)
        raise UsageError(f"--out {out}: expected a folder{others}", f"write --out {_nearest(out, suffix, files)}{more}")
    check_writable(out.parent if suffix else out)


def _nearest(out: Path, suffix: str, files: Sequence[str]) -> Path:
    """The path that was most likely meant: a picture or table in a format that is written, else a folder.

    >>> str(_nearest(Path("fig.jpg"), ".jpg", (".png", ".csv"))), str(_nearest(Path("fig.docx"), ".docx", (".png",)))
    ('fig.png', 'fig')
    """
    instead = ".png" if suffix in OTHER_PICTURES else ".jsonl" if "json" in suffix else ".csv"
    known = suffix in (*OTHER_PICTURES, *OTHER_TABLES) and instead in files
    return out.with_suffix(instead if known else "")


def check_file(path: Path, example: str) -> None:
    """Raise UsageError for a path that cannot be a file such as the example, `page.html`, before a model is loaded."""
    expected = Path(example).suffix
    suffixes = (expected, ".htm") if expected == ".html" else (expected,)
    if path.is_dir():
        raise UsageError(f"{path} is a folder, expected a file", f"name one: {path / example}")
    if not path.suffix or suffix_of(path) not in ("", *suffixes):
        raise UsageError(f"{path}: expected a file in {expected}", f"name one: {path.with_suffix(expected)}")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Raise UsageError for a folder that cannot be made or written, before a model is loaded; make nothing yet.

    A mistyped path is no place: at most three levels are made, and none at the root.
    """
    levels = (folder, *folder.absolute().parents)
    missing, there = next((count, path) for count, path in enumerate(levels) if os.path.lexists(path))
    if not there.is_dir():
        raise UsageError(f"cannot write to {folder}: {there} is no folder", "name another folder with --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {folder}: {there} is not writable", "name another folder with --out")
    if missing > MOST_MADE or (missing and there == Path(there.anchor)):
        above = folder if missing == 1 else folder.parent
        raise UsageError(f"there is no folder {above}", f"check the path, or make it: mkdir -p {above}")


def write_file(
    file: Path,
    table: Callable[[], pa.Table],
    draw: Callable[[Path], Sequence[Path | None]],
    quiet: bool,
    hint: str = "name a folder",
    spreadsheet: bool = False,
) -> None:
    """Write the table to the file that --out names, or the picture that is drawn into a folder, and say so."""
    from attnscope.export.export import write_alone

    with unwinding(), progress("drawing", None, quiet):
        write_alone(file, table, draw, hint, spreadsheet)
    log(f"wrote {file}", quiet)


def settle_figures(groups: tuple[type, ...], given: Mapping[str, Any], typed: Collection[str]) -> dict[str, str]:
    """The format of pictures, by field, where --out names a picture.

    given: the options, by field; typed: those that the command line gives. Raises UsageError for another --image, and
    for options of pictures where none is written.
    """
    out, options = given.get("out"), parameters(*groups)
    of_folders = next((group.of_folders for group in groups if hasattr(group, "of_folders")), ())
    suffix = "" if out is None else suffix_of(out, of_folders)
    idle = [option for name, option in options.items() if DRAWN in option.extra and name in typed]
    if idle and "out" in options and (out is None or suffix in TABLES):
        raise UsageError(f"--{idle[0].spelled} is about pictures, and none is written", "name a folder with --out DIR")
    if suffix not in PICTURES or "image" not in options:
        return {}
    if "image" in typed and f".{given['image']}" != suffix:
        raise UsageError(f"--out {out} and --image {given['image']} name two formats", "leave out --image")
    return {"image": suffix[1:]}


class Quiet(OptionGroup, panel="Output"):
    """Whether messages are printed."""

    quiet: Annotated[bool, "Print no messages on stderr.", Option("-q"), UNRECORDED] = False


class Noise(Quiet):
    """Which messages stderr gets, those of other libraries among them."""

    verbose: Annotated[bool, "Show library warnings and tracebacks.", UNRECORDED] = False


class Writing(Noise):
    """Where files go, and which messages stderr gets."""

    files = tuple[str, ...]()  # the suffixes of files that --out may name in a folder's place
    of_folders = tuple[str, ...]()  # those that a folder's name may have, too
    out: Annotated[Path | None, "Folder for tables and figures.", "DIR", Option("-o"), FIRST] = None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_out(self.out, self._suffix, self.files)

    @property
    def _suffix(self) -> str:
        return "" if self.out is None else suffix_of(self.out, self.of_folders)

    @property
    def file(self) -> Path | None:
        """The file that --out names; None where it names a folder."""
        return self.out if self._suffix else None

    @property
    def folder(self) -> Path | None:
        """The folder that --out names; None where it names a file."""
        return None if self._suffix else self.out

    @property
    def draws(self) -> bool:
        """Whether pictures are written."""
        return self.out is not None and self._suffix not in TABLES


W = TypeVar("W", bound=Writing)


def writing_to(group: type[W], help: str, *files: str) -> type[W]:
    """A group whose --out has this help; files: suffixes that it may name in a folder's place.

    >>> writing_to(Results, "Write keys.csv here, or the table to this file.", ".csv")
    """
    out = Annotated[Path | None, help, "DIR|FILE" if files else "DIR"]
    fields = {"__annotations__": {"out": out}, "out": None, "files": files}
    return cast("type[W]", type(group.__name__, (group,), fields))


class Exporting(Writing):
    """A folder that holds one run."""

    force: Annotated[bool, "Replace another run in --out.", UNRECORDED] = False


class Format(OptionGroup, panel="Output"):
    """How a table is printed."""

    format: Annotated[
        Literal["table", "csv", "tsv", "jsonl", "parquet", "arrow"] | None,
        "Format on stdout (default: table on a terminal, csv in a pipe).",
        FIRST,
        UNRECORDED,
    ] = None


class Facts(Format):
    """How facts that are no table are printed."""

    format: Annotated[
        Literal["table", "json"] | None, "Format on stdout (default: table on a terminal, json in a pipe)."
    ] = None  # type: ignore[assignment]


class Config(OptionGroup, panel="Input"):
    """Where options come from that no flag gives."""

    config: Annotated[Path | None, "YAML file of options and settings; the command line wins over it.", UNRECORDED] = (
        None
    )


class Printing(Config, Format, Writing):
    """A table to stdout, files to --out."""


class Spreadsheet(OptionGroup, panel="Output"):
    """Who reads the tables."""

    spreadsheet: Annotated[bool, "Escape formulas in cells of csv and tsv.", HELD, SETTING] = False


class Results(Spreadsheet, Printing, Exporting):
    """A table to stdout, a run to --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spreadsheet and self.format not in (None, "table", "csv", "tsv"):
            raise UsageError("--spreadsheet is for csv and tsv alone", "add --format csv")
