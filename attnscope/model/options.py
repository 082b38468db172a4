"""Which model is loaded, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from attnscope.model.permits import Permits

DEMO = "demo"


class LoadFields(TypedDict, total=False):
    """The fields of `LoadOptions` but the model, as keywords."""

    device: str
    dtype: str
    device_map: str | None
    revision: str | None
    offline: bool
    quantize: Literal["8bit", "4bit"] | None
    trust_remote_code: bool
    allow_pickle: bool
    attention: str
    positions: int | None
    base: str | None
    adapter: Literal["merged", "beside"] | None
    task: str | None
    gguf: Literal["check", "trust"]


@dataclass(frozen=True)
class LoadOptions:
    """Which model, where, and how; the defaults are those of the command line."""

    model: str = DEMO
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    offline: bool = False
    quantize: Literal["8bit", "4bit"] | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    attention: str = "eager"
    positions: int | None = None
    base: str | None = None
    adapter: Literal["merged", "beside"] | None = None
    task: str | None = None
    gguf: Literal["check", "trust"] = "check"

    @property
    def permits(self) -> Permits:
        """What the libraries may do while they load it."""
        return Permits(code=self.trust_remote_code, network=not self.offline)
