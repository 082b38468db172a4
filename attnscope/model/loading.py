"""A name or a folder -> a loaded model, its tokenizer and its geometry.

Everything that can be refused without importing torch is refused first (`sources`, `checkpoint`); what is loaded is in
eval mode, without gradients, and nothing of it is patched.

A model of transformers in an object that somebody handed over is found in the object's own entries, never by what it
answers to a name: some objects of other libraries answer to every one.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from attnscope.errors import (
    AttnscopeError,
    MemoryLimitError,
    ModelError,
    UsageError,
    brief,
    first_line,
    hints_of,
    is_panic,
    listed,
    visible,
)
from attnscope.model import adapters, checkpoint, fitting, gguf, quantised, sources, tasks
from attnscope.model.checkpoint import Stored
from attnscope.model.families import family
from attnscope.model.geometry import MOST_NUMBER, Geometry, geometry_of, number_bytes, stretch_positions, weight_bytes
from attnscope.model.libraries import bars_as_elsewhere, knows_interface, needed, uncollected, weights_counted
from attnscope.model.loaded import LoadedModel, LoadedModule, LoadedTokenizer, device_of
from attnscope.model.options import RUNS_CODE, TRUST, LoadOptions, read_error
from attnscope.model.selection import ENCODER_ONLY, SEQ2SEQ, VISION, VISION_ONLY, mixes
from attnscope.model.sources import DEMO_FOLDER, Source
from attnscope.utils.isolation import without_stderr
from attnscope.utils.memory import free_memory, human_bytes, is_out_of_memory

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?|mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES, PACKAGE = re.compile(r"\b(GPU|CUDA|XPU)\b"), re.compile(r"install|librar|package|version", re.I)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load(options: LoadOptions) -> LoadedModel:
    """Load the model and its tokenizer.

    Raises `UsageError` for a device, dtype or flag that cannot be meant, `ModelError` for a model that cannot be found,
    read or has no softmax attention over text, `MemoryLimitError` when it does not fit the device.

    Example:
        loaded = load(LoadOptions(model="demo"))
        loaded.geometry.attention_layers[0].heads  # 6
    """
    # What folder and files show is refused before torch is imported.
    source = locate(options)
    try:
        sources.check_tokenizer(source, options)
    except ModelError:
        config, task, _ = _config(source, options)  # one that reads no text has none, and that is the better answer
        tasks.model_class(config, task, source.name)
        if task != VISION_ONLY:
            raise

    # What the config shows is refused before weights are downloaded.
    names = sources.weight_files(source, options)
    device = chosen_device(options)
    config, task, replaced = _config(source, options)
    trained = _geometry(config, source, task).max_positions
    config = stretch_positions(config, options.positions)
    geometry = _geometry(config, source, task)
    if not geometry.layers:
        tasks.model_class(config, task, source.name)  # one that reads no text has none, and that is the better answer
    _readable(geometry)

    # What a reader of the numbers has to know of the model that is read.
    trusted = gguf.taken_on_trust(source.gguf, options.permits) if source.gguf else ()
    if source.gguf and (stated := gguf.statement(source.gguf, options.permits)).left:
        logger.warning("%s has %s, and transformers leaves that out", source.gguf, gguf.in_words(stated))
    if geometry.max_positions != trained:
        logger.warning("positions %s are stretched: heads may do something else than the model was trained to", trained)

    # Now the weights: of the adapter too, and all there before the first is read.
    for origin, files in names.items():
        if origin.snapshot:
            sources.fetch_weights(origin.snapshot, files)
    sources.check_weights(source, options)
    tokenizer: Any = None if task == VISION_ONLY else _tokenizer(source, config, options)
    import torch

    with torch.inference_mode(False):  # weights made in that mode could not be followed by gradients in any other
        model, loaded_as, unused = _model(source, config, options, device, task)
    if unused:
        logger.warning("%s has %s, and transformers leaves that out", source.name, listed(unused))
        trusted = (*trusted, f"{listed(unused)} (of the files, left out by transformers)")
    return _loaded(
        model,
        geometry,
        tokenizer=tokenizer,
        name=source.name,
        revision=source.revision,
        source_folder=source.source_folder,
        stretched_from=trained if geometry.max_positions != trained else None,
        base_folder=source.base_folder,
        options=options,
        trusted=trusted,
        replaced=replaced,
        loaded_as=loaded_as,
        arithmetic=_arithmetic(model, config, source.name),
    )


def load_tokenizer(options: LoadOptions) -> LoadedTokenizer:
    """The tokenizer of a model, without its weights; raises as `load` does.

    Example:
        load_tokenizer(LoadOptions(model="demo")).max_positions  # 512
    """
    source = locate(options)
    config, task, _ = _config(source, options)
    if task == VISION_ONLY:
        what = f"{source.name} ({config.model_type}) reads pictures, and has no tokenizer"
        raise ModelError(what, "give it one with {picture=FILE}")
    sources.check_tokenizer(source, options)  # only now: one that reads no text has none, the better answer
    most = _geometry(config, source, task).max_positions
    return LoadedTokenizer(_tokenizer(source, config, options), source.name, most, source.source_folder != DEMO_FOLDER)


@overload
def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> LoadedModel: ...
@overload
def wrap(
    model: nn.Module,
    tokenizer: Any = None,
    name: str | None = None,
    *,
    feed: Callable[..., Any] | None = None,
    row: int = 0,
    parts: str | Sequence[str] = "*",
) -> LoadedModule: ...
@hints_of()
def wrap(
    model: Any,
    tokenizer: Any = None,
    name: str | None = None,
    *,
    feed: Callable[..., Any] | None = None,
    row: int = 0,
    parts: str | Sequence[str] = "*",
) -> LoadedModel | LoadedModule:
    """A model that is loaded already, with its tokenizer, as attnscope reads it; the model itself is left as it is.

    That holds for its training mode too, in which `capture` refuses to read it: call `model.eval()` first. One that
    torch.compile, PEFT or an object of another library holds is read inside it, with its adapters; virtual tokens of
    prompt, prefix or P-tuning as they are now. name: what tables and manifests call it. Raises UsageError for what is
    and holds no model of transformers and no module of PyTorch, ModelError for a model that has no softmax attention
    over text.

    Any other module of PyTorch is heard while it runs, by what it asks of PyTorch, and `capture` reads it. A text is
    then its tokenizer's ids, (1, T); a tensor or an array is given as it is, a mapping by the names of the arguments.
    feed: makes something else of an input: the one argument, a tuple of them, or a mapping. row: which text or window
    of the batch is shown. parts: patterns of the paths of the parts that are read, as "blocks.*".

        >>> model = wrap(AutoModelForCausalLM.from_pretrained("gpt2"), AutoTokenizer.from_pretrained("gpt2"))
        >>> vit = wrap(timm.create_model("vit_tiny_patch16_224").eval())
    """
    from torch import nn

    if feed is not None or (isinstance(model, nn.Module) and not holds_model(model)):
        if not isinstance(model, nn.Module):
            raise UsageError(f"expected a module of PyTorch, got {type(model).__name__}", "leave out {feed}")
        if not isinstance(row, int) or row < 0:
            raise UsageError(f"expected a row of the batch from 0, got {brief(row)}", "use {row=0}")
        patterns = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Sequence) else (parts,)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise UsageError(f"expected parts as patterns of paths, got {brief(parts)}", "give them as 'blocks.*'")
        return LoadedModule(model, name or type(model).__name__, tokenizer, feed, row, patterns)

    # Of the whole: a part that is read alone knows neither its quantizer nor the hooks that unpack its weights.
    whole = model_inside(model)
    quantised.check_plain(whole, name or type(whole).__name__)
    quantised.unpack(whole, name or type(whole).__name__)

    # Of CLIP the text tower; a tower of pictures must be one grid of patches.
    model = tasks.reading_part(whole)
    if tasks.task_of(model.config) == VISION_ONLY:
        fitting.check_tower(model.config, name or type(model).__name__)
    geometry = _readable(geometry_of(model.config, count=False))
    return _loaded(
        model,
        geometry,
        tokenizer=tokenizer,
        name=name or getattr(model.config, "name_or_path", "") or geometry.model_type,
        revision=None,
        arithmetic=_arithmetic(model, model.config, name or type(model).__name__),
    )


def as_deployed(holder: Any, tokenizer: Any = None) -> LoadedModel:
    """The record of a model that somebody else runs, as it is: nothing of it is read, unpacked or replaced.

    Raises as `wrap`.

        >>> as_deployed(AutoModelForCausalLM.from_pretrained("gpt2")).geometry.stack
        'decoder'
    """
    model = model_inside(holder)
    geometry = _readable(geometry_of(model.config, count=False))
    name = getattr(model.config, "name_or_path", "") or geometry.model_type
    return _loaded(model, geometry, tokenizer=tokenizer, name=name, revision=None)


FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*(?:\.\w+)*)")


def load_module(name: str, trusted: bool) -> LoadedModel | LoadedModule:
    """What a function of somebody's package returns, in eval mode: a module, or (module, tokenizer, feed), wrapped.

    It is looked for where Python looks, and last in the working folder. name: PACKAGE.MODULE:FUNCTION. trusted: whether
    its code may be run. Raises UsageError for another form, ModelError for code that may not be run, or fails.

        >>> load_module("nets.gpt:make", trusted=True)
    """
    match = FUNCTION.fullmatch(name)
    if match is None:
        raise UsageError(f"expected PACKAGE.MODULE:FUNCTION, got {brief(name)}", "write it as mynets.gpt:make_model")
    if not trusted:
        raise ModelError(f"the module {name} runs code of its own", TRUST)
    from torch import nn

    package, function = match.groups()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value: Any = importlib.import_module(package)
        for part in function.split("."):
            value = getattr(value, part)
        value = value()
    except (Exception, SystemExit) as error:  # anybody's code
        if isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}."):
            where = "run this in the folder that holds it, or install it"
            raise ModelError(f"there is no package {error.name} for {name}", where) from error
        raise read_error(name, error, "its cause says where it failed; {verbose} shows it", "made") from error
    if isinstance(value, LoadedModel | LoadedModule):
        return value
    parts = value if isinstance(value, tuple) else (value,)
    if not (isinstance(parts[0] if parts else None, nn.Module) and len(parts) <= 3):
        kind = type(value).__name__
        what = f"expected a module of PyTorch from {name}, got {kind}"
        raise ModelError(what, "have the function return it, or (module, tokenizer, feed)")
    module, tokenizer, feed = (*parts, None, None)[:3]
    return wrap(module.eval(), tokenizer, name, feed=feed)


def load_config(options: LoadOptions) -> Any:
    """The transformers config of a model, without its weights or tokenizer; raises as `load` does.

    Example:
        geometry_of(load_config(LoadOptions(model="demo"))).layers[0].kv_heads  # 3
    """
    source = locate(options)
    config, task, _ = _config(source, options)
    tasks.model_class(config, task, source.name)
    _readable(_geometry(config, source, task))
    return config


def has_lm_head(options: LoadOptions, config: Any) -> bool:
    """Whether a model gives logits, as far as its config says: by the class of its checkpoint, or of its adapter's.

    Example:
        has_lm_head(options, load_config(options))  # True for the demo
    """
    source = locate(options)
    task = tasks.chosen_task(config, options.task, source.name)
    kind = tasks.model_classes(config, task, source.name, exact=source.adapter is not None)[0]
    return not hasattr(kind, "can_generate") or bool(kind.can_generate())  # AutoModelForCausalLM has no such method


def bytes_in_memory(options: LoadOptions, config: Any, device: str, files: Sequence[Path] | None = None) -> int | None:
    """What the weights of a model will take on a device; None where they cannot be counted.

    By its config, and of a checkpoint whose weights stay quantised by the headers of its files, where they are here.
    files: those of its weights, where they are known.

    Example:
        bytes_in_memory(options, load_config(options), "cpu")  # 4 for each parameter of the demo
    """
    if files is None and quantised.method_of(config) is not None and not (source := locate(options)).gguf:
        with suppress(ModelError):  # weights that are not here, or are damaged
            files = checkpoint.check_weights(source.folder, options.allow_pickle)
    dtype = dtype_on(options, device)
    stored = checkpoint.stored_tensors(files or ())
    packed = quantised.packed_bytes(config, stored, number_bytes(config, dtype), device)
    return weight_bytes(config, options.quantize or dtype) if packed is None else packed


def bytes_on_disk(options: LoadOptions) -> int | None:
    """What the files of a model's weights take, of the adapter too; None where they are not here."""
    with suppress(ModelError, OSError):
        files = sources.weight_files(locate(options), options)
        return sum((source.folder / name).stat().st_size for source, names in files.items() for name in names)
    return None


def dtype_on(options: LoadOptions, device: str) -> str:
    """The name of the dtype that a model is loaded in on a device, or `auto` for its own."""
    return "float32" if options.dtype == "auto" and device == "cpu" else options.dtype


def identify(options: LoadOptions) -> tuple[str, LoadOptions]:
    """What a model's files are, in a word, and the options that load just these; raises as `load` does.

    Of the Hub that is the commit; of a folder a hash, which reads a few MB and no more.

    Example:
        identify(LoadOptions(model="gpt2"))[0]  # "commit 607a30d783df"
    """
    source = locate(options)
    return sources.identity(source, options), replace(options, revision=source.revision)


def locate(options: LoadOptions) -> Source:
    """Where a model comes from, without its weights; raises as `load` does."""
    # What cannot be meant is refused before anything is looked up or imported.
    if not options.model.strip():
        raise UsageError("the model has no name", "pass a folder, a Hub id, or demo")

    # Values: those of a manifest and of Python have not passed the choices of the command line.
    if not DEVICE.fullmatch(options.device):
        raise UsageError(
            f"expected a device auto, cpu, cuda, cuda:N or mps, got {options.device!r}",
            "use {device=cuda} for a GPU, {device=auto} for whatever is there",
        )
    if options.positions is not None and not 1 <= options.positions <= MOST_NUMBER:
        raise UsageError(
            f"expected positions from 1 to {MOST_NUMBER}, got {options.positions}", "leave out {positions}"
        )
    maps = ", ".join(DEVICE_MAPS)
    choices = (
        (options.dtype, DTYPES, f"a dtype of {', '.join(DTYPES)}", "{dtype=auto}"),
        (options.device_map or None, (None, *DEVICE_MAPS), f"a device map of {maps}", "{device_map=auto}"),
        (options.adapter, (None, "merged", "beside"), "an adapter `merged` or `beside`", "{adapter=merged}"),
        (options.quantize, (None, "8bit", "4bit"), "to quantize to 8bit or 4bit", "{quantize=8bit} or {quantize=4bit}"),
    )
    for value, allowed, expected, instead in choices:
        if value not in allowed:
            raise UsageError(f"expected {expected}, got {value!r}", f"use {instead}")
    if options.device_map and options.device != "auto":
        raise UsageError("a device map places the model itself", f"leave out {{device={options.device}}}")

    # The package is asked for now, and not after the weights were downloaded.
    if options.quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("quantized models need bitsandbytes", 'pip install "attnscope[quantize]"')
    return sources.find_source(options)


@uncollected()
def _config(source: Source, options: LoadOptions) -> tuple[Any, str, dict[str, Any]]:
    """The config as the model is read, what it is read at, and what its files state in place of the config, by name.

    Raises ModelError where transformers knows no such type, and no code is brought that may be run; and as
    `tasks.chosen_task`.
    """
    if source.gguf:
        config = gguf.load_config(source.gguf, options.permits, trust=options.gguf == "trust")
    else:
        from transformers import AutoConfig

        # A type that this transformers does not know needs code of its own, which has to be allowed.
        types = needed("transformers.models.auto.configuration_auto", "CONFIG_MAPPING_NAMES")
        raw = checkpoint.read_json(source.folder / "config.json")
        model_type, remote = raw.get("model_type") or None, bool(raw.get("auto_map"))
        if model_type not in types and not (remote and options.trust_remote_code):
            if remote:
                raise ModelError(f"{source.name} ({model_type}) {RUNS_CODE}", TRUST)
            what = f"this transformers does not know the model type {model_type!r}"
            raise ModelError(what, "pip install -U transformers")
        try:
            with options.permits.held():
                config = AutoConfig.from_pretrained(source.folder, **options.permits.given)
        except Exception as error:  # any family's config class, with any content
            raise read_error(f"the config of {source.name}", error, "check its values") from error
        config.transformers_weights = None  # a list of weight files of its own, which was not checked
        if source.snapshot:
            config.name_or_path = source.name  # what transformers would have written, had it looked the name up itself
        if source.adapter and (kind := adapters.trained_class(source.adapter.folder, config)):
            config.architectures = [kind]
    # What the family is read without, since its default gives no matrix.
    changes = family(config.model_type).config_changes
    replaced = {name: getattr(config, name) for name, value in changes.items() if getattr(config, name) != value}
    for name, value in changes.items():
        setattr(config, name, value)
    return config, tasks.chosen_task(config, options.task, source.name), replaced


def _geometry(config: Any, source: Source, task: str) -> Geometry:
    """What the config says of the attention. Raises ModelError where its values are of no such kind."""
    if task == VISION_ONLY:
        fitting.check_tower(tasks.stack_config(config, VISION), source.name)
    try:
        return geometry_of(config, count=False, task=task)
    except Exception as error:  # any family's attributes, of any type
        raise ModelError(
            f"the config of {source.name} cannot be read: {first_line(error)}", "check its values"
        ) from error


def _readable(geometry: Geometry) -> Geometry:
    """The geometry, if there is attention over the text, or layers that mix its tokens by a rule."""
    kind = geometry.model_type
    checkpoint.check_has_attention(kind)
    if not geometry.layers:
        raise ModelError(f"attnscope does not find the layers of {kind} in its config", "choose another")
    if not geometry.attention_layers and not any(map(mixes, geometry.views)):
        types = ", ".join(sorted({layer.type for layer in geometry.layers}))
        raise ModelError(
            f"{kind} has no layer whose mixing of tokens attnscope reads (layers: {types})", "choose another"
        )
    if geometry.task == SEQ2SEQ and geometry.both_ways:
        raise ModelError(
            f"the decoder of this {kind} looks both ways ({geometry.both_ways}), and such a target is not read",
            "read its encoder alone: {task=encoder}",
        )
    return geometry


def _cuda_answers() -> bool:
    """Whether there is a CUDA device. A driver that is there and does not answer, such as one too old, is logged."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = torch.cuda.is_available()
    for words in (str(warning.message) for warning in caught):
        if words.startswith("CUDA initialization"):
            logger.warning("no CUDA device is used: %s", first_line(Warning(words.partition(":")[2])))
    return answers


@uncollected()
def chosen_device(options: LoadOptions) -> str:
    """The device to load to: what was asked for, if it is there."""
    import torch

    device = options.device
    if device == "auto":
        return "cuda" if _cuda_answers() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device.startswith("cuda"):
        count = torch.cuda.device_count() if _cuda_answers() else 0
        if int(device.partition(":")[2] or 0) >= count:
            raise UsageError(f"there is no {device} here ({count} CUDA devices)", "use {device=auto} or {device=cpu}")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UsageError("there is no mps device here", "use {device=auto} or {device=cpu}")
    return device


def _tokenizer(source: Source, config: Any, options: LoadOptions) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with options.permits.held(), without_stderr():  # where a panic prints where it came from
            return AutoTokenizer.from_pretrained(
                source.tokenizer_folder,
                config=config,
                **options.permits.given,
                **(source.given if source.tokenizer_folder == source.folder else {}),
            )
    except BaseException as error:  # any tokenizer class, with any files
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise read_error(f"the tokenizer of {source.name}", error, "check its files") from error


def _model(
    source: Source, config: Any, options: LoadOptions, device: str, task: str
) -> tuple[PreTrainedModel, fitting.LoadedAs, list[str]]:
    """The model in eval mode on its device, how it was loaded, and the tensors of its files that it has no place for.

    Every weight that it needs was in the checkpoint, and holds the numbers that the checkpoint stores.
    """
    files = [source.folder / name for name in sources.weight_files(source, options)[source]]
    stored = checkpoint.stored_tensors(() if source.gguf else files)
    room = human_bytes(free_memory(device))  # asked before: what was loaded when memory ran out may still be held
    try:
        with weights_counted({name: tensor.bytes for name, tensor in stored.items()}):
            fit = _fit(source, config, options, device, task)
        unused = [] if source.gguf else fit.unused_inside
        # What is loaded is compared with what the files store: transformers passes over what it does not know.
        if not source.gguf:
            quantised.check_numbers(fit, config, stored, source.name)
            if quantised.method_of(config):
                quantised.even_out(fit.model)
        model = fit.model
        quantised.unpack(model, source.name)
        if source.adapter:
            layout = options.adapter or ("beside" if quantised.is_quantised(model) else "merged")
            model = adapters.attach(model, source.adapter.folder, merged=layout == "merged")
    except AttnscopeError:
        raise
    except Exception as error:  # any family's loading code, with any weights
        if not is_out_of_memory(error):
            raise _not_loaded(error, source, config, stored) from error
        weights = bytes_in_memory(options, config, device, files)
        takes = f"its weights take {human_bytes(weights)}" if weights else first_line(error)
        smaller = {
            "{device_map=auto}": options.device_map is None,
            "{quantize=4bit}": options.quantize != "4bit",
            "{dtype=bfloat16}": options.dtype not in ("bfloat16", "float16"),
        }
        open_to_it = [option for option, unused in smaller.items() if unused]
        raise MemoryLimitError(
            f"{source.name} does not fit on {device}: {takes}, and {room} was free",
            f"use {' or '.join(open_to_it)}" if open_to_it else "take a smaller model",
        ) from error

    # A body without some of its weights would be random numbers; a head without them is ignored.
    if fit.body:
        hint = "transformers finds no tensors for them in the file" if source.gguf else "download the model again"
        raise ModelError(
            f"{source.name} lacks {len(fit.body)} of its weights (first: {fit.body[0]})",
            f"they would be random numbers; {hint}",
        )
    part = fitting.BODY if fit.head else fitting.WHOLE
    if task == ENCODER_ONLY and tasks.task_of(config) != ENCODER_ONLY:
        part = fitting.ENCODER
    if task == VISION_ONLY:
        part = fitting.TOWER
    elif tasks.text_part(config) is not None:
        part = fitting.TEXT
    return fitting.part_of(model, part).eval().requires_grad_(False), fitting.LoadedAs(fit.kind.__name__, part), unused


def _fit(source: Source, config: Any, options: LoadOptions, device: str, task: str) -> fitting.Fit:
    """What transformers makes of the files, by the class that they fit best."""
    packing = None
    if options.quantize is not None:
        from transformers import BitsAndBytesConfig

        packing = BitsAndBytesConfig(**{f"load_in_{options.quantize}": True})

    def load_as(kind: Any, **changes: Any) -> Any:
        arguments = {
            "dtype": dtype_on(options, device),
            "device_map": options.device_map or (None if device == "cpu" else {"": device}),
            "attn_implementation": _attention(config, options, task, kind),
            "use_safetensors": None if options.allow_pickle else True,
            "quantization_config": packing,
            "output_loading_info": True,
            **changes,
        }
        try:
            return kind.from_pretrained(
                source.folder, config=config, **options.permits.given, **source.given, **arguments
            )
        except RuntimeError:  # such as of zero points, for which transformers expects another shape
            plain = None if "quantization_config" in changes else quantised.dequantizing(config)
            if plain is None:
                raise
            model = load_as(kind, **changes, quantization_config=plain)
            logger.warning("transformers reads the weights of %s only as unpacked while they are loaded", source.name)
            return model

    # Its patterns would be matched without a deadline, and a method that is not known would be passed over.
    path = source.folder / "config.json"
    if not (source.gguf or options.permits.code) and (stated := checkpoint.quantization_of(path)):
        adapters.check_patterns(stated, (name for name, _ in tasks.empty_model(config).named_modules()), path)
    quantised.check_method(config, source.name)
    # Some packages print what they do.
    with options.permits.held(), bars_as_elsewhere(), redirect_stdout(sys.stderr):
        kinds = tasks.model_classes(config, task, source.name, exact=source.adapter is not None)
        if source.adapter:
            adapters.set_labels(config, kinds[0], source.adapter.folder)
        return fitting.best_fit(kinds, load_as)


def _not_loaded(error: Exception, source: Source, config: Any, stored: Mapping[str, Stored]) -> ModelError:
    """Why transformers did not load a model, in a line; raised where its weights stay packed. stored: in its files."""
    words = str(error)
    if DEVICES.search(words) and not (PACKAGE.search(words) or _cuda_answers()):
        hint = "load it on a machine that has one, or choose another checkpoint of the model"
        return ModelError(f"{source.name} cannot be loaded here: {first_line(error)}", hint)
    if isinstance(error, ImportError):  # what a quantised checkpoint needs, named by transformers
        what = f"{source.name} cannot be loaded without another package: {first_line(error)}"
        return ModelError(what, "install that package")
    if (report := fitting.interrupted_fit(error)) is not None:
        fit, reasons = report
        quantised.check_numbers(fit, config, stored, source.name)
        hint = "check its config against its files, or download the model again"
        return ModelError(f"{source.name} cannot be loaded: {reasons}", hint)
    hint = "its cause says where it failed; {verbose} shows it"
    return read_error(source.name, error, hint, "loaded")


def _arithmetic(model: PreTrainedModel, config: Any, name: str) -> quantised.Arithmetic | None:
    """How the model computes where it is or was quantised, with a warning where tokens are not computed apart."""
    arithmetic = quantised.arithmetic_of(model, config)
    if arithmetic is not None and arithmetic.together:
        logger.warning("%s rounds the tokens of a pass together: earlier rows change with later tokens", name)
    return arithmetic


def _loaded(model: PreTrainedModel, geometry: Geometry, **facts: Any) -> LoadedModel:
    """The record of a model, with what the model itself says; facts: the other fields of the record."""

    # Of weights that are packed by two in a byte only transformers counts each.
    packed = getattr(model, "is_quantized", False)
    count = int(model.num_parameters()) if packed else sum(parameter.numel() for parameter in model.parameters())
    return LoadedModel(
        model=model,
        geometry=replace(geometry, parameters=count),
        device=str(device_of(model)),
        dtype=str(model.dtype).removeprefix("torch."),
        **facts,
    )


@uncollected()
def _attention(config: Any, options: LoadOptions, task: str, kind: Any) -> str:
    """The implementation asked for; eager where the family has no sdpa, or attends outside the interface."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModelForCausalLM

    name, known = options.attention or "eager", {"eager", *AttentionInterface().valid_keys()}
    if name not in known and not ("/" in name and options.trust_remote_code):  # a kernel of the hub is code
        names = ", ".join(sorted(word for word in known if "|" not in word))
        raise UsageError(f"transformers has no attention named {visible(name)}", f"{{attention}} may be {names}")

    own = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), kind) if kind is AutoModelForCausalLM else kind
    outside = family(config.model_type).bypasses_interface or (task == VISION_ONLY and not knows_interface(own))
    if outside or (name == "sdpa" and not getattr(own, "_supports_sdpa", True)):
        return "eager"
    return name


def model_inside(holder: Any) -> PreTrainedModel:
    """The model that torch.compile, PEFT or a peer's object holds, its adapters in it; a model itself.

    A module of torch that keeps a config and no model of transformers is itself read as one. Raises UsageError where
    there is none, or several; ModelError where its adapter is more than layers of the model or tokens before the text.

    >>> model_inside(TransformersModel("gpt2", dispatch=True))  # nnsight's
    GPT2LMHeadModel(...)
    """
    from torch import nn

    models = list({id(model): model for model in _models(holder)}.values())
    if len(models) == 1:
        return models[0]
    if isinstance(holder, nn.Module) and hasattr(holder, "config"):
        return holder  # somebody's own code, of the same kind
    name = type(holder).__name__
    if models:
        raise UsageError(f"expected one model of transformers, got {name} that holds {len(models)}", "pass one of them")
    raise UsageError(
        f"expected a model of transformers (PreTrainedModel) or a module of PyTorch, got {name}, which holds none",
        "pass a model, or an object that holds one; matrices alone: attnscope.from_weights(weights, tokens)",
    )


def holds_model(module: nn.Module) -> bool:
    """Whether a module of torch is a model that is read by its config, or holds one of transformers.

    >>> holds_model(torch.nn.Linear(2, 2))
    False
    """
    config = getattr(module, "config", None)  # of other code too, which means something else by it
    return hasattr(config, "get_text_config") or next(_models(module), None) is not None


def _models(holder: Any) -> Iterator[PreTrainedModel]:
    """The outermost models in an object: in a module of torch at any depth, in another object among its own entries."""
    from torch import nn
    from transformers import PreTrainedModel

    if not isinstance(holder, nn.Module):
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, nn.Module):
                yield from _models(value)
        return
    module = adapters.unwrap(holder)
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for part in module.children():
        yield from _models(part)
