"""Whether a model's attention asks the interface, and what its forward pass must be given for its weights to be heard.

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


_routes: WeakKeyDictionary[nn.Module, Route] = WeakKeyDictionary()


def route_of(model: nn.Module, listen: Callable[[Mapping[str, Any]], set[str]]) -> Route:
    """The route of a model, tried once. listen: runs two tokens with further arguments, and names the calls' routes.

    >>> route_of(attnscope.load("demo").model, lambda extras: set()).interface
    True
    """
    has_config = hasattr(model, "config")
    if type(model).__module__.startswith("transformers.") or not has_config:
        family = family_of(model)
        files = {type(module) for module in model.modules()} if has_config else ()
        asks = not family.bypasses_interface and (not has_config or any(map(knows_interface, files)))
        return Route(asks, ASKED if family.returns_weights_when_asked else {})

    # Code that somebody else wrote may ask the interface, return its weights, or return them to who asks for them.
    for extras in ({}, ASKED) if model not in _routes else ():
        try:
            routes = listen(extras)
        except Exception:  # any author's code: what is wrong with it is shown where it is run in earnest
            continue
        if routes:
            _routes[model] = Route("interface" in routes, extras)
            break
    return _routes.setdefault(model, Route())
