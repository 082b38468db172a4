"""docs/commands.md and docs/metrics.md: what `--help all` of each command and `attnscope metrics` print."""

from collections.abc import Iterator
from itertools import groupby

from attnscope.cli.app import COMMANDS
from attnscope.metrics.roles import NEEDED_TOKENS, ROLES
from helpers.command_line import call

WIDE = "100"  # columns of a help text
MADE = "Made by `scripts/reference_doc.py`; a test compares it with the program."
COMMAND_HEAD = f"""# Commands

Every option of every command, as `attnscope COMMAND --help all` prints it.
{MADE}
[The cookbook](cookbook.md) has a command for each question, [metrics](metrics.md) the numbers.
"""
METRICS_HEAD = f"""# Metrics

Every number that a table, a picture or `--sort` can have, as `attnscope metrics` prints it.
{MADE}

A is the matrix of weights of a head, i a query, j a key, n the number of queries. *Rows* are the queries of the mean.
Without such a row the number is empty.
"""
ROLES_HEAD = """## Roles

A head gets the first role of this list that its numbers show. Where the model has an [atlas](atlas.md), roles are those
of its scan.

| role | condition | at least |
|---|---|---|
"""


def command_section(name: str) -> str:
    """One command of the page."""
    shown = call(name, "--help", "all", COLUMNS=WIDE).ok().out.decode()
    return f"### {name}\n\n```text\n{shown.strip()}\n```\n"


def command_sections() -> Iterator[str]:
    """The page of commands, part by part: its head, and the commands under the headings of `attnscope --help`."""
    yield COMMAND_HEAD
    yield "## Model and engine\n\n```text\n" + call("help", "model", COLUMNS=WIDE).ok().out.decode().strip() + "\n```\n"
    for panel, rows in groupby(COMMANDS.items(), lambda row: row[1][0]):
        yield f"## {panel}\n"
        yield from (command_section(name) for name, _ in rows)


def metrics_page() -> str:
    """The page of metrics."""
    parts = [METRICS_HEAD]
    for row in call("metrics", "--format", "jsonl").ok().records:
        facts = {
            "formula": f"`{row['formula']}`",
            "unit and range": f"{row['unit']}, {row['range']}",
            "how to read it": row["reading"],
            "rows": row["rows"],
            "stacks": row["stacks"],
            "source": row["source"],
        }
        lines = "".join(f"| {name} | {cell(text)} |\n" for name, text in facts.items())
        parts.append(f"## {row['id']}\n\n| column | `{row['short']}` |\n|---|---|\n{lines}")
    roles = "".join(
        f"| {role.name} | {cell(role.condition)} | {role.needed} {cell(NEEDED_TOKENS[role.rows])} |\n" for role in ROLES
    )
    return "\n".join([*parts, ROLES_HEAD]).rstrip("\n") + "\n" + roles


def cell(text: str) -> str:
    """A text that ends no cell of a table."""
    return text.replace("|", "\\|")
