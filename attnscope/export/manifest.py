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
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError
from attnscope.inputs.prompt import Medium, Prompt
from attnscope.model.selection import STACKS
from attnscope.utils.files import check_schema, jsonable, read_json, save_json
from attnscope.utils.folders import (
    COMMAND,
    LONGEST_SAID,
    OVER,
    another,
    changes,
    clipped,
    command_of,
    refuse_file_name,
    refuse_other_kind,
    writable,
)
from attnscope.utils.schema import from_json

if TYPE_CHECKING:
    from attnscope.observe.request import CaptureSpec

SCHEMA = "run/4"  # of a folder; goes up when a file or a column is renamed, or means something else
BEFORE = "run/3"  # whose heads.csv has the text's role alone, as `role`: what reads it knows that
NAME, MARK = "manifest.json", "unfinished.json"
PROMPT, TARGET = "prompt", "target_prompt"  # where a manifest says the tokens of a text, and of its target
SOURCE = "source"  # of tensors that were given instead of a text to a model
# What a folder had by default, and what it has now.
FIGURES_BY_DEFAULT = [["overview", "layers", "heads", "metrics"], ["overview", "top", "heads"]]
# What it says there of a Medium, and as which field.
MEDIA = {"media": "sha256", "step": "step", "unasked": "unasked", "virtual": "virtual"}
# Options that say where a run comes from, where it goes and what it may do; the rest says what it is.
AROUND = {"out", "file", "ids", "audio", "picture", "tensors", "weights_file", "generate"}
AROUND |= {"offline", "trust_remote_code", "allow_pickle"}
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
    values: dict[str, Any] = jsonable({"text": text, "options": options, "prompt": tokens_of(prompt)})
    return {"schema": SCHEMA, **facts, **values}


def tokens_of(prompt: Prompt) -> dict[str, Any]:
    """What a manifest says of a text's tokens, and `prompt_of` makes a Prompt of."""
    medium = prompt.medium
    columns = asdict(replace(prompt, medium=Medium()))
    columns |= {"media": medium.sha256, "step": medium.step, "windows": (), "unasked": medium.unasked}
    columns |= {} if medium.virtual else {"virtual": False}
    values: dict[str, Any] = jsonable({name: value for name, value in columns.items() if name != "medium"})
    return values


def read_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says. Raises UsageError for what is none, and for one of another version."""
    manifest = _of_any_version(path)
    if manifest["schema"] != BEFORE:
        check_schema(manifest, SCHEMA, path, "run its text again with this version of attnscope")
    return manifest


def ask_of(path: Path) -> CaptureSpec:
    """What the run of a manifest asked, of the tokens that it read: `read` gives the same again.

    Raises UsageError for a manifest that does not say it, and for a run that read more than tokens.

        >>> read(load(), ask_of(Path("runs/bank/manifest.json"))).table()
    """
    from attnscope.observe.request import CaptureSpec

    manifest = read_manifest(path)
    prompt, target = prompt_of(manifest, path), prompt_of(manifest, path, TARGET).ids if TARGET in manifest else None
    if prompt.medium.sha256 is not None:
        message = f"the run of {path} read pictures or a sound too, which its tokens do not hold"
        raise UsageError(message, "give {picture} or {audio} again")
    return replace(CaptureSpec.of_json(manifest.get("ask")), text=prompt, target=target)


def _of_any_version(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or not str(manifest.get("schema")).startswith("run/"):
        raise UsageError(f"{path} is not a manifest of attnscope, or is damaged", "name another")
    return manifest


def prompt_of(manifest: Mapping[str, Any], path: Path, name: str = PROMPT) -> Prompt:
    """The tokens that the run of a manifest read. Raises UsageError where it does not say them, or not all of them.

    name: PROMPT, or TARGET of what an encoder-decoder's decoder read.
    """
    try:
        columns = {"turns": [], **manifest[name]}
        columns.pop("windows", None)  # of a vision tower's text alone
        media = {field: columns.pop(key) for key, field in MEDIA.items() if key in columns}
        if "medium" in columns:  # which is written as MEDIA
            raise KeyError(name)
        prompt = replace(from_json(Prompt, columns, name), medium=from_json(Medium, media, name))
        whole = _is_whole(prompt)
        "".join((prompt.text, *prompt.tokens, *prompt.labels, *prompt.plain)).encode()
    except (UsageError, KeyError, TypeError, ValueError):  # the last: halves of surrogate pairs
        whole = False
    if not whole:
        raise UsageError(f"{path} does not say which tokens were read", "give the text with {text} or {file}")
    return prompt


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What tells two runs apart, in words; none where the second is the first again."""
    text = [f"text was {_shown(before)}, now {_shown(now)}"] * (not _same_text(before, now))
    options = changes(_facts(before), _facts(now), _short)
    if options or now.get("options"):  # what a command drew follows from its options, by the defaults of its version
        return text + options
    exports = [dict(_mapping(manifest.get("export"))) for manifest in (before, now)]
    if [export.get("figures") for export in exports] == FIGURES_BY_DEFAULT:
        exports = [{name: export[name] for name in export if name not in ("figures", "heads")} for export in exports]
    return text + changes(exports[0], exports[1], _short)


def check(folder: Path, now: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError, which says which run lies in the folder where it is another; force lets it be written over.

    What a run left that was stopped may be taken over by any other.
    """
    refuse_file_name(folder)
    refuse_other_kind(folder, NAME, force)
    path, reasons, before = folder / NAME, list[str](), dict[str, Any]()
    if not force and path.exists():
        before = _of_any_version(path)
        check_schema(before, SCHEMA, folder, OVER)
        reasons = differences(before, now)
    elif not force and not (folder / MARK).exists():
        reasons = [f"{name}, which no manifest lists" for name in sorted(_ours(folder))[:1]]
    if reasons:
        command, text = command_of(before), f", of the text {_shown(before)}" * (not _same_text(before, now))
        if command.split(" ")[:1] != command_of(now).split(" ")[:1] and command:
            raise UsageError(f"{folder} holds a run of `{clipped(command)}`{text}", OVER)
        raise another(folder, "run", reasons)


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
    # What a run before left: what its manifest lists, and where it was cut off, all that bears a name of ours.
    again, left = False, set[str]()
    with suppress(UsageError):  # none, or damaged: it lists nothing
        before = _of_any_version(folder / NAME)
        again = not differences(before, now)
        listed = before.get("files")
        left = {str(name) for name in listed} if isinstance(listed, Mapping | list) else left
    if (folder / MARK).exists():
        left |= _ours(folder)
    left -= {NAME, MARK}
    save_json(now, folder / MARK)
    if not again:
        _remove(folder, {NAME, *left})
    yield written
    _remove(folder, left - written)
    _remove(folder, {MARK})


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
    """Remove those of the files that are ours and lie in the folder itself, not through a link."""
    for path in (folder / name for name in sorted(names) if _is_ours(name)):
        inner = [part for part in path.parents if folder in part.parents]
        if not path.is_dir() and not any(part.is_symlink() for part in inner):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds more
                for part in inner:
                    part.rmdir()


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, by name, but for its text."""
    model, options = _mapping(manifest.get("model")), _mapping(manifest.get("options"))
    facts = {"model": model.get("name"), "revision": model.get("revision")}
    facts |= {name: manifest.get(name) for name in ("device", "dtype")}
    facts["weights' sha256"] = _mapping(manifest.get(SOURCE)).get("sha256")  # of weights that were given
    return {name: value for name, value in options.items() if name not in AROUND} | facts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _same_text(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """The hash and the lengths say it; the ids too, where both say them, since two lists of ids may read the same.

    One text may be divided into prompt and answer, and another time not.
    """
    prompts = [_mapping(manifest.get("prompt")) for manifest in (before, now)]
    ids, answers = ([prompt.get(name) for prompt in prompts] for name in ("ids", "answer"))
    return before.get("text") == now.get("text") and (None in ids or ids[0] == ids[1]) and answers[0] == answers[1]


def _shown(manifest: Mapping[str, Any]) -> str:
    tokens, prompt = _mapping(manifest.get("text")).get("tokens"), _mapping(manifest.get("prompt"))
    answer = "" if prompt.get("answer") is None else f", from {_short(prompt['answer'])} on the answer"
    return f"{_short(prompt.get('text'))} ({_short(tokens)} tokens{answer})"


def _short(value: Any) -> str:
    """A value for a message: on one line, in letters that show."""
    if value is None:
        return "not given"
    return clipped(repr(value[: LONGEST_SAID + 1] if isinstance(value, str) else value))


def _is_whole(prompt: Prompt) -> bool:
    """Whether every column has one entry per token, and every range is one of the tokens or of the text.

    `characters` are a range of the text for each token, running forward.
    """
    count, characters = len(prompt.ids), prompt.characters
    columns = (prompt.tokens, prompt.labels, prompt.special, prompt.plain, characters)
    return (
        all(len(column) == count for column in columns)
        and len(prompt.ids) > 0
        and len(prompt.types) in (0, count)
        and (prompt.answer is None or 0 < prompt.answer < count)
        and all(0 <= span.start <= span.stop <= count for span in (*prompt.turns, *prompt.segments))
        and all(len(ends) == 2 and 0 <= ends[0] <= ends[1] <= len(prompt.text) for ends in characters)
        and all(before[0] <= now[0] and before[1] <= now[1] for before, now in pairwise(characters))
    )
