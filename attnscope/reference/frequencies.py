"""How fast each pair of dims turns: inverse frequencies (M,), and what a longer context makes of them.

    inv_freq_m = base^(-2m / dim),   m = 0 ... dim / 2 - 1          Su et al. 2021, "RoFormer", section 3.3.2

A pair turns once in 2 pi / inv_freq tokens, its wavelength. `dim` is the number of dims that turn. All in float32, in
the order of operations of transformers' `modeling_rope_utils`: at position 1,000 a last bit of a frequency is 1e-4 of
an angle, and models were trained with theirs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(
    rope: Mapping[str, Any], dim: int, *, max_position: int | None = None, seq_len: int | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies (M,) and attention factor, from a config's `rope_parameters`.

    rope: `rope_type` (default, linear, dynamic, yarn, longrope, llama3, proportional), `rope_theta` and that type's own
    entries. dim: dims that turn (proportional: the whole head). max_position: the config's `max_position_embeddings`.
    seq_len: longest text of the batch, which dynamic and longrope depend on. Raises ValueError for an unknown type.

    >>> inverse_frequencies({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, dim=4)
    (tensor([0.5000, 0.0050]), 1.0)
    """
    kind = rope.get("rope_type", "default")
    if kind not in KINDS:
        raise ValueError(f"expected a rope_type out of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind](rope, dim, max_position, seq_len)


def default_frequencies(dim: int, base: float = 10000.0) -> Tensor:
    """base^(-2m / dim); (dim / 2,).

    >>> default_frequencies(4)
    tensor([1.0000, 0.0100])
    """
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def dynamic_base(dim: int, base: float, factor: float, max_position: int, seq_len: int | None = None) -> float:
    """The base for a text longer than the model was trained on (bloc97 and emozilla 2023, "dynamic NTK").

    base * (factor * n / max_position - (factor - 1))^(dim / (dim - 2)), n = max(seq_len, max_position).

    >>> dynamic_base(64, 10000.0, factor=2.0, max_position=2048, seq_len=100)
    10000.0
    """
    n = max(seq_len or 0, max_position)
    return base * (factor * n / max_position - (factor - 1)) ** (dim / (dim - 2))


def yarn_frequencies(
    dim: int,
    base: float,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Fast pairs as they are, slow ones divided by factor, a ramp between (Peng et al. 2023, "YaRN", section 3.2).

    beta_fast, beta_slow: turns within the original context above which a pair is fast, below which it is slow; the dim
    that makes r turns is dim * log(original_max_position / (2 pi r)) / (2 log base). truncate: whole dims only.

    >>> yarn_frequencies(8, 10000.0, factor=4.0, original_max_position=2048) / default_frequencies(8)
    tensor([1.0000, 1.0000, 0.6250, 0.2500])
    """

    def turning_dim(turns: float) -> float:
        return dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = turning_dim(beta_fast), turning_dim(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # 0.001: the ramp of a single step has no slope
    slow_M = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    fast_M = 1 - slow_M
    wave_M = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (factor * wave_M) * (1 - fast_M) + 1.0 / wave_M * fast_M


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 for a factor up to 1 (Peng et al. 2023, equation 15).

    >>> round(yarn_mscale(40.0), 4)
    1.3689
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_frequencies(dim: int, base: float, factors: Sequence[float]) -> Tensor:
    """Each pair divided by its own, searched factor (Ding et al. 2024, "LongRoPE", equation 3); (dim / 2,).

    >>> longrope_frequencies(4, 10000.0, [1.0, 2.0])
    tensor([1.0000, 0.0050])
    """
    wave_M = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wave_M)


def llama3_frequencies(
    dim: int, base: float, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: int
) -> Tensor:
    """Long waves divided by factor, short ones as they are, smooth between (Llama 3.1, `apply_scaling`, 2024).

    With r = original_max_position / wavelength: slow below low_freq_factor, fast above high_freq_factor.

    >>> rope = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    >>> llama3_frequencies(4, 500000.0, **rope) / default_frequencies(4, 500000.0)
    tensor([1.0000, 0.3711])
    """
    inv_freq_M = default_frequencies(dim, base)
    wavelength_M = 2 * math.pi / inv_freq_M
    smooth_M = (original_max_position / wavelength_M - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between_M = (1 - smooth_M) * inv_freq_M / factor + smooth_M * inv_freq_M
    scaled_M = torch.where(wavelength_M > original_max_position / low_freq_factor, inv_freq_M / factor, between_M)
    return torch.where(wavelength_M < original_max_position / high_freq_factor, inv_freq_M, scaled_M)


def proportional_frequencies(dim: int, base: float, *, proportion: float = 1.0, factor: float = 1.0) -> Tensor:
    """The first share of the pairs turns as in a whole head, the others do not turn (Gemma 4); (dim / 2,).

    >>> proportional_frequencies(8, 10000.0, proportion=0.5)
    tensor([1.0000, 0.1000, 0.0000, 0.0000])
    """
    inv_freq_M = default_frequencies(dim, base)
    inv_freq_M[int(proportion * dim // 2) :] = 0.0
    return inv_freq_M / factor


def _default(rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None) -> tuple[Tensor, float]:
    return default_frequencies(dim, rope["rope_theta"]), 1.0


def _linear(rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None) -> tuple[Tensor, float]:
    # positions divided by factor (Chen et al. 2023, "Position Interpolation", equation 3), said of the frequencies
    return default_frequencies(dim, rope["rope_theta"]) / rope["factor"], 1.0


def _dynamic(rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None) -> tuple[Tensor, float]:
    longest = _needed(max_position, "dynamic")
    return default_frequencies(dim, dynamic_base(dim, rope["rope_theta"], rope["factor"], longest, seq_len)), 1.0


def _yarn(rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None) -> tuple[Tensor, float]:
    factor, original = _stretch(rope, max_position), rope["original_max_position_embeddings"]
    inv_freq_M = yarn_frequencies(
        dim,
        rope["rope_theta"],
        factor=factor,
        original_max_position=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )
    scaling, mscale, all_dim = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if scaling is None:
        scaling = yarn_mscale(factor)
        if mscale and all_dim:  # DeepSeek takes all_dim's part out of q and k again, into the softmax scale
            scaling = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return inv_freq_M, scaling


def _longrope(rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None) -> tuple[Tensor, float]:
    original = rope["original_max_position_embeddings"]
    factors = rope["long_factor"] if (seq_len or 0) > original else rope["short_factor"]
    scaling = rope.get("attention_factor")
    if scaling is None:
        # Ding et al. 2024, section 3.3: sqrt(1 + ln(factor) / ln(original context))
        factor = _stretch(rope, max_position)
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return longrope_frequencies(dim, rope["rope_theta"], factors), scaling


def _llama3(rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None) -> tuple[Tensor, float]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    original = rope["original_max_position_embeddings"]
    entries = {name: rope[name] for name in names}
    return llama3_frequencies(dim, rope["rope_theta"], **entries, original_max_position=original), 1.0


def _proportional(
    rope: Mapping[str, Any], dim: int, max_position: int | None, seq_len: int | None
) -> tuple[Tensor, float]:
    share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    return proportional_frequencies(dim, rope["rope_theta"], proportion=share, factor=factor), 1.0


def _stretch(rope: Mapping[str, Any], max_position: int | None) -> float:
    if rope.get("factor") is not None:
        return rope["factor"]
    return _needed(max_position, rope["rope_type"]) / rope["original_max_position_embeddings"]


def _needed(max_position: int | None, kind: str) -> int:
    if max_position is None:
        raise ValueError(f"expected max_position for rope_type {kind!r}, got None")
    return max_position


KINDS: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
