"""`attnscope heatmap`: pictures of the attention, and nothing else."""

from __future__ import annotations

import os
import sys

import typer

from attnscope.cli import options, output
from attnscope.cli.settings import Settings, gather
from attnscope.cli.signals import unwinding

EXAMPLES = (
    'attnscope heatmap --text "the cat sat on the mat" --select last --out runs/cat',
    'attnscope heatmap --text "the cat sat on the mat" --scale log --sink mask --image svg --out runs/cat',
)


def heatmap(
    context: typer.Context,
    text: options.Text = None,
    file: options.File = None,
    model: options.Model = "demo",
    out: options.Out = None,
    select: options.Select = None,
    weights: options.Weights = "softmax",
    by: options.By = None,
    scale: options.Scale = "linear",
    sink: options.Sink = None,
    per_head_scale: options.PerHeadScale = False,
    bin: options.Bin = "sum",
    annotate: options.Annotate = None,
    image: options.Image = "png",
    chat: options.Chat = False,
    truncate: options.Truncate = None,
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
    """Draw the attention of a text: overview, layers, and the heads of --select, into --out.

    The path of every picture is printed on stdout, a line each.
    """
    return run(gather(context, locals()))


def run(settings: Settings) -> int:
    """Observe one text and draw it."""
    from attnscope.errors import UsageError

    if settings.out is None:
        raise UsageError("nowhere to draw", "name a folder with --out DIR")

    from attnscope.cli.single import observe_text, report_checks

    loaded, seen = observe_text(
        settings, metrics=(), maps="all", bin_rule=settings.bin, split_sink=settings.sink == "mask"
    )
    from attnscope.cli.export import draw, finish, writable

    folder = writable(settings.out)
    seen.heads = seen.kept_heads()
    with unwinding():
        written = draw(settings, seen, folder, [head.name for head in seen.heads] if settings.select else [])
        finish(settings, loaded, seen, folder, written)
    sys.stdout.buffer.write(b"".join(os.fsencode(path) + b"\n" for path in written))
    output.talk("heads are drawn one by one with --select", settings.quiet or settings.select is not None)
    return report_checks(loaded, seen, settings)
