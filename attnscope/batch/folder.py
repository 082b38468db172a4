"""An output folder: which run has it, the options it must be run with, and one run in it at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnscope.batch.corpus import STDIN
from attnscope.batch.journal import FAILURES, JOURNAL, PARTIAL, Journal, Record
from attnscope.errors import UsageError
from attnscope.hooks.report import joined_ways
from attnscope.utils.files import check_schema, read_json, refuse_links, save_json
from attnscope.utils.folders import LOCK, changes, document, locked, writable

OPTIONS = "run.json"
ANOTHER = "name another folder with {out}"
SCHEMA = 6  # of the folder; goes up when a file or a column is renamed, or means something else
BEFORE = 5  # whose heads have the text's role alone, as `role`; its numbers are read, and it is not resumed


@contextmanager
def opened(folder: Path, options: Mapping[str, Any]) -> Iterator[Journal]:
    """The folder's journal, with the folder locked, its options checked, and what is not committed removed."""
    with writable(folder, "free disk space or name another folder; the same command resumes the run"):
        folder.mkdir(parents=True, exist_ok=True)
        check_ours(folder)
        with locked(folder):
            check_options(folder, options, {"about": "written by attnscope batch; docs/schemas.md says what is here"})
            journal = Journal(folder)
            journal.sweep()
            (folder / PARTIAL).mkdir(exist_ok=True)
            try:
                yield journal
            finally:
                journal.sweep()  # what actors that died on other machines left half made


def check_options(folder: Path, options: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Check that the folder was started with these options; a new folder takes them.

    about: what else run.json says, which is not compared. Raises UsageError that names every option that differs.
    """
    plain = json.loads(json.dumps(options, default=str))
    before = _options(folder / OPTIONS)
    if before is None:
        save_json({"schema": SCHEMA, "options": plain, **about}, folder / OPTIONS)
    elif changed := changes(before, plain):
        raise UsageError(
            f"{folder} was started with other options: {'; '.join(changed)}",
            f"give the same options to resume, or {ANOTHER}",
        )


def begun_sources(folder: Path, sources: Sequence[str]) -> tuple[str, ...]:
    """The sources that the folder was started with, where these are the same paths spelled another way.

    The rows name their files as the sources do, so that those of a resumed run have the names of the first.
    """
    sources_before = (_options(folder / OPTIONS) or {}).get("sources")
    if not isinstance(sources_before, list) or not all(isinstance(name, str) for name in sources_before):
        return tuple(sources)
    return tuple(sources_before if list(map(_resolved, sources_before)) == list(map(_resolved, sources)) else sources)


def _resolved(name: str) -> str:
    """A source as a path from the root, links followed; standard input, and what no path can be, as it is."""
    return name if name == STDIN or "\0" in name else os.path.realpath(name)


def say_who_answered(folder: Path, records: Iterable[Record]) -> None:
    """Write into run.json which engines read how many of the texts that are whole, and who each kind of question.

    Of encoder-decoders also how many targets were given, and how many generated; of a model that is read without what
    its config states, what that is.
    """
    path, whole = folder / OPTIONS, list(records)
    values = read_json(path)
    engines, targets = (
        dict(sorted(sum((Counter(getattr(record, name)) for record in whole), Counter[str]()).items()))
        for name in ("engines", "targets")
    )
    answered_by = joined_ways(record.answered_by for record in whole)
    replaced = {name: value for record in whole for name, value in record.replaced.items()}
    values |= {"engines": engines, "answered_by": answered_by} | ({"replaced": replaced} if replaced else {})
    save_json(values | ({"targets": targets} if targets else {}), path)


def check_ours(folder: Path) -> None:
    """Refuse a folder with files that no run of ours left, or links. Raises UsageError that names one."""
    paths = sorted(folder.iterdir())
    refuse_links(path for path in paths if path.name in (LOCK, JOURNAL, FAILURES) or path.is_dir())
    foreign = [path for path in paths if not path.name.startswith(".") and path.name != "lost+found"]
    if _options(folder / OPTIONS) is None and foreign:
        raise UsageError(
            f"{folder} holds {foreign[0].name}, which is not part of a dataset of attnscope batch",
            "name a new or an empty folder with {out}",
        )


def is_dataset(folder: Path) -> bool:
    """Whether `attnscope batch` has filled a folder, as far as the names in it tell."""
    return (folder / OPTIONS).exists() or (folder / JOURNAL).exists()


def kept_options(folder: Path) -> dict[str, Any]:
    """The options that a dataset was made with. Raises UsageError for a folder that is none."""
    hint = "name the folder of a dataset that attnscope batch wrote"
    options = _options(folder / OPTIONS, hint, "read it with the version of attnscope that wrote it", (SCHEMA, BEFORE))
    if options is None:
        raise UsageError(f"{folder} has no {OPTIONS}, which each dataset has", hint)
    return options


def _options(
    path: Path, hint: str = ANOTHER, old: str = "", versions: Sequence[int] = (SCHEMA,)
) -> dict[str, Any] | None:
    """The options in a run.json; None without one.

    Raises UsageError where it is another program's, damaged, or of none of the versions. hint, old: what to do then.
    """
    content = document(
        path,
        "not written by attnscope batch, or is damaged",
        hint,
        lambda content: isinstance(content.get("options"), dict) and type(content.get("schema")) is int,
    )
    if content is None:
        return None
    old = old or f"resume it with the version of attnscope that wrote it, or {ANOTHER}"
    if content["schema"] not in versions:
        check_schema(content, SCHEMA, path.parent, old)
    options: dict[str, Any] = content["options"]
    return options
