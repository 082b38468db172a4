"""A model, or its tokenizer alone, as it was loaded, and what is refused of it.

Whether texts of different length can be read side by side, padded on the right without a mask.

That leaves causal rows exact, except where a family's positions depend on the longest text, where it looks ahead, or
where it chooses keys by their scores: ties are broken by the length of the row. Config and `families.py` say some of
it; the rest is found while the model runs, and remembered with the model.

Where a model's weights are: on its devices, or as accelerate offloads them, elsewhere until a module runs. Read off the
hooks that accelerate leaves on modules (`_hf_hook`), so that accelerate is not imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from attnscope.errors import InputError, ModelError, UsageError, visible
from attnscope.model.families import family
from attnscope.model.fitting import LoadedAs, has_head
from attnscope.model.geometry import Geometry, rotary_types
from attnscope.model.options import LoadOptions, TrustPolicy
from attnscope.model.selection import CAUSAL_LM, ENCODER_ONLY, NAMES, SEQ2SEQ, mixes
from attnscope.model.sources import DEMO_FOLDER
from attnscope.model.tasks import task_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from attnscope.model.quantised import Arithmetic

WHOLE_MODEL = "load a checkpoint of the whole language model"
MAPS_ALONE = "`attnscope heads` and `draw` show the maps of its layers; or choose another model"


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to be read; `revision` is the commit of a Hub model, `device` where its inputs go.

    source_folder: where its files are, or its GGUF file; None for a model made in memory. stretched_from: the positions
    it was trained for, where rope scaling stretched them. base_folder: where the files of an adapter's base are.
    options: how it was loaded, and loaded_as: as which class; None for a model made in memory. trusted: what of its
    attention no file states or no one has use for, in words. replaced: what its config states and the model is read
    without, by name. arithmetic: how it computes, of one that is or was quantised.

        >>> loaded = attnscope.load("demo")
        >>> loaded.geometry.heads_by_layer  # {0: 6, 1: 6, 2: 6, 3: 6}
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    name: str
    revision: str | None
    device: str
    dtype: str
    source_folder: Path | None = None
    stretched_from: int | None = None
    base_folder: Path | None = None
    options: LoadOptions | None = None
    trusted: tuple[str, ...] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict)
    loaded_as: LoadedAs | None = None
    arithmetic: Arithmetic | None = None

    @property
    def precision(self) -> str:
        """Its dtype, and that of its layers' products where these are made in another.

        >>> attnscope.load("demo").precision
        'float32'
        """
        products = self.arithmetic and self.arithmetic.products
        return f"{self.dtype} (products in {products})" if products else self.dtype

    @property
    def devices(self) -> str:
        """The devices that its layers run on, comma-joined, as `free_memory` is asked about them.

        >>> attnscope.load("demo").devices
        'cpu'
        """
        spread = getattr(self.model, "hf_device_map", None) or {}
        names = (f"cuda:{device}" if isinstance(device, int) else str(device) for device in spread.values())
        return ",".join(sorted({self.device, *names} - {"disk", *({"cpu"} if self.device != "cpu" else ())}))

    @property
    def permits(self) -> TrustPolicy:
        """What the libraries may do where more of its files are read, such as those of its processor."""
        return self.options.permits if self.options else TrustPolicy()

    @property
    def brought(self) -> bool:
        """Whether its tokenizer is from elsewhere: its patterns and templates are then somebody's programs."""
        return self.source_folder not in (None, DEMO_FOLDER)

    @property
    def embeddings(self) -> int | None:
        """How many token ids the model knows; None for one that does not say where its embeddings are."""
        return getattr(self._embeds, "num_embeddings", None)

    @property
    def virtual(self) -> Sequence[int]:
        """The ids of the tokens that an adapter puts before every text: the model's last."""
        embeds = self._embeds
        every, count = getattr(embeds, "num_embeddings", None) or 0, getattr(embeds, "virtual", 0)
        return range(every - count, every)

    @property
    def prefix(self) -> Any:
        """What the model's forward is given as its cache, where virtual tokens are keys and values of its layers."""
        return getattr(self._embeds, "prefix", None)

    @property
    def _embeds(self) -> torch.nn.Module | None:
        with suppress(NotImplementedError):
            return self.model.get_input_embeddings()
        return None

    def read_otherwise(self, tokens: int) -> list[str]:
        """What a text of so many tokens is read with in place of what the config states, in words.

        >>> bigbird.read_otherwise(4096)
        ['attention_type original_full in place of block_sparse, from 705 tokens on']
        """
        config = self.model.config
        most = family(config.model_type).changes_nothing_up_to(config)
        if tokens <= most:
            return []
        return [
            f"{name} {getattr(config, name)} in place of {value}, from {most + 1} tokens on"
            for name, value in self.replaced.items()
        ]

    def check_dense(self, tokens: int) -> None:
        """Raise ModelError for a text of so many tokens of which the model's own code gives no whole matrices."""
        config = self.model.config
        own = family(config.model_type)
        most = own.changes_nothing_up_to(config)
        for name, value in own.config_changes.items():
            if tokens > most and any(getattr(module, name, value) != value for module in self.model.modules()):
                raise ModelError(
                    f"{self.name} ({config.model_type}) reads texts from {most + 1} tokens on in blocks, and gives no "
                    "whole matrices of them",
                    f"load it with {name}={value!r}, as attnscope.load does, or give a shorter text",
                )

    def check_queries(self, what: str) -> None:
        """Raise ModelError where `what` needs every token's query, and an adapter's virtual tokens have keys alone."""
        if self.prefix is not None:
            raise ModelError(
                f"{what} needs the query of every token, and {len(self.virtual)} virtual ones of {self.name} have none",
                "use attnscope heads, relations, draw or text",
            )

    def check_bare(self, what: str) -> None:
        """Raise ModelError where `what` reads texts alone, and an adapter puts tokens before them."""
        if self.virtual:
            raise ModelError(
                f"{what} reads texts as they are, and {self.name} puts {len(self.virtual)} virtual tokens before them",
                "read one text at a time, with attnscope heads",
            )

    def unknown_id(self, ids: Sequence[int]) -> int | None:
        """The place of the first id that the model has no embedding of; None where it has them all."""
        most = self.embeddings
        if ids and min(ids) >= 0 and (most is None or max(ids) < most):
            return None
        return next((i for i, token in enumerate(ids) if token < 0 or (most is not None and token >= most)), None)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ModelError for a token that the model has no embedding of: its tokenizer is another model's.

        Raises InputError for a text that is too short, see `check_length`.
        """
        self.check_length(len(ids))
        place = self.unknown_id(ids)
        if place is not None:
            raise ModelError(
                f"{self.name} has {self.embeddings} embeddings, and its tokenizer gives the token {ids[place]}",
                "copy the model's own tokenizer into its folder",
            )

    def check_length(self, tokens: int) -> None:
        """Raise InputError for a text that is too short for the model's own code."""
        least = self.geometry.least_tokens
        if tokens < least:
            raise InputError(
                f"{self.name} ({self.geometry.model_type}) reads texts of at least {least} tokens, and this one has "
                f"{tokens}: there is nothing left for its last block",
                "give a longer text",
            )

    def check_task(self, what: str, *tasks: str, patches: bool = False) -> None:
        """Raise ModelError where `what` is not for a model of this task; tasks: those that it is for.

        patches: whether it is for a model too that has layers over bytes and patches of them.
        """
        if self.geometry.over_patches and not patches:
            raise ModelError(
                f"{what} is for a model whose layers all read tokens, and {self.name} reads bytes and patches of them",
                "choose another",
            )
        if self.geometry.task not in (tasks or (CAUSAL_LM,)):
            meant = " or ".join(NAMES[task] for task in tasks or (CAUSAL_LM,))
            half = self.geometry.task == SEQ2SEQ and ENCODER_ONLY in tasks
            hint = "read its encoder alone: {task=encoder}" if half else "choose another"
            words = self.geometry.both_ways
            other = f"looks both ways: its config says {words}" if words else f"is {NAMES[self.geometry.task]}"
            raise ModelError(f"{what} is for {meant}, and {self.name} {other}", hint)

    def check_softmax(self, what: str, otherwise: str = MAPS_ALONE) -> None:
        """Raise ModelError where `what` is of a softmax, and the layers of the model mix tokens without one.

        >>> attnscope.load("demo").check_softmax("a rollout")
        """
        if not any(self.geometry.stacks.values()) and any(map(mixes, self.geometry.views)):
            raise ModelError(
                f"{what} is of attention by a softmax, and no layer of {self.geometry.model_type} has one", otherwise
            )

    def check_heads(self, why: str) -> None:
        """Raise ModelError where every layer has a map per channel, and none per head; why: what that prevents.

        >>> attnscope.load("demo").check_heads("none can be changed")
        """
        if not self.geometry.changeable and self.geometry.views:
            raise ModelError(
                f"{self.geometry.model_type} has no heads: each channel has a map of its own, and {why}",
                "choose a model with attention, or with linear layers",
            )

    def check_logits(self, what: str, otherwise: str = WHOLE_MODEL) -> None:
        """Raise ModelError where `what` needs logits, and the checkpoint is of a model without an LM head."""
        if not self.has_logits:
            raise ModelError(f"{what} needs logits, and {self.name} has none: it has no LM head", otherwise)

    @property
    def has_logits(self) -> bool:
        """Whether the model gives logits over its vocabulary.

        >>> attnscope.load("demo").has_logits
        True
        """
        return has_head(self.model)

    @property
    def attention(self) -> str:
        """The attention implementation of transformers that the model is set to; a capture may run under another."""
        return str(self.model.config._attn_implementation)

    @property
    def line(self) -> str:
        """The model, where it is, its precision and its heads, as a command says it before it reads anything."""
        return f"{self.name}  {self.device}  {self.precision}  {self.geometry.in_words}"

    def __repr__(self) -> str:
        size = f"{self.geometry.parameters / 1e6:,.1f} M parameters, " if self.geometry.parameters else ""
        kind = f"{visible(self.name)} ({self.geometry.model_type})"
        return "\n".join(
            (
                f"LoadedModel: {kind}, {size}{self.precision} on {self.device}",
                f"  {self.geometry.in_words}",
                f"  reads {self.geometry.max_positions or 'any number of'} tokens",
            )
        )


@dataclass(frozen=True)
class LoadedTokenizer:
    """A model's tokenizer alone, and how many tokens the model reads; brought: as of a LoadedModel."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    max_positions: int | None
    brought: bool


@dataclass(frozen=True, repr=False)
class LoadedModule:
    """A module of PyTorch of any code, as `attnscope.wrap` makes it; the module itself is left as it is.

    tokenizer: of its texts, None where its input is no text. feed: makes the arguments of its forward of a text, or of
    another input; without it see `attnscope.wrap`. row: which text, or window, of the batch of each call is shown.
    parts: patterns of the paths of the parts that are read.

        >>> attnscope.capture(attnscope.wrap(net), torch.arange(9)[None]).table()
    """

    module: nn.Module
    name: str
    tokenizer: Any = None
    feed: Callable[..., Any] | None = None
    row: int = 0
    parts: tuple[str, ...] = ("*",)

    @property
    def device(self) -> str:
        """Where its inputs go: where its first parameter is."""
        tensor = self._first
        return "cpu" if tensor is None else str(tensor.device)

    @property
    def dtype(self) -> str:
        """The dtype of its first parameter, `float32` without one.

        >>> attnscope.wrap(net).dtype
        'float32'
        """
        tensor = self._first
        return "float32" if tensor is None else str(tensor.dtype).removeprefix("torch.")

    @property
    def _first(self) -> Tensor | None:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), None)

    def __repr__(self) -> str:
        size = f"{sum(parameter.numel() for parameter in self.module.parameters()) / 1e6:,.1f} M parameters"
        return (
            f"LoadedModule: {visible(self.name)} ({type(self.module).__name__}), {size}, {self.dtype} on {self.device}"
        )


def check_loaded(model: object) -> None:
    """Raise UsageError for what is no model that `attnscope.load` or `attnscope.wrap` made."""
    if isinstance(model, LoadedModule):
        raise UsageError(
            f"this needs a model of transformers, and {model.name} is a module of other code",
            "attnscope.capture reads it, attnscope.knockout cuts its heads",
        )
    if not isinstance(model, LoadedModel):
        raise UsageError(
            f"expected a LoadedModel, got {type(model).__name__}",
            "attnscope.load makes one, attnscope.wrap one of a model and a tokenizer",
        )


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


def padding_is_unknown(model: nn.Module) -> bool:
    """Whether `families.py` leaves it to the run to say if this model's texts can be padded."""
    return _one_length(model.config) is None


def padding_is_untried(model: nn.Module, longest: int) -> bool:
    """Whether a text as long as this is still to be tried with a shorter one."""
    return padding_is_unknown(model) and _tried.get(model, 0) < longest


def remember_padding(model: nn.Module, longest: int, exact: bool) -> None:
    """Remember what a batch with a text of this length has shown."""
    if exact:
        _tried[model] = max(_tried.get(model, 0), longest)
    else:
        _apart.add(model)


def settle_rotary(model: nn.Module) -> None:
    """Make dynamic rotary frequencies forget the longest text so far: each pass then reads as if it were the first."""
    import torch

    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
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


def hooks_of(module: nn.Module) -> list[Any]:
    """What accelerate does around a module's forward: its hooks, one by one.

    >>> hooks_of(attnscope.load("demo").model)
    []
    """
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; an offloaded one as its module's next run would bring it.

    Those that no one knows where to find stay on the device meta.

    >>> weights_of(nn.Linear(2, 3))["weight"].shape
    torch.Size([3, 2])
    """
    weights = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for path, hook in _offloading(module):
        prefix = f"{path}." if path else ""
        for name, tensor in weights.items():
            short = name.removeprefix(prefix)
            if tensor.is_meta and name.startswith(prefix) and short in hook.weights_map:
                weights[name] = hook.weights_map[short].to(hook.execution_device, tensor.dtype)
    return weights


def device_of(model: nn.Module) -> torch.device:
    """Where a model's inputs go: its first weight's device, or where that is brought to.

    >>> device_of(attnscope.load("demo").model)
    device(type='cpu')
    """
    import torch

    device = next(model.parameters()).device
    targets = (hook.execution_device for _, hook in _offloading(model)) if device.type == "meta" else ()
    return torch.device(next((target for target in targets if target is not None), device))


def as_input(x: Tensor, module: nn.Module) -> Tensor:
    """x on the device and in the dtype of a module's weights.

    >>> as_input(torch.ones(1, dtype=torch.float64), nn.Linear(1, 1)).dtype
    torch.float32
    """
    return x.to(device_of(module), next(module.parameters()).dtype)


def _offloading(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        yield from ((path, hook) for hook in hooks_of(part) if getattr(hook, "weights_map", None) is not None)
