"""The commands, gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from attnscope._version import __version__
from attnscope.cli import batch, explain, heads, heatmap, info, metrics, parity, relations, rollout
from attnscope.cli.batch_ray import BatchCommand

app = typer.Typer(
    name="attnscope",
    help="See, measure and verify what every attention head of a pretrained decoder attends to.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="Start with: attnscope heads --text 'the financial bank is located on river bank' --out runs/bank",
)

COMMANDS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "heads": (heads.heads, heads.EXAMPLES),
    "relations": (relations.relations, relations.EXAMPLES),
    "heatmap": (heatmap.heatmap, heatmap.EXAMPLES),
    "rollout": (rollout.rollout, rollout.EXAMPLES),
    "explain": (explain.explain, explain.EXAMPLES),
    "batch": (batch.batch, batch.EXAMPLES),
    "parity": (parity.parity, parity.EXAMPLES),
    "info": (info.info, info.EXAMPLES),
    "metrics": (metrics.metrics, metrics.EXAMPLES),
}

for name, (command, examples) in COMMANDS.items():
    app.command(
        name,
        cls=BatchCommand if name == "batch" else None,
        epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples),
    )(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"attnscope {__version__}")
        raise typer.Exit


@app.callback()
def attnscope(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """See, measure and verify what every attention head of a pretrained decoder attends to."""
