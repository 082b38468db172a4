"""The options that commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="`demo`, a folder, or a hub id.", metavar="NAME")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="auto: the checkpoint's on an accelerator, float32 on CPU."),
]
DeviceMap = Annotated[str | None, typer.Option(help="`auto` spreads a model over several devices.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never ask the network.")]
Quantize = Annotated[Literal["8bit", "4bit"] | None, typer.Option(help="Load with bitsandbytes.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")]
Pickle = Annotated[bool, typer.Option("--allow-pickle", help="Read weights that are not safetensors.")]

Positions = Annotated[
    int | None, typer.Option(help="Extend the model to so many positions, by linear rope scaling.", metavar="N")
]
Engine = Annotated[
    Literal["auto", "eager", "fused"],
    typer.Option(help="eager: the model's own matrices; fused: none is made; auto: eager where a layer's fit."),
]
Listen = Annotated[bool, typer.Option("--listen", help="Fused: keep the model's own attention call, too.")]
Memory = Annotated[
    str | None,
    typer.Option(help="What a layer's matrices may take, e.g. 4GB (default: half of what is free).", metavar="SIZE"),
]
Verify = Annotated[bool, typer.Option("--verify", help="Check every layer against the oracle, as `parity` does.")]

Text = Annotated[str | None, typer.Option("--text", "-t", help="The text; - reads stdin.", metavar="TEXT")]
File = Annotated[str | None, typer.Option("--file", "-f", help="A UTF-8 file; - reads stdin.", metavar="FILE")]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Apply the chat template: a user turn, or JSON messages."),
]
Truncate = Annotated[Literal["left", "right"] | None, typer.Option(help="Cut a text that is too long.")]

Select = Annotated[
    str | None,
    typer.Option("--select", "-s", help="Heads: 27, 27.3, L27H3, 0-3.*, last, *.0; joined by commas.", metavar="HEADS"),
]
Weights = Annotated[Literal["softmax", "scores"], typer.Option(help="Weights, or the logits before the softmax.")]
By = Annotated[Literal["kv"] | None, typer.Option(help="Average the heads that share a kv head.")]
TopK = Annotated[str, typer.Option(help="Strongest keys a query: a number, or all.", metavar="N|all")]
MinWeight = Annotated[float | None, typer.Option(help="Leave out smaller entries.")]
Group = Annotated[
    Literal["words", "sentences"] | None,
    typer.Option(help="Relations of words or sentences: sum over keys, mean over queries."),
]

Scale = Annotated[Literal["linear", "log"], typer.Option(help="Colour scale.")]
Sink = Annotated[
    Literal["keep", "mask"] | None,
    typer.Option(help="Key 0: keep it, or draw it as its own strip (default: keep)."),
]
PerHeadScale = Annotated[bool, typer.Option("--per-head-scale", help="A colour scale a head, not one a figure.")]
Bin = Annotated[Literal["sum", "max"], typer.Option(help="How texts over 200 tokens are binned.")]
Annotate = Annotated[
    bool | None,
    typer.Option("--annotate/--no-annotate", help="Numbers in the cells (default: up to 12 tokens)."),
]
Image = Annotated[Literal["png", "svg", "pdf"], typer.Option(help="Picture format.")]

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write tables and figures here.", metavar="DIR")]
Format = Annotated[
    Literal["table", "csv", "tsv", "jsonl", "parquet", "arrow"] | None,
    typer.Option(help="Default: table on a terminal, csv in a pipe."),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="A YAML file of options; flags win over it.", metavar="FILE")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="The libraries' noise, and tracebacks.")]
