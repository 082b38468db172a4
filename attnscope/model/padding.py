"""Whether texts of different length can be read side by side, padded on the right without a mask.

That leaves causal rows exact, except where a family's positions depend on the longest text, where it looks ahead, or
where it chooses keys by their scores: ties are broken by the length of the row. Config and `families.py` say some of
it; the rest is found while the model runs, and remembered with the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from attnscope.model.families import family
from attnscope.model.geometry import rotary_types
from attnscope.model.task import task_of
from attnscope.stacks import CAUSAL_LM

if TYPE_CHECKING:
    from torch import nn

ONE_LENGTH_ROTARY = {"dynamic", "longrope"}
_apart: WeakSet[nn.Module] = WeakSet()
_tried: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def pads_exactly(config: Any) -> bool:
    """Whether, by all that is known beforehand, padding leaves the real rows of this model as they are.

    >>> pads_exactly(LlamaConfig())
    True
    """
    return not (_one_length(config) or rotary_types(config) & ONE_LENGTH_ROTARY)


def pads(model: nn.Module) -> bool:
    """`pads_exactly`, and no text was found that this model reads in another way with a longer one."""
    return model not in _apart and pads_exactly(model.config)


def to_be_found(model: nn.Module) -> bool:
    """Whether `families.py` leaves it to the run to say if this model's texts can be padded."""
    return _one_length(model.config) is None


def to_be_tried(model: nn.Module, longest: int) -> bool:
    """Whether a text as long as this is still to be tried with a shorter one."""
    return to_be_found(model) and _tried.get(model, 0) < longest


def found(model: nn.Module, longest: int, exact: bool) -> None:
    """Remember what a batch with a text of this length has shown."""
    if exact:
        _tried[model] = max(_tried.get(model, 0), longest)
    else:
        _apart.add(model)


def settle_rotary(model: nn.Module) -> None:
    """Make dynamic rotary frequencies forget the longest text so far: each pass then reads as if it were the first."""
    import torch

    for module in model.modules():
        names = [name for name in vars(module) if name.endswith("max_seq_len_cached")]
        for name in names:
            prefix = name.removesuffix("max_seq_len_cached")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None:
                setattr(module, name, getattr(module, "original_max_seq_len", getattr(module, name)))
                frequencies = getattr(module, f"{prefix}inv_freq")
                with torch.inference_mode(False):  # what stays in the model can be trained with
                    setattr(module, f"{prefix}inv_freq", original.to(frequencies.device).clone())


def _one_length(config: Any) -> bool | None:
    if task_of(config) != CAUSAL_LM:  # whatever looks ahead sees what pads the text
        return True
    answers = [family(part.model_type).one_length for part in (config, config.get_text_config(decoder=True))]
    return next((answer for answer in answers if answer is not None), None)
