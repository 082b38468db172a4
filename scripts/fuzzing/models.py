"""Folders of models: configs, weights, what GGUF files say, how weights are quantised, how a text goes on."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

from fuzzing.made import gguf, model_folder
from fuzzing.trying import Try, heads, kind
from fuzzing.words import JSONS, NASTY, RAW_JSON, REGEXES, TRAPPED, damage, edit, odd_file

CONFIGURED = (
    "model_type", "text_config", "auto_map", "architectures", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_size", "head_dim", "vocab_size", "max_position_embeddings", "layer_types",
    "rope_parameters", "torch_dtype", "dtype", "sliding_window", "quantization_config", "transformers_weights",
    "tie_word_embeddings", "_attn_implementation", "attn_implementation", "is_decoder", "tokenizer_class",
    "sub_configs", "base_model_tp_plan",
)  # fmt: skip

FILES = ("../x.safetensors", "/etc/passwd", "x.bin", "absent.safetensors", ".", "", "x.safetensors", *NASTY)


@kind
def configs(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    if rng.random() < 0.5:
        key = rng.choice(CONFIGURED)
        edit(model / "config.json", lambda values: values.update({key: rng.choice(JSONS)}))
    else:
        damage(rng, model / rng.choice(("config.json",) * 3 + ("generation_config.json",)))
    return heads("--model", str(model)) if rng.random() < 0.7 else Try(["info", str(model)], terminal=True)


@kind
def weights(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    file, index = model / "model.safetensors", model / "model.safetensors.index.json"
    content = file.read_bytes()
    trapped = pickle.dumps(Trap(folder / TRAPPED))
    what = rng.choice(("index", "index", "header", "cut", "pickle", "flip", "other list"))
    if what in ("index", "other list"):
        name = rng.choice(FILES)
        if 0 < len(name) < 50 and not {*name} & {*"/\x00\ud800"} and name not in ("..", "."):
            (model / name).write_bytes(rng.choice((trapped, content, b"")))
        listed = rng.choice((name, name, *JSONS))
        mapped: Any = rng.choice(({"a": listed}, {"a": "model.safetensors", "b": listed}, listed))
        document = {"metadata": rng.choice(({}, *JSONS)), "weight_map": mapped}
        if what == "other list":
            index = model / "other.safetensors.index.json"
            edit(model / "config.json", lambda values: values.update(transformers_weights=index.name))
        else:
            file.unlink()
        index.write_text(json.dumps(document), encoding="utf-8")
        if rng.random() < 0.1:
            damage(rng, index)
    elif what == "header":
        header = rng.choice((*RAW_JSON, *(json.dumps({"a": one}).encode() for one in JSONS)))
        file.write_bytes(rng.choice((len(header), 2**63, 0)).to_bytes(8, "little") + header + bytes(64))
    elif what == "cut":
        file.write_bytes(content[: rng.randrange(200)])
    elif what == "flip":
        place = rng.randrange(3000)
        file.write_bytes(content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :])
    else:
        file.write_bytes(trapped)
    return heads("--model", str(model))


@kind
def gguf_files(rng: random.Random, folder: Path) -> Try:
    names = ("general.architecture", "llama.block_count", "tokenizer.ggml.tokens", *NASTY)
    document = b"GGUF" + struct.pack("<IQQ", rng.choice((3, 3, 2, 9)), rng.choice((0, 0, 1, 2**63)), 2)
    for name in rng.choices(names, k=2):
        said = name.encode(errors="surrogatepass")
        value = rng.choice((struct.pack("<IQ", 8, 5) + b"llama", struct.pack("<II", 4, rng.randrange(2**32)), b""))
        document += struct.pack("<Q", rng.choice((len(said), len(said), 2**62))) + said + value
    path, whole = folder / "model.gguf", gguf().read_bytes()
    path.write_bytes(rng.choice((document, document, document[:20], b"GGUF", b"", whole)))
    if rng.random() < 0.3:
        at = rng.randrange(4000)  # in its metadata
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    return heads("--model", str(path)) if rng.random() < 0.7 else Try(["info", str(path)], terminal=True)


class Trap:
    """A pickle that leaves a folder behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# What a config says of how its weights are quantised; the demo's are plain.
QUANTISED: tuple[Any, ...] = (
    *({"load_in_8bit": True, "llm_int8_skip_modules": [one]} for one in REGEXES),
    *({"load_in_4bit": True, "bnb_4bit_quant_type": one} for one in ("nf4", "fp4", "x")), {"load_in_8bit": True},
    {"load_in_4bit": True}, {"load_in_8bit": True, "load_in_4bit": True},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "os.system"}, {"load_in_8bit": True, "llm_int8_threshold": "x"},
    {}, {"bits": 4, "group_size": 0}, {"bits": 10**9, "group_size": -1, "dataset": "c4"},
    {"bits": 4, "modules_to_not_convert": "x"}, {"weights": "int8", "modules_to_not_convert": ["(.*.*)*x"]},
    {"weight_block_size": [0, 0]}, {"config_groups": {"a": {}}}, {"quant_type": "int4_weight_only"},
    {"quant_type": {"default": {"_type": "Evil", "_data": {}}}}, {"nbits": 4},
)  # fmt: skip
METHODS = (
    "bitsandbytes", "gptq", "awq", "fp8", "fbgemm_fp8", "hqq", "quanto", "torchao", "compressed-tensors", "aqlm", "x",
    5,
)  # fmt: skip
LOOPS = ("assistant_early_exit", "prompt_lookup_num_tokens")  # what generates in other ways
ENDLESS = (10**12, 10**12, 10**6, -1, "x")
# What the model's own generation config says, whatever was asked.
GENERATION: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": ENDLESS, "num_beams": (10**6, 3), "num_return_sequences": (10**9, 2),
    "max_new_tokens": ENDLESS, "min_new_tokens": (10**9,), "max_time": (-1, "x"),
    "penalty_alpha": (0.5,), "top_k": (10**12, -1), "dola_layers": ("high", [10**9]),
    "prompt_lookup_num_tokens": ENDLESS, "num_assistant_tokens": ENDLESS,
    "cache_implementation": ("static", "offloaded", "quantized", "x"), "custom_generate": ("evil", "owner/evil"),
    "stop_strings": (["((a+)+)+$"] * 10**4, ["a" * 10**6], "x"), "bad_words_ids": ([[10**9]], [[]]),
    "suppress_tokens": ([10**9], [-1]), "forced_bos_token_id": (10**9, -1), "forced_eos_token_id": (10**9,),
    "eos_token_id": (10**9, [], "x"), "pad_token_id": (10**9, -1), "bos_token_id": (10**9,),
    "temperature": (0, -1, 1e308), "repetition_penalty": (0, -1, 1e308), "do_sample": (True,),
    "return_dict_in_generate": (False,), "output_scores": (True,), "watermarking_config": ({"context_width": 10**9},),
    "compile_config": ({"mode": "x"},), "guidance_scale": (2.0,), "sequence_bias": ([[[10**9], 1.0]],),
    "use_cache": (False,), "exponential_decay_length_penalty": ([10**9, 1e9],), "no_repeat_ngram_size": ENDLESS,
    "transformers_version": (5,),
}  # fmt: skip


@kind
def quantised(rng: random.Random, folder: Path) -> Try:
    said = {"quant_method": rng.choice((*METHODS[:1] * 6, *METHODS)), **rng.choice(QUANTISED)}
    return heads("--model", str(model_folder(folder, quantization_config=said)))


@kind
def generation(rng: random.Random, folder: Path) -> Try:
    model = model_folder(folder)
    path = model / "generation_config.json"
    if rng.random() < 0.7:
        for key in sorted({rng.choice((*GENERATION, *LOOPS * 5)) for _ in range(rng.choice((1, 1, 2)))}):
            value = rng.choice((*GENERATION[key], *GENERATION[key], rng.choice(JSONS)))
            edit(path, lambda values, key=key, value=value: values.update({key: value}))
    else:
        rng.choice((damage, damage, odd_file))(rng, path)
    return heads("--model", str(model), "--generate", "2")
