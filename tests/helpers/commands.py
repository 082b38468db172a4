"""Every command with its examples: the table of `cli/app.py`, its modules imported."""

from typing import Any

from attnscope.cli import app

COMMANDS = {name: (getattr(app.module_of(name), name), app.module_of(name).EXAMPLES) for name in app.COMMANDS}


def context(name: str, *arguments: str) -> Any:
    """The context in which click parses a command. It names `-h`, which a command keeps from its first use."""
    return app.make_command(name).make_context(name, [*arguments], help_option_names=["--help", "-h"])
