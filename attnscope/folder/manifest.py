"""A folder of one text's run: which run lies in it, which files are its own, and how another takes its place.

    check(folder, now, force=False)   # refused where another run lies there
    with taken(folder, now) as files:  # marked as unfinished while the block writes, and adds the names of its files
        ...

A manifest is what somebody wrote: nothing is removed for its word but files that bear a name of ours, in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError
from attnscope.files import check_schema, jsonable, read_json, save_json
from attnscope.folder.claim import MOST_SAID, OVER, another, changes, writable
from attnscope.folder.kinds import COMMAND, LONGEST_SAID, clipped, command_of, refuse_other_kind
from attnscope.folder.suffix import refuse_file_name
from attnscope.stacks import STACKS
from attnscope.text.prompt import Medium, Prompt, Span

SCHEMA = "run/4"  # of a folder; goes up when a file or a column is renamed, or means something else
BEFORE = "run/3"  # whose heads.csv has the text's role alone, as `role`: what reads it knows that
NAME, MARK = "manifest.json", "unfinished.json"
PROMPT, TARGET = "prompt", "target_prompt"  # where a manifest says the tokens of a text, and of its target
# Options that say where a run comes from, where it goes and what it may do; the rest says what it is.
AROUND = frozenset(
    {"out", "file", "ids", "audio", "picture", "generate", "offline", "trust_remote_code", "allow_pickle"}
)
OURS = re.compile(
    r"(heads|relations|keys|text|rollout)\.csv|(manifest|unfinished)\.json"
    rf"|(({'|'.join(STACKS)})/)?"
    r"(overview|metrics|mass|top|rollout|picture\d*|layers/L\d+|heads/L\d+(H|KV)\d+)\.(png|svg|pdf)",
    re.ASCII,
)
HALF = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}")  # what `whole_path` calls a file that is not whole yet


def run_facts(prompt: Prompt, facts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a manifest by which runs differ; facts: the model, its device and dtype, and more.

    options: what was asked for, and under COMMAND by which command line.
    """
    facts = {**facts, COMMAND: options[COMMAND]} if COMMAND in options else facts
    options = {name: value for name, value in options.items() if name != COMMAND}
    text = {"sha256": prompt.sha256, "tokens": len(prompt), "removed_tokens": prompt.removed}
    said: dict[str, Any] = jsonable({"text": text, "options": options, "prompt": tokens_of(prompt)})
    return {"schema": SCHEMA, **facts, **said}


def tokens_of(prompt: Prompt) -> dict[str, Any]:
    """What a manifest says of a text's tokens, and `prompt_of` makes a Prompt of."""
    medium = prompt.medium
    found = asdict(replace(prompt, medium=Medium()))
    found |= {"media": medium.sha256, "step": medium.step, "windows": (), "unasked": medium.unasked}
    said: dict[str, Any] = jsonable({name: value for name, value in found.items() if name != "medium"})
    return said


def read_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says. Raises UsageError for what is none, and for one of another version."""
    found = _of_any_version(path)
    if found["schema"] != BEFORE:
        check_schema(found, SCHEMA, path, "run its text again with this version of attnscope")
    return found


def _of_any_version(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not str(found.get("schema")).startswith("run/"):
        raise UsageError(f"{path} is not a manifest of attnscope, or is damaged", "name another")
    return found


def prompt_of(said: Mapping[str, Any], path: Path, name: str = PROMPT) -> Prompt:
    """The tokens that the run of a manifest read. Raises UsageError where it does not say them, or not all of them.

    name: PROMPT, or TARGET of what an encoder-decoder's decoder read.
    """
    try:
        columns = {one: _frozen(value) for one, value in said[name].items()}
        turns, segments = (tuple(Span(**one) for one in columns.pop(name, ())) for name in ("turns", "segments"))
        said_of = {"sha256": columns.pop("media", None), "step": columns.pop("step", None)}
        medium = Medium(**said_of, unasked=columns.pop("unasked", 0))
        columns.pop("windows", None)  # of a vision tower's text alone
        prompt = Prompt(**columns, turns=turns, medium=medium, segments=segments)
        whole = _is_whole(prompt)
        "".join((prompt.text, *prompt.tokens, *prompt.labels, *prompt.plain)).encode()
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):  # the last: halves of surrogate pairs
        whole = False
    if not whole:
        raise UsageError(f"{path} does not say which tokens were read", "give the text with {text} or {file}")
    return prompt


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What tells two runs apart, in words; none where the second is the first again."""
    text = [f"text was {_shown(before)}, now {_shown(now)}"] * (not _same_text(before, now))
    options = changes(_facts(before), _facts(now), _short)
    asked = changes(_mapping(before.get("export")), now["export"], _short) if "export" in now and not options else []
    return text + options + asked


def check(folder: Path, now: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError, which says which run lies in the folder where it is another; force lets it be written over.

    What a run left that was stopped may be taken over by any other.
    """
    refuse_file_name(folder)
    refuse_other_kind(folder, NAME, force)
    path, found, before = folder / NAME, list[str](), dict[str, Any]()
    if not force and path.exists():
        before = _of_any_version(path)
        check_schema(before, SCHEMA, folder, OVER)
        found = differences(before, now)
    elif not force and not (folder / MARK).exists():
        found = [f"{name}, which no manifest lists" for name in sorted(_ours(folder))[:1]]
    if found:
        made, text = command_of(before), f", of the text {_shown(before)}" * (not _same_text(before, now))
        if made.split(" ")[:1] != command_of(now).split(" ")[:1] and made:
            raise UsageError(f"{folder} holds a run of `{clipped(made)}`{text}", OVER)
        more = f"; {len(found) - MOST_SAID} more" * (len(found) > MOST_SAID)
        raise another(folder, "run", f": {'; '.join(found[:MOST_SAID])}{more}")


@contextmanager
def taken(folder: Path, now: Mapping[str, Any]) -> Iterator[set[str]]:
    """The folder for a run to write into, made if need be; gives the set that the block adds the names of its files to.

    Files of the run before are removed: first where it is another, at the end where it is the same and wrote more.
    While the block runs, and where it is cut off, the folder says that it is unfinished. Raises UsageError where it
    cannot be written.
    """
    written: set[str] = set()
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    left, again = _left(folder, now)
    save_json(now, folder / MARK)
    if not again:
        _remove(folder, {NAME, *left})
    yield written
    _remove(folder, left - written)
    _remove(folder, {MARK})


def _left(folder: Path, now: Mapping[str, Any]) -> tuple[set[str], bool]:
    """What a run before left in a folder, manifest and mark aside; and whether it was the same run."""
    again, names = False, set[str]()
    with suppress(UsageError):  # none, or damaged: it lists nothing
        before = _of_any_version(folder / NAME)
        again = not differences(before, now)
        listed = before.get("files")
        names = {str(name) for name in listed} if isinstance(listed, Mapping | list) else names
    if (folder / MARK).exists():
        names |= _ours(folder)
    return names - {NAME, MARK}, again


def _ours(folder: Path) -> set[str]:
    """The files in a folder that bear a name of ours, whole or not, manifest and mark aside."""
    paths = [path for part in (folder, *inner_folders(folder)) if part.is_dir() for path in part.iterdir()]
    names = {path.relative_to(folder).as_posix() for path in paths if not path.is_dir()}
    return {name for name in names if _is_ours(name)} - {NAME, MARK}


def inner_folders(folder: Path) -> list[Path]:
    """The folders that an export makes in its own, whether they are there or not."""
    stacks = [folder / stack for stack in STACKS]
    return [*stacks, *(top / name for top in (folder, *stacks) for name in ("layers", "heads"))]


def _is_ours(name: str) -> bool:
    """Whether it is the name of a file that an export writes, or of one that is not whole yet."""
    place, slash, last = name.rpartition("/")
    half = HALF.fullmatch(last)
    return OURS.fullmatch(place + slash + (half["name"] if half else last)) is not None


def _remove(folder: Path, names: set[str]) -> None:
    """Remove those of the files that are ours and lie in the folder itself, not behind a link."""
    for path in (folder / name for name in sorted(names) if _is_ours(name)):
        inner = [part for part in path.parents if folder in part.parents]
        if not path.is_dir() and not any(part.is_symlink() for part in inner):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds more
                for part in inner:
                    part.rmdir()


def _facts(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, by name, but for its text."""
    model, options = _mapping(said.get("model")), _mapping(said.get("options"))
    facts = {"model": model.get("name"), "revision": model.get("revision")}
    facts |= {name: said.get(name) for name in ("device", "dtype")}
    return {name: value for name, value in options.items() if name not in AROUND} | facts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _same_text(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """The hash and the lengths say it; the ids too, where both say them, since two lists of ids may read the same.

    One text may be divided into prompt and answer, and another time not.
    """
    prompts = [_mapping(said.get("prompt")) for said in (before, now)]
    ids, answers = ([prompt.get(name) for prompt in prompts] for name in ("ids", "answer"))
    return before.get("text") == now.get("text") and (None in ids or ids[0] == ids[1]) and answers[0] == answers[1]


def _shown(said: Mapping[str, Any]) -> str:
    tokens, prompt = _mapping(said.get("text")).get("tokens"), _mapping(said.get("prompt"))
    answer = "" if prompt.get("answer") is None else f", from {_short(prompt['answer'])} on the answer"
    return f"{_short(prompt.get('text'))} ({_short(tokens)} tokens{answer})"


def _short(value: Any) -> str:
    """A value for a message: on one line, in letters that show."""
    if value is None:
        return "not given"
    return clipped(repr(value[: LONGEST_SAID + 1] if isinstance(value, str) else value))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is_whole(prompt: Prompt) -> bool:
    """Whether every column has one entry per token, of its kind."""
    kinds = {"ids": int, "tokens": str, "labels": str, "special": bool, "plain": str}
    columns = {name: getattr(prompt, name) for name in kinds}
    return (
        type(prompt.text) is str
        and type(prompt.removed) is int
        and isinstance(prompt.medium.sha256, str | None)
        and isinstance(prompt.medium.step, float | None)
        and type(prompt.medium.unasked) is int
        and len(prompt.ids) > 0
        and all(type(column) is tuple and len(column) == len(prompt.ids) for column in columns.values())
        and all(type(one) is kinds[name] for name, column in columns.items() for one in column)
        and (prompt.answer is None or (type(prompt.answer) is int and 0 < prompt.answer < len(prompt.ids)))
        and _in_order(prompt.characters, len(prompt.ids), len(prompt.text))
        and _are_spans((*prompt.turns, *prompt.segments), len(prompt.ids))
        and type(prompt.types) is tuple
        and len(prompt.types) in (0, len(prompt.ids))
        and all(type(one) is int for one in prompt.types)
    )


def _are_spans(spans: tuple[Span, ...], tokens: int) -> bool:
    """Whether they are named ranges of the tokens."""
    return all(0 <= one.start <= one.stop <= tokens and type(one.name) is str for one in spans)


def _in_order(characters: Any, tokens: int, most: int) -> bool:
    """Whether they are what `Prompt.characters` may be: a range of the text for each token, running forward."""
    return (
        type(characters) is tuple
        and len(characters) == tokens
        and all(type(one) is tuple and list(map(type, one)) == [int, int] for one in characters)
        and all(0 <= start <= stop <= most for start, stop in characters)
        and all(before[0] <= now[0] and before[1] <= now[1] for before, now in pairwise(characters))
    )
