"""What a server says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.model.options import LoadOptions


@dataclass(frozen=True)
class HeldModel:
    """A model that is held; bytes: of its weights, None where they cannot be counted."""

    name: str
    device: str = ""
    dtype: str = ""
    bytes: int | None = None


@dataclass(frozen=True)
class Status:
    """A server: its process, how old it is, how many questions it answered, whether it answers one now.

    memory_bytes: of the process with the models, None where the system does not say. ready: whether all its models are
    loaded. loading: the model that is loaded now, for `loading_seconds`; else empty. pages: for browsers, that ask it.
    """

    pid: int
    seconds: int
    answered: int
    busy: bool
    memory_bytes: int | None
    models: tuple[HeldModel, ...]
    ready: bool = True
    loading: str = ""
    loading_seconds: int = 0
    pages: int = 0


@dataclass(frozen=True)
class Holdings:
    """The models of a server, with the options that they were loaded with in the folder where it runs."""

    folder: str
    options: tuple[LoadOptions, ...]
