"""A YAML file of options and settings, named as on the command line with underscores for hyphens; and --set.

A value is read as if it had been typed there: the option itself says what it takes. How pictures look may be in a
section of its own, `figures: {dpi: 200, cmap: magma}`.

`--from MANIFEST`, or a run's folder as TEXT: the options and the text of a run that was written down.

A command gets its options from groups, and is called with one object of each.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Container, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from attnscope.cli import output
from attnscope.cli.figure_options import Drawing
from attnscope.cli.option_groups import (
    AS_OPTIONS,
    Mark,
    Settings,
    as_options,
    as_typed,
    build,
    by_key,
    converters,
    for_typer,
    parameters,
    settings_of,
    signed,
    suggestion,
    synonyms_of,
)
from attnscope.cli.output import settle_figures
from attnscope.errors import UsageError, brief, nearest

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.inputs.sound import Sound
    from attnscope.inputs.tensors import GivenTensors

TEXTS = ("text", "file", "ids", "given", "audio")  # a flag of one leaves out the others of the file
OWN = ("config", "from_")  # which name files themselves
FIGURES, KINDS = "figures", "kinds"  # a section, and what --figures is called in it
MOST_BYTES = 1 << 20
ALL = "attnscope.help.all"  # in a context: whether `all` follows --help
COMPLETED = "attnscope.completed"  # in a context: whether TAB was pressed after the first letters of an option
MORE = "attnscope.more"  # in a context: whether words were typed that are no listed option, but may be a setting


def keys_of(*groups: type) -> dict[str, str]:
    """What a configuration file may hold for these groups, and the field of each: every option but the file itself."""
    options = [option for option in parameters(*groups).values() if not option.is_argument and option.name not in OWN]
    return {option.key: option.name for option in options}


def configured(context: typer.Context, groups: tuple[type, ...], keys: Mapping[str, str]) -> dict[str, Any]:
    """The options, by field, that the file of --config gives and no flag does.

    keys: what the file may hold; what the groups have no option for is left out.
    """
    path, fields = context.params["config"], parameters(*groups)
    content = {keys[key]: value for key, value in read_config(path, keys).items()}
    known = {name: value for name, value in content.items() if name in fields}
    values = {name: convert(context, groups, f"{path}: {name}", name, value) for name, value in known.items()}
    texts = TEXTS if any(flagged(context, name) for name in TEXTS) else ()
    return {name: value for name, value in values.items() if not (flagged(context, name) or name in texts)}


class SettingsCommand(TyperCommand):
    """A command whose settings may be typed as options; an `all` behind its --help is heard."""

    groups: tuple[type, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ALL] = any(word in ctx.help_option_names and after == "all" for word, after in pairwise(args))
        listed = {name for option in super().get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
        ctx.meta[MORE] = any(word.startswith("--") and word.partition("=")[0] not in listed for word in args)
        rest = super().parse_args(ctx, args)
        # Typer calls a command with its listed options alone: settings that were typed as options are put aside.
        there = {name: ctx.params.pop(name) for name in settings_of(self.groups) if name in ctx.params}
        ctx.meta[AS_OPTIONS] = {name: value for name, value in there.items() if flagged(ctx, name)}
        return rest

    def get_params(self, ctx: Any) -> Any:
        """The listed options; its settings too, as options, only where one may have been typed: they take time."""
        options = super().get_params(ctx)
        if ctx.meta.get(COMPLETED):
            options = [*options, *as_options(self.groups, hidden=False)]
        elif ctx.meta.get(MORE):
            options = [*options, *as_options(self.groups)]
        return as_typed(options, ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """What TAB offers: options, and settings too once a letter was typed, since `--` alone has many already."""
        ctx.meta[COMPLETED] = incomplete.startswith("--") and len(incomplete) > len("--")
        return super().shell_complete(ctx, incomplete)


def typed_settings(context: typer.Context, groups: tuple[type, ...], given: Sequence[str] | None) -> dict[str, Any]:
    """The settings, by field: those that options give, and those of --set, NAME=VALUE each.

    --set takes what a file may hold for the command. The last of a name counts, and of one that takes several all.
    Raises UsageError for a name that is none, and for a value that an option gives too.
    """
    keys, values_of = keys_of(*groups), dict[str, list[str]]()
    for setting in given or ():
        name, equals, value = setting.partition("=")
        key = name.strip().replace("-", "_")
        if key not in keys:
            own = by_key(groups)
            settings = ", ".join(key for key, option in own.items() if option.is_setting)
            hint = suggestion(key, own) or f"the settings are {settings}"
            raise UsageError(f"--set: there is no setting {brief(name)}", hint)
        if not equals:
            raise UsageError(f"--set {key}: expected NAME=VALUE, got {brief(setting)}", f"write --set {key}=VALUE")
        if flagged(context, keys[key]):
            raise UsageError(f"--{key.replace('_', '-')} and --set {key} were both given", "give one of them")
        values_of.setdefault(keys[key], []).append(value)
    several = {name: _option(context, groups, name).multiple for name in values_of}
    return context.meta.get(AS_OPTIONS, {}) | {
        name: convert(context, groups, f"--set {name}", name, values if several[name] else values[-1])
        for name, values in values_of.items()
    }


def convert(context: typer.Context, groups: tuple[type, ...], where: str, name: str, value: Any) -> Any:
    """What the option of a field would be, had a person typed this value; a list is an option that is repeated.

    where: what gives it, as messages say it. Raises UsageError where the option does not take it.
    """
    from typer import BadParameter

    option = _option(context, groups, name)
    text = str(value) if isinstance(value, bool | int | float) else value
    parts = text if option.multiple else [text]
    try:  # a command line and a path hold no NUL, and no half of a surrogate pair
        can_be_typed = isinstance(parts, list) and not any(b"\0" in os.fsencode(part) for part in parts)
    except (UnicodeEncodeError, TypeError):
        can_be_typed = False
    if not can_be_typed:
        kind = "a list of texts" if option.multiple else "text"
        raise UsageError(f"{where}: expected {kind}, got {brief(text)}", "correct the value")
    try:
        return option.process_value(context, text)
    except BadParameter as error:
        raise parameters(*groups)[name].refusal(where, text, error.message, "correct the value") from None


def _option(context: typer.Context, groups: tuple[type, ...], name: str) -> Any:
    """The option or setting of a field, which converts its values."""
    return {**{option.name: option for option in context.command.params}, **converters(groups)}[name]


def flagged(context: typer.Context, name: str) -> bool:
    """Whether the command line gives an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def refuse_others(context: typer.Context, names: Container[str], what: str, otherwise: str) -> None:
    """Raise UsageError for an option of the command line that is none of these. what: is read in place of a text."""
    for option in context.command.get_params(context):
        if option.name not in names and flagged(context, str(option.name)):
            raise UsageError(f"{what}: {max(option.opts, key=len)} does not apply to it", otherwise)


def read_config(path: Path | str, keys: Mapping[str, str]) -> dict[str, Any]:
    """The options of a configuration file, by name, as text; keys that say nothing (null) are left out.

    keys: what it may hold. Raises `UsageError`: no such file, not YAML (with the line), an unknown key (with the
    nearest valid one).

    >>> read_config("configs/demo.yaml", keys_of(Loading))["model"]
    'demo'
    """
    content = _parse(Path(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}, expected options", "write them as key: value")
    for name in content:
        _check_key(path, name, keys)
    section = content.get(FIGURES)
    if isinstance(section, dict):  # a section of options, else the value of --figures
        inner = {KINDS if key == FIGURES else key: key for key in keys_of(Drawing) if key in keys}
        content = {name: value for name, value in content.items() if name != FIGURES}
        for name in section:
            _check_key(f"{path}: {FIGURES}", name, inner)
            if inner[name] in content:
                raise UsageError(f"{path}: {name!r} is given twice, in {FIGURES} too", "leave out one of them")
        content |= {inner[name]: value for name, value in section.items()}
    return {name: value for name, value in content.items() if value is not None}


def _parse(path: Path) -> Any:
    import yaml

    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)  # it may be a stream without an end
        if len(data) > MOST_BYTES:
            raise UsageError(f"{path} is over {MOST_BYTES} bytes", "name a file of options")
        return yaml.load(data.decode(), Loader=_strict())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path} is not YAML: {error.problem} in line {line}", "correct that line") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {str(error).splitlines()[0]}", "correct the file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}", "save it as UTF-8") from None
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", "check the path of --config") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path of --config") from None
    except UsageError:
        raise
    except Exception as error:  # PyYAML's own, of tags, dates, numbers of 5,000 digits and a thousand brackets
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} holds a value that cannot be read: {why}", "correct the file") from None


def _strict() -> type:
    """PyYAML's safe loader, reading every scalar but null as text, and refusing aliases and a key that occurs twice.

    PyYAML itself takes the last of two keys, and reads 27.10 as 27.1. A few lines of aliases of aliases mean more
    values than any machine holds.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent) and (alias := self.peek_event()).anchor in self.anchors:
                problem = f"aliases are not taken, and *{alias.anchor} is one"
                raise yaml.composer.ComposerError(None, None, problem, alias.start_mark)
            return super().compose_node(parent, index)

    def construct(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping as key: refused by PyYAML itself
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{brief(key.value)} is given twice", key.start_mark
                )
            seen.add(key.value)
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct)
    return Loader


def _check_key(path: Path | str, name: object, keys: Mapping[str, str]) -> None:
    if name not in keys:
        word = str(name).replace("-", "_")
        near = next((key for key, _ in synonyms_of(word) if key in keys), nearest(word, keys))
        hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(keys)}"
        raise UsageError(f"{path}: unknown key {brief(name)}", hint)


def named_run(context: typer.Context) -> dict[str, Any]:
    """The options, by field, that a folder means, as TEXT or in --from: the manifest of the run in it.

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
    """The options, by field, that the manifest of --from gives and no flag does; a message names what flags change.

    settings: the values of --set, by field.
    The source and the destination of the run, and its permissions, are not repeated. Raises UsageError for a value
    that the option does not take.
    """
    from attnscope.export.manifest import AROUND, SOURCE, read_manifest

    path = context.params["from_"]
    manifest = read_manifest(path)
    model, options = manifest.get("model"), manifest.get("options")
    if not isinstance(model, Mapping) or not isinstance(options, Mapping):
        raise UsageError(f"{path} lacks the model or the options of a run", "name another manifest")
    commit = {"revision": model["revision"]} if model.get("revision") else {}  # the hub may have moved on
    recorded = {"model": model.get("name"), **options, **commit}
    if SOURCE in manifest:  # tensors from a file: there is no model to load
        del recorded["model"]
    repeatable = {
        name: option
        for name, option in parameters(*groups).items()
        if name in recorded and name not in AROUND and Mark.UNRECORDED not in option.extra
    }
    if context.params.get("out") is None:
        repeatable.pop(FIGURES, None)  # which figures a folder had: now none is written
    values = {
        name: None if recorded[name] is None else convert(context, groups, f"{path}: {name}", name, recorded[name])
        for name in repeatable
    }
    now = {**context.params, **settings}
    named = [name for name in repeatable if flagged(context, name) or name in settings]
    replaced = [name for name in TEXTS if flagged(context, name) and context.params[name] is not None]
    texts = ["TEXT" if name == "given" else f"--{name}" for name in replaced]
    changes = [f"--{repeatable[name].spelled}" for name in named if now[name] != values[name]]
    changed = f"; changed here: {', '.join([*texts, *changes])}"
    output.log(f"settings from {path}{changed if texts or changes else ''}", context.params["quiet"])
    return {name: value for name, value in values.items() if name not in named}


def tokens_of(path: Path) -> Prompt | Sound | GivenTensors:
    """The tokens that the run of a manifest read, or its sound, or the tensors that it was given.

    Raises UsageError where that file holds another now, and where there were pictures with the tokens.
    """
    from attnscope.export.manifest import SOURCE, prompt_of, read_manifest

    manifest = read_manifest(path)
    if SOURCE in manifest:
        return _tensors_of(path, manifest)
    prompt, file = prompt_of(manifest, path), manifest.get("options", {}).get("audio")
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


def _tensors_of(path: Path, manifest: Mapping[str, Any]) -> GivenTensors:
    """The tensors that a run was given. Raises UsageError where the file holds others now, or was none."""
    from attnscope.export.manifest import SOURCE
    from attnscope.inputs.tensor_files import read_tensors

    options, source = manifest.get("options"), manifest[SOURCE]
    named = (options.get(name) for name in ("tensors", "weights_file")) if isinstance(options, Mapping) else ()
    file = next((name for name in named if name is not None), None)
    if file is None:
        how = "save them with attnscope.save_tensors, and name that file with {tensors}"
        raise UsageError(f"the run of {path} was given tensors in memory", how)
    given = read_tensors(str(file))
    if not isinstance(source, Mapping) or given.sha256 != source.get("sha256"):
        raise UsageError(f"{file} does not hold the tensors of the run of {path}", "name their file with {tensors}")
    return given


def with_options(
    *groups: type,
    of_folder: Callable[..., int] | None = None,
    folders: Callable[[Path], bool] = lambda folder: True,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of these groups; it is called with one object of each, in this order.

    of_folder: what is done with a folder as TEXT, called with the context, the folder, and the options by field;
    without it the run in the folder is repeated, and so it is of a folder that is none of `folders`.

        @with_options(Loading, Top)
        def command(loading: Loading, top: Top) -> int: ...
    """
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    options = [context, *for_typer(*groups, *[Settings] * bool(settings_of(groups)))]

    def give(run: Callable[..., int]) -> Callable[..., int]:
        def command(context: typer.Context, **given: Any) -> int:
            try:  # from a folder that was removed no path can be read
                os.getcwd()
            except FileNotFoundError:
                hint = "change to another, for example: cd ~"
                raise UsageError("the folder that this shell is in was removed", hint) from None
            # What counts more comes later: a run that is repeated, a file of options, what the line itself says.
            settings = typed_settings(context, groups, given.pop("set", None))
            folder = given.get("given") if of_folder else None
            folder = Path(folder) if folder and os.path.isdir(folder) and folders(Path(folder)) else None
            if "from_" in given and folder is None:
                given |= named_run(context)
                given |= repeated(context, groups, settings) if given["from_"] is not None else {}
            if given.get("config") is not None:
                # One file serves several commands: what `heads` has, and this command has not, is ignored.
                # By name, as `app` loads commands: `heads` is made with this function, and cannot be imported above.
                of_heads = import_module("attnscope.cli.heads").GROUPS
                given |= configured(context, groups, keys_of(*of_heads, *groups))
            given |= settings
            typed = settings.keys() | {name for name in given if flagged(context, name)}
            given |= settle_figures(groups, given, typed)
            quiet = bool(given.get("quiet"))
            if "verbose" in given:  # the commands that have it show what the library warns of
                output.complain_through_talk(quiet)
            with output.watched(quiet):
                if of_folder and folder:
                    return of_folder(context, folder, given | {"given": None})
                return run(*(build(group, given) for group in groups))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.groups = groups  # type: ignore[attr-defined]
        signed(command, options)
        return command

    return give
