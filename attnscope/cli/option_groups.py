"""Option groups: frozen dataclasses of a command's options, a field each, and what is read off those fields.

A field's name is the option (`top_k` is `--top-k`), its type what may be given, its default the default. A text in
its annotation is the help, a second one the placeholder of the value where its type does not say it; what else typer
is to know is in a `typer.Option`. A subclass that declares a field again inherits what it does not say itself.

    class Top(OptionGroup, panel="Output"):
        top: Annotated[str, "Rows in the printed table.", "N|all", typer.Option("-n")] = "20"

    class TopHeads(Top):
        top: Annotated[str, "Heads in the printed table."] = "10"

Settings: values that few people change; see `Mark.SETTING`.

--help lists them apart, as `--set NAME=VALUE` gives them. They may be typed as options, too: `--dpi 200`.

What other tools call an option or a command: a word that is none here is answered with its name here.

How what was typed for an option is converted: by Typer only where it has to be.

Last what the shell's TAB offers where Typer cannot know: metrics, models, devices. Nothing heavy is imported for it.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from attnscope.errors import InputError, UsageError, brief, nearest, visible

T = TypeVar("T")
UNSET = vars(typer.Option())
METAVARS = {int: "N", float: "N", str: "TEXT", Path: "FILE"}  # placeholders of values, where an option has no other


class Mark(Enum):
    """What a field's annotation may say of its option besides typer's description."""

    FIRST = "one of the most used, which a plain --help shows"
    REST = "shown by --help all alone, in a group that varies one where it is FIRST"
    HELD = "a run that resumes an output folder of batch must give the same value"
    DRAWN = "it is about pictures in files: without any it has no part"
    UNRECORDED = "left out of manifests: it changes no number, or it is the text, which manifests only hash"
    HIDDEN = "no help lists it: another name has taken its place, and it means what it did"
    SETTING = "few people change it: --help lists it with what --set NAME=VALUE or a key in --config gives"


FIRST, REST, HELD, DRAWN, UNRECORDED = Mark.FIRST, Mark.REST, Mark.HELD, Mark.DRAWN, Mark.UNRECORDED
HIDDEN, SETTING = Mark.HIDDEN, Mark.SETTING


@dataclass_transform(kw_only_default=True, frozen_default=True)
class OptionGroup:
    """A class with a field per option, and each class that varies it. They have no equality and no text of their own,
    which take half the time to make.

    panel: the section of --help that lists the options; that of the class that is varied without it.
    """

    panel: ClassVar[str | None] = None

    def __init_subclass__(cls, panel: str | None = None) -> None:
        cls.panel = panel or cls.panel
        dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)


@dataclass(frozen=True)
class Parameter:
    """An option or argument, as the fields of a group declare it; info is typer's description, complete."""

    name: str
    hint: Any
    info: OptionInfo | ArgumentInfo
    extra: tuple[Any, ...]

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the command line."""
        return isinstance(self.info, ArgumentInfo)

    @property
    def is_setting(self) -> bool:
        """Whether --help lists it with what --set gives."""
        return SETTING in self.extra

    @property
    def is_hidden(self) -> bool:
        """Whether no help, TAB or hint names it."""
        return HIDDEN in self.extra

    @property
    def spelled(self) -> str:
        """`top-k` of --top-k; of an argument its name."""
        names = self.info.param_decls or (self.name,)
        return max(names, key=len).partition("/")[0].lstrip("-")

    @property
    def metavar(self) -> str:
        """The placeholder of a value in help: `N`, `png|svg|pdf`; empty of an option that takes none."""
        if self.info.metavar or self.choices or self.is_argument:
            return self.info.metavar or "|".join(self.choices)
        if self.hint in (bool, bool | None):
            return "true|false" * self.is_setting
        kinds = (self.hint, *get_args(self.hint), *(kind for part in get_args(self.hint) for kind in get_args(part)))
        return next((METAVARS[kind] for kind in kinds if kind in METAVARS), "")

    @property
    def key(self) -> str:
        """Its name in --config and --set: `top_k` of --top-k."""
        return self.spelled.replace("-", "_")

    def words(self, value: Any) -> list[str]:
        """The words of a command line that give it a value: `--top 3`, `--force`, `--set dpi=200`."""
        if isinstance(value, list):
            return [word for part in value for word in self.words(part)]
        if self.is_setting:
            return ["--set", f"{self.key}={str(value).lower() if isinstance(value, bool) else value}"]
        return [f"--{self.spelled}"] if value is True else [f"--{self.spelled}", str(value)]

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that may be given; empty where others may be, too."""
        words = [kind for kind in (self.hint, *get_args(self.hint)) if get_origin(kind) is Literal]
        return get_args(words[0]) if words else ()

    @property
    def expected(self) -> str:
        """What may be given, as messages say it: `a whole number from 1`, `kv or none`; empty of a text."""
        if self.choices:
            return " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))
        kinds = {bool: "true or false", int: "a whole number", float: "a number"}
        kind = next((words for kind, words in kinds.items() if kind in (self.hint, *get_args(self.hint))), "")
        ends = zip(("from", "to"), (self.info.min, self.info.max), strict=True)
        return " ".join([kind, *(f"{word} {end:,.15g}" for word, end in ends if end is not None)])

    def refusal(self, where: str, value: Any, why: str, otherwise: str) -> UsageError:
        """The error for a value that it does not take. why: the reason its parser gives. otherwise: the next step."""
        own = why.removeprefix("Value error, ").rstrip(".")
        expected = f"expected {self.expected}" if self.expected and not self.info.parser else own
        near = None
        if isinstance(value, str):
            known = (choice for choice, others in CHOICES.items() if value.lower() in others.split())
            near = next((choice for choice in known if choice in self.choices), nearest(value, self.choices))
        got = "" if ", got " in expected else f", got {brief(value)}"
        return UsageError(f"{where}: {expected}{got}", f"did you mean {near}?" if near else otherwise)

    def for_typer(self, default: Any) -> inspect.Parameter:
        """The parameter of a function as typer reads it; MISSING is no default."""
        info = copy(self.info)
        info.default = ... if default is MISSING else default
        info.metavar = self.metavar or None
        info.hidden = info.hidden or self.is_hidden
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=self.hint)


def parameters(*groups: type) -> dict[str, Parameter]:
    """The options of groups by field, in the order of the groups and their fields."""
    options: dict[str, Parameter] = {}
    for group in groups:
        options |= _parameters(group)
    return options


@cache
def _parameters(group: type) -> dict[str, Parameter]:
    declared: dict[str, Parameter] = {}
    for cls in reversed(group.__mro__):
        for name, hint in inspect.get_annotations(cls, eval_str=True).items():
            declared[name] = _parameter(name, hint, getattr(cls, "panel", None), declared.get(name))
    options = {field.name: declared[field.name] for field in fields(group)}
    if vars(group).get("hidden"):
        return {name: replace(option, extra=(*option.extra, HIDDEN)) for name, option in options.items()}
    return options


def for_typer(*groups: type, settings: bool = False) -> list[inspect.Parameter]:
    """The options of the groups, or their settings, as the parameters of a function that typer reads."""
    defaults = {field.name: field.default for group in groups for field in fields(group)}
    options = {name: option for name, option in parameters(*groups).items() if option.is_setting == settings}
    return [option.for_typer(defaults[name]) for name, option in options.items()]


def build(group: type[T], values: dict[str, Any]) -> T:
    """The group with its fields' values; a setting that is not among them keeps its default."""
    return group(**{name: values[name] for name in parameters(group) if name in values})


def fill(target: type[T], /, *sources: Any, **more: Any) -> T:
    """A library dataclass from the fields of the same name of groups; what was not given keeps its default.

    >>> fill(LoadOptions, loading)
    """
    names = {field.name for field in fields(target)}  # type: ignore[arg-type]
    values = {
        name: value
        for source in sources
        for name in names & parameters(type(source)).keys()
        if (value := getattr(source, name)) not in (None, ())
    }
    return target(**(values | more))


def check_one_given(options: Mapping[str, Any], hint: str = "give one of them") -> None:
    """Raise UsageError where two of these were given; options: the values by name, None and False where not given.

    >>> check_one_given({"--text": "the bank", "--file": None})
    """
    named = [name for name, value in options.items() if value is not None and value is not False]
    if len(named) > 1:
        raise UsageError(f"{named[0]} and {named[1]} were both given", hint)


def check_words(text: str | None, name: str) -> None:
    """Raise InputError for a text, given by this option, without a word.

    >>> check_words("the bank", "--corrupted")
    """
    if text is not None and not text.strip():
        raise InputError(f"{name} is empty", "give a text with at least one word")


def recorded(*groups: Any) -> dict[str, Any]:
    """What was asked for, as it goes into a manifest: enough to repeat the run."""
    return {
        name: str(value) if isinstance(value := getattr(group, name), Path) else value
        for group in groups
        for name, option in parameters(type(group)).items()
        if Mark.UNRECORDED not in option.extra
    }


def command_line(command: str, *groups: Any) -> str:
    """What a picture says of itself: the command without defaults, text, and the source and destination of the run."""
    from attnscope.export.manifest import AROUND

    words = ["attnscope", command]
    for option, value in (pair for group in groups for pair in changed(group)):
        if Mark.UNRECORDED not in option.extra and option.name not in AROUND:
            words += option.words(value)
    return visible(shlex.join(words))


def of_run(command: str, *groups: Any) -> dict[str, Any]:
    """What a manifest says was asked for, and by which command line."""
    from attnscope.utils.folders import COMMAND

    return recorded(*groups) | {COMMAND: command_line(command, *groups).removeprefix("attnscope ")}


def changed(options: Any, group: type | None = None) -> list[tuple[Parameter, Any]]:
    """The options that have another value than their default, each with it; group: those of a class that these vary."""
    defaults = {field.name: field.default for field in fields(options)}
    values = ((option, getattr(options, name)) for name, option in parameters(group or type(options)).items())
    return [(option, value) for option, value in values if value != defaults[option.name]]


def refuse_changed(options: Any, group: type, allowed: Container[str], why: str) -> None:
    """Raise UsageError for an option of the group that was given, and is none of the allowed ones."""
    for option, value in changed(options, group):
        if option.name not in allowed:
            flag = " ".join(option.words(value)[: 1 + option.is_setting])
            raise UsageError(f"{flag} {why}", f"leave out {{{option.name}}}")


def held(group: Any) -> dict[str, Any]:
    """What an output folder is held to, by option: {"top-k": "5"}."""
    return {
        option.spelled: getattr(group, name)
        for name, option in parameters(type(group)).items()
        if Mark.HELD in option.extra
    }


def _parameter(name: str, hint: Any, panel: str | None, inherited: Parameter | None) -> Parameter:
    """A field's option: what its own annotation says, and for the rest what the group that it varies says."""
    plain, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    own = [note for note in notes if isinstance(note, OptionInfo | ArgumentInfo)]
    texts = [note for note in notes if isinstance(note, str)]
    below = inherited.info if inherited else typer.Option(rich_help_panel=panel)
    info = copy(own[0]) if own else copy(below)
    if isinstance(info, OptionInfo):
        info.param_decls = _names(name, info) or below.param_decls or (f"--{name.replace('_', '-')}",)
        info.default = ...
    for key, value in vars(below).items():
        if key in vars(info) and vars(info)[key] == UNSET[key]:
            setattr(info, key, value)
    for key, text in zip(("help", "metavar"), texts, strict=False):
        setattr(info, key, text)
    extra = tuple(note for note in notes if isinstance(note, Mark))
    if inherited and extra in ((), (REST,)):
        extra = tuple(mark for mark in inherited.extra if not (extra and mark == FIRST))
    return Parameter(name, plain, info, extra)


def _names(name: str, info: OptionInfo) -> tuple[str, ...]:
    """The names that an annotation gives, the long one with them; none where it gives none."""
    first = () if info.default is ... else (info.default,)  # inside Annotated, typer keeps the first name there
    names = (*first, *(info.param_decls or ()))
    long = any(name.startswith("--") for name in names)
    return names if long or not names else (*names, f"--{name.replace('_', '-')}")


AS_OPTIONS = "attnscope.settings"  # in a context: the settings that were typed as options, by field


def offered(ctx: typer.Context) -> list[tuple[str, str]]:
    """What the shell offers behind --set: `dpi=` and its help."""
    options = settings_of(getattr(ctx.command, "groups", ())).values()
    return [(f"{option.key}=", option.info.help or "") for option in options if not option.is_hidden]


class Settings(OptionGroup, panel="Settings"):
    """How settings are given on a command line."""

    set: Annotated[
        list[str] | None,
        "Give one of these; --NAME VALUE does the same.",
        "NAME=VALUE",
        typer.Option(autocompletion=offered),
    ] = None


def settings_of(groups: Sequence[type]) -> dict[str, Parameter]:
    """The settings of a command with these groups, by field."""
    return {name: option for name, option in parameters(*groups).items() if option.is_setting}


@cache
def converters(groups: tuple[type, ...]) -> Mapping[str, Any]:
    """The settings of groups as Typer's parameters, which convert values and describe themselves, by field."""
    alone = typer.Typer(add_completion=False)
    alone.command()(signed(lambda **given: None, for_typer(*groups, settings=True)))
    return {option.name: option for option in typer.main.get_command(alone).params}


@cache
def as_options(groups: tuple[type, ...], hidden: bool = True) -> list[Any]:
    """The settings of groups as options of a command; hidden: no list shows them.

    They are copies: a command changes how its parameters convert, and `converters` still convert.
    """
    options = [copy(option) for option in converters(groups).values()]
    for option in options:
        option.hidden = option.hidden or hidden
    return options


def signed(function: Any, options: Sequence[inspect.Parameter]) -> Any:
    """The function, with parameters that Typer reads."""
    function.__signature__ = inspect.Signature(options)
    function.__annotations__ = {option.name: option.annotation for option in options}
    return function


def records(groups: tuple[type, ...], context: typer.Context) -> list[tuple[str, str]]:
    """What --help lists of the settings: `dpi=N` and its help."""
    settings = settings_of(groups)
    return [
        (f"{settings[name].key}={settings[name].metavar}", option.get_help_record(context)[1])
        for name, option in converters(groups).items()
        if not option.hidden
    ]


# An option here, by its key in --config, with a value where one is meant; or a command. Then what others call it:
# transformers and hf, gh, ruff, pytest, matplotlib, BertViz, TransformerLens, CircuitsVis.
SYNONYMS = {
    "explain": "steps step_by_step show_steps",
    "view": "html page interactive browser web open save_html html_action head_view model_view",
    "draw": "plot_heatmap plot_attention plot visualize visualise",
    "serve": "server daemon status stop",
    "budgets": "kv_cache cache cache_budget",
    "doctor": "env environment system_info sys_info",
    "select": "layer layers head heads block blocks include_layers include_heads",
    "query": "queries q source_token from_token destination dest",
    "key": "keys k source src target_token to_token",
    "text": "p prompt prompts sentence sentence_a input_text string",
    "file": "i input input_file text_file path filename",
    "ids": "tokens token_ids input_ids",
    "pair": "sentence_b text_b text_pair second context",
    "answer": "completion continuation response output_text correct",
    "foil": "incorrect wrong alternative distractor",
    "compare_text": "with against versus vs other other_text text2",
    "corrupted": "corrupt corruption counterfactual clean",
    "target": "decoder_input tgt translation labels",
    "generate": "max_new_tokens new_tokens num_tokens n_tokens generation",
    "truncate": "truncation",
    "max_tokens": "max_length max_len max_seq_len seq_len n_ctx",
    "chat": "apply_chat_template chat_template messages instruct",
    "define": "name_tokens alias",
    "texts": "corpus data dataset jsonl records input_file prompts",
    "sequences": "n samples n_samples num_samples examples batches",
    "seed": "random_seed random_state",
    "model": "checkpoint model_name model_id model_name_or_path model_path pretrained repo repo_id hub_id",
    "base": "base_model",
    "revision": "branch tag commit",
    "offline": "local_files_only no_network",
    "trust_remote_code": "remote_code",
    "engine": "attn_implementation attn attention implementation backend",
    "device_map": "multi_gpu",
    "memory": "max_memory",
    "dtype": "torch_dtype precision",
    "dtype=float32": "fp32 full_precision",
    "dtype=float16": "fp16 half",
    "dtype=bfloat16": "bf16",
    "device=cuda": "gpu cuda gpus",
    "device=mps": "mps",
    "device=cpu": "cpu no_cuda",
    "quantize=8bit": "load_in_8bit int8",
    "quantize=4bit": "load_in_4bit int4 nf4",
    "top": "n L limit num rows max_rows head tail",
    "top_k": "topk k",
    "min_weight": "threshold min_attention cutoff least min",
    "sort": "order_by sort_by order rank rank_by reverse asc",
    "metrics": "metric measure measures",
    "format": "output_format fmt",
    "format=json": "json",
    "format=csv": "csv",
    "format=tsv": "tsv",
    "format=parquet": "parquet",
    "out": "O output output_dir out_dir output_file save save_dir save_path dir directory dest export html",
    "force": "overwrite y yes exist_ok clobber",
    "quiet": "silent no_progress s",
    "verbose": "v debug log_level traceback",
    "config": "c yaml settings options",
    "figures": "plot plots pictures kinds graph",
    "image": "ext extension figure_format image_format",
    "image=png": "png",
    "image=svg": "svg",
    "image=pdf": "pdf",
    "cmap": "colormap colourmap colors colours color colour palette color_map",
    "width": "figsize size fig_width",
    "title": "suptitle header",
    "annotate": "annot numbers",
    "how": "mode",
    "replace": "ablation ablate_with replacement ablation_type",
    "random": "n_random null nulls permutations",
    "batch_tokens": "b batch_size bs per_device_batch_size",
    "num_actors": "j jobs workers num_workers n_jobs processes num_proc",
    "shard_size": "max_shard_size chunk_size",
    "strict": "fail_fast x exitfirst",
    "dry_run": "n plan estimate",
}

CHOICES = {  # a value of an option: what others call it
    "float16": "fp16 half f16",
    "bfloat16": "bf16 bfp16",
    "float32": "fp32 float single f32",
    "8bit": "int8 8 fp8",
    "4bit": "int4 4 nf4 fp4",
    "jsonl": "json ndjson",
    "csv": "excel xls xlsx",
    "parquet": "pq",
    "arrow": "feather ipc",
}
SENTENCE_END = re.compile(r"(?<!e\.g)\.\s")


def synonyms_of(word: str) -> list[tuple[str, str]]:
    """The options, each with its value or none, and the commands that others call so."""
    return [(key, value) for key, _, value in (row.partition("=") for row in SYNONYMS if word in SYNONYMS[row].split())]


def by_key(groups: Sequence[type]) -> dict[str, Parameter]:
    """The options and settings of groups that a hint may name, by their key in --config."""
    listed = (option for option in parameters(*groups).values() if not (option.is_argument or option.is_hidden))
    return {option.key: option for option in listed}


def suggestion(word: str, own: Mapping[str, Parameter]) -> str:
    """The option of a command that a word probably means, as `did you mean --top?`; empty where none is near.

    own: the command's options and settings, by key.
    """
    for key, value in synonyms_of(word):
        if key not in own:
            continue
        option = own[key]
        if value and option.choices:
            value = next((choice for choice in option.choices if choice.startswith(value)), "")
        # With its value, else with the first sentence of its help.
        purpose = SENTENCE_END.split(option.info.help or "")[0].rstrip(".")
        return f"did you mean --{option.spelled} {value}?" if value else f"did you mean --{option.spelled} ({purpose})?"
    near = nearest(word, own)
    return "" if near is None else f"did you mean --{own[near].spelled}?"


def as_typed(parameters: list[Any], ctx: Any) -> list[Any]:
    """A command's parameters, which have Typer convert no more than they must: that takes importing pydantic.

    While a shell asks what may follow they convert nothing, else neither a default nor what Python alone can read. They
    are changed in place, since parsing tells parameters apart by identity, and changed back by the next command.
    """
    for option in parameters:
        vars(option).pop("process_value", None)
        if option.callback is not None and getattr(option, "is_flag", False) and option.default is None:
            option.default = False  # of Typer's own: None would be converted, a bool is not
        if ctx.resilient_parsing:
            option.process_value = lambda ctx, value: value
        elif not option.required and option.callback is None:
            option.process_value = partial(_converted, option, option.process_value)
    return parameters


def _converted(option: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """The value of a parameter, as Typer converts it where it has to be; an error of Typer's has it as `value`."""
    if value is None:
        return () if option.multiple or option.nargs == -1 else None
    if type(value) is type(option.default) and value == option.default:
        return value
    descriptor = getattr(option, "type_descriptor", None)
    plain = descriptor and _read_plain(descriptor.annotation, descriptor.parameter_info, value)
    if plain is not None:
        return plain
    try:
        return convert(ctx, value)
    except typer.BadParameter as error:
        error.value = value  # type: ignore[attr-defined]
        raise


NUMBERS = {int: re.compile(r"-?(0|[1-9][0-9]{0,14})"), float: re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,14})?")}


def _read_plain(kind: Any, info: Any, value: Any) -> Any:
    """What Typer makes of a text, where that takes no more than Python; None where Typer has to read or refuse it.

    >>> _read_plain(int, OptionInfo(min=1), "20")
    20
    """
    if get_origin(kind) is list and not isinstance(value, str):
        items = [_read_plain(get_args(kind)[0], info, item) for item in value]
        return None if None in items else items
    if not isinstance(value, str):
        return None
    if info.parser is not None:
        with suppress(Exception):  # whatever is wrong with the text: Typer calls the parser again, and says what
            return info.parser(value)
    elif kind is str or (get_origin(kind) is Literal and value in get_args(kind)):
        return value
    elif kind in NUMBERS and NUMBERS[kind].fullmatch(value):
        number = kind(value)
        return number if (info.min is None or info.min <= number) and (info.max is None or number <= info.max) else None
    elif kind is Path and not (info.exists or info.resolve_path or info.writable or info.path_type):
        with suppress(ValueError):  # a path that no system has
            free = info.file_okay and info.dir_okay and (os.access(value, os.R_OK) or not os.path.exists(value))
            return Path(value) if free else None
    return None


def offer(*known: str) -> Callable[[], list[str]]:
    """Offer these, where others may be given too."""
    return lambda: list(known)


def metrics() -> list[tuple[str, str]]:
    """The metrics, each with its title."""
    from attnscope.metrics.metrics import KNOWN

    return [(metric.id, metric.title) for metric in KNOWN.values()]


def models() -> list[str]:
    """The embedded model and those of the Hub's cache; for folders the shell offers its own."""
    from attnscope.model.sources import HUB_ID

    names = [path.name.removeprefix("models--").replace("--", "/") for path in cached_models()]
    return ["demo", *sorted(filter(HUB_ID.fullmatch, names))]  # of others a shell would print whatever they hold


def cached_models() -> list[Path]:
    """The folders of the models in the Hub's cache; none where it cannot be listed."""
    with suppress(OSError):
        return list(cache_folder().glob("models--*"))
    return []


def cache_folder() -> Path:
    """Where huggingface_hub keeps models, found without its import; as there, `~` stays where there is no home."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
