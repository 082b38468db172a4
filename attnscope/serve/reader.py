"""Texts that are read in a process of their own, for a worker that cannot fork: a fork of what used torch may hang.

The reader is forked before any model is loaded. Each text is read in a fork of it, as a command reads one. Between the
two processes, both of this program, functions are sent by name, and a tokenizer by the options that load it.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from attnscope.model.loading import load_tokenizer
from attnscope.model.options import LoadOptions
from attnscope.serve.wire import UnansweredError
from attnscope.utils.isolation import Answer, answer_of, forked, seconds, within
from attnscope.utils.isolation import IsolatedCall as Apart

MORE_SECONDS = 5  # than a text may take: a reader that is not suspended has answered by then


class Reader:
    """The other process: `apart.call_elsewhere(Reader())`."""

    def __init__(self) -> None:
        self._pipe, self.pid = forked(_serve)
        self._options: dict[int, LoadOptions] = {}

    def hold(self, tokenizer: Any, options: LoadOptions) -> None:
        """Remember how a tokenizer, which stays loaded, is loaded."""
        self._options[id(tokenizer)] = options

    def __call__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Answer[Any]:
        """What the function gives, or an error of ours. Raises UnansweredError where it cannot be called there."""
        question = io.BytesIO()
        try:
            _Sent(question, self._options).dump((function, arguments))
            return within(seconds() + MORE_SECONDS, partial(self._answer, question.getvalue()))
        except TimeoutError as error:  # it or its fork was suspended
            os.kill(self.pid, signal.SIGKILL)
            raise UnansweredError("a server cannot read its text") from error
        except (pickle.PicklingError, AttributeError, TypeError, EOFError, OSError) as error:
            raise UnansweredError("a server cannot read its text") from error

    def _answer(self, question: bytes) -> Answer[Any]:
        self._pipe.send_bytes(question)
        answer: Answer[Any] = pickle.loads(self._pipe.recv_bytes())  # of this program's own process
        return answer


class _Sent(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, options: dict[int, LoadOptions]) -> None:
        super().__init__(stream)
        self._options = options

    def persistent_id(self, value: Any) -> LoadOptions | None:
        return self._options.get(id(value))


class _Received(pickle.Unpickler):
    def __init__(self, data: bytes, tokenizers: dict[LoadOptions, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._held = tokenizers

    def persistent_load(self, options: LoadOptions) -> Any:
        if options not in self._held:
            self._held[options] = load_tokenizer(replace(options, offline=True)).tokenizer
        return self._held[options]


def _serve(pipe: Connection) -> None:
    """Answer until no one asks."""
    tokenizers: dict[LoadOptions, Any] = {}
    while True:
        data = pipe.recv_bytes()
        pipe.send_bytes(pickle.dumps(answer_of(partial(_called, data, tokenizers), ())))


def _called(data: bytes, tokenizers: dict[LoadOptions, Any]) -> Any:
    function, arguments = _Received(data, tokenizers).load()
    with Apart(function, "process") as call:
        return call(*arguments)
