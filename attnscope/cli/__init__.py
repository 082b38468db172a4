"""The command line: parse, call the library, emit. Errors become one line and an exit code here, and only here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

INTERNAL_ERROR = 70
INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM came: unwind, so that no half file stays."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _terminate)
    code = run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. Whatever goes wrong is one line on stderr."""
    import typer

    from attnscope.cli.app import app
    from attnscope.errors import AttnscopeError

    try:
        return int(app(args=list(arguments), prog_name="attnscope", standalone_mode=False) or 0)
    except AttnscopeError as error:
        return _say(str(error), error.exit_code)
    except typer.TyperException as error:  # what typer itself refuses
        return _say(_usage(error), error.exit_code)
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except Terminated:
        return _say("terminated", TERMINATED)
    except MemoryError:
        return _say("out of memory; give a shorter text, or --select fewer heads", 5)
    except Exception as error:
        return _internal(error, arguments)


def _usage(error: Exception) -> str:
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "attnscope"
    return f"{message.rstrip('.')}; `{command} --help` lists what there is"


def _internal(error: Exception, arguments: Sequence[str]) -> int:
    if "out of memory" in str(error).lower():  # torch.OutOfMemoryError, without importing torch
        return _say("out of memory; give a shorter text, or a smaller model or dtype", 5)
    if isinstance(error, OSError) and error.strerror:
        where = f" {error.filename}" if error.filename else ""
        return _say(f"cannot read or write{where}: {error.strerror}; check the path and its permissions", 4)
    if "--verbose" in arguments:
        import traceback

        traceback.print_exc()
    first = (str(error).splitlines() or [""])[0]
    return _say(
        f"internal error: {type(error).__name__}: {first}; run again with --verbose for the traceback", INTERNAL_ERROR
    )


def _say(message: str, code: int) -> int:
    line = " ".join(message.splitlines())
    try:
        print(f"attnscope: {line}", file=sys.stderr)  # noqa: T201
    except BrokenPipeError:
        pass
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _forget_stdout() -> None:
    """The reader has gone: give the interpreter somewhere harmless to flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
