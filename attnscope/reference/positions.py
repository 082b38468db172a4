"""Positions of tokens, in the forms that models give them to attention: rotary, ALiBi, and a learned table.

Rotary: q and k are turned by an angle that grows with their position, so q . k knows their distance.

    (a, b) -> (a cos t - b sin t, b cos t + a sin t),   t = position * inv_freq_m
                                                        Su et al. 2021, "RoFormer", equations 15 and 34

One pair of dims per frequency. Families differ in which dims make a pair, and in how many dims turn at all.

How fast each pair of dims turns: inverse frequencies (M,), and what a longer context makes of them.

    inv_freq_m = base^(-2m / dim),   m = 0 ... dim / 2 - 1          Su et al. 2021, "RoFormer", section 3.3.2

A pair turns once in 2 pi / inv_freq tokens, its wavelength. `dim` is the number of dims that turn. All in float32, in
the order of operations of transformers' `modeling_rope_utils`: at position 1,000 a last bit of a frequency is 1e-4 of
an angle, and models were trained with theirs.

ALiBi: no position vectors, but a penalty that grows with distance (Press et al. 2022, "Train Short, Test Long").

    logits_HQK = scale * q k^T - slope_H * (query - key)

A learned table: a bias for every bucket of distances and head (Raffel et al. 2020, "T5").

    logits_HQK = scale * q k^T + table[bucket(key - query), head]

Near distances have a bucket each, far ones share buckets that grow with the logarithm of the distance (section 2.1).

Shapes: T token, A axis, D width of q or k, M pairs that turn (2 M <= D), H head, Q query, K key, N bucket.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("half", "interleaved", "deinterleaved")
KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def cos_sin(positions_T: Tensor, inv_freq_M: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles: two tensors (..., T, M), in the frequencies' dtype.

    scaling: YaRN's and LongRoPE's attention factor; it multiplies q and k, so the logits get its square.

    >>> cos_sin(torch.tensor([0, 1]), torch.tensor([torch.pi]))[0]
    tensor([[ 1.],
            [-1.]])
    """
    angle_TM = positions_T[..., None].to(inv_freq_M.dtype) * inv_freq_M
    return angle_TM.cos() * scaling, angle_TM.sin() * scaling


def axial_cos_sin(
    positions_AT: Tensor, axis_M: Tensor, inv_freq_M: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same where tokens have positions on several axes, and pair m turns by axis_M[m]; two tensors (T, M).

    >>> axial_cos_sin(torch.tensor([[0], [1]]), torch.tensor([0, 1]), torch.tensor([torch.pi, torch.pi]))[0]
    tensor([[ 1., -1.]])
    """
    angle_TM = positions_AT[axis_M].T.to(inv_freq_M.dtype) * inv_freq_M
    return angle_TM.cos() * scaling, angle_TM.sin() * scaling


def apply_rotary(
    x_TD: Tensor, cos_TM: Tensor, sin_TM: Tensor, *, layout: str = "half", part: str = "first", reverse: bool = False
) -> Tensor:
    """q or k with 2 M of its dims turned, the others as they were; shape and dtype of x.

    x: (..., H, T, D). cos, sin: (T, M), or (B, T, M) where texts have their own positions.
    layout, which dims are pair m: "half": m and m + M (GPT-NeoX, Llama); "interleaved": 2m and 2m + 1 (RoFormer,
    GPT-J, Cohere, GLM); "deinterleaved": reads interleaved, leaves half (DeepSeek; the same logits as interleaved).
    part: "first" or "last" 2 M dims. reverse: turn the other way (nanochat). Raises ValueError for another layout or
    part, and where 2 M > D.

    >>> cos, sin = cos_sin(torch.tensor([1]), torch.tensor([torch.pi / 2]))
    >>> apply_rotary(torch.tensor([[1.0, 0.0, 7.0]]), cos, sin).round()
    tensor([[-0., 1., 7.]])
    """
    width = 2 * cos_TM.shape[-1]
    if layout not in LAYOUTS:
        raise ValueError(f"expected a layout out of {', '.join(LAYOUTS)}, got {layout!r}")
    if part not in ("first", "last"):
        raise ValueError(f"expected part to be first or last, got {part!r}")
    if width > x_TD.shape[-1]:
        raise ValueError(f"expected at most {x_TD.shape[-1]} dims to turn, got {width}")
    # Texts with positions of their own have angles of their own, which are those of all heads.
    cos_TM, sin_TM = (t.unsqueeze(-3) if t.dim() == 3 else t for t in (cos_TM, sin_TM))
    sin_TM = -sin_TM if reverse else sin_TM
    start = 0 if part == "first" else x_TD.shape[-1] - width
    before, turned, after = x_TD.split([start, width, x_TD.shape[-1] - start - width], dim=-1)
    a_TM, b_TM = turned.chunk(2, dim=-1) if layout == "half" else (turned[..., 0::2], turned[..., 1::2])
    pair = (a_TM * cos_TM - b_TM * sin_TM, b_TM * cos_TM + a_TM * sin_TM)
    turned = torch.stack(pair, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(pair, dim=-1)
    return torch.cat([before, turned.to(x_TD.dtype), after], dim=-1)


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

    def longest() -> int:
        if max_position is None:
            raise ValueError(f"expected max_position for rope_type {kind!r}, got None")
        return max_position

    def stretch() -> float:
        factor = rope.get("factor")
        return longest() / rope["original_max_position_embeddings"] if factor is None else factor

    # Types that leave q and k as long as they are: their factor is 1.
    base = rope["rope_theta"]
    if kind == "default":
        return default_frequencies(dim, base), 1.0
    if kind == "linear":  # positions divided by factor (Chen et al. 2023, "Position Interpolation", equation 3)
        return default_frequencies(dim, base) / rope["factor"], 1.0
    if kind == "dynamic":
        return default_frequencies(dim, dynamic_base(dim, base, rope["factor"], longest(), seq_len)), 1.0
    if kind == "proportional":
        share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
        return proportional_frequencies(dim, base, proportion=share, factor=factor), 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        entries = {name: rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
        return llama3_frequencies(dim, base, **entries, original_max_position=original), 1.0

    # The others make q and k longer, by what the config says or, where it does not, by the source's rule.
    scaling = rope.get("attention_factor")
    if kind == "longrope":
        if scaling is None:  # Ding et al. 2024, section 3.3: sqrt(1 + ln(factor) / ln(original context))
            factor = stretch()
            scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        factors = rope["long_factor"] if (seq_len or 0) > original else rope["short_factor"]
        return longrope_frequencies(dim, base, factors), scaling
    factor, mscale, all_dim = stretch(), rope.get("mscale"), rope.get("mscale_all_dim")
    inv_freq_M = yarn_frequencies(
        dim,
        base,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )
    if scaling is None:
        scaling = yarn_mscale(factor)
        if mscale and all_dim:  # DeepSeek takes all_dim's part out of q and k again, into the softmax scale
            scaling = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return inv_freq_M, scaling


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


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> Tensor:
    """The slopes (H,): 2^(-8/n), 2^(-16/n), ... 2^-8 for n heads, n a power of 2 (section 3; BLOOM, Falcon, MPT).

    For another number the authors' code takes the slopes of the power of 2 below, then every other slope of the power
    of 2 above. max_bias: another last exponent than 8 (`alibi_bias_max` of MPT). Falcon rounds slopes to bfloat16, and
    divides the bias by sqrt(D) together with the logits.

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    below = 2 ** math.floor(math.log2(n_heads))
    places = [(h, n) for n, step in ((below, 1), (2 * below, 2)) for h in range(0, n, step)]
    return torch.tensor([2.0 ** (-max_bias * (h + 1) / n) for h, n in places])[:n_heads]


def alibi_bias(slopes_H: Tensor, query_Q: Tensor, key_K: Tensor) -> Tensor:
    """The bias (H, Q, K) to add to the logits: -slope * (query - key), positions as in `masks.positions`.

    BLOOM and MPT add slope * key instead: the same weights, since softmax doesn't see a row's constant.

    >>> alibi_bias(torch.tensor([0.5]), torch.tensor([2]), torch.tensor([0, 1, 2]))
    tensor([[[-1.0000, -0.5000,  0.0000]]])
    """
    return slopes_H[:, None, None] * (key_K[None, :] - query_Q[:, None])


def buckets(distance_QK: Tensor, n_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """The bucket of every distance key - query, integers in its shape.

    both_ways: half of the buckets are for keys after the query, as in an encoder; else those share bucket 0. Of the
    buckets for one direction the first half are single distances, the others are of equal width in log(distance) up to
    max_distance, and the last has all that is further away.

    >>> buckets(torch.tensor([-40, -3, -1, 0, 1]), n_buckets=8, max_distance=16, both_ways=True)
    tensor([3, 2, 1, 0, 5])
    """
    n = n_buckets // 2 if both_ways else n_buckets
    away_QK = distance_QK.abs() if both_ways else (-distance_QK).clamp_min(0)
    single = n // 2
    # float32 in the authors' order of operations: where a bucket begins may hang on the last bit of a logarithm
    log_QK = (away_QK.clamp_min(1).float() / single).log() / math.log(max_distance / single) * (n - single)
    shared_QK = (single + log_QK.long()).clamp_max(n - 1)
    after_QK = (distance_QK > 0).long() * n if both_ways else 0
    return torch.where(away_QK < single, away_QK, shared_QK) + after_QK


def relative_bias(table_NH: Tensor, query_Q: Tensor, key_K: Tensor, *, max_distance: int, both_ways: bool) -> Tensor:
    """The bias (H, Q, K) to add to the logits, from the table's entry for each pair's bucket.

    >>> relative_bias(torch.tensor([[0.5], [2.0]]), *[torch.arange(2)] * 2, max_distance=4, both_ways=False)
    tensor([[[0.5000, 0.5000],
             [2.0000, 0.5000]]])
    """
    distance_QK = key_K[None, :] - query_Q[:, None]
    return table_NH[buckets(distance_QK, len(table_NH), max_distance, both_ways)].permute(2, 0, 1)
