"""What becomes of what a GGUF file states, for each architecture that llama.cpp and transformers' reader both name."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers

from attnscope.errors import ModelError
from attnscope.model.gguf import PERIODS
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from helpers.gguf_files import LAYOUTS, tiny, write

IDS = [0, *(3 + (7 * i * i + 3 * i) % 60 for i in range(47))]
BEGIN, END = "<!-- gguf: written by scripts/gguf_doc.py -->", "<!-- gguf end -->"
COLUMNS = {
    "sizes": "heads, head sizes, epsilons, experts, biases",
    "base": "`rope.freq_base`",
    "linear": "`rope.scaling.type` linear",
    "yarn": "`rope.scaling.type` yarn",
    "table": "`rope_freqs`, or `rope_factors_*` of Phi-3",
    "window": "`attention.sliding_window`",
    "cap": "`attn_logit_softcapping`",
    "scale": "`attention.scale`",
}
NEAR = 1e-5
THETA, FACTOR, ORIGINAL, WINDOW = 70000.0, 4.0, 24, 5  # no class has them by default
Case = tuple[dict[str, Any], dict[str, Any]]  # changes of the config, and keys beside the converter's


def case(arch: str, column: str) -> Case:
    """A model and the keys that say so; of an architecture without such a thing the keys alone."""
    if column == "window":
        return {"sliding_window": WINDOW} if arch in PERIODS else {}, {"attention.sliding_window": WINDOW}
    if column == "cap":
        capped = arch in ("gemma2", "gemma3")
        return {"attn_logit_softcapping": 2.0} if capped else {}, {"attn_logit_softcapping": 2.0}
    if column == "scale":
        scaled = arch in ("gemma2", "gemma3")
        return {"query_pre_attn_scalar": 4} if scaled else {}, {"attention.scale": 0.5}
    return ({}, {}) if column == "sizes" else _positions(arch, column)


def _positions(arch: str, column: str) -> Case:
    keys: dict[str, Any] = {"rope.freq_base": THETA}
    if column in ("linear", "yarn"):
        keys |= {"rope.scaling.type": column, "rope.scaling.factor": FACTOR}
    if column == "yarn":
        keys["rope.scaling.original_context_length"] = ORIGINAL
    defaults = _defaults(arch)
    if defaults is None or (arch == "phi3" and column in ("linear", "yarn")):
        return {}, keys
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
    if column in ("linear", "yarn"):
        rope |= {"rope_type": column, "factor": FACTOR}
        rope |= {"original_max_position_embeddings": ORIGINAL} if column == "yarn" else {}
    nested = "sliding_attention" in defaults
    part = 0.5 if "partial_rotary_factor" in defaults else 1.0
    rope |= {"partial_rotary_factor": part} if part != 1.0 else {}
    changes: dict[str, Any] = {}
    if arch == "gemma4" and column in ("base", "table"):  # its table says which dimensions are turned
        rope["rope_type"], keys["rope_freqs"] = "proportional", np.array([1.0] * 4 + [1e30] * 4, np.float32)
    elif column == "table":
        layout = LAYOUTS[arch].sizes
        size = layout.get("head_dim", layout.get("hidden_size", 32) // layout.get("num_attention_heads", 4))
        short = np.linspace(1.0, 3.0, int(size * part) // 2).astype(np.float32)
        long, length = (short * 4, ORIGINAL) if arch == "phi3" else (short, 96)
        rope |= {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
        rope |= {"original_max_position_embeddings": length, "attention_factor": 1.25 if arch == "phi3" else 1.0}
        if arch == "phi3":
            keys |= {"rope_factors_short": short, "rope_factors_long": long, "rope.scaling.attn_factor": 1.25}
            keys["rope.scaling.original_context_length"] = changes["original_max_position_embeddings"] = length
        else:
            keys["rope_freqs"] = short
    if nested:
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}, "full_attention": rope}
    return changes | {"rope_parameters": rope}, keys


def _defaults(arch: str) -> dict[str, Any] | None:
    return getattr(getattr(transformers, LAYOUTS[arch].config)(), "rope_parameters", None)


def own(model: Any) -> list[torch.Tensor]:
    """The attentions of a model by itself, (1, H, Q, K) each; of an encoder-decoder those of all its stacks."""
    ids, asked = torch.tensor([IDS]), {"output_attentions": True, "use_cache": False}
    with torch.no_grad():
        if not model.config.is_encoder_decoder:
            return [one for one in model(ids, **asked).attentions if one is not None]
        found = model(ids, decoder_input_ids=ids, **asked)
    return [*found.encoder_attentions, *found.decoder_attentions, *found.cross_attentions]


def outcome(arch: str, column: str) -> str:
    """`equal`, `refused`, or the largest difference of a weight from the model that was written."""
    changes, keys = case(arch, column)
    model = tiny(arch, **changes)
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "model.gguf", arch, model, **keys)
        try:
            loaded = load(LoadOptions(str(path)))
        except ModelError:
            return "refused"
    found, expected = own(loaded.model), own(model)
    assert len(found) == len(expected)
    apart = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    return "equal" if apart <= NEAR else f"{apart:.2g}"


def row(arch: str) -> str:
    return f"| {arch} | {' | '.join(outcome(arch, column) for column in COLUMNS)} |"


def table() -> str:
    """What docs/models.md has between its marks."""
    head = f"| | {' | '.join(COLUMNS.values())} |"
    return "\n".join((BEGIN, "", head, "|---" * (len(COLUMNS) + 1) + "|", *map(row, LAYOUTS), "", END))
