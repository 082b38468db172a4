"""Quantised weights: whether a model's are, whether it has the numbers that its checkpoint stores, how it computes.

transformers passes over a method that it does not know, and over scales that no method applies: what it then computes
with is another model's. So the registry, the names that stayed unused and the types in the files are asked.

Weights that transformers leaves packed until a model's first forward are unpacked as soon as it is there. A hook of the
whole model does it (compressed-tensors). No part that is read alone has that hook, and PEFT, which calls the forward of
the model inside it, passes it by.

Shapes: B text, T token, E width.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from attnscope.errors import ModelError, brief
from attnscope.model.checkpoint import Stored
from attnscope.model.fitting import Fit
from attnscope.model.libraries import bars_as_elsewhere, needed

logger = logging.getLogger(__name__)
OTHERWISE = "choose the model as it was before that, or quantised in a way that transformers reads"
SEPARATORS = re.compile("[._:]")  # of a weight's name and what is stored for it: weight_scale, weight.absmax
# What a quantizer of transformers does with weights: operations on each, or a last step over the model.
STEPS = ("get_quantize_ops", "get_weight_conversions", "_process_model_after_weight_loading")
NO_SCALES = ("BOOL", "I64", "U64")  # the types of masks and counts


def is_quantised(model: Any) -> bool:
    """Whether a layer computes with anything but plain weights, so that it cannot be copied to float32 as it is.

    Whoever quantised it: the weights are asked, and what the layers make of them. Those that were unpacked for good, as
    of a GGUF file, are plain.

    >>> is_quantised(loaded.model)
    False
    """
    import torch

    of_transformers = getattr(model, "hf_quantizer", None) is not None
    tensors = [*model.parameters(), *(model.buffers() if of_transformers else ())]
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    replaced = of_transformers and any(type(layer) is not torch.nn.Linear for layer in linear)
    attend = (module for module in model.modules() if "attention" in type(module).__name__.lower())
    hooked = of_transformers and any(module._forward_pre_hooks for module in attend)  # which round keys and values
    return replaced or hooked or not all(map(is_plain, tensors)) or any(True for _ in rounding_layers(model))


def rounding_layers(model: Any) -> Iterator[Any]:
    """The linear layers of a model that compute with packed weights, or round what enters them.

    >>> list(rounding_layers(loaded.model))
    []
    """
    import torch

    for module in model.modules():
        weight = getattr(module, "weight", None)
        linear = isinstance(module, torch.nn.Linear) and isinstance(weight, torch.Tensor)
        if inspect.ismethod(weight) or (linear and (not is_plain(weight) or _rounds(module))):  # torch.ao's are methods
            yield module


def is_plain(tensor: Any) -> bool:
    """Whether a tensor holds the numbers that are multiplied: no integers, no float8, nothing packed by a library.

    >>> is_plain(torch.zeros(2, dtype=torch.int8))
    False
    """
    import torch

    if type(tensor).__module__.partition(".")[0] != "torch" or tensor.is_quantized:
        return False
    return tensor.element_size() > 4 or tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bool)


def _rounds(layer: Any) -> bool:
    """Whether a linear layer got another forward that gives other numbers, as of an input that it rounds first."""
    import torch

    forward = vars(layer).get("_old_forward") or vars(layer).get("forward")  # accelerate's hooks keep the one before
    if forward is None or getattr(forward, "__func__", None) is type(layer).forward:
        return False
    if layer.weight.is_meta:
        return True
    x = torch.randn(1, 1, layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    with torch.no_grad(), suppress(Exception):  # anybody's code
        return not torch.equal(forward(x), type(layer).forward(layer, x))
    return True


def method_of(config: Any) -> str | None:
    """The quantization method that a config names, where transformers looks for it; None where its model has none.

    >>> method_of(LlamaConfig())
    """
    stated = _quantization(config)
    method = None if stated is None else stated.get("quant_method") or "bitsandbytes"
    return None if method is None else str(getattr(method, "value", method))


def check_method(config: Any, name: str) -> None:
    """Raise ModelError where a config names a quantization method that transformers does not read. name: the model's.

    Of a method that it does not know transformers itself would load the tensors as if they were the weights.
    """
    stated = _quantization(config)
    if stated is None:
        return
    try:
        supported = needed("transformers.quantizers.auto", "AutoHfQuantizer").supports_quant_method(stated)
    except ValueError:  # as transformers says that there is none
        raise ModelError(
            f"the config of {name} has a quantization_config without a quant_method", "download the model again"
        ) from None
    # Some quantizers of transformers do nothing with weights, and make no layers that have them packed: that of HQQ
    # only marks layers. One that is not of transformers is taken at its word.
    method = str(method_of(config))
    quantizer = needed("transformers.quantizers.auto", "AUTO_QUANTIZER_MAPPING").get(method)
    base = needed("transformers.quantizers.base", "HfQuantizer", *STEPS)
    if quantizer and not quantizer.requires_calibration and quantizer.__module__.startswith("transformers."):
        supported = supported and any(getattr(quantizer, step) is not getattr(base, step) for step in STEPS)
    if not supported:
        raise ModelError(f"{name} is quantised by {brief(method)}, a method that transformers does not read", OTHERWISE)


def check_numbers(fit: Fit, config: Any, stored: Mapping[str, Stored], name: str) -> None:
    """Raise ModelError where the numbers of a loaded model are not those that its checkpoint stores.

    fit: of the model as it was loaded, or as far. config: as it was before that. stored: the tensors of its files by
    name, as their headers state them. name: the model's.
    """
    method = method_of(config)
    scale = next(_unapplied(fit, stored), None)
    if scale is not None:
        how = f" ({method})" if method else ""
        raise ModelError(f"{name} is stored quantised{how}, and transformers does not apply its {scale}", OTHERWISE)
    packs = getattr(fit.model, "hf_quantizer", None) is not None
    checked = set(stored)
    if method:  # it unpacks what has scales: something by its name and more, or a neighbour that is no bias
        longer = {name[: sign.start()] for name in stored for sign in SEPARATORS.finditer(name)}
        of_layer = Counter(name.rpartition(".")[0] for name in stored if not name.endswith(".bias"))
        checked = {name for name in checked - longer if of_layer[name.rpartition(".")[0]] == 1}
    lacking = None if method and packs else next((key for key in _narrow(fit, stored) if key in checked), None)
    if lacking is not None:
        why = "no scale of it" if method else "its config names no method to unpack it"
        raise ModelError(f"{name} stores {lacking} as {stored[lacking].dtype}, and {why}", OTHERWISE)
    check_plain(fit.model, name)
    # Float8 weights are unpacked by blocks: transformers divides the sides of a weight by their number. Where a side is
    # no multiple of the blocks, the last of which is then smaller, that makes blocks of another size, or no whole ones.
    size: Sequence[int] = () if packs else (_quantization(config) or {}).get("weight_block_size") or ()
    for key, tensor in stored.items() if size else ():
        scales = stored.get(f"{key}_scale_inv") or stored.get(f"{key.removesuffix('.weight')}.scale")
        sides = tensor.shape[-2:]
        if scales is None or len(sides) != 2 or not tensor.is_float8:
            continue
        grid = tuple(-(-side // width) for side, width in zip(sides, size, strict=True))
        ragged = any(side % width and count > 1 for side, width, count in zip(sides, size, grid, strict=True))
        if ragged and scales.shape[-2:] == grid:
            (rows, columns), (high, wide) = sides, size
            raise ModelError(
                f"{name} stores {key}, {rows} x {columns}, in blocks of {high} x {wide} that do not fill it, and "
                "transformers unpacks whole blocks alone",
                "read it on a GPU that computes in float8",
            )


def even_out(model: Any) -> None:
    """Give all weights of an unpacked model its dtype: transformers leaves those that were not packed as stored.

    But for those that a half-precision model keeps in float32. A model whose weights stay packed is left as it is.

    >>> even_out(loaded.model)
    """
    import torch

    if getattr(model, "hf_quantizer", None) is not None:
        return
    dtype, wide = model.config.dtype, set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        wide |= set(model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        stays_wide = any(f".{part}." in f".{name}." for part in wide)
        if weight.is_floating_point() and not weight.is_meta:
            weight.data = weight.data.to(torch.float32 if stays_wide else dtype)


def packed_bytes(config: Any, stored: Mapping[str, Stored], width: int, device: str) -> int | None:
    """What the weights of a quantised checkpoint take where they stay packed; None where they do not on a device.

    width: bytes of a number of the weights that are not packed. Whether a method unpacks them its quantizer says, which
    also asks for packages and devices: one that cannot be loaded here counts as packed.
    """
    stated = _quantization(config)
    if stated is None or not stored:
        return None
    try:
        quantizer = needed("transformers.quantizers.auto", "AutoHfQuantizer").from_config(
            dict(stated), trust_remote_code=False
        )
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
        unpacks = bool(getattr(quantizer.quantization_config, "dequantize", False))
    except Exception:  # any method's checks
        unpacks = False
    if unpacks:
        return None
    sizes = (prod(tensor.shape) * (tensor.bits if tensor.is_packed else 8 * width) for tensor in stored.values())
    return sum(sizes) // 8


def check_plain(model: Any, name: str) -> None:
    """Raise ModelError where a plain layer's weights are integers or float8, which nothing turns back into numbers.

    Libraries that quantise leave a quantizer, or replace the layer, its forward, or the class of its weights.
    name: the model's.

    >>> check_plain(loaded.model, "demo")
    """
    import torch

    modules = () if getattr(model, "hf_quantizer", None) else model.named_modules()
    for path, module in modules:
        weight = getattr(module, "weight", None) if type(module) in (torch.nn.Linear, torch.nn.Embedding) else None
        if type(weight) is not torch.nn.Parameter or "forward" in vars(module) or module._forward_pre_hooks:
            continue
        if weight.element_size() == 1 or not weight.is_floating_point():
            kind = str(weight.dtype).removeprefix("torch.")
            raise ModelError(f"{name} has {path}.weight in {kind}, and nothing that unpacks it", OTHERWISE)


def _quantization(config: Any) -> dict[str, Any] | None:
    """What a config states of its quantization, where transformers looks: of the whole model, or of its language.

    None for one of bitsandbytes with both of its ways switched off, as training without them leaves it.
    """
    configs = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config(decoder=True)))
    content = next((content for content in configs if content is not None), None)
    if content is None:
        return None
    stated: dict[str, Any] = content if isinstance(content, dict) else content.to_dict()
    of_bitsandbytes = stated.get("quant_method") == "bitsandbytes"
    return None if of_bitsandbytes and not any(map(stated.get, ("load_in_8bit", "load_in_4bit"))) else stated


def _unapplied(fit: Fit, stored: Mapping[str, Stored]) -> Iterator[str]:
    """The unused tensors that a weight of the model was stored with: those of its name and more, then its neighbours.

    A bias is none, which stays unused where the config says that its layers have none, nor are floating-point numbers
    as many as the weight's, such as its average over training. A neighbour of a single number is none: that scales what
    enters the layer, or its keys and values in a cache.
    """
    if not fit.unused:
        return
    prefix = f"{fit.model.base_model_prefix}."
    sizes = {name: tensor.numel() for name, tensor in fit.model.state_dict().items()}
    sizes = {name: prod(tensor.shape) for name, tensor in stored.items()} | sizes
    weights = sizes.keys() - set(fit.unused)
    neighbours = []
    for key in fit.unused:
        tensor = stored.get(key)
        if key.endswith("bias") or (tensor is not None and tensor.dtype in NO_SCALES):
            continue

        # Packed numbers of any count may be scales; plain ones are fewer than what they scale.
        fewest = 0 if tensor is None or tensor.is_packed else prod(tensor.shape)
        for name in dict.fromkeys((key, prefix + key, key.removeprefix(prefix))):
            weight = f"{name.rpartition('.')[0]}.weight"
            beginnings = (name[: sign.start()] for sign in SEPARATORS.finditer(name))
            if any(beginning in weights and fewest < sizes[beginning] for beginning in beginnings):
                yield key
            elif weight in weights and (fewest != 1 and fewest < sizes[weight]):
                neighbours.append(key)
    yield from neighbours


def _narrow(fit: Fit, stored: Mapping[str, Stored]) -> Iterator[str]:
    """The tensors of the files that hold integers or float8 where the model has floating-point numbers.

    A tensor whose place in the model has another name counts where it is float8, or a layer's weight of whole numbers.
    """
    narrow = {key for key, tensor in stored.items() if tensor.is_packed}
    if not narrow:
        return
    prefix, places = f"{fit.model.base_model_prefix}.", {**fit.model.state_dict(), **dict(fit.model.named_buffers())}
    packs = getattr(fit.model, "hf_quantizer", None) is not None  # as it was asked to: its own weights are integers
    for key in sorted(narrow - set(fit.unused)):
        names = (key, prefix + key, key.removeprefix(prefix))
        place = next((places[name] for name in names if name in places), None)
        of_layer = (place is None or packs) and (stored[key].is_float8 or key.endswith(".weight"))
        if of_layer or (place is not None and place.is_floating_point()):
            yield key


def unpack(model: Any, name: str) -> None:
    """Run what a quantizer left for the first forward of the model. name: the model's, for
    warnings and errors.

    Raises ModelError where it put an attention of its own in place of the model's.

    Some formats (NVFP4, MXFP4) unpack to bfloat16 whatever the model's dtype is. Its layers take one dtype, so these
    weights and their scales get it too, which changes no number where it is float32.

    >>> unpack(loaded.model, "demo")
    """
    import torch

    if not getattr(model, "hf_quantizer", None):
        return
    own = needed("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS").get(model.config._attn_implementation)
    if own is not None and not own.__module__.startswith("transformers."):
        raise ModelError(
            f"the quantizer of {name} rounds queries in an attention of its own ({model.config._attn_implementation}), "
            "and only those of transformers are read",
            OTHERWISE,
        )
    # Hooks of its quantizer's package, or of one that this works with: whoever loaded the model may have put others
    # there, which count on being given arguments.
    parts = (model.hf_quantizer, *getattr(model.hf_quantizer, "__dict__", {}).values())
    packages = {_package(type(part)) for part in parts} - {"builtins", "torch"}
    hooks = [hook for hook in model._forward_pre_hooks.values() if _package(hook) in packages]
    if not hooks:
        return
    dtype = model.dtype
    with bars_as_elsewhere():
        for hook in hooks:
            hook(model, ())

    # A layer with weights of two dtypes would fail in its product.
    halves = {torch.bfloat16, torch.float16} - {dtype}
    other = [weight for weight in model.parameters() if weight.dtype in halves]
    for kind in sorted({str(weight.dtype).removeprefix("torch.") for weight in other}):
        target = str(dtype).removeprefix("torch.")
        logger.warning("the weights of %s unpack to %s, and are read as %s", name, kind, target)
    for weight in other:
        weight.data = weight.data.to(dtype)


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", "")).partition(".")[0]


def dequantizing(config: Any) -> Any | None:
    """The quantization config by which transformers unpacks a model's weights for good while it loads them.

    None where its method knows no such way, or where the model would be another one: the layers no longer round what
    enters them, and transformers takes the first of several schemes for all.

    >>> dequantizing(loaded.model.config)
    """
    stated = getattr(config, "quantization_config", None)
    stated = stated if isinstance(stated, dict) else {}
    kinds = needed("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING")
    kind, groups = kinds.get(str(stated.get("quant_method"))), stated.get("config_groups")
    if kind is None or "dequantize" not in inspect.signature(kind).parameters or not isinstance(groups, dict):
        return None
    schemes = [group for group in groups.values() if isinstance(group, dict)]
    rounding = [stated.get("kv_cache_scheme")]
    rounding += [scheme.get(f"{what}_activations") for scheme in schemes for what in ("input", "output")]
    weights = [scheme.get("weights") for scheme in schemes]
    same = len(weights) == len(groups) and all(scheme == weights[0] for scheme in weights)
    return kind(dequantize=True) if weights and same and not any(rounding) else None


@dataclass(frozen=True)
class Arithmetic:
    """How a model that is or was quantised computes.

    method: that its config names, or the package of its layers. unpacked: whether its weights are plain numbers now,
    and its layers compute with these as they are. products: the dtype to which a layer rounds what enters it, where
    that is another than the model's. together: whether what a layer makes of a token depends on other tokens.
    """

    method: str
    unpacked: bool
    products: str | None = None
    together: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "method": self.method,
            "unpacked": self.unpacked,
            **({"products": self.products} if self.products else {}),
            **({"tokens_together": True} if self.together else {}),
        }


def arithmetic_of(model: Any, config: Any) -> Arithmetic | None:
    """How a model computes that is quantised, or was in its files; None for others. config: as its files state it.

    >>> arithmetic_of(loaded.model, loaded.model.config)
    """
    method = method_of(config)
    if not is_quantised(model):
        return Arithmetic(method, unpacked=True) if method else None
    layer = next(rounding_layers(model), None)
    if layer is None:
        return Arithmetic(method or "unknown", unpacked=False)
    kinds = (type(getattr(layer, "weight", None)), type(layer))
    packages = [kind.__module__.partition(".")[0] for kind in kinds]
    package = next((package for package in packages if package not in ("torch", "builtins")), "torch")
    import torch

    # A copy of it is asked, since some layers repack their weights when they first run.
    products, together, dtype = None, False, model.dtype
    x_BTE = torch.randn(1, 4, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad(), suppress(Exception):  # any library's layer
        own = copy.deepcopy(layer)
        x_BTE = x_BTE.to(next(iter((*own.parameters(), *own.buffers())), x_BTE).device)
        output_BTE = own(x_BTE)
        halves = [half for half in (torch.bfloat16, torch.float16) if dtype == torch.float32]
        rounding = next((half for half in halves if torch.equal(own(x_BTE.to(half).to(dtype)), output_BTE)), None)
        # A token's output depends on the others' where much larger ones next to it change it.
        with_large_BTE = own(torch.cat([x_BTE, 1000 * x_BTE], 1))[:, :4]
        difference = float((with_large_BTE - output_BTE).norm() / output_BTE.norm())
        products = None if rounding is None else str(rounding).removeprefix("torch.")
        together = difference > 10 * torch.finfo(dtype).eps
    return Arithmetic(method or package, False, products, together)
