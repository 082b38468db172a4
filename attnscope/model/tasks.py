"""What a model is read at: as a causal decoder, as an encoder, or as an encoder and a decoder that looks at it.

Which layers of a model attend, and which mix tokens by a linear rule, read from the code of its modules.

A module attends where its code asks transformers' attention interface. It has a linear rule where it calls a function
of its file with the arguments of such a rule. Nothing is run, and no weights are needed.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscope.errors import ModelError, UsageError
from attnscope.model.families import family
from attnscope.model.libraries import needed
from attnscope.model.options import TrustPolicy
from attnscope.model.selection import (
    CAUSAL_LM,
    CROSSING,
    DECODER,
    ENCODER_ONLY,
    NAMES,
    SEQ2SEQ,
    TASKS,
    VISION_ONLY,
    is_bidirectional,
    is_causal,
    is_vision,
)

if TYPE_CHECKING:
    from torch import nn


def task_of(config: Any) -> str:
    """`decoder`, `encoder`, `seq2seq` or `vision`, by what the config says.

    A family that can be both is what its config makes it, and so is a decoder that looks both ways: it is read as an
    encoder. One that transformers has no causal language model of is an encoder.

    >>> task_of(AutoConfig.from_pretrained("google-t5/t5-small"))
    'seq2seq'
    """
    if _given_pixels(config):
        return VISION_ONLY
    if getattr(config, "is_encoder_decoder", False):
        return SEQ2SEQ
    part = text_part(config)
    if part is not None:
        return task_of(part)
    if family(config.model_type).looks_ahead or _as_configured(config) is False:
        return ENCODER_ONLY
    causal = config.model_type in _types_with("CAUSAL_LM") or _causal_part(config) or _generates_beside(config)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return CAUSAL_LM if (causal or remote) and not both_ways(config) else ENCODER_ONLY


def both_ways(config: Any) -> str:
    """What a decoder's config says that has its tokens see those after them too; empty where it says nothing of it.

    transformers makes the mask of a text by `is_causal`. A model of text alone may ask `use_bidirectional_attention`
    first, whose `vision` is of pictures; with pictures the whole model makes the masks, and does not ask it.

    >>> both_ways(LlamaConfig(is_causal=False))
    'is_causal=false'
    """
    text = stack_config(config, DECODER)
    both, causal = getattr(text, "use_bidirectional_attention", None), getattr(text, "is_causal", True)
    if both in (True, "all") and (text is config or not causal):
        return f"use_bidirectional_attention={json.dumps(both)}"
    return "" if causal or family(text.model_type).hides_future else f"is_causal={json.dumps(causal)}"


def looks_back_alone(config: Any, stack: str) -> bool | None:
    """Whether a stack's queries see no key after their own, by config and class; None where these do not say it.

    Of an encoder that is known where transformers has a masked language model of it, or a decoder's config says so, and
    has no layers that look back all the same: transformers makes chunks and the keys of an indexer so.

    >>> looks_back_alone(LlamaConfig(), "decoder")
    True
    """
    if is_causal(stack):
        return True
    if not is_bidirectional(stack) or getattr(config, "is_encoder_decoder", False):
        return None
    types = {*(getattr(stack_config(config, DECODER), "layer_types", None) or ())}
    decoder = both_ways(config) and not types - {"full_attention", "sliding_attention", "linear_attention", "conv"}
    return False if decoder or config.model_type in _types_with("MASKED_LM") else None


def _as_configured(config: Any) -> bool | None:
    """Whether a type that can be both is a decoder here; None for a type whose config does not choose."""
    if hasattr(config, "causal"):
        return bool(config.causal)
    kind = config.model_type
    can_be_both = kind in _types_with("MASKED_LM") and kind in _types_with("CAUSAL_LM")
    can_be_both = can_be_both and kind not in _types_with("SEQ_TO_SEQ_CAUSAL_LM")
    return bool(config.is_decoder) if can_be_both or family(kind).either else None


@cache
def _types_with(kind: str) -> Mapping[str, Any]:
    """The types that transformers has a model of one kind of, such as `CAUSAL_LM`, with the names of the classes."""
    names: Mapping[str, Any] = needed("transformers.models.auto.modeling_auto", f"MODEL_FOR_{kind}_MAPPING_NAMES")
    return names


def _generates_beside(config: Any) -> bool:
    """Whether transformers has a causal language model of this type only among those that are given pictures or sounds
    too, and that model reads a text without them."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

    if config.model_type not in _types_with("MULTIMODAL_LM") or config.model_type in _types_with("CAUSAL_LM"):
        return False
    if getattr(config, "vision_config", None) is not None and config.get_text_config(decoder=True) is config:
        return False
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    return kind is not None and kind.main_input_name == "input_ids" and kind.can_generate()


def text_part(config: Any) -> Any | None:
    """The config of the part that reads the texts of a model which reads none alone, as CLIP's text tower does.

    None for a model of text, also one that reads it together with pictures or sounds, or without them.

    >>> text_part(CLIPConfig()).model_type
    'clip_text_model'
    """
    part = config.get_text_config()
    writes = config.model_type in _types_with("CAUSAL_LM") or getattr(config, "is_encoder_decoder", False)
    brings_code = bool(getattr(config, "auto_map", None))
    return None if part is config or writes or brings_code or _generates_beside(config) else part


def reading_part(model: Any) -> Any:
    """The module of a model that reads text: the model itself, or the outermost with the config of its `text_part`."""
    part = text_part(model.config)
    if part is None:
        return model
    kind = type(part)
    of_text = (inner for inner in model.modules() if type(getattr(inner, "config", None)) is kind)
    return next((inner for inner in of_text if getattr(inner, "main_input_name", "") == "input_ids"), model)


def _given_pixels(config: Any) -> bool:
    """Whether a model of this type is given a picture and no text, by its class; by its config where none is known.

    AltCLIP's tower is a part of its own, and no class of the registry.
    """
    of_text = getattr(config, "vocab_size", None) is not None and not hasattr(config, "image_size")
    if of_text or config.get_text_config() is not config:  # whose classes need not be imported
        return False
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, MODEL_MAPPING

    auto = (MODEL_MAPPING, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING)
    kinds = [kind for mapping in auto for kind in classes_of(mapping, config)]
    if not kinds:
        return hasattr(config, "image_size") and hasattr(config, "patch_size") and not hasattr(config, "vocab_size")
    return _takes_pixels(kinds[0], config)


def _takes_pixels(kind: Any, config: Any) -> bool:
    """Whether a class is given a picture, or its patches: towers of language models do not name their main input."""
    if getattr(kind, "main_input_name", "") == "pixel_values":
        return True
    first = next(iter([*inspect.signature(kind.forward).parameters][1:]), "")
    return first in ("hidden_states", "pixel_values") and hasattr(config, "patch_size")


def _has_tower(config: Any) -> bool:
    """Whether a model that compares texts with pictures has a tower for each, as CLIP does."""
    from transformers import MODEL_MAPPING

    return getattr(config, "vision_config", None) is not None and type(config) in MODEL_MAPPING


def _causal_part(config: Any) -> bool:
    """Whether this is the part that reads text of a family that writes text, also one that is given pictures too.

    Of the latter a part that transformers loads alone: BLIP's looks both ways in one of its models, not in another.
    """
    from transformers import CONFIG_MAPPING

    alone = config.model_type in needed("transformers.models.auto.modeling_auto", "MODEL_MAPPING_NAMES")
    with_pictures = _types_with("IMAGE_TEXT_TO_TEXT") if alone else ()
    names = [name for name in (*_types_with("CAUSAL_LM"), *with_pictures) if config.model_type.startswith(f"{name}_")]
    parts = [CONFIG_MAPPING[name].sub_configs for name in names]
    return any(type(config) is part.get(name) for part in parts for name in ("text_config", "decoder"))


def stack_config(config: Any, stack: str) -> Any:
    """The part of a config that speaks of a stack: of an encoder-decoder a config inside it, or the whole.

    A vision tower's is a part of its own, unless the tower is the whole model, as is that of each decoder of a model
    that is made of several. For others `get_text_config` of transformers would do, were it not for the defaults that it
    leaves behind in older families.
    """
    if is_vision(stack):
        return getattr(config, "vision_config", config)
    part = family(config.model_type).parts.get(CROSSING.get(stack, stack))
    if part is not None:
        return getattr(config, part)
    if not getattr(config, "is_encoder_decoder", False):
        part = text_part(config)
        whole = part is None and stack != DECODER and not _generates_beside(config)
        return config if whole else part or config.get_text_config(decoder=True)
    inner: Any = getattr(config, stack, None) or getattr(config, f"{stack}_config", None) or config
    return inner.get_text_config() if hasattr(inner, "get_text_config") else config


def chosen_task(config: Any, wanted: str | None, name: str) -> str:
    """The task that was asked for, or what the config says. Raises where the model cannot be read so.

    wanted: one of TASKS, `auto` or None; or `picture`: by its vision tower where it can be read so, else as by `auto`.
    name: of the model, for the error.
    """
    own = task_of(config)
    if wanted in (VISION_ONLY, "picture") and own == ENCODER_ONLY and _has_tower(config):
        return VISION_ONLY
    if wanted is None or wanted in ("auto", "picture", own):
        return own
    if wanted not in TASKS:
        raise UsageError(f"expected a task auto, {', '.join(TASKS)}, got {wanted!r}", "use {task=auto}")
    if own == SEQ2SEQ and wanted == ENCODER_ONLY:
        return ENCODER_ONLY
    entry = both_ways(config)
    if own == ENCODER_ONLY and wanted == CAUSAL_LM and (entry or _as_configured(config) is False):
        raise ModelError(
            f"{name} ({config.model_type}) as configured looks ahead{f' ({entry})' * bool(entry)}: it is not a causal "
            "language model",
            "leave out {task=decoder}, or take a checkpoint trained as one",
        )
    raise ModelError(
        f"{name} ({config.model_type}) cannot be read as {NAMES[wanted]}: it is {NAMES[own]}", "use {task=auto}"
    )


def model_class(config: Any, task: str, name: str) -> Any:
    """The first of `model_classes`, and raises as it."""
    return model_classes(config, task, name)[0]


def model_classes(config: Any, task: str, name: str, exact: bool = False) -> list[Any]:
    """The classes of transformers that such a checkpoint may have been saved from, the likeliest first.

    That is the class which `architectures` names, where transformers has it for this config. A language model comes
    before a body without a head where the head is tied to the embeddings: then a checkpoint of the body has it too.
    After them come the family's language model and its body. name: of the model, for the error. exact: the named one
    alone, where there is one. Raises ModelError for a model that reads no text.

    >>> [kind.__name__ for kind in model_classes(MistralConfig(architectures=["MistralModel"]), "decoder", "")]
    ['MistralModel', 'AutoModelForCausalLM']
    """
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM

    if task != CAUSAL_LM and "AutoModel" in (getattr(config, "auto_map", None) or {}):
        return [AutoModel]
    # The classes that the config names, as far as they are transformers' own and of this config.
    words = getattr(config, "architectures", None)
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    saved: list[Any] = [getattr(transformers, word, None) for word in words]
    stated = [kind for kind in saved if getattr(kind, "config_class", None) is type(config)]
    if exact and stated:
        return stated[:1]

    # In what order they are tried: see above. A family with several bodies names the whole first.
    bodies, part = classes_of(transformers.MODEL_MAPPING, config), text_part(config)
    # The class with which such a model writes text; none of an encoder.
    head, beside = None, _generates_beside(config)
    if part is None and task == CAUSAL_LM and not beside:
        remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        if remote or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            head = AutoModelForCausalLM
    elif part is None and (task == SEQ2SEQ or beside):
        pairs = classes_of(transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, config) if task == SEQ2SEQ else []
        head = next(iter([*pairs, *classes_of(transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING, config)]), None)
    tied = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
    auto = head is AutoModelForCausalLM and any(kind.can_generate() for kind in stated[:1])
    first = [head] if auto or (tied and stated[:1] in ([body] for body in bodies)) else stated
    others: list[Any] = []
    if task == ENCODER_ONLY:
        others = classes_of(transformers.MODEL_FOR_MASKED_LM_MAPPING, config)
    elif task == VISION_ONLY:
        others = classes_of(transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, config)
    kinds = [kind for kind in dict.fromkeys((*first, *stated, head, *bodies[:1], *others)) if kind is not None]

    # What reads something else than a text alone is no such class; of the likeliest one that is the error.
    judged = [kind for kind in kinds if part is None and kind is not AutoModelForCausalLM]
    why = {kind: why for kind in judged if (why := _unreadable(kind, config, task))}
    model_type = config.model_type
    pixels = getattr(next(iter(kinds), None), "main_input_name", "") == "pixel_values"
    if pixels and task == SEQ2SEQ and hasattr(config, "encoder"):  # two models, as TrOCR and Donut are
        raise ModelError(
            f"{name} ({model_type}) writes the text of a picture, and such a pair of towers is not read",
            "save its encoder as a model of its own, model.encoder.save_pretrained(FOLDER), and read that",
        )
    not_of_text = f"{name} ({model_type}) is not a model of text that attnscope reads"
    if not kinds:
        raise ModelError(not_of_text, "choose a model of text")
    if kinds[0] in why:
        raise ModelError(f"{not_of_text}: {why[kinds[0]]}", "choose another")
    return [kind for kind in kinds if kind not in why]


def empty_model(config: Any) -> nn.Module:
    """The model of a config without its weights, on the meta device, and without code that a model brings.

    Raises what the family's constructor raises.
    """
    return empty_of(model_class(config, task_of(config), ""), config)


def empty_of(kind: Any, config: Any) -> nn.Module:
    """The same as one class of transformers."""
    import torch

    permits = TrustPolicy()
    with permits.held(), torch.device("meta"):
        if hasattr(kind, "from_config"):
            return kind.from_config(config, trust_remote_code=permits.code)
        return kind._from_config(config)


def classes_of(mapping: Any, config: Any) -> list[Any]:
    """Those of a mapping of transformers for a config: none, one, or several."""
    kinds = mapping.get(type(config), None)
    return list(kinds) if isinstance(kinds, tuple) else [] if kinds is None else [kinds]


def _unreadable(kind: Any, config: Any, task: str) -> str:
    """Why a class cannot be given a text alone, or a sound if it can count the frames; of a vision tower a picture."""
    main = getattr(kind, "main_input_name", "")
    counts = hasattr(kind, "_get_feat_extract_output_lengths")
    if task == VISION_ONLY:
        takes = _takes_pixels(kind, config) or _has_tower(config)
        return "" if takes else f"{kind.__name__} is given {main} first, and no picture alone"
    if main not in ("input_ids", "input_features") and not (main == "input_values" and counts):
        return f"{kind.__name__} is given {main} first, and no text alone"
    if kind.forward.__name__ == "_forward_unimplemented":  # PyTorch's own: several models run one after another
        return f"{kind.__name__} has no forward pass of its own"
    if (
        task == SEQ2SEQ and "decoder_input_ids" not in inspect.signature(kind.forward).parameters
    ):  # FastSpeech2's reads frames
        return f"the decoder of {kind.__name__} reads no tokens"
    return ""


INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what every modelling file of transformers calls it


def layer_of(module: nn.Module, path: str) -> int:
    """The index of a module's layer: its `layer_idx`, or the first number in its path."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int) and index >= 0:  # zamba2's shared module says -1
        return index
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else 0


def asks_interface(module: nn.Module) -> bool:
    """Whether the code of a module's forward asks transformers' attention interface.

    >>> asks_interface(model.model.layers[0].self_attn)
    True
    """
    forward = inspect.unwrap(type(module).forward)
    return INTERFACE in getattr(getattr(forward, "__code__", None), "co_names", ())


# What modelling files call the arguments of a rule, by the kind of its maps and its form. `linear` has a map per head,
# `channels` one per channel. A rule is a function of the file, or a method of the module itself.
RULES: Mapping[str, Mapping[str, frozenset[str]]] = {
    "linear": {
        "delta": frozenset({"query", "key", "value", "g", "beta"}),
        "ssd": frozenset({"hidden_states", "dt", "A", "B", "C", "chunk_size"}),
        "mlstm": frozenset({"query", "key", "value", "igate", "fgate"}),
        "lightning": frozenset(),
    },
    "channels": {
        "scan": frozenset({"hidden_states", "dt", "A", "B", "C", "delta_bias"}),
        "wkv": frozenset({"time_decay", "time_first", "key", "value"}),
        "gated": frozenset({"hidden_states", "recurrent_gate", "reset"}),
        "convolution": frozenset({"hidden_states", "weight", "bias", "activation"}),
    },
}
CACHED = frozenset({"conv_state"})  # an argument of functions that are given one token and what a cache holds
# A rule that is written out in a module's forward: what the module has, by its form.
PARTS: Mapping[str, frozenset[str]] = {"lightning": frozenset({"qkv_proj", "slope_rate", "norm"})}
CONVOLUTION = "convolution"  # a rule where nothing else of its layer mixes tokens; elsewhere it prepares what does
HEADS = ("num_v_heads", "num_heads", "num_attention_heads")  # of a module that mixes by a rule, or of its config
# What the forms are called in words.
RULE_NAMES = {
    "delta": "gated delta rule",
    "ssd": "Mamba-2",
    "mlstm": "mLSTM",
    "lightning": "lightning attention",
    "scan": "Mamba",
    "wkv": "RWKV-4",
    "gated": "gated recurrence",
    "convolution": "short convolution",
}


class Mixer(NamedTuple):
    """How a module mixes tokens without a softmax.

    kind: a key of RULES. heads: how many maps it has; of channels the one that is shown. name: the form of its rule.
    """

    kind: str
    heads: int
    name: str


OF_NO_MODEL = frozenset({"builtins", "torch"})  # where classes come from that every module is made of
_rules: weakref.WeakKeyDictionary[type, dict[str, str]] = weakref.WeakKeyDictionary()


def rules_of(module: nn.Module) -> dict[str, str]:
    """What of a module's code is such a rule, {name: form}: functions of its file that it calls, or its own methods.

    A rule that its forward spells out has that name.

    >>> rules_of(model.model.layers[0].linear_attn)
    {'torch_chunk_gated_delta_rule': 'delta', 'torch_recurrent_gated_delta_rule': 'delta'}
    """
    kind = type(module)
    if kind not in _rules:
        parts = {*module._modules, *module._buffers, *module._parameters}
        spelled = next((form for form, needs in PARTS.items() if needs <= parts), None)
        _rules[kind] = {"forward": spelled} if spelled else _read_rules(kind)
    return _rules[kind]


def _read_rules(kind: type) -> dict[str, str]:
    """Of a class; where a method has the arguments of a rule, what it calls is a part of that."""
    methods = _methods_of(kind)
    own = {name: form for name, (_, method) in methods.items() if (form := _form_of(method))}
    if own:
        return own
    called = {name: function for _, method in methods.values() for name, function in _called_by(method).items()}
    known = {name: form for name, function in sorted(called.items()) if (form := _form_of(function))}
    others = {name: form for name, form in known.items() if form != CONVOLUTION}
    return others or known


def homes_of(kind: type, rule: str) -> list[Any]:
    """Where a class looks the name of a rule up: the class that has it as a method, or the files that have it.

    Both may be those of another class, of which it is made, as torch makes one of a module that it shards.
    """
    methods = _methods_of(kind)
    if rule in methods:
        return [methods[rule][0]]
    callers = (inspect.unwrap(method) for _, method in methods.values() if rule in _called_by(method))
    return [sys.modules[file] for file in dict.fromkeys(caller.__globals__["__name__"] for caller in callers)]


def _methods_of(kind: type) -> dict[str, tuple[type, Any]]:
    """{name: (the class that has it, method)} of a class of modules, and of what it is made of."""
    owners = [owner for owner in reversed(kind.__mro__) if owner.__module__.partition(".")[0] not in OF_NO_MODEL]
    functions = ((owner, name, method) for owner in owners for name, method in vars(owner).items())
    return {name: (owner, method) for owner, name, method in functions if inspect.isfunction(method)}


def _called_by(method: Any) -> dict[str, Any]:
    """The functions of its own file that a method calls by their names."""
    bare = inspect.unwrap(method)
    home = getattr(bare, "__globals__", {})
    names = getattr(getattr(bare, "__code__", None), "co_names", ())
    return {name: home[name] for name in names if inspect.isfunction(home.get(name))}


def _form_of(function: Any) -> str | None:
    parameters = inspect.signature(function).parameters.keys()
    for forms in RULES.values():
        for form, needs in forms.items():
            if needs and needs <= parameters and not CACHED & parameters:
                return form
    return None


def mixer_of(module: nn.Module) -> Mixer | None:
    """How a module mixes tokens by a rule; None where it has none.

    >>> mixer_of(model.model.layers[0].linear_attn)
    Mixer(kind='linear', heads=32, name='delta')
    """
    form = next(iter(rules_of(module).values()), None)
    if form is None:
        return None
    kind = next(kind for kind, forms in RULES.items() if form in forms)
    owners = (module, getattr(module, "config", None))
    counts = (getattr(owner, name, None) for owner in owners for name in HEADS)
    heads = next((count for count in counts if isinstance(count, int)), 1)
    return Mixer(kind, heads if kind == "linear" else 1, form)


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """The modules of a model that mix tokens by a rule, by their paths.

    A convolution is one where no other module of its layer mixes tokens: elsewhere it is a part of what does.
    """
    modules = dict(model.named_modules())
    mixers = {path: mixer for path, module in modules.items() if (mixer := mixer_of(module))}
    busy = {_layer_path(path) for path, module in modules.items() if asks_interface(module)}
    busy |= {_layer_path(path) for path, mixer in mixers.items() if mixer.name != CONVOLUTION}
    return {path: m for path, m in mixers.items() if m.name != CONVOLUTION or _layer_path(path) not in busy}


def _layer_path(path: str) -> str:
    """The path of the layer that a module lies in, `model.layers.3`; its own where that has no number."""
    number = re.search(r"(?:^|\.)\d+(?=\.|$)", path)
    return path[: number.end()] if number else path


class LayerModules(NamedTuple):
    """Which layers of a stack have modules that attend, and which have modules that mix by a rule."""

    attending: frozenset[int]
    mixers: Mapping[int, Mixer]


def layer_modules(config: Any, stack: str) -> LayerModules | None:
    """What the modules of a stack's layers do; None where the model of a config cannot be built.

    The model of the stack's own config, or the whole, is built on the meta device, without code that it brings, once
    for each config.
    """
    key = stack, config.to_json_string()
    if key not in _last_answer:
        from transformers import AutoModel

        _last_answer.clear()  # one model is read at a time, and asks again for every pass
        layers = None
        for whole in (stack_config(config, stack), config):
            with suppress(Exception):  # any family's constructor, with any config
                model: Any = empty_of(AutoModel, copy.deepcopy(whole))
                of_stack = model.get_decoder() if stack == DECODER else model.get_encoder()
                modules = dict(of_stack.named_modules())
                at = {layer_of(module, path): module for path, module in modules.items() if asks_interface(module)}
                mixers = {layer_of(modules[path], path): mixer for path, mixer in mixers_of(of_stack).items()}
                layers = LayerModules(frozenset(at), mixers)
                break
        _last_answer[key] = layers
    return _last_answer[key]


_last_answer: dict[tuple[str, str], LayerModules | None] = {}
