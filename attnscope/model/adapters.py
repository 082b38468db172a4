"""Adapters of PEFT: a folder with a few weights, and the model that they change.

The folder is recognised and judged without peft, which takes seconds to import and is asked for only to put the weights
into the model.

Patterns in the configs of adapters and quantised models: libraries match them with `re`, which has no deadline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import ModelError, UsageError
from attnscope.model import checkpoint
from attnscope.model.checkpoint import ADAPTER_CONFIG
from attnscope.model.geometry import geometry_of
from attnscope.model.options import TrustPolicy
from attnscope.model.selection import CAUSAL_LM, NAMES
from attnscope.model.tasks import classes_of, empty_of, task_of
from attnscope.utils.isolation import IsolatedCall

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

REPEATS = re.compile(r"[*+?{|]")  # a pattern without any of these is as quick as it is short
# How PEFT and transformers put a pattern together, to match it from the beginning of a module's name.
FORMS = (
    r"(?:{})$",
    r"(.*\.)?({})$",
    r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    r"(^|.*\.){}($|\..*)",
    r"(?:{})(?:(?<=\.)|(?=\.|$))",
)


def check_patterns(config: Any, names: Iterable[str], path: Path) -> None:
    """Raise ModelError where a text of a config, taken as a pattern, does not end in time over the names of modules.

    They are tried by `re` itself, in a process of its own, which can be ended. config: what a JSON file says, of which
    any text may be a pattern. path: that file.

    >>> check_patterns({"target_modules": r".*\\.(q|k)_proj"}, ["layers.0.q_proj"], Path("adapter_config.json"))
    """

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
                yield from texts(part)

    patterns = {text for text in texts(config) if REPEATS.search(text)}
    if not patterns:  # then no model is built for its names
        return
    names = list(names)
    with IsolatedCall(_match, "process") as matched:
        try:
            matched(patterns, names)
        except ModelError as error:
            raise ModelError(
                f"{path} has a pattern that takes more than {matched.seconds} seconds over the names of modules",
                "name the modules in its place",
            ) from error


def _match(patterns: Iterable[str], names: Iterable[str]) -> None:
    for pattern in patterns:
        for form in FORMS:
            with suppress(re.error, OverflowError, RecursionError):  # no pattern, then
                compiled = re.compile(form.replace("{}", pattern))
                for name in names:
                    compiled.match(name)


SAFETENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
BY_TOKEN = ("XLORA", "POLY")  # other weights for each token or task
VIRTUAL = ("PROMPT_TUNING", "P_TUNING")  # embeddings before the text, and nothing else
PREFIX = "PREFIX_TUNING"  # keys and values of each layer
MORE = (
    "is_prompt_learning",
    "is_adaption_prompt",
    "alora_invocation_tokens",
    "megatron_config",
    "arrow_config",  # several adapters
    "layer_replication",
    "shadow_model",  # another model
)
PROMPT = "prompt_embeddings"  # where PEFT saves them
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # by how its weights were first drawn
FROM_BASE = re.compile(r"olora|pissa(_niter_[0-9]{1,2})?")  # that the base alone says, in steps that can be counted
# The mapping of transformers with the classes that PEFT means by a task.
TRAINED_ON = {
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "FEATURE_EXTRACTION": "MODEL_MAPPING",
}
WRAPPED = "base_model.model."  # what PEFT writes before the names of a model's weights
SAVED = ".modules_to_save."
PERMITS = TrustPolicy()  # nothing: all its files are there, and it brings no code


def base_of(folder: Path, there: frozenset[str], chosen: str | None) -> str:
    """The folder or the Hub id of the model that an adapter changes: as asked for, or as its config says.

    chosen: by the user. there: the names of all files of the adapter, downloaded or not. A path counts from the
    adapter's folder first. Raises ModelError where the config names none, and for a folder that is a whole model as
    well.

        >>> base_of(Path("runs/lora"), frozenset(), None)
        'meta-llama/Llama-3.2-1B'
    """
    if there.intersection((*checkpoint.SAFETENSORS, *checkpoint.PICKLES)):
        raise ModelError(
            f"{folder} holds a whole model and an adapter, and either could be meant",
            f"leave one of them there: without {ADAPTER_CONFIG} it is a model",
        )
    base = chosen or checkpoint.read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise ModelError(f"{folder} holds an adapter and does not say of which model", "name it: {base=FOLDER}")

    # What a config names may be a folder next to the adapter's, which moved with it; what the user names is as written.
    with suppress(OSError):  # a name too long, a folder that is closed to us: reported when the base is looked up
        if chosen is None and (folder / base).is_dir():
            return str(folder / base)
    if chosen is None and Path(base).is_absolute():
        raise ModelError(
            f"{folder} holds an adapter of {base}, which is not there", "say where that model is: {base=FOLDER}"
        )
    return base


def weight_file(folder: Path, there: frozenset[str], allow_pickle: bool = False) -> str:
    """The name of the file that holds an adapter's weights. Raises ModelError where there is none that may be read."""
    if SAFETENSORS in there:
        return SAFETENSORS
    if PICKLE not in there:
        raise ModelError(f"{folder} has no weights of the adapter (no {SAFETENSORS})", "download the adapter again")
    if not allow_pickle:
        raise ModelError(
            f"{folder} has its weights as pickle only, which can run any code when it is read", checkpoint.CONVERT
        )
    return PICKLE


def trained_class(folder: Path, config: Any) -> str | None:
    """The class of transformers that an adapter was trained on, by its name; None where its config does not say.

    PEFT writes a task, or without one the class itself. config: of the base.

        >>> trained_class(Path("runs/reward"), LlamaConfig())
        'LlamaForSequenceClassification'
    """
    import transformers

    content = checkpoint.read_json(folder / ADAPTER_CONFIG)
    mapping = TRAINED_ON.get(str(content.get("task_type")))
    if mapping is not None:
        kinds = classes_of(getattr(transformers, mapping), config)
        return kinds[0].__name__ if kinds else None
    auto = content.get("auto_mapping")
    name = auto.get("base_model_class") if isinstance(auto, dict) else None
    return name if isinstance(name, str) else None


def set_labels(config: Any, kind: Any, folder: Path) -> None:
    """Set how many labels the config of a base has, where an adapter brings a head that has others.

    kind: the class that it was trained on.
    """
    shapes = {name.removeprefix(WRAPPED): shape for name, shape in _shapes(folder / SAFETENSORS).items()}
    if not shapes or not hasattr(kind, "_from_config"):
        return
    head = dict(empty_of(kind, config).named_parameters())
    for name, shape in shapes.items():
        own = tuple(head[name].shape) if name in head else shape
        if own != shape and own[:1] == (config.num_labels,) and own[1:] == shape[1:]:
            config.num_labels = shape[0]
            return


def attach(model: PreTrainedModel, folder: Path, merged: bool) -> PreTrainedModel:
    """The model with an adapter: in its weights where merged, else in layers of its own; or tokens before a text.

    Every weight of the adapter found its place, and no place was left. Raises ModelError for an adapter that is neither
    a change of weights nor such tokens, or not of this model.
    """
    from peft import PeftConfig, PeftModel
    from peft.utils.save_and_load import load_peft_weights

    with PERMITS.held():
        config = PeftConfig.from_pretrained(str(folder), **PERMITS.given)
        if config.peft_type.value in (*VIRTUAL, PREFIX):
            learnt = load_peft_weights(str(folder), device="cpu", **PERMITS.given).get(PROMPT)
            return _with_tokens(model, config, learnt, f"the adapter in {folder}")
        _check_kind(config, f"the adapter in {folder}")
        path = folder / ADAPTER_CONFIG
        check_patterns(checkpoint.read_json(path), dict(model.named_modules()), path)

        # One that was trained with more tokens than its base has brings embeddings for them.
        embeddings = model.get_input_embeddings()
        ending = next(f".{name}.weight" for name, module in model.named_modules() if module is embeddings)
        shapes = _shapes(folder / SAFETENSORS)
        rows = next((shape[0] for key, shape in shapes.items() if key.endswith(ending)), None)
        if rows not in (None, embeddings.num_embeddings):
            model.resize_token_embeddings(rows, mean_resizing=False)

        # A LoRA of a larger rank than any of its weights PEFT would draw in a size which the config makes up.
        config.inference_mode = True
        sizes = [size for shape in shapes.values() for size in shape]
        ranks = [config.r, *config.rank_pattern.values()] if config.peft_type.value == "LORA" and sizes else []
        wrong = next((rank for rank in ranks if not 0 < rank <= max(sizes)), None)
        if wrong is not None:
            raise ModelError(f"the adapter in {folder} has no weights of rank {wrong}", "download it again")

        # A part of the base may have been taken out of it when the weights were first drawn, which PEFT repeats: from
        # the base alone, in bounded time, it can repeat some ways only.
        drawn = str(getattr(config, "init_lora_weights", "")).lower()
        begins_from_base = drawn.startswith(CHANGES_BASE)
        if begins_from_base and not FROM_BASE.fullmatch(drawn):
            raise ModelError(
                f"the adapter in {folder} changes its base by {drawn!r} before its weights are read",
                "save it as a plain LoRA of that base",
            )

        # Weights that are read anyway are drawn nowhere before, in sizes that the config alone would say.
        options: dict[str, Any] = {"low_cpu_mem_usage": not begins_from_base}
        adapted = PeftModel(model, config, **options)
        mapping = getattr(model, "_checkpoint_conversion_mapping", {})
        try:
            report = adapted.load_adapter(str(folder), "default", key_mapping=mapping, **options, **PERMITS.given)
            # Embeddings that were resized and trained PEFT writes twice, and reads by their plain name.
            unexpected = report.unexpected_keys
            weights = load_peft_weights(str(folder), device="cpu", **PERMITS.given) if unexpected else {}
            twice = {key: weights.get(key.replace(SAVED, ".")) for key in unexpected if SAVED in key and key in weights}
            copies = {key for key, plain in twice.items() if plain is not None and plain.equal(weights[key])}
            misfits = sorted([*report.missing_keys, *(key for key in unexpected if key not in copies)])
        except KeyError as error:  # a module that was trained as a whole, and is not in the file
            misfits = [str(error.args[0])]
        if misfits:
            raise ModelError(
                f"the adapter in {folder} does not fit its base: {len(misfits)} of its weights are "
                f"missing or unexpected (first: {misfits[0]})",
                "name the model that it was trained on: {base=FOLDER}",
            )
    if not merged:
        return adapted.get_base_model()
    try:
        return adapted.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError) as error:  # as kinds of adapters say that they cannot
        raise ModelError(
            f"the adapter in {folder} ({config.peft_type.value}) cannot be merged", "use {adapter=beside}"
        ) from error


def unwrap(model: Any) -> Any:
    """The model inside a PeftModel or a compiled one, with its adapters in it; another model itself.

    Of one with prompt, prefix or P-tuning it is a second model of the same weights, which knows the virtual tokens as
    they are now. Raises ModelError where an adapter is more than either, UsageError where dropout changes such tokens.

    >>> unwrap(model) is model
    True
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "get_base_model"):
        return model
    inner = getattr(model.get_base_model(), "_orig_mod", model.get_base_model())
    for name in getattr(model, "active_adapters", None) or [model.active_adapter]:
        config, what = model.peft_config[name], f"the adapter {name!r}"
        if config.peft_type.value not in (*VIRTUAL, PREFIX):
            _check_kind(config, what)
            continue
        encoder = model.prompt_encoder[name]
        if inner.training or encoder.training:
            raise UsageError(f"{what} is in training mode, where dropout changes it", "call model.eval() first")
        from attnscope.model.modules import sharing

        # what was loaded to be used has no network around its embeddings, and PEFT then reads these alone
        learnt = encoder.embedding.weight if config.inference_mode else model.get_prompt_embedding_to_save(name)
        inner = _with_tokens(sharing(inner), config, learnt.detach(), what)
    return inner


def _with_tokens(model: PreTrainedModel, config: Any, learnt: Tensor | None, what: str) -> PreTrainedModel:
    """The model that knows the virtual tokens of prompt or prefix tuning. Raises ModelError for another model's.

    learnt: (virtual tokens, their numbers), as PEFT saves them. what: the adapter, in words.
    """
    from attnscope.model.modules import cache_argument, put_before, put_in_layers

    if task_of(model.config) != CAUSAL_LM:
        raise ModelError(
            f"{what} ({config.peft_type.value}) puts tokens before the text of "
            f"{NAMES[task_of(model.config)]}, and only a causal model is read with such",
            "choose another adapter",
        )
    # The numbers of a virtual token: an embedding's, or the keys and values of every layer.
    in_layers = config.peft_type.value == PREFIX
    shape: tuple[int, ...] = (model.get_input_embeddings().weight.shape[1],)
    if in_layers:
        geometry = geometry_of(model.config, count=False)
        shapes = {(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in geometry.layers}
        types = {layer.type for layer in geometry.layers}
        alike = len(shapes) == 1 and types <= {"full", "sliding"} and not geometry.other_stacks
        kv_heads, head_dim, value_dim = next(iter(shapes))
        if not alike or head_dim != value_dim or cache_argument(model) is None:
            raise ModelError(
                f"{what} ({PREFIX}) puts keys and values into the layers of {geometry.model_type}, which "
                "do not all attend to tokens with keys and values of one size",
                "choose one of prompt tuning or P-tuning",
            )
        shape = len(geometry.layers), 2, kv_heads, head_dim
    # Weights of other sizes are another model's, and reshaping them could pass without an error.
    width = prod(shape)
    if learnt is None or learnt.ndim != 2 or learnt.shape[1] != width or not len(learnt):
        raise ModelError(
            f"{what} does not fit its base: {'keys and values' if in_layers else 'embeddings'} of "
            f"{width} numbers were expected",
            "name the model that it was trained on: {base=FOLDER}",
        )
    if in_layers:
        return put_in_layers(model, learnt.unflatten(1, shape).permute(1, 2, 3, 0, 4))
    return put_before(model, learnt)


def _check_kind(config: Any, what: str) -> None:
    if config.peft_type.value in BY_TOKEN or any(getattr(config, name, None) for name in MORE):
        raise ModelError(
            f"{what} ({config.peft_type.value}) is more than a change of weights",
            "merge it where that can be done, or choose a plain LoRA",
        )


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in a safetensors file; none where there is no such file."""
    stored = checkpoint.stored_tensors([weights] if weights.is_file() else ())
    return {name: tensor.shape for name, tensor in stored.items()}
