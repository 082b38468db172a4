"""`attnscope serve --page`: the page of this server, or of one that runs already."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.model.options import LoadOptions
    from attnscope.serve.page import LivePage
    from attnscope.serve.server import Server
    from attnscope.serve.wire import Holdings, Status

EXTRA = "pip install 'attnscope[serve]'"


def live_page(port: int | None) -> Callable[[Server], AbstractContextManager[str]]:
    """What makes the page of a server and yields its address. Raises UsageError where its libraries are missing."""
    Page = page_class()

    @contextmanager
    def opened(server: Server) -> Iterator[str]:
        with server.page(), Page(lambda: server.options, port or 0) as address:
            yield address

    return opened


def page_class() -> type[LivePage]:
    """The class of pages. Raises UsageError where its libraries are not installed."""
    try:
        from attnscope.serve.page import LivePage
    except ImportError as error:
        raise UsageError(f"--page needs {error.name}, which is not installed", EXTRA) from None
    return LivePage


def running_server() -> Status | None:
    """What the server of this user says of itself; None where there is none."""
    from attnscope.serve.client import asked
    from attnscope.serve.wire import UnansweredError

    try:
        return asked("status")
    except UnansweredError:
        return None


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
                status = client.asked("status")
        link, holdings = client.joined()
    except UnansweredError as why:
        raise UsageError(f"a page cannot join the server that runs: {why}", "end it: attnscope serve --stop") from None
    # The link is held open: when it closes, the server has ended, and its page with it.
    stop = threading.Event()
    with link, GracefulStop(stop.set) as stopped:
        check_held(wanted, holdings)
        stopped()
        with Page(lambda: holdings.options, port or 0, holdings.folder) as address:
            names = ", ".join(options.model for options in holdings.options)
            output.talk(
                f"joined process {status.pid}, which answers for {names}; attnscope serve --stop ends both", quiet
            )
            print(address, flush=True)  # noqa: T201  # for a browser
            while not stop.is_set() and not is_readable(link, client.WORD_SECONDS / 4):
                pass
    if not stop.is_set():
        output.talk("the server has ended, and the page with it", quiet)
    return 0


def check_held(wanted: Sequence[LoadOptions], held: Holdings) -> None:
    """Raise UsageError for a model that a server does not hold, or not with these options."""
    loaded = {_from(held.folder, options) for options in held.options}
    for options in wanted:
        if _from(os.getcwd(), options) not in loaded:
            raise UsageError(
                f"the server that runs does not hold {options.model} as it is asked for",
                "leave out the model's options, or end it: attnscope serve --stop",
            )


def _from(folder: str, options: LoadOptions) -> LoadOptions:
    """The options with the path of a model from the root, so that those of two folders can be compared."""
    path = os.path.join(folder, os.path.expanduser(options.model))
    return replace(options, model=os.path.realpath(path)) if os.path.exists(path) else options
