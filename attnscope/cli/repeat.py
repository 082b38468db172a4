"""`--from MANIFEST`, or a run's folder as TEXT: the options and the text of a run that was written down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.config import TEXTS, flagged, typed
from attnscope.cli.groups import Mark, parameters
from attnscope.errors import UsageError

if TYPE_CHECKING:
    import typer

    from attnscope.inputs.prompt import Prompt
    from attnscope.inputs.sound import Sound


def named_run(context: typer.Context) -> dict[str, Any]:
    """The options, by field, that a folder stands for, as TEXT or in --from: the manifest of the run in it.

    Raises UsageError for a folder as TEXT that holds no run.
    """
    from attnscope.export.manifest import NAME

    given, path = context.params["given"], context.params["from_"]
    named: dict[str, Any] = {}
    if given and os.path.isdir(given):
        named = {"given": None, "from_": Path(given, NAME)}
        if path is not None:
            raise UsageError(f"two runs were named, {given} and {path}", "name one of them")
        if not named["from_"].exists():
            what = "a run, or of a dataset of attnscope batch" if context.info_name == "heads" else "a run"
            raise UsageError(
                f"TEXT is the name of a folder without {NAME}: {given}",
                f"name the folder of {what}, or --text {given} reads the name",
            )
    elif path is not None and path.is_dir():
        named = {"from_": path / NAME}
    context.params.update(named)
    return named


def repeated(context: typer.Context, groups: tuple[type, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options, by field, that the manifest of --from gives and no flag does; what flags change is said.

    settings: the values of --set, by field.
    Where the run came from and went to, and what it was allowed to do, is not repeated. Raises UsageError for a value
    that the option does not take.
    """
    from attnscope.export.manifest import AROUND, read_manifest

    path = context.params["from_"]
    said = _options(read_manifest(path), path)
    found = {
        name: option
        for name, option in parameters(*groups).items()
        if name in said and name not in AROUND and Mark.UNRECORDED not in option.extra
    }
    values = {
        name: None if said[name] is None else typed(context, groups, f"{path}: {name}", name, said[name])
        for name in found
    }
    now = {**context.params, **settings}
    given = [name for name in found if flagged(context, name) or name in settings]
    replaced = [name for name in TEXTS if flagged(context, name) and context.params[name] is not None]
    texts = ["TEXT" if name == "given" else f"--{name}" for name in replaced]
    changes = [f"--{found[name].spelled}" for name in given if now[name] != values[name]]
    changed = f"; changed here: {', '.join([*texts, *changes])}"
    output.talk(f"settings from {path}{changed if texts or changes else ''}", context.params["quiet"])
    return {name: value for name, value in values.items() if name not in given}


def _options(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options of a manifest, and the model itself, of which the hub may have moved on."""
    model, options = said.get("model"), said.get("options")
    if not isinstance(model, Mapping) or not isinstance(options, Mapping):
        raise UsageError(f"{path} lacks the model or the options of a run", "name another manifest")
    commit = {"revision": model["revision"]} if model.get("revision") else {}
    return {"model": model.get("name"), **options, **commit}


def tokens_of(path: Path) -> Prompt | Sound:
    """The tokens that the run of a manifest read, or its sound.

    Raises UsageError where that file holds another now, and where there were pictures with the tokens.
    """
    from attnscope.export.manifest import prompt_of, read_manifest

    said = read_manifest(path)
    prompt, file = prompt_of(said, path), said.get("options", {}).get("audio")
    if file is None and prompt.medium.sha256 is not None:
        raise UsageError(
            f"the run of {path} read pictures or a sound too, which its tokens do not hold",
            "add --text TEXT, and --picture FILE as then",
        )
    if file is None:
        return prompt
    from attnscope.inputs.sound import read_sound

    sound = read_sound(str(file))
    if sound.sha256 != prompt.medium.sha256:
        raise UsageError(f"{file} is not the sound that the run of {path} read", "name that with --audio")
    return sound
