"""Many texts -> a dataset: reading, bucketing, measuring, writing, and never losing work."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.batch.folders import run_folder
    from attnscope.batch.job import Job
    from attnscope.batch.reading import Reading

__all__ = ["Job", "Reading", "run_folder"]

_HOME = {"Job": "running", "Reading": "reading", "run_folder": "folders"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
