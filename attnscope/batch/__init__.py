"""Many texts -> a dataset: reading, batching, measuring, writing, and never losing work."""

from typing import TYPE_CHECKING, Any

from attnscope.utils.callable_module import callable_room

if TYPE_CHECKING:
    from attnscope.batch.corpus import Corpus
    from attnscope.batch.job import Job
    from attnscope.batch.run import run_folder

__all__ = ["Corpus", "Job", "run_folder"]

callable_room(__name__)
_HOME = {"Corpus": "corpus", "Job": "job", "run_folder": "run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
