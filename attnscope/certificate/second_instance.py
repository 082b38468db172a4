"""A second instance of a model: transformers alone makes it of its files, in a process of its own, and runs it once.

    python -P second_instance.py FOLDER    # which holds recipe.json and inputs.safetensors, and gets output.safetensors

Nothing of attnscope is imported here, so that a fault of ours, or a class that somebody changed while the first
instance ran, is not in the second. `attnscope.certificate.whole_model` asks for it, and runs the first through `run`
too.

Shapes: B text, T token, M width of the output.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECIPE, INPUTS, OUTPUT = "recipe.json", "inputs.safetensors", "output.safetensors"
FIRST = "first"  # what the inputs' file calls the first argument of the model's forward
MOST_TOKENS = 256  # that are compared, the last: they depend on all before


def run(model: Any, first: Tensor, inputs: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Tensor]:
    """What enters modules of a model, by their paths, and last the first thing that its forward returns, by its name.

    That is its logits, or hidden states where it has no head; both (B, T, M), of the last tokens alone where there are
    many. Where more than one tensor enters a module, as an encoder's states do, a number after its path counts them.

    >>> list(run(loaded.model, torch.tensor([prompt.ids]), {}, ["model.layers.0.self_attn"]))
    ['model.layers.0.self_attn', 'logits']
    """
    entering: dict[str, Tensor] = {}

    def keep(path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3):  # a mask has 4
                times = sum(name.split(" ")[0] == path for name in entering)
                entering[f"{path} {times}" if times else path] = value[..., -MOST_TOKENS:, :].detach().cpu()

    inside = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT's wrapper
    # A head of some labels refuses texts, and attention does not depend on it.
    if inside.get_output_embeddings() is None and not inside.can_generate():
        model = inside.base_model
    names = inspect.signature(model.forward).parameters
    how: dict[str, Any] = {"use_cache": False} if {"use_cache", "kwargs"} & names.keys() else {}
    how |= {"logits_to_keep": MOST_TOKENS} if "logits_to_keep" in names else {}
    handles = [
        inside.get_submodule(path).register_forward_pre_hook(
            lambda module, args, kwargs, path=path: keep(path, args, kwargs), with_kwargs=True
        )
        for path in modules
    ]
    try:
        with torch.no_grad():
            output = model(first, **inputs, **how)
    finally:
        for handle in handles:
            handle.remove()
    parts = [("output", output[0])] if isinstance(output, tuple) else output.items()
    name, value = next((name, value) for name, value in parts if name != "loss")
    return {**entering, name: value.detach().cpu()}


def make_model(recipe: Mapping[str, Any]) -> Any:
    """The model, from its files; recipe: as `whole.recipe` gives it."""
    import transformers

    # The config: as the files say it, with what the first instance changed in it.
    code = recipe["trust_remote_code"]
    if entries := recipe["entries"]:  # transformers' own reader of a GGUF file leaves some at defaults
        config = transformers.CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
    else:
        config = transformers.AutoConfig.from_pretrained(
            recipe["folder"], local_files_only=True, trust_remote_code=code
        )
    for part, changes in ((config, recipe["config"]), (config.get_text_config(), recipe["text_config"])):
        for name, value in changes.items():
            setattr(part, name, value)
    quantize = recipe["quantize"] and transformers.BitsAndBytesConfig(**{f"load_in_{recipe['quantize']}": True})
    if recipe["dequantize"]:
        method = config.quantization_config["quant_method"]
        quantize = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method](dequantize=True)
    # The weights, by transformers alone; "eager" asks for nothing of ours.
    model = getattr(transformers, recipe["class"]).from_pretrained(
        recipe["folder"],
        config=config,
        dtype=recipe["dtype"],
        device_map=recipe["device_map"],
        attn_implementation="eager",
        use_safetensors=recipe["use_safetensors"],
        quantization_config=quantize,
        local_files_only=True,
        trust_remote_code=code,
        **recipe["files"],
    )
    if getattr(model, "hf_quantizer", None) is not None:
        unpacked(model)
    elif recipe["unpacked"]:
        even(model)
    # What of it the first instance is: a tower, or a model's part for texts, is run alone.
    model = adapted(model, **recipe["adapter"]) if recipe["adapter"] else model
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = {
        "whole": lambda: model,
        "body": lambda: inside.base_model,
        "encoder": model.get_encoder,
        "tower": lambda: tower(inside),
        "text": lambda: text(inside),
    }
    return parts[recipe["part"]]().eval()


def even(model: Any) -> None:
    """Give the weights of a model one dtype, but for those that transformers keeps wider: it left some as stored."""
    dtype = model.config.dtype
    keeps = [model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules if dtype == torch.float16 else None]
    wide = [part for parts in keeps for part in parts or ()]
    for name, weight in model.named_parameters():
        weight.data = weight.data.to(torch.float32 if any(f".{part}." in f".{name}." for part in wide) else dtype)


def unpacked(model: Any) -> None:
    """Let a quantizer's hooks unpack weights, in the model's dtype: a part that is run alone would not call them."""
    dtype, hooks = model.dtype, list(model._forward_pre_hooks.values())
    for hook in hooks:
        hook(model, ())
    for weight in model.parameters() if hooks else ():
        if weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.to(dtype)


def tower(model: Any) -> Any:
    """The part that is given pictures: of models with one for pictures and one for texts the first, else the body."""
    for part in (*model.base_model.modules(), *model.modules()):
        main = getattr(part, "main_input_name", "") == "pixel_values"
        if main and "pixel_values" in inspect.signature(part.forward).parameters:
            return part
    return model


def text(model: Any) -> Any:
    """The part that is given texts: of models with one for pictures and one for texts the second."""
    kind = type(model.config.get_text_config())
    parts = (part for part in model.modules() if type(getattr(part, "config", None)) is kind)
    return next((part for part in parts if getattr(part, "main_input_name", "") == "input_ids"), model)


def adapted(model: Any, folder: str, embeddings: int, merged: bool) -> Any:
    """The model with an adapter, by PEFT; embeddings: how many of its own tokens the adapted model has."""
    from peft import PeftModel

    if embeddings != model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(embeddings, mean_resizing=False)
    wrapped = PeftModel.from_pretrained(model, folder, local_files_only=True, trust_remote_code=False)
    return wrapped.merge_and_unload() if merged else wrapped


def main(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe = json.loads((folder / RECIPE).read_text("utf-8"))
    torch.set_num_threads(recipe["threads"])
    model = make_model(recipe)
    inputs = load_file(folder / INPUTS, device=recipe["device"])
    entering = run(model, inputs.pop(FIRST), inputs, recipe["modules"])
    save_file({name: values.contiguous().clone() for name, values in entering.items()}, folder / OUTPUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
