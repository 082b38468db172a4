"""What the libraries that load a model may do beside reading its files: run code that it brings, and ask the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from attnscope.model.libraries import NEVER_ASKS, OFFLINE


@dataclass(frozen=True)
class Permits:
    """code: run what the model brings. network: let the libraries ask the Hub for what the model's files name.

    >>> Permits(network=True).given
    {'trust_remote_code': False, 'local_files_only': False}
    """

    code: bool = False
    network: bool = False

    @property
    def given(self) -> dict[str, bool]:
        """The arguments of every call that loads something; left out, transformers asks on standard input."""
        return {"trust_remote_code": self.code, "local_files_only": not self.network}

    @contextmanager
    def held(self) -> Iterator[None]:
        """While open they hold for what the libraries load in turn as well, without these arguments.

        A part of a model with code of its own is such a case, and a file that names another repository.
        """
        with ExitStack() as stack:
            stack.enter_context(NEVER_ASKS.held())
            if not self.network:
                stack.enter_context(OFFLINE.held())
            yield
