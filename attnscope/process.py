"""Settings of the whole process that a call changes for its time, where several threads may call at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, ParamSpec

P = ParamSpec("P")


class ProcessWide(Generic[P]):
    """A change that holds while anyone needs it: the first who enters makes it, the last who leaves undoes it.

    Each thread that read the setting for itself and put back what it read would undo another's change, and leave its
    own in place.

    >>> @ProcessWide
    ... @contextmanager
    ... def more_threads(): ...
    """

    def __init__(self, change: Callable[P, AbstractContextManager[object]]) -> None:
        self.change, self.lock, self.users, self.made = change, threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        with self.lock:
            if not self.users:
                self.made.enter_context(self.change(*args, **kwargs))
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    self.made.close()
