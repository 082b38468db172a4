"""What runs beside the model: a thread that reads ahead of it, and a thread that writes behind it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from attnscope.batch.journal import Record
from attnscope.batch.rows import Measured
from attnscope.batch.shards import Shard

T = TypeVar("T")


class Writer(Protocol):
    """Where a shard's rows go: all of them at `commit`, none at `abandon`."""

    def add(self, measured: Measured) -> None: ...
    def commit(self) -> Record: ...
    def abandon(self) -> None: ...


END = object()


class Ahead(Iterable[T]):
    """An iterable, run in a thread a few steps ahead of its reader; its errors come out where they are read."""

    def __init__(self, source: Iterable[T], depth: int = 2) -> None:
        self._source, self._queue = source, queue.Queue[Any](depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get(timeout=0.05)

    def __iter__(self) -> Iterator[T]:
        while (found := self._queue.get()) is not END:
            if isinstance(found, _Raised):
                raise found.error
            yield found

    def _fill(self) -> None:
        try:
            for one in self._source:
                if self._closed.is_set():
                    return
                self._queue.put(one)
            self._queue.put(END)
        except BaseException as error:
            self._queue.put(_Raised(error))


@dataclass
class _Raised:
    error: BaseException


class Writing:
    """Writes windows in a thread; its errors come out at the next `put`, or at `finish`."""

    def __init__(self, open_writer: Callable[[Shard], Writer], commit: Callable[[Record], None]) -> None:
        self._open, self._commit = open_writer, commit
        self._queue = queue.Queue[Any](1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and self._error is None:
            self._error = RuntimeError("abandoned")
        self._queue.put(END)
        self._thread.join()

    def put(self, shard: Shard, measured: Measured, last: bool) -> None:
        """Write some more of a shard; `last` commits it."""
        self._raise()
        self._queue.put((shard, measured, last))

    def finish(self) -> None:
        """Commit what is whole, also of a shard that is not at its end."""
        self._queue.put(END)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _drain(self) -> None:
        writer: Writer | None = None
        while (found := self._queue.get()) is not END:
            if self._error is not None:
                continue
            try:
                shard, measured, last = found
                writer = writer or self._open(shard)
                writer.add(measured)
                if last:
                    self._commit(writer.commit())
                    writer = None
            except BaseException as error:
                self._error = error
        self._end(writer)

    def _end(self, writer: Writer | None) -> None:
        if writer is None:
            return
        if self._error is not None:
            writer.abandon()
            return
        try:
            self._commit(writer.commit())
        except BaseException as error:
            self._error = error
            writer.abandon()
