"""A second instance of a model: transformers alone makes it of its files, in a process of its own, and runs it once.

    python -P alone.py FOLDER    # which holds asked.json and inputs.safetensors, and gets output.safetensors

Nothing of attnscope is imported here, so that a fault of ours, or a class that somebody changed while the first
instance ran, is not in the second. `attnscope.parity.whole` asks for it, and runs the first through `output_of` too.

Shapes: B text, T token, M width of the output.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ASKED, INPUTS, OUTPUT = "asked.json", "inputs.safetensors", "output.safetensors"
FIRST = "first"  # what the inputs' file calls the first argument of the model's forward
MOST_TOKENS = 256  # whose logits are made, the last: they depend on all tokens before


def output_of(model: Any, first: Tensor, inputs: Mapping[str, Any]) -> tuple[str, Tensor]:
    """The first thing that a model's forward returns and its name: logits, or hidden states where it has no head.

    (B, T, M), of the last tokens alone where its family can leave out the others' logits.

    >>> output_of(model, ids_BT, {})[0]
    'logits'
    """
    names = inspect.signature(model.forward).parameters
    how: dict[str, Any] = {"use_cache": False} if {"use_cache", "kwargs"} & names.keys() else {}
    how |= {"logits_to_keep": MOST_TOKENS} if "logits_to_keep" in names else {}
    with torch.no_grad():
        output = model(first, **inputs, **how)
    if isinstance(output, tuple):
        return "output", output[0]
    return next((name, found) for name, found in output.items() if name != "loss")


def made(asked: Mapping[str, Any]) -> Any:
    """The model, from its files; asked: as `whole.recipe` gives it."""
    import transformers

    files = {"local_files_only": True, "trust_remote_code": asked["trust_remote_code"], **asked["files"]}
    config = transformers.AutoConfig.from_pretrained(asked["folder"], **files)
    for part, changes in ((config, asked["config"]), (config.get_text_config(), asked["text_config"])):
        for name, value in changes.items():
            setattr(part, name, value)
    quantize = asked["quantize"] and transformers.BitsAndBytesConfig(**{f"load_in_{asked['quantize']}": True})
    model = getattr(transformers, asked["class"]).from_pretrained(
        asked["folder"],
        config=config,
        dtype=asked["dtype"],
        device_map=asked["device_map"],
        attn_implementation="eager",
        use_safetensors=asked["use_safetensors"],
        quantization_config=quantize,
        **files,
    )
    model = adapted(model, **asked["adapter"]) if asked["adapter"] else model
    return (model.get_encoder() if asked["encoder"] else model).eval()


def adapted(model: Any, folder: str, embeddings: int, merged: bool) -> Any:
    """The model with an adapter, by PEFT; embeddings: how many of its own tokens the adapted model has."""
    from peft import PeftModel

    if embeddings != model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(embeddings, mean_resizing=False)
    found = PeftModel.from_pretrained(model, folder, local_files_only=True)
    return found.merge_and_unload() if merged else found


def main(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    asked = json.loads((folder / ASKED).read_text("utf-8"))
    torch.set_num_threads(asked["threads"])
    model = made(asked)
    inputs = load_file(folder / INPUTS, device=asked["device"])
    name, found = output_of(model, inputs.pop(FIRST), inputs)
    save_file({name: found.detach().cpu().contiguous()}, folder / OUTPUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
