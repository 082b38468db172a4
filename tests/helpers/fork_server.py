"""The server behind `forks.py`: imports everything, then forks for each request. `python fork_server.py ADDRESS`.

A request is the length of a JSON object with three file descriptors beside it, then the object. The answers are the
process id and, once that process has ended, its exit code.
"""

import atexit
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass

# What commands import only while they run; typer's own part, with pydantic, is not in each of its versions.
LATE = """
    accelerate matplotlib.backends.backend_agg matplotlib.backends.backend_svg matplotlib.pyplot pyarrow.ipc
    pyarrow.parquet rich.console rich.progress rich.table safetensors.torch seaborn
    transformers.models.auto.tokenization_auto transformers.models.llama.modeling_llama
    transformers.models.llama.tokenization_llama typer._adapters yaml
"""


@dataclass(frozen=True)
class Command:
    """What a fork becomes; stdin, stdout and stderr are file descriptors.

    script: a file of Python that runs in the place of attnscope.
    """

    script: str | None
    arguments: list[str]
    cwd: str
    env: dict[str, str]
    streams: list[int]


def import_everything() -> None:
    import torch

    import attnscope

    modules = [module.name for module in pkgutil.walk_packages(attnscope.__path__, "attnscope.")]
    for name in modules:
        if not name.endswith("__main__") and ".kernels_cuda." not in name:  # Triton may not be here
            importlib.import_module(name)
    for name in LATE.split():
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    torch.set_num_threads(1)  # threads do not live through a fork
    run_once()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # as in conftest.py


def run_once() -> None:
    """A first command, for what libraries make at their first use and keep: a third of the time of a short one.

    Under --verbose, which leaves their bars and logs as they are.
    """
    from tqdm import tqdm

    from attnscope import cli

    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0  # a bar starts no thread then
    environment, logger = dict(os.environ), logging.getLogger("attnscope")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not live through a fork either
    with (
        open(os.devnull, "w") as none,
        redirect_stdout(none),
        redirect_stderr(none),
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as out,
    ):
        assert cli.run(["heads", "a bank", "--verbose", "--out", out]) == 0
    os.environ.clear()
    os.environ.update(environment)
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    tqdm.monitor_interval = interval


def serve(address: str) -> Command | None:
    """Fork for every request until stdin ends; in the fork, its command."""
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno())
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready\n")
        while 0 not in (ready := select.select([0, listener, woken], [], [])[0]):
            if woken in ready:
                woken.recv(4096)
                _report(running)
            if listener in ready:
                client = listener.accept()[0]
                command = _received(client)
                if not (child := os.fork()):
                    return command
                running[child] = client
                client.sendall(struct.pack("i", child))
                for stream in command.streams:
                    os.close(stream)
    for child in running:
        os.kill(child, signal.SIGKILL)
    return None


def _received(client: socket.socket) -> Command:
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    body = client.recv(*struct.unpack("I", size), socket.MSG_WAITALL)
    return Command(**json.loads(body), streams=streams)


def _report(running: dict[int, socket.socket]) -> None:
    """Tell the clients whose commands have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with running.pop(ended[0]) as client, suppress(BrokenPipeError):
                client.sendall(struct.pack("i", os.waitstatus_to_exitcode(ended[1])))


def become(command: Command) -> None:
    """What `python -m attnscope ARGUMENTS` or `python SCRIPT ARGUMENTS` is once it has imported everything."""
    import torch

    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # makes a new pool, before two threads do so at once: PyTorch's assertion fails then
    for number, stream in enumerate(command.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.env)
    sys.argv = [command.script or "attnscope", *command.arguments]
    try:
        if command.script is None:
            runpy.run_module("attnscope", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command.script, run_name="__main__")
    except SystemExit as left:
        _leave(int(left.code or 0))
    _leave(0)


def _leave(code: int) -> None:
    """What Python does at its end that can be seen; to take all modules apart lasts longer than most commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import_everything()
    if (command := serve(sys.argv[1])) is not None:
        become(command)
