"""From flags and a configuration file to what the library takes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.cli.config import KEYS, Key, read_config
from attnscope.errors import UsageError

if TYPE_CHECKING:
    import typer

    from attnscope.figures import Style
    from attnscope.measure.probes import View
    from attnscope.model.loading import LoadOptions


@dataclass(frozen=True)
class Settings:
    """One run, as asked for; a command that lacks an option leaves its default."""

    model: str = "demo"
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    offline: bool = False
    quantize: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    positions: int | None = None
    engine: str = "eager"
    listen: bool = False
    memory: str | None = None
    verify: bool = False
    text: str | None = None
    file: str | None = None
    chat: bool = False
    truncate: str | None = None
    select: str | None = None
    sort: str = "focus"
    top: int = 20
    top_k: str | int = "5"
    min_weight: float | None = None
    group: str | None = None
    weights: str = "softmax"
    by: str | None = None
    scale: str = "linear"
    sink: str | None = None
    per_head_scale: bool = False
    bin: str = "sum"
    annotate: bool | None = None
    image: str = "png"
    out: Path | None = None
    format: str | None = None
    quiet: bool = False
    verbose: bool = False

    def options(self) -> dict[str, Any]:
        """What was asked for, as it goes into a manifest: enough to repeat the run."""
        left_out = ("text", "quiet", "verbose", "format")
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
            if key not in left_out
        }

    def load_options(self) -> LoadOptions:
        """How the model is to be loaded."""
        from attnscope.model.loading import LoadOptions

        names = {field.name for field in fields(LoadOptions)}
        attention = "eager" if self.engine == "eager" else "sdpa"
        return LoadOptions(**{key: value for key, value in vars(self).items() if key in names}, attention=attention)

    def view(self, heads: Mapping[int, tuple[int, ...]] | None) -> View:
        """How entries are read, and of which heads."""
        from attnscope.measure.probes import View

        return View("scores" if self.weights == "scores" else "softmax", self.by == "kv", heads)

    def style(self) -> Style:
        """How figures are drawn."""
        from attnscope.figures import Style

        return Style(
            scale=self.scale,  # type: ignore[arg-type]
            sink=self.sink or "keep",  # type: ignore[arg-type]
            per_head_scale=self.per_head_scale,
            image=self.image,  # type: ignore[arg-type]
            annotate=self.annotate,
        )

    @property
    def keys_per_query(self) -> int | None:
        """The number behind --top-k, None for all."""
        text = str(self.top_k)
        if text == "all":
            return None
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
            raise UsageError(f"--top-k takes a number from 1, or all; {text!r} came", "write --top-k 5, or --top-k all")
        return int(text)


def gather(context: typer.Context, given: Mapping[str, Any]) -> Settings:
    """The settings of a command: its flags, then the configuration file's, then the defaults.

    given: the command's parameters by name. Raises UsageError for what cannot be meant.
    """
    return settings_of(configured(context, given, KEYS))


def configured(context: typer.Context, given: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """The command's parameters by name, those that no flag gave as the configuration file has them.

    keys: what may stand in the file; of these, what the command has no option for is left out.
    """
    values = dict(given)
    if given.get("config") is None:
        return values
    parameters = {max(one.opts, key=len).lstrip("-").replace("-", "_"): one.name for one in context.command.params}
    for key, value in read_config(given["config"], keys).items():
        name = parameters.get(key)
        if name in values and context.get_parameter_source(name).name == "DEFAULT":  # type: ignore[union-attr]
            values[name] = Path(str(value)) if key == "out" else value
    if _given(context, "text") and "file" in values and not _given(context, "file"):
        values["file"] = None  # the flag's text wins over the file's
    if _given(context, "file") and not _given(context, "text"):
        values["text"] = None
    return values


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The settings among a command's parameters. Raises UsageError for what cannot be meant."""
    settings = Settings(**{key: value for key, value in values.items() if key in Settings.__dataclass_fields__})
    _check(settings)
    return settings


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check(settings: Settings) -> None:
    _ = settings.keys_per_query
    if settings.top < 1:
        raise UsageError(f"--top takes a number from 1; {settings.top} came", "write --top 20")
    if settings.min_weight is not None and math.isnan(settings.min_weight):
        raise UsageError("--min-weight takes a number; nan came", "write --min-weight 0.1")
    if settings.text is not None and settings.file is not None:
        raise UsageError("--text and --file were both given", "give one of them")
    if settings.group and settings.weights == "scores":
        raise UsageError("logits of several keys cannot be summed into one", "use --weights softmax with --group")
    if settings.scale == "log" and settings.weights == "scores":
        raise UsageError("logits can be negative and have no log scale", "use --scale linear with --weights scores")
    if settings.out is not None:
        _check_out(settings.out)


def _check_out(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before a model is loaded; make nothing yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UsageError(f"cannot write to {folder}: {there} is no folder", "name another folder with --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {folder}: {there} is not writable", "name another folder with --out")
