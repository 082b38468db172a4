"""Which model is loaded, and how."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from attnscope.model.permits import Permits

DEMO = "demo"


@dataclass(frozen=True)
class LoadOptions:
    """Which model, where, and how; the defaults are those of the command line."""

    model: str = DEMO
    _: KW_ONLY
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
