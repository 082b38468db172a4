"""`attnscope relations`: which token looks at which, head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options, output
from attnscope.cli.settings import Settings, gather
from attnscope.cli.signals import unwinding

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

EXAMPLES = (
    'attnscope relations --text "the cat sat on the mat" --select last --top-k 3',
    'echo "the bank by the river" | attnscope relations --text - --group words --min-weight 0.2 --format jsonl',
)


def relations(
    context: typer.Context,
    text: options.Text = None,
    file: options.File = None,
    model: options.Model = "demo",
    out: options.Out = None,
    select: options.Select = None,
    top: Annotated[int, typer.Option(help="Rows in the printed table.", metavar="N")] = 40,
    top_k: options.TopK = "5",
    min_weight: options.MinWeight = None,
    group: options.Group = None,
    weights: options.Weights = "softmax",
    by: options.By = None,
    chat: options.Chat = False,
    truncate: options.Truncate = None,
    format: options.Format = None,
    config: options.Config = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    offline: options.Offline = False,
    quantize: options.Quantize = None,
    trust_remote_code: options.RemoteCode = False,
    allow_pickle: options.Pickle = False,
    positions: options.Positions = None,
    engine: options.Engine = "auto",
    listen: options.Listen = False,
    memory: options.Memory = None,
    verify: options.Verify = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Which token looks at which: the strongest keys of every query, of every head or of --select.

    On a terminal the first --top rows are shown; in a pipe all of them are printed as csv. With --out, relations.csv
    and manifest.json are written too.
    """
    return run(gather(context, locals()))


def run(settings: Settings) -> int:
    """Observe one text and list its relations."""
    format = output.wanted_format(settings.format)

    from attnscope.cli.single import observe_text, report_checks

    loaded, seen = observe_text(
        settings, metrics=(), relations=True, top_k=settings.keys_per_query, group=settings.group
    )
    table = seen.relations(settings.min_weight)
    if settings.out:
        from attnscope.cli.export import finish, writable
        from attnscope.tables import save

        folder = writable(settings.out)
        with unwinding():
            finish(settings, loaded, seen, folder, [save(table, folder / "relations.csv")])
    output.emit(table, format, lambda: picture(table, settings.top))
    if format == "table" and len(table) > settings.top:
        output.talk(f"{settings.top} of {len(table)} rows; --top N shows more, a pipe gets all", settings.quiet)
    return report_checks(loaded, seen, settings)


def picture(table: pa.Table, top: int) -> RichTable:
    """The first rows for a person; where the screen is narrow the tokens are cut, never the numbers."""
    from attnscope.tables import rows

    shown = output.sheet()
    for name in table.column_names:
        token = name.endswith("_token")
        shown.add_column(name, no_wrap=not token, min_width=3)
    for row in rows(table.slice(0, top)):
        shown.add_row(*map(_cell, row))
    return shown


def _cell(value: object) -> RichText:
    from attnscope.text.labels import visible

    shown = "" if value is None else f"{value:.4f}" if isinstance(value, float) else visible(str(value))
    return output.one_line(shown)
