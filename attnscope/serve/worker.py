"""The process that holds models and answers one question after the other: `python -m attnscope.serve.worker FD`.

`Reader`: texts are read in a process of their own, for a worker that cannot fork: a fork of what used torch may hang.
It is forked before any model is loaded. Each text is read in a fork of it, as a command reads one. Between the two
processes, both of this program, functions are sent by name, and a tokenizer by the options that load it.

`work`: what comes on the socket is read by a thread; the models run in the main one. A question that was cancelled ends
at the next layer. `KeptModels`: models that stay loaded for commands that run in one process one after the other.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from attnscope.errors import AttnscopeError, InputError, MemoryLimitError, UsageError
from attnscope.model.libraries import silence_libraries
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import bytes_in_memory, chosen_device, load, load_config, load_tokenizer
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec, RunInfo
from attnscope.serve.questions import PURPOSES, Purpose
from attnscope.serve.records import packed, unpacked
from attnscope.serve.wire import Contents, Files, Frame, UnansweredError, WireError, files, receive, send
from attnscope.utils.isolation import Answer, IsolatedCall, answer_of, call_elsewhere, forked, seconds, within
from attnscope.utils.memory import free_memory, human_bytes
from attnscope.utils.schema import from_json
from attnscope.utils.signals import begin_helper
from attnscope.utils.stages import Progress

MORE_SECONDS = 5  # than a text may take: a reader that is not suspended has answered by then


class Reader:
    """The other process: `isolation.call_elsewhere(Reader())`."""

    def __init__(self) -> None:
        self._pipe, self.pid = forked(_serve)
        self._options: dict[int, LoadOptions] = {}

    def hold(self, tokenizer: Any, options: LoadOptions) -> None:
        """Remember how a tokenizer, which stays loaded, is loaded."""
        self._options[id(tokenizer)] = options

    def __call__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Answer[Any]:
        """What the function gives, or an error of ours. Raises UnansweredError where it cannot be called there."""
        question = io.BytesIO()

        def ask() -> Answer[Any]:
            self._pipe.send_bytes(question.getvalue())
            answer: Answer[Any] = pickle.loads(self._pipe.recv_bytes())  # of this program's own process
            return answer

        try:
            pickler = pickle.Pickler(question)
            pickler.persistent_id = lambda value: self._options.get(id(value))  # type: ignore[method-assign]
            pickler.dump((function, arguments))
            return within(seconds() + MORE_SECONDS, ask)
        except (pickle.PicklingError, AttributeError, TypeError, EOFError, OSError) as error:
            if isinstance(error, TimeoutError):  # it or its fork was suspended
                os.kill(self.pid, signal.SIGKILL)
            raise UnansweredError("a server cannot read its text") from error


def _serve(pipe: Connection) -> None:
    """Answer until no one asks."""

    @cache
    def tokenizer(options: LoadOptions) -> Any:
        return load_tokenizer(replace(options, offline=True)).tokenizer

    def read(question: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(question))
        unpickler.persistent_load = tokenizer  # type: ignore[method-assign]
        function, arguments = unpickler.load()
        with IsolatedCall(function, "process") as call:
            return call(*arguments)

    while True:
        pipe.send_bytes(pickle.dumps(answer_of(read, (pipe.recv_bytes(),))))


GO_SECONDS = 5.0  # until who asked has seen that what is known before the pass can be used: the others wait as long


class CancelledError(Exception):
    """Who asked has gone."""


class Link(Progress):
    """The other end while one question is answered: lines and stages go there, a word to continue comes back."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.questions: queue.Queue[Frame] = queue.Queue()
        self._heard = threading.Condition()
        self.number = self._gone = self._cancelled = 0  # of the question at hand; that may continue; that was cancelled

    def listen(self) -> None:
        """Read what comes until the other end has gone; then end this process."""
        try:
            while True:
                frame = receive(self.link)
                kind, number = frame.header["what"], frame.header["number"]
                with self._heard:
                    if kind == "cancel":
                        self._cancelled = number
                    elif kind == "go":
                        self._gone = number
                    else:
                        self.questions.put(frame)
                    self._heard.notify_all()
        except (WireError, OSError):
            os._exit(0)

    def check(self) -> None:
        """Raise CancelledError where who asked has gone."""
        if self._cancelled == self.number:
            raise CancelledError

    def say(self, line: str) -> None:
        send(self.link, ["said", line])

    @contextmanager
    def stage(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], object]]:
        send(self.link, ["stage", [title, total, unit]])

        def advance(steps: int) -> None:
            self.check()
            send(self.link, ["step", steps])

        yield advance
        send(self.link, ["over", None])

    def prepared(self, prepared: RunInfo) -> None:
        """Send what is known before the pass, and wait until the other end has seen that it can be used.

        Raises UnansweredError where the models of this process had a part in which engine was chosen, and where no word
        comes: who asked may be suspended, and others wait.
        """
        if prepared.by_memory:
            raise UnansweredError("the engine depends on the memory that is free")
        document, blobs = packed(prepared)
        send(self.link, ["prepared", document], blobs)
        with self._heard:
            heard = self._heard.wait_for(lambda: self.number in (self._gone, self._cancelled), GO_SECONDS)
        self.check()
        if not heard:
            raise UnansweredError(f"the command did not answer for {GO_SECONDS:.0f} seconds")

    def last(self, kind: str, value: Any, blobs: list[memoryview] | None = None) -> None:
        """End the answer."""
        send(self.link, [kind, value], blobs or (), last=True)


def work(number: int) -> None:
    """Answer questions until the other end has gone."""
    begin_helper()
    silence_libraries(verbose=False)
    gc.freeze()  # what is imported is no garbage, as on the command line
    reader = Reader()  # forked while this process has no thread, and has not used torch
    call_elsewhere(reader)
    link, models = Link(socket.socket(fileno=number)), dict[str, LoadedModel]()
    # The library's warnings go to who asked.
    logger, handler = logging.getLogger("attnscope"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: send(link.link, ["warned", record.getMessage()])  # type: ignore[method-assign]
    logger.handlers, logger.propagate = [handler], False
    threading.Thread(target=link.listen, daemon=True).start()
    while True:
        frame = link.questions.get()
        link.number = frame.header["number"]
        try:
            answer = partial(load_model, reader) if frame.header["what"] == "load" else answer_question
            link.last(*answer(link, models, frame))
        except CancelledError:
            link.last("no", "cancelled")
        except (UnansweredError, MemoryLimitError) as error:
            link.last("no", str(error))
        except AttnscopeError as error:  # of a kind that both ends know
            known = (base.__name__ for base in type(error).__mro__ if base.__module__ == AttnscopeError.__module__)
            link.last("error", [next(known), error.message, error.hint])
        except Exception as error:  # any family's code: a process of its own says what it has to say
            link.last("no", f"{type(error).__name__}: {error}")


def load_model(reader: Reader, link: Link, models: dict[str, LoadedModel], frame: Frame) -> tuple[str, Any]:
    """Load a model. Raises MemoryLimitError where it does not fit next to the others."""
    options: LoadOptions = from_json(LoadOptions, frame.header["options"], "options")
    device = chosen_device(options)
    needed, free = bytes_in_memory(options, load_config(options), device), free_memory(device)
    if needed is not None and needed > free:
        others = f" with {', '.join(loaded.name for loaded in models.values())}" * bool(models)
        raise MemoryLimitError(f"its weights take {human_bytes(needed)}, and {device} has {human_bytes(free)}{others}")
    loaded = models[frame.header["model"]] = load(options)
    reader.hold(loaded.tokenizer, options)
    return "loaded", {"device": loaded.device, "dtype": loaded.dtype, "bytes": needed}


def answer_question(link: Link, models: dict[str, LoadedModel], frame: Frame) -> tuple[str, Any, list[memoryview]]:
    """Answer an ask with the record of its purpose."""
    question = frame.header
    purpose: Purpose = from_json(PURPOSES[question["purpose"]], question["how"], "how")
    os.chdir(question["folder"])  # the ask may name an atlas from there
    loaded, ask = replace(models[question["model"]], name=question["name"]), CaptureSpec.of_json(question["ask"])
    prompt = unpacked(question["prompt"], frame.blobs)
    if prompt is not None:
        ask = replace(ask, text=prompt)
        size = loaded.embeddings
        if not all(type(token) is int and token >= 0 and (size is None or token < size) for token in prompt.ids):
            raise InputError("these are no token ids of this model", "give others")
    with cancellable(loaded.model, link.check):
        return "answer", *packed(purpose.answer(loaded, ask, link, link.prepared))


@contextmanager
def cancellable(model: nn.Module, check: Callable[[], object]) -> Iterator[None]:
    """While open, something is called before every layer of a model: what it raises ends the pass."""

    def before(layer: nn.Module, args: object) -> None:
        check()

    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    handles = [layer.register_forward_pre_hook(before) for stack in stacks for layer in stack]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    work(int(sys.argv[1]))


MOST = 4  # models at once


class KeptModels:
    """The models that were loaded last, each as long as its files hold what they held."""

    def __init__(self) -> None:
        self._kept: dict[LoadOptions, tuple[LoadedModel, Contents]] = {}

    def load(self, options: LoadOptions) -> LoadedModel:
        """A model, loaded where it is not there; raises as `attnscope.model.loading.load` does."""
        if options.trust_remote_code or options.allow_pickle:
            return load(options)
        entry = self._kept.pop(options, None)
        if entry is None or not entry[1].same(_files_of(entry[0])):
            began = time.time_ns()
            loaded = load(options)
            states = _files_of(loaded)
            if not states or any(state.changed_ns >= began for state in states.values()):
                return loaded  # which of their contents was loaded is not known
            entry = loaded, Contents(states)
        self._kept[options] = entry
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        return entry[0]


def _files_of(loaded: LoadedModel) -> Files:
    """The files of a model; none where they cannot be watched."""
    try:
        return files(loaded.source_folder, loaded.base_folder)
    except UsageError:
        return {}
