"""The commands, gathered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from attnscope._version import __version__
from attnscope.cli import batch, explain, heads, heatmap, info, keys, metrics, parity, relations, rollout
from attnscope.cli.batch_ray import BatchCommand
from attnscope.cli.help import CommandList, PanelCommand

app = typer.Typer(
    name="attnscope",
    help="See, measure and verify what every attention head of a pretrained decoder attends to.",
    cls=CommandList,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": sys.maxsize},
    epilog="\b\nStart with:\n  attnscope heads --text 'the financial bank is located on river bank' --out runs/bank",
)

COMMANDS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "heads": (heads.heads, heads.EXAMPLES),
    "relations": (relations.relations, relations.EXAMPLES),
    "keys": (keys.keys, keys.EXAMPLES),
    "heatmap": (heatmap.heatmap, heatmap.EXAMPLES),
    "rollout": (rollout.rollout, rollout.EXAMPLES),
    "explain": (explain.explain, explain.EXAMPLES),
    "batch": (batch.batch, batch.EXAMPLES),
    "parity": (parity.parity, parity.EXAMPLES),
    "info": (info.info, info.EXAMPLES),
    "metrics": (metrics.metrics, metrics.EXAMPLES),
}
PANELS = {"Read one text": ("heads", "relations", "keys", "heatmap", "rollout", "explain"), "Read a corpus": ("batch",)}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}

for name, (command, examples) in COMMANDS.items():
    app.command(
        name,
        cls=BatchCommand if name == "batch" else PanelCommand,
        epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples),
        rich_help_panel=PANEL_OF.get(name, "Check and look up"),
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
