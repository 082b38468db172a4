"""`attnscope serve`: models that stay loaded, for commands that ask them in place of a pass of their own.

`attnscope serve --page`: the page of this server, or of one that runs already.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.option_groups import FIRST, HIDDEN, OptionGroup, check_one_given, fill
from attnscope.cli.options import Loading
from attnscope.cli.output import Quiet
from attnscope.errors import UsageError, in_a_line
from attnscope.utils.stages import clock

if TYPE_CHECKING:
    from attnscope.model.options import LoadOptions
    from attnscope.serve.page import LivePage
    from attnscope.serve.wire import Status

EXAMPLES = (
    "attnscope serve -m demo --idle 30m & until attnscope serve status; do sleep 1; done; attnscope serve stop",
    "attnscope serve --page --idle 10s",
)
UNITS = {"s": 1, "m": 60, "h": 3600}


class Served(Loading):
    """Which models, and how they are loaded."""

    model: Annotated[list[str] | None, "Model to hold; may be repeated (default: demo).", FIRST] = None  # type: ignore[assignment]


class Session(OptionGroup, panel="What to ask"):
    """How long a server runs, and what to do with one that runs already."""

    request: Annotated[
        Literal["status", "stop"] | None,
        "status: print the models of the running server; stop: end it.",
        Argument(),
    ] = None
    idle: Annotated[str | None, "End after this time without a question: 30m, 8h (default: never).", "TIME", FIRST] = (
        None
    )
    page: Annotated[bool, "Serve a page too, for a browser of this machine; its address is printed.", FIRST] = False
    port: Annotated[int | None, "Port of the page (default: a free one).", Option(min=1, max=65535)] = None
    status: Annotated[bool, "Another name of `serve status`.", HIDDEN] = False
    stop: Annotated[bool, "Another name of `serve stop`.", HIDDEN] = False
    run: Annotated[str | None, "Another name of `run FILE`.", "FILE", HIDDEN] = None

    def __post_init__(self) -> None:
        words = {self.request or "status or stop": self.request}
        check_one_given(
            words | {f"--{name}": getattr(self, name) or None for name in ("status", "stop", "run", "page")}
        )
        if self.port and not self.page:
            raise UsageError("--port is that of --page", "add --page")

    @property
    def of_running(self) -> str | None:
        """What is asked of the server that runs: its status, or that it ends."""
        return self.request or ("status" if self.status else "stop" if self.stop else None)

    @property
    def idle_seconds(self) -> float | None:
        """Seconds of --idle. Raises UsageError for what is no time."""
        if self.idle is None:
            return None
        number, unit = self.idle[:-1], self.idle[-1:]
        if unit not in UNITS or not (number.isascii() and number.isdecimal() and 0 < int(number[:9]) < 10**6):
            raise UsageError(f"--idle: expected a time, got {self.idle!r}", "write --idle 30m")
        return int(number) * UNITS[unit]


@with_options(Served, Session, Quiet)
def serve(served: Served, session: Session, noise: Quiet) -> int:
    """Keep models loaded for the commands that follow.

    heads, relations, keys, text, tokens, draw, rollout, view, explain, depth, knockout and why ask a running server
    about one text. They then load no model, if the server holds it from the same files, with the same code and
    environment. The output is the same. The server listens on a socket of this user alone, and on no network.

    --page prints an address for a browser of this machine. The page has a field for a text, and shows the page of
    `view`. A token in the address keeps other users out. If a server runs already, the page uses that one, and ends
    with it.
    """
    if session.of_running is not None:
        return ask_server(session.of_running, noise.quiet)
    if session.run is not None:
        from attnscope.cli.run_file import run_lines

        return run_lines(session.run, noise.quiet)
    if session.page:
        from attnscope.serve.client import request_status
        from attnscope.serve.wire import UnansweredError

        status = None  # where no server of this user runs
        with suppress(UnansweredError):
            status = request_status("status")
        if status is not None:
            if session.idle is not None:
                raise UsageError("--idle is that of the server, which runs already", "leave it out")
            from attnscope.model.options import DEMO, LoadOptions

            # Where no option was given, any models will do.
            models = [fill(LoadOptions, served, model=name) for name in served.model or [DEMO]]
            wanted = models if served.model or models != [LoadOptions()] else []
            return join(wanted, session.port, status, noise.quiet)
    return hold(served, session, noise.quiet)


def hold(served: Served, session: Session, quiet: bool) -> int:
    """Load the models and answer until the end."""
    from attnscope.model.options import LoadOptions
    from attnscope.serve import wire as place

    idle = session.idle_seconds
    if not place.supported():
        raise UsageError("this system has no sockets that say who asks", "use attnscope run FILE")
    from attnscope.serve.server import Server
    from attnscope.utils.signals import GracefulStop

    Page = page_class() if session.page else None
    with Server(idle, lambda line: output.log(line, quiet)) as server, GracefulStop(lambda: server.stop()) as stopped:
        for name in dict.fromkeys(served.model or ["demo"]):
            with output.loading(name, quiet):
                if not server.hold(fill(LoadOptions, served, model=name)):
                    return 0
        names = ", ".join(options.model for options in server.options)
        output.log(f"answering for {names}; attnscope serve stop ends it", quiet)
        stopped()
        with ExitStack() as stack:
            if Page is not None:
                stack.enter_context(server.page())
                address = stack.enter_context(Page(lambda: server.options, session.port or 0))
                print(address, flush=True)  # noqa: T201  # for a browser
            server.serve()
    output.log(f"answered {server.answered} questions", quiet)
    return 0


def ask_server(request: str, quiet: bool) -> int:
    """Say what the server that runs holds, or end it; 1 without one, and for its status while it loads its models."""
    from attnscope.serve.client import request_status
    from attnscope.serve.wire import SilentServerError, UnansweredError
    from attnscope.utils.memory import human_bytes

    try:
        status = request_status(request)
    except SilentServerError as why:
        step = f"kill -CONT {why.process} continues one that was stopped, kill -KILL {why.process} ends it"
        output.log(f"attnscope: {why}" + f"; {step}" * bool(why.process), quiet=False)
        return 1
    except UnansweredError as why:
        output.log(f"attnscope: {why}; start one: attnscope serve", quiet=False)
        return 1
    # Data to stdout, a line per model; what is of the server itself to stderr.
    for model in status.models:
        size = "" if model.bytes is None else f"  weights {human_bytes(model.bytes)}"
        sys.stdout.write(f"{in_a_line(model.name)}  {in_a_line(model.device)}  {in_a_line(model.dtype)}{size}\n")
    memory = "" if status.memory_bytes is None else f", {human_bytes(status.memory_bytes)} of memory"
    age, busy = clock(status.seconds), ", busy" * (status.busy and not status.loading)
    pages = f", {status.pages} {'page' if status.pages == 1 else 'pages'}" if status.pages else ""
    output.log(f"process {status.pid}, {age} old, {status.answered} answered{busy}{pages}{memory}", quiet)
    if status.ready:
        return 0
    if status.loading:
        output.log(f"loading {status.loading}, {clock(status.loading_seconds)} so far", quiet)
    return int(request == "status")


def page_class() -> type[LivePage]:
    """The class of pages. Raises UsageError where its libraries are not installed."""
    try:
        from attnscope.serve.page import LivePage
    except ImportError as error:
        hint = "pip install 'attnscope[serve]'"
        raise UsageError(f"--page needs {error.name}, which is not installed", hint) from None
    return LivePage


def join(wanted: Sequence[LoadOptions], port: int | None, status: Status, quiet: bool) -> int:
    """A page that asks a server which runs already, in a process of its own; it ends with that server.

    wanted: models that it has to hold. Raises UsageError where it does not, or runs other code or in another
    environment.
    """
    from attnscope.serve import client
    from attnscope.serve.wire import UnansweredError, is_readable
    from attnscope.utils.signals import GracefulStop

    Page = page_class()
    try:
        with output.progress("waiting until the server has loaded its models", None, quiet):
            while not status.ready:
                time.sleep(client.WORD_SECONDS / 4)
                status = client.request_status("status")
        link, holdings = client.join_server()
    except UnansweredError as why:
        raise UsageError(f"a page cannot join the server that runs: {why}", "end it: attnscope serve stop") from None
    # The link is held open: when it closes, the server has ended, and its page with it.
    stop = threading.Event()
    with link, GracefulStop(stop.set) as stopped:
        loaded = {_from(holdings.folder, options) for options in holdings.options}
        for options in wanted:
            if _from(os.getcwd(), options) not in loaded:
                raise UsageError(
                    f"the server that runs does not hold {options.model} as it is asked for",
                    "leave out the model's options, or end it: attnscope serve stop",
                )
        stopped()
        with Page(lambda: holdings.options, port or 0, holdings.folder) as address:
            names = ", ".join(options.model for options in holdings.options)
            output.log(f"joined process {status.pid}, which answers for {names}; attnscope serve stop ends both", quiet)
            print(address, flush=True)  # noqa: T201  # for a browser
            while not stop.is_set() and not is_readable(link, client.WORD_SECONDS / 4):
                pass
    if not stop.is_set():
        output.log("the server has ended, and the page with it", quiet)
    return 0


def _from(folder: str, options: LoadOptions) -> LoadOptions:
    """The options with the path of a model from the root, so that those of two folders can be compared."""
    path = os.path.join(folder, os.path.expanduser(options.model))
    return replace(options, model=os.path.realpath(path)) if os.path.exists(path) else options
