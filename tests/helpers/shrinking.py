"""A config made small by asking its class: a size is changed where the model can still be built, on the meta device.

shrunk("swin", build=AutoModel.from_config).depths
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from helpers.families import LAYER_COUNTS, _shrunk, _update, tiny_config

MOST = 5_000_000  # parameters that are few enough
LEAST = 4  # no size is made smaller than this
VOCABULARY = 128  # and no vocabulary smaller than this: the ids of texts are below it
Keys = tuple[str | int, ...]  # of a value in a config's JSON
Build = Callable[[PreTrainedConfig], nn.Module]


def shrunk(model_type: str, build: Build, **changes: Any) -> PreTrainedConfig:
    """A config of this type whose model has at most `MOST` parameters, where one can be found.

    Sizes that `families.SIZES` names are tried first, all at once. Where the class refuses them or they are not enough,
    every value of the default config is halved or made an eighth, wherever it stands, as long as the class takes it.
    changes: arguments that this type needs. Raises what transformers raises of the default config, if it raises.
    """
    config_class = CONFIG_MAPPING[model_type]
    try:
        config = _with_sections(tiny_config(model_type, **changes))
        parameters(config, build)
    except Exception:  # any class's own checks: sizes that depend on each other
        config = _with_few_layers(config_class, changes, build)
    return _with_sections(_by_value(config, build))


def parameters(config: PreTrainedConfig, build: Build) -> int:
    """The parameters of a config's model. Raises what its class raises."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(deepcopy(config)).parameters())


def _with_few_layers(config_class: Any, changes: Mapping[str, Any], build: Build) -> PreTrainedConfig:
    """The default config with few layers and ids within any vocabulary; without these where the class refuses them."""
    for arguments in (_layers_and_ids(_shrunk(config_class(**changes))), {}):
        _update(arguments, dict(changes))
        try:
            config = config_class(**arguments)
            parameters(config, build)
        except Exception:  # any class's own checks
            if arguments == changes:
                raise
        else:
            return config
    raise AssertionError("the last arguments are the changes alone")


def _layers_and_ids(arguments: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping) and "model_type" in value:
            kept[name] = _layers_and_ids(value) | {"model_type": value["model_type"]}
        elif name in LAYER_COUNTS or isinstance(value, list) or name.endswith(("_token_id", "_token_index")):
            kept[name] = value
    return kept


def _by_value(config: PreTrainedConfig, build: Build) -> PreTrainedConfig:
    """Every size, from the largest, an eighth or half of itself: sizes that must be equal change together."""
    count, refused = parameters(config, build), set[tuple[int, int]]()
    while count > MOST:
        for size, less in _steps(config, refused):
            changed = _replaced(config, size, less)
            try:
                fewer = parameters(changed, build) if changed else count
            except Exception:  # any class's own checks
                fewer = count
            if changed is not None and fewer < count:
                config, count = changed, fewer
                break
            refused.add((size, less))
        else:
            break
    return config


def _steps(config: PreTrainedConfig, refused: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    sizes = sorted({size for _, size in _sizes(config.to_dict())}, reverse=True)
    steps = [(size, size // part) for size in sizes for part in (8, 2)]
    return iter([step for step in steps if step[1] >= LEAST and step not in refused])


def _with_sections(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with rotary sections as wide as its heads, where its model cuts their dims in such.

    Their widths are a default in the code of the model, for heads of the default size.
    """
    for part in [config, *(getattr(config, name, None) for name in config.sub_configs)]:
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and "rope_type" in rope and "mrope_section" in _code_of(part):
            width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            pairs = int(width * rope.get("partial_rotary_factor", 1)) // 2
            rope["mrope_section"] = [pairs // 3, pairs // 3, pairs - 2 * (pairs // 3)]
    return config


def _code_of(config: PreTrainedConfig) -> str:
    """The code of the models of a config."""
    path = Path(inspect.getfile(type(config)))
    models = path.with_name(path.name.replace("configuration_", "modeling_"))
    return models.read_text() if models.is_file() else ""


def _replaced(config: PreTrainedConfig, size: int, less: int) -> PreTrainedConfig | None:
    values = config.to_dict()
    for place, value in _sizes(config.to_dict()):
        if value == size and (less >= VOCABULARY or "vocab" not in str(place[-1])):
            holder: Any = values
            for name in place[:-1]:
                holder = holder[name]
            holder[place[-1]] = less
    try:
        return type(config).from_dict(values)
    except Exception:  # any class's own checks
        return None


def _sizes(values: Any, place: Keys = ()) -> Iterator[tuple[Keys, int]]:
    """The whole numbers of a config's JSON that are no ids, with their places."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in items:
        if isinstance(value, dict | list) and name not in ("id2label", "label2id"):
            yield from _sizes(value, (*place, name))
        elif isinstance(value, int) and not isinstance(value, bool) and not str(name).endswith(("_id", "_index")):
            yield (*place, name), value
