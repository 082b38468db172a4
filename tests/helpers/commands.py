"""Every command with its examples: the table of `cli/app.py`, its modules imported."""

from attnscope.cli import app

COMMANDS = {name: (getattr(app.module_of(name), name), app.module_of(name).EXAMPLES) for name in app.COMMANDS}
