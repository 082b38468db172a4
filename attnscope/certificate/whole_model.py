"""The whole model against a second instance of it: what the oracle takes on trust of the layers' hidden states.

The oracle gets the hidden states that enter a layer's attention. That these are what embeddings, norms, MLPs and the
order of layers make them is shown by an instance that `alone` makes of the same files and runs on the same inputs: what
enters each attention module is compared, and the output. The output alone would not do: what a decoder gives does not
depend on the order in which T5's encoder states are handed over, and the weights do.

Shapes: B text, T token, M width of the output.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.certificate import second_instance
from attnscope.certificate.verdicts import Tolerance, WholeParity, output_difference
from attnscope.errors import MemoryLimitError, ModelError, UsageError
from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.listen import listening, running
from attnscope.model.families import family
from attnscope.model.fitting import WHOLE, LoadedAs
from attnscope.model.loading import chosen_device, load_config, locate
from attnscope.model.quantised import dequantizing, is_quantised, method_of
from attnscope.utils.memory import free_memory, human_bytes, is_out_of_memory

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.options import LoadOptions

NEVER = 1e30  # the size of logits of tokens that a family never gives: equal in both, and no measure of others


def check_whole(
    loaded: LoadedModel,
    first: Tensor,
    inputs: Mapping[str, Any],
    modules: Sequence[str],
    *,
    atol: float,
    engine: Engine | None = None,
) -> WholeParity:
    """Compare a model with a second instance, made of its files in a process of its own.

    first, inputs: what its forward is given. modules: the paths of its attention modules. atol, engine: as of
    `check_parity`. Raises UsageError for a model that has no files, MemoryLimitError where there is no room for two,
    ModelError where the second cannot be made.

        check_parity(loaded, ids, whole=True).whole    # asks for it
    """
    if loaded.options is None:
        message = f"{loaded.name} was made in memory: there are no files to load a second instance from"
        raise UsageError(message, "load it with attnscope.load, or leave out {whole}")
    # Two of them have to fit at once, unless the weights are spread over devices.
    needed = sum(weight.nbytes for weight in loaded.model.parameters())
    room = free_memory(loaded.device)
    if loaded.options.device_map is None and needed > room:
        raise _no_room(f"its weights take {human_bytes(needed)}, and {loaded.device} has {human_bytes(room)} free")
    implementation = (engine or ENGINES["eager"]).implementation
    with (
        running(loaded.model, implementation),
        listening(loaded.model, lambda call: None, engine=engine, computed=False),
    ):
        own = second_instance.run(loaded.model, first, inputs, modules)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}  # PEFT makes its own prefix
    tensors_given = {second_instance.FIRST: first[:, len(loaded.virtual) :], **tensors}
    second = _second_states(loaded, loaded.options, tensors_given, modules)
    differences = {name: state_difference(value, second.get(name)) for name, value in own.items()}
    return WholeParity(differences, Tolerance(atol, getattr(torch, loaded.dtype)).output)


def state_difference(own: Tensor, second: Tensor | None) -> float:
    """The largest norm of a token's difference, over the typical token's norm; infinite for another shape.

    Of an adapter whose virtual tokens not both instances give, the last tokens are compared.

    >>> state_difference(torch.ones(1, 3, 2), torch.ones(1, 3, 2))
    0.0
    """
    if second is None:
        return math.inf
    tokens = min(own.shape[-2], second.shape[-2])
    ours, theirs = (states.reshape(-1, *states.shape[-2:])[:, -tokens:] for states in (own, second))
    if ours.shape != theirs.shape:
        return math.inf
    never = (ours == theirs) & (ours.abs() > NEVER)
    return output_difference(*(states.double().masked_fill(never, 0.0) for states in (ours, theirs)))[1]


def recipe(loaded: LoadedModel, options: LoadOptions) -> dict[str, Any]:
    """How `alone` is to make the second instance: of which files, as which class, with what changed in its config.

    >>> recipe(loaded, loaded.options)["class"]
    'AutoModelForCausalLM'
    """
    options = replace(options, revision=loaded.revision, offline=True)  # the same files, which are here
    source, config, device = locate(options), load_config(options), chosen_device(options)
    loaded_as = loaded.loaded_as or LoadedAs(type(loaded.model).__name__, WHOLE)
    text = loaded.model.config.get_text_config()
    adapted = {} if source.adapter is None else {"num_labels": loaded.model.config.num_labels}
    stretched = ("rope_parameters", "max_position_embeddings") if loaded.stretched_from is not None else ()
    adapter = None
    if source.adapter is not None:
        form = options.adapter or ("beside" if is_quantised(loaded.model) else "merged")
        adapter = {
            "folder": str(source.adapter.folder),
            "embeddings": (loaded.embeddings or 0) - len(loaded.virtual),
            "merged": form == "merged" and not loaded.virtual,
        }
    # Every choice that loading made of "auto" is said here: the second instance chooses nothing.
    return {
        "class": loaded_as.kind,
        "folder": str(source.folder),
        "files": source.given,
        "entries": json.loads(config.to_json_string(use_diff=False)) if source.gguf else None,
        "config": {"transformers_weights": None, **adapted, **family(config.model_type).config_changes},
        "text_config": {name: getattr(text, name) for name in stretched},
        "dtype": "float32" if options.dtype == "auto" and device == "cpu" else options.dtype,
        "device": loaded.device,
        "device_map": options.device_map or (None if device == "cpu" else {"": device}),
        "quantize": options.quantize,
        "unpacked": not is_quantised(loaded.model) and method_of(config) is not None,
        "dequantize": dequantizing(config) is not None and getattr(loaded.model, "hf_quantizer", None) is None,
        "use_safetensors": None if options.allow_pickle else True,
        "trust_remote_code": options.trust_remote_code,
        "part": loaded_as.part,
        "adapter": adapter,
        "threads": torch.get_num_threads(),
    }


def _no_room(why: str) -> MemoryLimitError:
    return MemoryLimitError(f"there is no room for a second instance: {why}", "free memory, or leave out {whole}")


def _second_states(
    loaded: LoadedModel, options: LoadOptions, inputs: Mapping[str, Tensor], modules: Sequence[str]
) -> dict[str, Tensor]:
    """What `second_instance.run` finds in the second instance, in a process that is off the network."""
    from safetensors.torch import load_file, save_file

    with TemporaryDirectory(prefix="attnscope-") as name:
        folder, document = Path(name), recipe(loaded, options) | {"modules": list(modules)}
        (folder / second_instance.RECIPE).write_text(json.dumps(document), "utf-8")
        save_file(
            {name: values.cpu().contiguous().clone() for name, values in inputs.items()},
            folder / second_instance.INPUTS,
        )
        process = subprocess.run(
            [sys.executable, "-P", second_instance.__file__, str(folder)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        if not process.returncode:
            return load_file(folder / second_instance.OUTPUT)
    # The last line is the reason why it failed. A process that was killed, or lacked memory, has an error of its own.
    last_line = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    killed = process.returncode == -getattr(signal, "SIGKILL", 0)  # which Windows lacks
    if killed or "MemoryError" in last_line or is_out_of_memory(RuntimeError(last_line)):
        raise _no_room("memory ran out while it was loaded or run")
    raise ModelError(f"no second instance of {loaded.name} could be run: {last_line[:200]}", "leave out {whole}")
