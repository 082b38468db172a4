"""Adapters: what their config says, and what their weights are."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from fuzzing.models import Trap
from fuzzing.trying import Try, heads, kind
from fuzzing.words import JSONS, NASTY, REGEXES, TRAPPED, damage, edit, odd_file

SAID = {"peft_type": "LORA", "base_model_name_or_path": "demo", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 2}
SAID |= {"target_modules": ["q_proj"], "revision": None, "auto_mapping": None, "modules_to_save": None}
# What one key of the config is set to.
CHANGED: dict[str, tuple[Any, ...]] = {
    "target_modules": REGEXES, "exclude_modules": REGEXES, "layers_pattern": REGEXES, "target_parameters": REGEXES,
    "rank_pattern": tuple({one: 1} for one in REGEXES), "alpha_pattern": tuple({one: 1} for one in REGEXES),
    "layers_to_transform": (0, [10**9], list(range(10**5)), -1), "r": (1_000_000, 10**9, 0, -1, 1.5),
    "init_lora_weights": ("pissa", "pissa_niter_1000000000", "olora", "eva", "corda", "loftq", "orthogonal"),
    "layer_replication": ([[0, 4]] * 3, [[0, 4]] * 200_000, [[4, 0]], [[0, 10**9]], [[0]]),
    "lora_dropout": (2, -1, 1e400), "use_dora": (True,), "use_rslora": (True,), "lora_bias": (True,),
    "bias": ("all",), "modules_to_save": (["lm_head"], ["q_proj"] * 10**5, REGEXES[:1]),
    "megatron_core": ("os", "evil"), "auto_mapping": ({"base_model_class": "x", "parent_library": "evil"},),
    "trainable_token_indices": ([10**9], [-1]),
    "peft_type": ("LOHA", "LOKR", "VERA", "IA3", "OFT", "BOFT", "PREFIX_TUNING", "PROMPT_TUNING", "XLORA", "LN_TUNING"),
    "num_virtual_tokens": (10**9,), "runtime_config": ({"ephemeral_gpu_offload": True},),
    "loftq_config": ({"loftq_bits": 4},), "corda_config": ({"cache_file": "/dev/zero"},),
    "eva_config": ({"rho": -1},), "base_model_name_or_path": NASTY,
}  # fmt: skip


@kind
def adapters(rng: random.Random, folder: Path) -> Try:
    import numpy as np
    from safetensors.numpy import save_file

    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    edit(config, lambda values: values.update(SAID))
    shapes = {"lora_A": (1, 192), "lora_B": (192, 1)}
    part = "base_model.model.model.layers.{}.self_attn.q_proj.{}.weight"
    save_file({part.format(i, name): np.ones(shapes[name], np.float32) for i in range(4) for name in shapes}, weights)
    what = rng.choice(("damaged", "damaged", "changed", "changed", "changed", "cut", "pickle"))
    if what == "damaged":
        damage(rng, config)
    elif what == "changed":
        key = rng.choice(list(CHANGED))
        edit(config, lambda values: values.update({key: rng.choice((*CHANGED[key], *CHANGED[key], *JSONS[:4]))}))
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[: rng.randrange(weights.stat().st_size)])
    else:
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(folder / TRAPPED)))
        odd_file(rng, weights)
    return heads("--model", str(folder), "--set", f"adapter={rng.choice(('merged', 'beside'))}")
