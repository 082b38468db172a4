"""Which class of transformers the weights of a checkpoint fit, and the part of that model which is read.

transformers itself says which weights a class lacks. Outside the body, which is the model without a head, they may be
missing: then the body alone is read, and random numbers never run.

Which models of pictures alone are read, and why others are not: those that read a picture as one grid of patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from attnscope.errors import ModelError, listed
from attnscope.model.libraries import knows_interface
from attnscope.model.tasks import empty_model, reading_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Load = Callable[..., tuple[PreTrainedModel, Mapping[str, Any]]]

OTHER = "choose a model that reads one grid of patches, as ViT, DINOv2 and CLIP do"


def patch_side(tower: Any) -> tuple[int, int] | None:
    """Height and width of a tower's patches in pixels; None where its config does not give one size for all.

    >>> patch_side(AutoConfig.from_pretrained("google/vit-base-patch16-224"))
    (16, 16)
    """
    size = getattr(tower, "patch_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    return sides[0], sides[1]


def tower_of(model: Any) -> Any:
    """The part of a model that is given pictures: of CLIP's two towers one, of a classifier its body.

    DINOv3's own body is given patches, and is no such part: there it is the whole.
    """
    parts = (part for whole in (model.base_model, model) for part in whole.modules())
    named = (part for part in parts if getattr(part, "main_input_name", "") == "pixel_values")
    return next((part for part in named if "pixel_values" in inspect.signature(part.forward).parameters), model)


def check_tower(config: Any, name: str) -> None:
    """Raise ModelError for a vision tower that does not attend over one grid of patches; config: its own."""
    heads, layers = (
        next((value for name in names if (value := getattr(config, name, None)) is not None), None)
        for names in (("num_attention_heads", "num_heads"), ("num_hidden_layers", "depth"))
    )
    # Whether any module attends: by what its class is called, or as it lies in a file that has attention.
    attends = True
    with suppress(Exception):  # any family's constructor, with any config: loading says what is wrong with it
        kinds = {type(module) for module in empty_model(config).modules()}
        attends = any("attention" in kind.__name__.lower() or knows_interface(kind) for kind in kinds)

    why = ""
    if not attends:
        why = "has no attention: it is made of convolutions"
    elif getattr(config, "is_encoder_decoder", False):
        why = "looks at them with queries of its own, which are no patches"
    elif getattr(config, "num_frames", None) is not None:
        why = "expects videos, frame by frame"
    elif isinstance(heads, list | tuple) or getattr(config, "depths", None) or getattr(config, "patch_sizes", None):
        why = "attends in stages, each over fewer and larger patches than the one before"
    elif patch_side(config) is None or not isinstance(heads, int) or not isinstance(layers, int):
        why = "its config does not say how it divides them into patches"
    elif getattr(config, "window_size", None) and getattr(config, "fullatt_block_indexes", None) is None:
        why = "attends in windows of patches"
    if why:
        raise ModelError(f"{name} ({config.model_type}) reads pictures, but {why}", OTHER)


WHOLE, BODY, ENCODER, TOWER, TEXT = PARTS = ("whole", "body", "encoder", "tower", "text")
OF_THE_WHOLE = ("hf_device_map", "hf_quantizer", "is_quantized", "quantization_method")  # set by from_pretrained


@dataclass(frozen=True)
class LoadedAs:
    """The class of transformers that a checkpoint was loaded as, by its name, and which of PARTS is read of it."""

    kind: str
    part: str


@dataclass(frozen=True)
class Fit:
    """A model as it was loaded, and its weights that the checkpoint lacks: those of its body, and those of its head.

    unused: the tensors of the checkpoint that the model has no place for, but for those that transformers passes over.
    """

    kind: Any
    model: PreTrainedModel
    body: Sequence[str]
    head: Sequence[str]
    unused: Sequence[str]

    @classmethod
    def of(cls, kind: Any, load: Load, **changes: Any) -> Fit:
        """changes: of the arguments of `from_pretrained`."""
        model, report = load(kind, **changes)
        body = "" if model.base_model is model else f"{model.base_model_prefix}."
        missing = sorted(report["missing_keys"])
        inside = [name for name in missing if name.startswith(body)]
        return cls(kind, model, inside, sorted(set(missing) - set(inside)), sorted(report["unexpected_keys"]))

    @property
    def rank(self) -> int:
        """0 where the body lacks weights, 1 where it has them all, 2 for a language model that has its head too."""
        return 0 if self.body else 2 if not self.head and has_head(self.model) else 1

    @property
    def may_be_another(self) -> bool:
        """Whether another class could fit better: the checkpoint's own head may be among the weights left over."""
        is_body = self.model.base_model is self.model
        left_over = bool(self.unused) and (bool(self.head) or is_body) and not has_head(self.model)
        return bool(self.body) or left_over

    @property
    def unused_inside(self) -> list[str]:
        """Those of `unused` that belong to a part of the body, such as layers beyond those of its config.

        A head that the class lacks, or a part that is not read, changes nothing of what the body computes.
        """
        body = self.model.base_model
        parts, prefix = {name for name, _ in body.named_children()}, f"{self.model.base_model_prefix}."
        return [name for name in self.unused if name.removeprefix(prefix).partition(".")[0] in parts]


def best_fit(kinds: Sequence[Any], load: Load) -> Fit:
    """The model of the first of some classes, or of one that the weights fit better.

    load: gives a class's model and transformers' report; with `device_map` meta nothing but names and shapes is read.
    """
    first = Fit.of(kinds[0], load)
    if not first.may_be_another:
        return first
    best, rank = first.kind, first.rank
    for kind in kinds[1:]:
        with suppress(Exception):  # any family's loading code: what cannot be loaded does not fit
            other = Fit.of(kind, load, device_map={"": "meta"}, quantization_config=None).rank
            best, rank = (kind, other) if other > rank else (best, rank)
    return first if best is first.kind else Fit.of(best, load)


def interrupted_fit(error: BaseException) -> tuple[Fit, str] | None:
    """What was loaded of a model before an error that only refers to transformers' report, and what that report says.

    transformers logs the report, and has it at hand where it raises the error. None for any other error.

    >>> interrupted_fit(RuntimeError("see the above report"))
    """
    for frame, _ in walk_tb(error.__traceback__):
        report: Any = frame.f_locals.get("loading_info")
        model: Any = frame.f_locals.get("model")
        if not hasattr(report, "conversion_errors") or not hasattr(model, "base_model_prefix"):
            continue
        reasons = [
            f"{name} is {tuple(stored)} in the files and {tuple(expected)} by the config"
            for name, stored, expected in sorted(report.mismatched_keys)
        ]
        for name, text in sorted(report.conversion_errors.items()):  # a traceback, its message, and what was done
            lines = [line for line in text.splitlines() if not line.startswith("Error")]
            reasons.append(f"{name}: {lines[-1]}")
        if reasons:
            return Fit(type(model), model, (), (), sorted(report.unexpected_keys)), listed(reasons, most=1)
    return None


def part_of(model: PreTrainedModel, part: str) -> PreTrainedModel:
    """One of PARTS of a model, with what transformers says of the whole.

    >>> part_of(model, "body") is model.base_model
    True
    """
    if part == WHOLE:
        return model
    inner: Any = model.get_encoder() if part == ENCODER else reading_part(model) if part == TEXT else model.base_model
    inner = tower_of(model) if part == TOWER else inner
    for name in OF_THE_WHOLE:
        if hasattr(model, name) and not hasattr(inner, name):
            setattr(inner, name, getattr(model, name))
    return inner


def has_head(model: Any) -> bool:
    """Whether a model gives logits over its vocabulary.

    >>> has_head(attnscope.load("demo").model)
    True
    """
    with suppress(NotImplementedError, AttributeError):
        if model.get_output_embeddings() is not None:
            return True
    return bool(getattr(model, "can_generate", lambda: False)())
