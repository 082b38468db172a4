"""The libraries underneath: their versions, and their progress bars, logs and warnings."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from attnscope._version import __version__
from attnscope.errors import ModelError

TRIED = ("5.17.0", "5.23.0")  # versions of transformers, the oldest and the newest: docs/versions.md


def silence_libraries(verbose: bool) -> None:
    """Silence the progress bars, logs and warnings of the libraries underneath, unless `verbose`.

    To be called before the first import of them: they read these variables once. For those already imported the same is
    said again through their own functions.

    Example:
        silence_libraries(verbose=False)
    """
    if verbose:
        return
    os.environ |= {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_VERBOSITY": "error",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "BITSANDBYTES_NOWELCOME": "1",
    }
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"attnscope(\.|$)")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for every layer that it casts
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # two lines where there is no home for its own cache
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection while the block imports: all that it makes stays, and looking for garbage in it takes a
    fifth of the time.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bar of transformers while the block runs; afterwards as it was."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def needed(module: str, name: str, *attributes: str) -> Any:
    """A name of transformers that is not promised to stay, with attributes that are not either.

    Raises ModelError with the versions that have it.

    >>> needed("transformers.modeling_utils", "AttentionInterface", "get_interface").__name__
    'AttentionInterface'
    """
    import transformers

    try:
        found = getattr(import_module(module), name)
        for attribute in attributes:
            getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        path = ".".join((module, name, *attributes))
        raise ModelError(
            f"transformers {transformers.__version__} has no {path}, which attnscope needs",
            f'install one that was tried: pip install "transformers>={TRIED[0]},<={TRIED[-1]}"',
        ) from error
    return found


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    import torch
    import transformers

    return {
        "attnscope": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
