"""How a model is run: its backbone, its own logits at some positions, without a cache, or with gradients.

What its forward is given of prompts are ids, and what some bring with them or instead of them. What fails while it runs
is its own code, a hook that somebody else left in it, or whoever listens.

Shapes: B text, T token.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from attnscope.errors import ForwardError, UsageError, first_line
from attnscope.model.loaded import hooks_of
from attnscope.model.modules import cache_argument
from attnscope.utils.memory import is_out_of_memory

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel


def bare_model(model: nn.Module) -> nn.Module:
    """The module inside a torch.compile wrapper."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def config_of(model: nn.Module) -> Any:
    """The config of transformers that a model keeps, None for another module."""
    config = getattr(bare_model(model), "config", None)
    return config if hasattr(config, "get_text_config") else None


def backbone(model: nn.Module) -> nn.Module:
    """The model without its vocabulary projection: 128k tokens of logits are tens of gigabytes.

    Of a model of pictures or sound the whole, where its inner part is not given these: DINOv3's are made patches
    before.
    """
    bare = bare_model(model)
    backbone, main = getattr(bare, "base_model", bare), getattr(bare, "main_input_name", "input_ids")
    if not isinstance(backbone, nn.Module):
        return bare
    return backbone if main == "input_ids" or main in argument_names(backbone.forward) else bare


def run_backbone(model: nn.Module, ids_BT: Tensor, **inputs: Any) -> Any:
    """What the backbone gives back. The whole model is called where hooks wait for that, with one row of logits.

    >>> run_backbone(loaded.model, ids_BT).last_hidden_state
    """
    bare, inner = bare_model(model), backbone(model)
    if not hooks_around(model):
        return inner(ids_BT, **inputs)
    outputs: list[Any] = []
    with inner.register_forward_hook(lambda module, args, output: outputs.append(output)):
        more = {"logits_to_keep": 1} if "logits_to_keep" in argument_names(bare.forward) else {}
        whole = bare(ids_BT, **inputs, **more)
    return outputs[-1] if outputs else whole


@contextmanager
def temporary(hooks: Iterable[Any]) -> Iterator[None]:
    """While open, hooks that were registered stay; afterwards they are removed, whatever happened.

    >>> with temporary([module.register_forward_hook(note) for module in model.modules()]):
    ...     run_backbone(model, ids_BT)
    """
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hooks_around(model: nn.Module) -> bool:
    """Whether hooks of the whole model must run, which a call of its backbone alone would pass by.

    Some bring or change weights that all layers need. Those that only carry tensors to a device need not run.

    >>> hooks_around(attnscope.load("demo").model)
    False
    """
    bare = bare_model(model)
    if backbone(model) is bare:
        return False
    if bare._forward_pre_hooks or bare._forward_hooks:
        return True
    # Few models have hooks of accelerate's: which they are is asked where there are some.
    return hasattr(bare, "_hf_hook") and any(getattr(hook, "offload", True) for hook in hooks_of(bare))


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that attend, and those around them, by what their classes are called.

    >>> len(attention_modules(attnscope.load("demo").model))
    4
    """
    return [module for module in bare_model(model).modules() if named_attention(module)]


def named_attention(module: nn.Module) -> bool:
    """Whether a module is called attention."""
    return "attention" in type(module).__name__.lower()


_names: WeakKeyDictionary[FunctionType, tuple[str, ...]] = WeakKeyDictionary()


def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a forward is given, in order, a method's own object first; of each function read once.

    >>> "input_ids" in argument_names(attnscope.load("demo").model.forward)
    True
    """
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType):  # such as the wrapper that accelerate puts around a module's own
        return tuple(inspect.signature(forward).parameters)
    if function not in _names:
        _names[function] = tuple(inspect.signature(function).parameters)
    return _names[function]


def bound(module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module's forward is given, by name."""
    return {**dict(zip(argument_names(type(module).forward)[1:], args, strict=False)), **kwargs}


def arguments(model: nn.Module) -> tuple[str, ...]:
    """The names of what the forward of a model's backbone is given."""
    return argument_names(backbone(model).forward)


def with_logits(model: nn.Module, ids_BT: Tensor, at: Sequence[int], inputs: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """What the whole model gives back, and its own logits at some positions, (B, len(at), vocabulary)."""
    tokens = ids_BT.shape[1]
    wrong = next((place for place in at if not -tokens <= place < tokens), None)
    if wrong is not None:
        raise UsageError(f"there is no token {wrong} in a text of {tokens}", "name positions of the text")
    first = min((place % tokens for place in at), default=0)
    rows = torch.tensor([place % tokens for place in at], dtype=torch.long, device=ids_BT.device)
    if "logits_to_keep" not in argument_names(model.forward):
        output = model(ids_BT, **inputs)
        return output, output.logits[:, rows.to(output.logits.device)]
    if hooks_of(model):  # accelerate's bring a tensor to the first device, and the hidden states are on the last
        output = model(ids_BT, logits_to_keep=tokens - first, **inputs)
        return output, output.logits[:, (rows - first).to(output.logits.device)]
    output = model(ids_BT, logits_to_keep=rows, **inputs)
    return output, output.logits


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that leaves out the cache, where the model has one."""
    return {"use_cache": False} if {"use_cache", "kwargs"}.intersection(argument_names(model.forward)) else {}


F = TypeVar("F", bound=Callable[..., Any])


def with_gradients(function: F) -> F:
    """Decorate a function, or a generator, that follows gradients: while it runs, they are kept.

    Tensors that its caller made in inference mode have to be cloned before they take part.

        >>> @with_gradients
        ... def backward(passes, batch): ...
    """
    # enable_grad has no effect in inference mode, so that mode is left first.
    return torch.inference_mode(False)(torch.enable_grad()(function))


def check_gradients(model: nn.Module) -> None:
    """Raise UsageError for weights that were made in inference mode: nothing computed with them has a gradient."""
    if any(weight.is_inference() for weight in model.parameters()):
        raise UsageError(
            "the model's weights were made in torch.inference_mode(), and this needs gradients",
            "load the model outside torch.inference_mode()",
        )


TYPES, GLOBAL = "token_type_ids", "global_attention_mask"  # arguments of a model's forward


def batch_inputs(loaded: LoadedModel, prompts: Sequence[Prompt], ids_BT: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What the model's forward is given: its first argument, and what else the prompts bring, by name.

    The first argument is the ids, unless the prompts bring it: the features of a sound, (B, F, frames).
    """
    names = dict.fromkeys(name for prompt in prompts for name in prompt.medium.inputs)
    inputs: dict[str, Any] = {}
    for name in names:
        value = torch.cat([prompt.medium.inputs[name] for prompt in prompts]).to(loaded.device)
        inputs[name] = value.to(loaded.model.dtype) if value.is_floating_point() else value

    # Padding has the type of the text's last token; a text without any has 0.
    if any(prompt.types for prompt in prompts):
        tokens, types = ids_BT.shape[1], [prompt.types or (0,) for prompt in prompts]
        padded = [[*own, *own[-1:] * (tokens - len(own))][:tokens] for own in types]
        inputs[TYPES] = torch.tensor(padded, device=loaded.device)
    reads = inputs.pop(getattr(loaded.model, "main_input_name", "input_ids"), ids_BT)
    if prompts[0].medium.unasked and (cache := cache_argument(loaded.model)):
        inputs[cache] = loaded.prefix
    return reads, inputs


def known_types(loaded: LoadedModel) -> int | None:
    """How many token types the model tells apart: 0 where it is given none, None where its config does not say.

    >>> known_types(bert)
    2
    """
    if TYPES not in arguments(loaded.model):
        return 0
    count = getattr(loaded.model.config, "type_vocab_size", None)
    return count if isinstance(count, int) else None


def text_inputs(
    loaded: LoadedModel, prompt: Prompt, source: Prompt | None = None, most: int | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The same of one text; of an encoder-decoder the source is first, and the prompt what its decoder reads.

    most: so many tokens from the beginning of each; of one that brings more than its ids all, since parts of it differ.
    """

    def ids(text: Prompt) -> Tensor:
        return torch.tensor([text.ids if text.medium.inputs else text.ids[:most]], device=loaded.device)

    first = source or prompt
    reads, inputs = batch_inputs(loaded, [first], ids(first))
    return reads, inputs | ({} if source is None else {"decoder_input_ids": ids(prompt)})


OURS = __name__.partition(".")[0]
MODEL = ""  # who calls an operation that a listener stands before


def operation(func: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """One of PyTorch's operations that the model's own code asks for, where a listener is between them.

    >>> operation(torch.ops.aten.relu.default, [torch.ones(2)], {})
    tensor([1., 1.])
    """
    return func(*args, **kwargs)


@contextmanager
def own_errors(model: nn.Module) -> Iterator[None]:
    """What fails in the model's own code while the block runs, or in a hook on it, is a ForwardError."""
    try:
        yield
    except Exception as error:  # any family's code, with any weights and any text
        if is_out_of_memory(error):
            raise
        if (failed := hook_error(error, model)) is not None:
            raise failed from error

        # The model's own code failed where neither attnscope nor who listens called PyTorch last.
        own = (_packages(model) - {"torch"}) | {MODEL}
        callers = [
            MODEL if frame.f_code is operation.__code__ else frame.f_globals.get("__name__", "").partition(".")[0]
            for frame, _ in walk_tb(error.__traceback__)
        ]
        last = next((place for place in reversed(range(len(callers))) if callers[place] in own | {OURS}), None)
        if last is None or callers[last] == OURS:
            raise
        # Kernels of a package that the model's code has called.
        known = {"", "torch"} | sys.stdlib_module_names
        other = next((package for package in callers[last:] if package not in own | known), None)
        where, hint = (f" in {other}", f"read it where {other} is not installed, or ") if other else ("", "")
        raise ForwardError(
            f"the forward pass of {_kind(model)} failed{where}: {first_line(error)}",
            f"{hint}check its config, its weights and its processor's files",
        ) from error


def hook_error(error: BaseException, model: nn.Module) -> ForwardError | None:
    """What to raise for an error that rose in somebody else's hook on the model; None for an error elsewhere."""
    # All that torch calls before or after the forward of one of the model's modules.
    hooks: list[Any] = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    for part in bare_model(model).modules():
        hooks += [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    codes = set[CodeType]()
    for hook in hooks:
        while isinstance(hook, functools.partial):
            hook = hook.func
        plain = getattr(hook, "__func__", hook)
        code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
        codes |= {code} if code is not None else set()

    # The last of them on the way to the error is to blame, where no listener of attnscope's was called after it.
    own, failed = _packages(model) | {"torch", "accelerate"}, None
    for frame, _ in walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == OURS:
            failed = None  # who listens was called in the hook, and failed
        elif frame.f_code in codes and package not in own:
            failed = f"{package} ({frame.f_code.co_qualname})"
    if failed is None:
        return None
    return ForwardError(
        f"a hook of {failed} failed in the forward pass of {_kind(model)}: {first_line(error)}",
        "read the model without that hook",
    )


def _kind(model: nn.Module) -> str:
    return getattr(config_of(model), "model_type", None) or type(bare_model(model)).__name__


def _packages(model: nn.Module) -> set[str]:
    """Where the code of a model is."""
    return {type(module).__module__.partition(".")[0] for module in bare_model(model).modules()} | {"transformers"}
