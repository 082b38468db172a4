"""Many texts -> a dataset: reading, batching, measuring, writing, and never losing work."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.corpus.folder import Job
    from attnscope.corpus.records import Corpus
    from attnscope.corpus.run import run_folder

__all__ = ["Corpus", "Job", "run_folder"]
_HOME = {"Corpus": "records", "Job": "folder", "run_folder": "run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
