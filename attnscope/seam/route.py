"""Whether a model's attention asks the interface, and what its forward pass must be told for its weights to be heard.

Of transformers' own families `families.py` knows it. Of code that somebody else wrote, a pass over two tokens shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from attnscope.model.families import family_of
from attnscope.model.libraries import knows_interface

ASKED: Mapping[str, Any] = {"output_attentions": True}


@dataclass(frozen=True)
class Route:
    """interface: whether its calls come through the interface. extras: further arguments of its forward."""

    interface: bool = True
    extras: Mapping[str, Any] = field(default_factory=dict)


_found: WeakKeyDictionary[nn.Module, Route] = WeakKeyDictionary()


def route_of(model: nn.Module, heard: Callable[[Mapping[str, Any]], set[str]]) -> Route:
    """The route of a model, tried once. heard: runs two tokens with further arguments, and names the calls' routes.

    >>> route_of(attnscope.load("demo").model, lambda extras: set()).interface
    True
    """
    if type(model).__module__.startswith("transformers.") or not hasattr(model, "config"):
        known = family_of(model)
        asks = not known.bypasses_interface and _asks(model)
        return Route(asks, ASKED if known.returns_weights_when_asked else {})
    if model not in _found:
        _found[model] = _tried(heard)
    return _found[model]


def _asks(model: nn.Module) -> bool:
    """Whether a file of transformers that the model's modules come from knows the interface."""
    if not hasattr(model, "config"):
        return True
    return any(map(knows_interface, {type(module) for module in model.modules()}))


def _tried(heard: Callable[[Mapping[str, Any]], set[str]]) -> Route:
    for extras in ({}, ASKED):
        try:
            routes = heard(extras)
        except Exception:  # any author's code: what is wrong with it is said where it is run in earnest
            continue
        if routes:
            return Route("interface" in routes, extras)
    return Route()
