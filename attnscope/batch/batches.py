"""Which texts run together: batches of like lengths within a token budget.

Texts of different length are padded on the right without a mask, which leaves causal rows exact, except where a
family's positions depend on the longest text of the batch, or where it looks ahead: there a batch has one length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.memory import DTYPE_BYTES, free_memory
from attnscope.model.families import family
from attnscope.model.geometry import eager_bytes

if TYPE_CHECKING:
    from torch import nn

    from attnscope.batch.job import Job
    from attnscope.model.loading import LoadedModel

ONE_LENGTH_ROTARY = ("dynamic", "longrope")
WINDOW_BYTES = 96 * 2**20  # kept results of the texts that are sorted into batches together
WINDOW_TEXTS = 512
BATCH_BYTES = 12 * 2**20  # of one layer's matrices: beyond a few caches' size a CPU gains nothing


def batches(lengths: Sequence[int], budget: int, one_length: bool = False, most: int | None = None) -> list[list[int]]:
    """Positions of texts, grouped by like length: padded to its longest, no batch exceeds `budget` tokens.

    Longest first. A text longer than the budget is a batch of its own; `one_length` keeps lengths apart; `most` is the
    number of texts in a batch.

        >>> batches([5, 100, 6], budget=100)
        [[1], [0, 2]]
    """
    grouped: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], place)):
        length, last = lengths[place], grouped[-1] if grouped else []
        fits = last and (len(last) + 1) * length <= budget and (most is None or len(last) < most)
        if fits and not (one_length and lengths[last[0]] != length):
            last.append(place)
        else:
            grouped.append([place])
    return grouped[::-1]


def batch_limit(loaded: LoadedModel) -> int:
    """The token budget that memory suggests: a batch's matrices take an eighth of what is free, at most."""
    room = free_memory(loaded.device) // 8
    room = room if loaded.device.startswith("cuda") else min(room, BATCH_BYTES)
    of_a_text = max(1, eager_bytes(loaded.geometry, 128, DTYPE_BYTES[loaded.dtype]))
    wanted = max(128, min(65_536, 128 * room // of_a_text))
    return 1 << (wanted.bit_length() - 1)  # a little more or less free memory is the same batches


def kept_bytes(job: Job, heads: int, tokens: int) -> float:
    """About how many bytes the results of one text take while they wait to be written."""
    entries = tokens * min(tokens, job.request.top_k or tokens) * heads if job.request.relations else 0
    squares = tokens * tokens * heads if job.request.weights or job.request.maps else 0
    return 12.0 * entries + 4.0 * squares + 400.0 * heads + 200.0 * tokens


def pads_exactly(config: Any) -> bool:
    """Whether right padding without a mask leaves the real rows of this model as they are.

    >>> pads_exactly(LlamaConfig())
    True
    """
    text = config.get_text_config(decoder=True)
    if any(family(one.model_type).one_length for one in (config, text)):
        return False
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return not any(kind in ONE_LENGTH_ROTARY for kind in _rotary_types(rotary))


def _rotary_types(rotary: Mapping[str, Any]) -> Iterator[str]:
    for key, value in rotary.items():
        if isinstance(value, Mapping):  # some families have one kind per layer type
            yield from _rotary_types(value)
        elif key in ("rope_type", "type"):
            yield str(value)


def settle_rotary(model: nn.Module) -> None:
    """Make dynamic rotary frequencies forget the longest text so far: each batch then reads as if it came first."""
    for module in model.modules():
        names = [name for name in vars(module) if name.endswith("max_seq_len_cached")]
        for name in names:
            prefix = name.removesuffix("max_seq_len_cached")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None:
                setattr(module, name, getattr(module, "original_max_seq_len", getattr(module, name)))
                frequencies = getattr(module, f"{prefix}inv_freq")
                setattr(module, f"{prefix}inv_freq", original.to(frequencies.device).clone())
