"""Rooms of the package that are functions too: `attnscope.batch(model, texts)` next to `attnscope.batch.job`.

A function of a room's name would hide the room, or the room the function, by what was imported last. So the room, a
module, is called itself, and says of itself what the function says.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """A module that is called as the function of its name in `attnscope.calls`."""

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"attnscope.calls.{name}"), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return inspect.getdoc(self._function)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


def callable_room(name: str) -> None:
    """Let a module be called; name: its own, while it is being imported."""
    sys.modules[name].__class__ = CallableRoom
