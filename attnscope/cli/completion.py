"""What the shell's TAB offers where Typer cannot know: metrics, models, devices. Nothing heavy is imported for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def offer(*known: str) -> Callable[[], list[str]]:
    """Offer these, where others may be given too."""
    return lambda: list(known)


def metrics() -> list[tuple[str, str]]:
    """The metrics, each with its title."""
    from attnscope.metrics.metrics import KNOWN

    return [(metric.id, metric.title) for metric in KNOWN.values()]


def models() -> list[str]:
    """The embedded model and those of the Hub's cache; for folders the shell offers its own."""
    from attnscope.model.sources import HUB_ID

    names = [path.name.removeprefix("models--").replace("--", "/") for path in cached_models()]
    return ["demo", *sorted(filter(HUB_ID.fullmatch, names))]  # of others a shell would print whatever they hold


def cached_models() -> list[Path]:
    """The folders of the models in the Hub's cache; none where it cannot be listed."""
    with suppress(OSError):
        return list(cache_folder().glob("models--*"))
    return []


def cache_folder() -> Path:
    """Where huggingface_hub keeps models, found without its import; as there, `~` stays where there is no home."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
