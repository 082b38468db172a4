"""`attnscope run FILE`: the commands of a file, one per line, in one process that loads each model once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import count
from typing import Annotated

from typer import Argument

from attnscope.cli.config import with_options
from attnscope.cli.option_groups import OptionGroup
from attnscope.cli.output import Quiet, log
from attnscope.errors import InputError, UsageError

EXAMPLES = (
    "echo 'heads \"the cat sat on the mat\"' | attnscope run -",
    'printf \'heads "the cat sat"\\nkeys "the cat sat"\\n\' | attnscope run - > tables.csv',
)
LONGEST_LINE = 2**20  # bytes
PART = re.compile(  # of a line of commands, as a shell reads it
    r"""(?P<blank>[ \t\r\n]+) | '(?P<single>[^']*)' | "(?P<double>(?:[^"\\]++|\\.)*+)"
    | \\(?P<escaped>[^\n]) | (?P<plain>[^ \t\r\n'"\\]+)""",
    re.VERBOSE | re.DOTALL,
)


class Lines(OptionGroup):
    """Where the commands are."""

    lines: Annotated[str | None, "File of commands, one per line; - reads stdin.", "FILE", Argument()] = None

    @property
    def file(self) -> str:
        """The file. Raises UsageError where none was named."""
        if self.lines is None:
            raise UsageError("no file of commands was named", "name one: attnscope run FILE; - reads stdin")
        return self.lines


@with_options(Lines, Quiet)
def run(lines: Lines, noise: Quiet) -> int:
    """Run the commands of a file in one process.

    The file has one command per line. Each model is loaded once. The exit code is that of the first command that
    failed. --quiet is that of every command.
    """
    return run_lines(lines.file, noise.quiet)


def run_lines(name: str, quiet: bool = False) -> int:
    """Run the commands of a file one after the other; the first exit code that is not 0. quiet: for each of them."""
    from attnscope.cli import one_text
    from attnscope.cli import run as run_command
    from attnscope.cli.app import command_named
    from attnscope.serve.worker import KeptModels

    failed = 0
    one_text.KEPT = KeptModels()
    try:
        for number, line in enumerate(_lines(name), 1):
            try:
                words = words_of(line)
            except ValueError as error:
                raise InputError(f"line {number} of {name} {error}", "end each command on its line") from None
            words = words[1:] if words[:1] == ["attnscope"] else words
            if words[:1] in (["serve"], ["run"]):
                raise InputError(f"line {number} of {name} is the command {words[0]}", "leave it out")
            if words:
                code = run_command([words[0], *["--quiet"] * (quiet and command_named(words[0]) != ""), *words[1:]])
                if code:
                    log(f"line {number} of {name} failed, exit code {code}", False)
                failed = failed or code
                sys.stdout.flush()
    finally:
        one_text.KEPT = None
    return failed


def _lines(name: str) -> Iterator[str]:
    """The lines of a file, or of stdin, as they come. Raises InputError for one that is too long, or no text."""
    from attnscope.utils.files import opened, standard_input

    from_stdin = name == "-"
    with standard_input("name a file") if from_stdin else opened(name, "check the path") as stream:
        for number in count(1):
            line = stream.readline(LONGEST_LINE + 1)
            if len(line) > LONGEST_LINE:
                raise InputError(
                    f"line {number} of {name} has over {LONGEST_LINE:,} bytes", "put its text into a file: --file FILE"
                )
            if not line:
                return
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InputError(f"line {number} of {name} is no text in UTF-8", "save the file as UTF-8") from None
            yield text


def words_of(line: str) -> list[str]:
    """The words of a line as a shell splits it, in a time that grows with its length; `shlex` takes its square.

    `#` begins a comment where a word would begin. Raises ValueError for a quote without an end and for a backslash at
    the end.
    """
    words, at = list[str](), 0
    word: list[str] | None = None  # the parts of the word that is not over yet
    while at < len(line):
        part = PART.match(line, at)
        if part is None:
            raise ValueError("ends with a backslash" if line[at] == "\\" else "has a quote without an end")
        at, kind = part.end(), part.lastgroup or ""
        text = part[kind]
        if kind == "blank":
            words += [] if word is None else ["".join(word)]
            word = None
        elif word is None and kind == "plain" and text.startswith("#"):
            break
        else:
            word = word or []
            word.append(re.sub(r'\\([\\"])', r"\1", text) if kind == "double" else text)
    return words if word is None else [*words, "".join(word)]
