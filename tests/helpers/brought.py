"""Models as people bring them: adapters saved by PEFT, GGUF files, folders with code of their own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from attnscope.model.loading import DEMO_FOLDER
from helpers.families import tiny_model
from helpers.folders import with_tokenizer
from helpers.gguf_files import LAYOUTS, add_keys, rows

SPECIAL = ("<s>", "</s>", "<unk>")


def an_adapter(folder: Path, base: Path | str = DEMO_FOLDER, config: PeftConfig | None = None, **named: Any) -> Path:
    """Save an adapter with random weights: LoRA of rank 4 on q, k and v unless told otherwise.

    named: changes of its config.json.
    """
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    get_peft_model(model, config or LoraConfig(task_type="CAUSAL_LM", **lora)).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)} | named))
    return folder


def in_peft(folder: Path, ids: Sequence[int], base: Path = DEMO_FOLDER) -> torch.Tensor:
    """The attentions of PEFT's own model, (layers, H, Q, K); virtual tokens that are no queries have no rows."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32", attn_implementation="eager")
    with torch.no_grad():
        found = PeftModel.from_pretrained(model, str(folder)).eval()(torch.tensor([ids]), output_attentions=True)
    return torch.cat(found.attentions)


def a_gguf(path: Path, model: Any, kind: GGMLQuantizationType | None = None, **tensors: np.ndarray) -> Path:
    """Write a llama with the tokenizer of the embedded model as llama.cpp's converter does.

    kind: how matrices are stored, float32 without one. tensors: more of them.
    """
    writer = GGUFWriter(str(path), "llama")
    add_keys(writer, "llama", LAYOUTS["llama"].keys(model.config))
    _vocabulary(writer)
    for name, x in rows("llama", model):
        if kind is None or x.ndim < 2:
            writer.add_tensor(name, np.ascontiguousarray(x))
        else:
            writer.add_tensor(name, quants.quantize(x, kind), raw_dtype=kind)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compressed(folder: Path, scheme: str, **rounded: Any) -> Path:
    """Save a tiny llama as compressed-tensors packs it, under one of that library's schemes, with a tokenizer.

    rounded: what else the quantization config says, such as its `kv_cache_scheme`.
    """
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = tiny_model("llama", num_hidden_layers=2, hidden_size=64, vocab_size=2000, initializer_range=0.2)
    groups = preset_name_to_scheme(scheme, ["Linear"])
    args = groups.weights
    if (args.group_size or 0) > 32:
        args.group_size = 32
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": groups}, ignore=["lm_head"], **rounded))
    for layer in [one for one in model.modules() if hasattr(one, "weight_scale")]:
        weight, more = layer.weight.detach(), {}
        parts = {"channel": weight, "tensor": weight.reshape(1, -1)}.get(
            args.strategy, weight.reshape(len(weight), -1, args.group_size or 1)
        )
        if hasattr(layer, "weight_global_scale"):
            layer.weight_global_scale.data.fill_(float(generate_gparam(weight.amin(), weight.amax())))
            more = {"global_scale": layer.weight_global_scale}
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, **more)
        layer.weight_scale.data.copy_(scale.reshape(layer.weight_scale.shape))
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero.reshape(layer.weight_zero_point.shape))
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(8 / 448)
    for name, parameter in model.named_parameters():
        if name.endswith(("k_scale", "v_scale")):
            parameter.data.fill_(8 / 448)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with_tokenizer(model, folder)
    compressor.update_config(str(folder))
    return folder


def _vocabulary(writer: GGUFWriter) -> None:
    tokenizer = json.loads((DEMO_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    names = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in SPECIAL else 1 for name in names])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
