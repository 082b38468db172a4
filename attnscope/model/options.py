"""Which model is loaded, and how.

What the libraries that load a model may do besides reading its files: run its code, and ask the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from attnscope.errors import ModelError, first_line
from attnscope.model.libraries import never_asks, offline

RUNS_CODE, TRUST = "runs code from its own repository", "read that code, then pass {trust_remote_code=True}"


@dataclass(frozen=True)
class TrustPolicy:
    """code: run what the model brings. network: let the libraries ask the Hub for what the model's files name.

    >>> TrustPolicy(network=True).given
    {'trust_remote_code': False, 'local_files_only': False}
    """

    code: bool = False
    network: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of every call that loads something; left out, transformers asks on standard input."""
        return {"trust_remote_code": self.code, "local_files_only": not self.network}

    @contextmanager
    def held(self) -> Iterator[None]:
        """While open they hold for what the libraries load in turn as well, without these arguments.

        A part of a model with code of its own is such a case, and a file that names another repository.
        """
        with never_asks(), nullcontext() if self.network else offline():
            yield


def needs_code(error: BaseException) -> bool:
    """Whether transformers would have had to run code that the model brings, and may not."""
    return "trust_remote_code" in str(error)  # which it tells its caller to pass


def read_error(what: str, error: BaseException, hint: str, way: str = "read") -> ModelError:
    """What went wrong in a library that was to read something of a model, in a line.

    >>> str(read_error("the config of m", ValueError("no such layer"), "check its values"))
    'the config of m cannot be read: no such layer; check its values'
    """
    if needs_code(error):
        return ModelError(f"{what} {RUNS_CODE}", TRUST)
    return ModelError(f"{what} cannot be {way}: {first_line(error)}", hint)


DEMO = "demo"


@dataclass(frozen=True)
class LoadOptions:
    """Which model, where, and how; the defaults are those of the command line.

    attention: the implementation of transformers. Without one `engine="probe"` reads the one that transformers chooses.
    """

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
    attention: str | None = None
    positions: int | None = None
    base: str | None = None
    adapter: Literal["merged", "beside"] | None = None
    task: str | None = None
    gguf: Literal["check", "trust"] = "check"

    @property
    def permits(self) -> TrustPolicy:
        """What the libraries may do while they load it."""
        return TrustPolicy(code=self.trust_remote_code, network=not self.offline)
