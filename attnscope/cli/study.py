"""Every command of a study: what is asked of one text or of each of a corpus, what it would take, the run, its outputs.

study = KnockoutStudy.of(load_studied(answered, table), questions, plan)
return run_study(study, compared, table, Printed(sheet, notes, draw))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attnscope.cli import output
from attnscope.cli.output import ONE_BY_ONE, write_file
from attnscope.errors import InputError, UsageError, brief
from attnscope.utils.signals import unwinding
from attnscope.utils.stages import clock

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnscope.cli.figure_options import StudyTable
    from attnscope.cli.knockout_options import Answered, Texts
    from attnscope.cli.options import Checkpoint
    from attnscope.cli.output import Top, Writing
    from attnscope.interventions.spec import AskedText
    from attnscope.model.loaded import LoadedModel
    from attnscope.studies.study import Cost, Study
    from attnscope.studies.study_folder import StudyRecord
    from attnscope.utils.tables import TableRecord

Record = TypeVar("Record", bound="StudyRecord")
Tabled = TypeVar("Tabled", bound="TableRecord")
Asked = TypeVar("Asked", bound="AskedText")


def read_one(asked: Answered, writing: Writing) -> str | list[int] | None:
    """The one text, or its token ids; None where a corpus is named instead."""
    from attnscope.cli.one_text import read_text

    return read_text(asked, writing) if asked.texts is None else None


def questions(
    asked: Answered,
    text: str | Sequence[int] | None,
    fields: Sequence[str],
    make: Callable[[Any], list[Asked]],
    most: int,
    stdin: str | None = None,
) -> list[Asked]:
    """What is asked of the one text, or of each text of the corpus, with the fields of its record.

    fields: what a record may say. make: of a text or of records, as the Python call takes them. most: texts that are
    read. stdin: as of `texts_in`. Raises as `texts_in`, and what `make` raises with the place of the record.
    """
    from attnscope.corpus.items import texts_in

    if text is not None:
        return make(text)
    assert asked.texts is not None
    asked_each = []
    for item in texts_in(asked.texts, most, chat=asked.chat, stdin=stdin):
        # A position may be a number in a record; other JSON is no expression and no text.
        own = {name: value for name in fields if (value := item.fields.get(name)) is not None}
        for name, value in own.items():
            if not isinstance(value, str | int) or isinstance(value, bool):
                example = "bank#2" if name in ("query", "key", "at") else "some words"
                wrong = f"field {name!r}: expected text, got {brief(value)}"
                raise InputError(f"{item.name}: {wrong}", f'write "{name}": "{example}"')
            own[name] = str(value)
        try:
            [question] = make([{"text": item.text, **own}])
        except UsageError as error:
            # What an option says for all texts, a record can say for its own.
            own_field = next((name for name in fields if f"{{{name}}}" in error.hint), None)
            hint = error.hint + f', or give each record a field "{own_field}"' * (own_field is not None)
            raise UsageError(f"{item.name}: {error.message}", hint) from error
        asked_each.append(replace(question, where=str(item.id)))
    return asked_each


def load_studied(asked: Checkpoint, writing: Writing) -> LoadedModel:
    """The model, which is named once it is there."""
    from attnscope.cli.one_text import load_model

    loaded = load_model(asked, writing)
    output.log(loaded.line, writing.quiet)
    return loaded


@dataclass(frozen=True)
class Printed(Generic[Tabled]):
    """How the record of a study is shown. sheet: its first rows on a terminal. notes: what a reader has to know.

    draw: writes the pictures into a folder. page: writes what else a folder gets. extra: writes what an option of this
    study alone asks for. hint: what makes one picture of many. what: what --top counts; sizes: how many rows each of
    these has, where it is not one.
    """

    sheet: Callable[[Tabled, int | None], RenderableType]
    notes: Callable[[Tabled], Iterable[str]]
    draw: Callable[[Tabled, Path], Sequence[Path | None]] = lambda record, folder: []
    page: Callable[[Tabled, Path], object] = lambda record, folder: None
    extra: Callable[[Tabled], object] = lambda record: None
    hint: str = ONE_BY_ONE
    what: str = "rows"
    sizes: Callable[[Tabled], Iterable[int]] | None = None


def run_study(study: Study[Record], top: Texts, table: StudyTable, printed: Printed[Record]) -> int:
    """Say what is asked, and do it: run, draw and print; with --dry-run say what it would take."""
    output.log_lines(study.lines, table.quiet)
    if top.dry_run:
        show_cost(study.cost(), table.quiet)
        return 0
    from attnscope.studies.study import PASSED

    with unwinding():
        with output.progress(study.stage, study.cost().steps, table.quiet, PASSED) as advance:
            record = study.run(table.folder, force=table.force, advance=advance)
        if table.folder is not None:
            with output.progress("drawing", None, table.quiet):
                printed.draw(record, table.folder)
                printed.page(record, table.folder)
    return print_study(record, top, table, printed)


def show_cost(cost: Cost, quiet: bool) -> None:
    """Print what a study would take, with about how long, by a batch that is run now."""
    with output.progress("measuring a batch", None, quiet):
        seconds = cost.seconds()
    output.show(f"{cost.line}; about {clock(max(1.0, seconds))} by the time of one measured batch")


def print_study(record: Tabled, top: Top, table: StudyTable, printed: Printed[Tabled]) -> int:
    """The file where one was asked for, the table on stdout, and what to know to read it on stderr."""
    if table.file is not None:
        write_file(table.file, record.table, lambda folder: printed.draw(record, folder), table.quiet, printed.hint)
    printed.extra(record)
    format, rows = output.wanted_format(table.format), record.table()
    sizes = [1] * len(rows) if printed.sizes is None else [*printed.sizes(record)]
    first = rows.slice(0, sum(sizes[: top.limit(format)]))
    output.emit(first, format, lambda: printed.sheet(record, top.shown))
    rest = top.rest(len(sizes[: top.shown]), len(sizes), printed.what) if format == "table" else []
    output.log_lines([*rest, *printed.notes(record)], table.quiet)
    return 0
