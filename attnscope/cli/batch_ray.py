"""`--ray [ADDRESS]`: an option whose value may be left out, which Typer has no word for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attnscope.cli.help import PanelCommand
from attnscope.errors import UsageError

if TYPE_CHECKING:
    import typer

# What is no address is the next argument, so that `--ray corpus.jsonl` reads the corpus.
ADDRESS = re.compile(r"auto|local|ray://\S+|([\w.-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}")


class BatchCommand(PanelCommand):
    """A command that reads a plain `--ray` as one with an empty address."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, list(with_value(args)))


def with_value(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, `--ray` with its address as `--ray=ADDRESS`, without one as `--ray=`.

    >>> list(with_value(["--ray", "corpus.jsonl", "--ray", "auto"]))
    ['--ray=', 'corpus.jsonl', '--ray=auto']
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
        elif argument != "--ray":
            yield argument
        else:
            following = next(rest, None)
            address = following if following is not None and ADDRESS.fullmatch(following) else ""
            yield f"--ray={address}"
            if following is not None and not address:
                yield from with_value([following, *rest])


def address(given: str | None) -> str | None:
    """The address behind --ray: None without it, "" for Ray's own default. Raises UsageError for what is none.

    A file of options says `ray: true` for the default, and `ray: false` for none.
    """
    if given is None or given == "false":
        return None
    if given in ("", "true"):
        return ""
    if not ADDRESS.fullmatch(given):
        raise UsageError(f"--ray: expected auto, local, ray://HOST:PORT or HOST:PORT, got {given!r}", "see --help")
    return given
