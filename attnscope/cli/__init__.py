"""The command line: parse, call the library, emit. Errors become one line and an exit code here, and only here."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from attnscope.errors import LINES, AttnscopeError, is_panic, visible
from attnscope.utils import signals, stages

USAGE = 2
BROKEN_MODEL = 3
OUT_OF_MEMORY = 5
INTERNAL_ERROR = 70
COMPLETION = "_ATTNSCOPE_COMPLETE"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    stages.begin()
    gc.set_threshold(10 * gc.get_threshold()[0], *gc.get_threshold()[1:])  # what is imported is no garbage
    gc.freeze()  # nor is what later imports bring: `model.libraries.uncollected`
    _mend_streams()
    signals.listen()
    code = run(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()  # the interpreter's end would look for garbage among a million objects of PyTorch's, for a second
    sys.exit(_flush(code))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. Whatever goes wrong is one line on stderr."""
    for name in ("COLUMNS", "LINES"):  # a width that is no number is none: rich takes `²` for one, and fails
        size = os.environ.get(name)
        if size and not (size.isascii() and size.isdecimal() and len(size) < 6):
            del os.environ[name]
    try:
        return _dispatch(list(arguments))
    except AttnscopeError as error:
        if error.__cause__ is not None:  # of a library: where it failed helps who wrote the model
            _trace(error, arguments)
        return _say(_in_words(error, arguments), error.exit_code)
    except BrokenPipeError:
        _forget_streams()
        return 0
    except signals.Stopped as stopped:
        return _stopped(stopped.number, stopped.kept)
    except MemoryError:
        return _say("out of memory; give a shorter text, or a smaller model or dtype", OUT_OF_MEMORY)
    except Exception as error:
        number = signals.arrived()
        return _internal(error, arguments) if number is None else _stopped(number)
    except BaseException as error:
        if not is_panic(error):
            raise
        return _say(f"a library that reads the model gave up: {error}; check the model's files", BROKEN_MODEL)


def _dispatch(arguments: list[str]) -> int:
    """Typer's parsing without its `main`, which ends a broken pipe with 1 and Ctrl-C without a word."""
    import typer

    from attnscope.cli.app import app

    command = typer.main.get_command(app)
    try:
        if os.environ.get(COMPLETION):  # a shell asks what may follow: Typer's `main` answers, and leaves
            command.main(arguments, prog_name="attnscope")
        with command.make_context("attnscope", arguments) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as left:
        return left.exit_code
    except SystemExit as left:  # completion
        return int(left.code or 0)
    except typer.TyperException as error:
        from attnscope.cli.app import refusal

        return _say(refusal(error, arguments), error.exit_code)


def _in_words(error: AttnscopeError, arguments: Sequence[str]) -> str:
    """An error as the command says it that was called: its hint names options that this command has.

    Where no step is left, the hint is of the first command that has its options.
    """
    from attnscope.cli.app import COMMANDS, command_named, module_of
    from attnscope.cli.option_groups import parameters

    called = command_named(arguments[0]) if arguments else ""
    if not called:
        return error.for_shell()
    for name in (called, *COMMANDS):
        options = parameters(*getattr(module_of(name), name).groups)  # its settings among them
        hint = error.steps({option.key for option in options.values()})
        if hint or not error.hint:
            hint += f", which `attnscope {name}` takes" * (name != called)
            return AttnscopeError(error.message, hint).for_shell()
    return AttnscopeError(error.message, f"`attnscope {called} --help all` lists all options").for_shell()


def _stopped(number: int, kept: str = "") -> int:
    from attnscope.utils.files import remove_unfinished

    remove_unfinished()
    return _say("; ".join(filter(None, (signals.WORDS[number], kept))), signals.CODES[number])


def _internal(error: Exception, arguments: Sequence[str]) -> int:
    from attnscope.utils.memory import is_out_of_memory

    if is_out_of_memory(error):
        return _say("out of memory; give a shorter text, or a smaller model or dtype", OUT_OF_MEMORY)
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, str | bytes)
        where = os.fsdecode(error.filename) if named else "standard output, or a file that the system does not name"
        return _say(f"cannot read or write {where}: {error.strerror}; check the path, and the room there", USAGE)
    _trace(error, arguments)
    first = (str(error).splitlines() or [""])[0]
    return _say(
        f"internal error: {type(error).__name__}: {first}; run again with --verbose for the traceback", INTERNAL_ERROR
    )


def _trace(error: Exception, arguments: Sequence[str]) -> None:
    """The traceback on stderr, where it was asked for."""
    if "--verbose" in arguments:
        import traceback

        with suppress(OSError):
            print(visible("".join(traceback.format_exception(error)), LINES), file=sys.stderr, end="")  # noqa: T201


def _say(message: str, code: int) -> int:
    from attnscope.cli.output import log

    log(f"attnscope: {message}", quiet=False)  # which makes a line of it
    return code


def _mend_streams() -> None:
    """Streams that were closed before us lead nowhere; a terminal of another encoding shows escapes, not an error."""
    for number in range(3):  # else the next file that is opened has the number, and what C code says is written into it
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):  # without a stderr, print would write its talk into the data
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush(code: int) -> int:
    """Write out what is buffered; a reader that has gone is no error, a full disk is one."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_streams()
    except OSError as error:
        _forget_streams(sys.stdout.fileno())
        return code or _say(f"cannot write to standard output: {error.strerror}; make room there", USAGE)
    return code


def _forget_streams(*numbers: int) -> None:
    """The reader has gone: give the interpreter somewhere harmless to flush at exit."""
    harmless = os.open(os.devnull, os.O_WRONLY)
    for number in numbers or (1, 2):
        os.dup2(harmless, number)
